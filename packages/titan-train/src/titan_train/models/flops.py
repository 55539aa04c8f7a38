"""Model FLOPs per token, for throughput and MFU, and parameter counts.

Convention (PaLM, arXiv:2204.02311, appendix B): a matrix of N parameters costs 2 N FLOPs a token forward and 4 N
backward, so 6 N; attention scores and their use cost 12 * L * q * S more a token, with q = heads x head width (where
values are narrower than keys, the mean of both widths). N leaves out input embeddings, which are looked up, not
multiplied; a matrix tied to the head counts once, for the head. Of routed experts only those that a token goes through
count. A causal kernel skips half of the attention term, yet by convention it is counted in full unless ``causal=True``;
accordingly a layer with a sliding window of w tokens counts 2 w of them, at most S. Frozen weights count as trained ones.
Recomputation (activation checkpointing) is never counted: these are FLOPs of the model, not of the hardware.
"""

from titan_fsdp import unwrap
from torch import nn

from titan_train.models.common.attention import CausalAttention
from titan_train.models.common.delta import DeltaRule
from titan_train.models.common.moe.routed import expert_stacks
from titan_train.models.common.mtp import mtp_of
from titan_train.models.traits import traits_of


def count_parameters(model: nn.Module) -> int:
    """Trainable and frozen parameters; tied ones count once, sharded ones in full."""
    return sum(p.numel() for p in model.parameters())


def count_active_parameters(model: nn.Module) -> int:
    """Parameters that one token meets: all but the routed experts that it does not go to. For the whole model."""
    return count_parameters(model) - _idle_parameters(model)


def flops_per_token(model: nn.Module, seq_len: int, *, causal: bool = False) -> float:
    """Model FLOPs of forward and backward, per token.

    A user's own module gets 6 N for its matrices, and the term of each `CausalAttention` and `DeltaRule` in it; attention
    of another kind is not seen, so its MFU reads slightly low.

    Args:
        model: The whole model, on any device, the meta device too, with any wrappers.
        seq_len: Tokens in a row.
        causal: Count only the half of the attention scores that a causal kernel computes.
    """
    model = unwrap(model)
    own = traits_of(model).flops_per_token
    if own is not None:  # a model or a block that knows better
        return float(own(seq_len))
    used = {id(p): p.numel() for p in model.parameters()}
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    others = (m for m in model.modules() if not isinstance(m, nn.Embedding))
    multiplied = {id(p) for m in others for p in m.parameters(recurse=False)}
    matrices = sum(count for key, count in used.items() if key not in looked_up or key in multiplied)
    matrices -= _idle_parameters(model)
    if (ahead := mtp_of(model)) is not None:  # each module has a pass through the head
        head = model.get_submodule(str(traits_of(model).loss_head))
        matrices += len(ahead) * sum(p.numel() for p in head.parameters())
    # the width of a key for the scores, the width of a value for their use
    inners = [m for m in model.modules() if isinstance(m, CausalAttention)]
    seen = [min(seq_len, 2 * m.window) if m.window else seq_len for m in inners]
    attention = sum(m.num_heads * (m.head_dim + m.value_dim) * n for m, n in zip(inners, seen, strict=True))
    states = sum(m.flops_per_token for m in model.modules() if isinstance(m, DeltaRule))
    return 6.0 * matrices + (3.0 if causal else 6.0) * attention + states


def _idle_parameters(model: nn.Module) -> int:
    """Parameters of routed experts that a token does not go to."""
    idle = 0
    for stack in expert_stacks(model):
        of_one = sum(p.numel() for p in stack.experts.parameters()) // stack.num_experts
        idle += of_one * (stack.num_experts - stack.experts_per_token)
    return idle
