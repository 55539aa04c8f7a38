"""Context parallelism for any attention, exact on CPU and GPU, packed documents included.

Start with `plan`; `Plan.explain` says what it chose and what that costs. Then `attention` (or a method by name), or
`CPAttention` in a model, or `apply_context_parallel` on one.
"""

from titan_cp import backends
from titan_cp._attention import (
    AttentionFn,
    allgather_attention,
    attention,
    ring_attention,
    ulysses_attention,
    usp_attention,
)
from titan_cp._costs import Costs
from titan_cp._flex import localize_mask
from titan_cp._merge import merge
from titan_cp._module import ContextParallel, CPAttention, apply_context_parallel
from titan_cp._plan import Plan, plan
from titan_cp._reference import attention_mask, reference_attention
from titan_cp._tiles import Tile

__all__ = [
    "AttentionFn",
    "CPAttention",
    "ContextParallel",
    "Costs",
    "Plan",
    "Tile",
    "allgather_attention",
    "apply_context_parallel",
    "attention",
    "attention_mask",
    "backends",
    "localize_mask",
    "merge",
    "plan",
    "reference_attention",
    "ring_attention",
    "ulysses_attention",
    "usp_attention",
]
