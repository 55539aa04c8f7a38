"""Context parallelism for any attention, exact on CPU and GPU, packed documents included.

Start with `plan`; `AttentionPlan.explain` says what it chose and what that costs. Then `attention` (or a method by name), or
`CPAttention` in a model, or `apply_context_parallel` on one.
"""

from titan_cp import backends
from titan_cp.backends.merge import merge
from titan_cp.methods.attention import (
    AttentionFn,
    allgather_attention,
    attention,
    ring_attention,
    ulysses_attention,
    usp_attention,
)
from titan_cp.methods.reference import attention_mask, reference_attention
from titan_cp.models.flex import localize_mask
from titan_cp.models.module import ContextParallel, CPAttention, apply_context_parallel
from titan_cp.planning.costs import AttentionCosts
from titan_cp.planning.groups import connect
from titan_cp.planning.plan import AttentionPlan, plan
from titan_cp.planning.steps import StepPlan, plan_step
from titan_cp.planning.tiles import Tile
from titan_cp.state.convolution import causal_convolution
from titan_cp.state.costs import StateCosts, explain_state, state_costs
from titan_cp.state.linear import linear_attention
from titan_cp.state.local import local_linear_attention
from titan_cp.state.reference import reference_linear_attention

__all__ = [
    "AttentionCosts",
    "AttentionFn",
    "AttentionPlan",
    "CPAttention",
    "ContextParallel",
    "StateCosts",
    "StepPlan",
    "Tile",
    "allgather_attention",
    "apply_context_parallel",
    "attention",
    "attention_mask",
    "backends",
    "causal_convolution",
    "connect",
    "explain_state",
    "linear_attention",
    "local_linear_attention",
    "localize_mask",
    "merge",
    "plan",
    "plan_step",
    "reference_attention",
    "reference_linear_attention",
    "ring_attention",
    "state_costs",
    "ulysses_attention",
    "usp_attention",
]
