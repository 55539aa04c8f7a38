"""Model FLOPs per token, for throughput and MFU, and parameter counts.

Convention (PaLM, arXiv:2204.02311, appendix B): a matrix of N parameters costs 2 N FLOPs a token forward and 4 N
backward, so 6 N; attention scores and their use cost 12 * L * q * S more a token, with q = heads x head width (where
values are narrower than keys, the mean of both widths). N leaves out input embeddings, which are looked up, not
multiplied; a matrix tied to the head counts once, for the head. Of routed experts only those that a token goes through
count. A causal kernel skips half of the attention term, yet by convention it is counted in full unless ``causal=True``;
accordingly a layer with a sliding window of w tokens counts 2 w of them, at most S. Frozen weights count as trained ones.
Recomputation (activation checkpointing) is never counted: these are FLOPs of the model, not of the hardware.
"""

from collections.abc import Collection

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
    return count_parameters(model) - _idle_parameters(model, list(model.modules()))


def flops_per_token(model: nn.Module, seq_len: int, *, causal: bool = False) -> float:
    """Model FLOPs of forward and backward, per token.

    A user's own module gets 6 N for its matrices, and the term of each `CausalAttention` and `DeltaRule` in it; attention
    of another kind is not seen, so its MFU reads slightly low. What a model or a block inside it states by its own method
    ``flops_per_token`` is taken instead, the outermost one's; a block with several names counts once, as its parameters do.

    Args:
        model: The whole model, on any device, the meta device too, with any wrappers.
        seq_len: Tokens in a row.
        causal: Count only the half of the attention scores that a causal kernel computes.
    """
    model = unwrap(model)
    own = traits_of(model).flops_per_token
    if own is not None:
        return float(own(seq_len))
    rest, stated = _by_statement(model, seq_len)
    used = {id(p): p.numel() for m in rest for p in m.parameters(recurse=False)}
    looked_up = {id(m.weight) for m in rest if isinstance(m, nn.Embedding)}
    others = (m for m in rest if not isinstance(m, nn.Embedding))
    multiplied = {id(p) for m in others for p in m.parameters(recurse=False)}
    matrices = sum(count for key, count in used.items() if key not in looked_up or key in multiplied)
    matrices -= _idle_parameters(model, rest)
    if (ahead := mtp_of(model)) is not None:  # each module has a pass through the head
        head = model.get_submodule(str(traits_of(model).loss_head))
        matrices += len(ahead) * sum(p.numel() for p in head.parameters())
    # the width of a key for the scores, the width of a value for their use
    inners = [m for m in rest if isinstance(m, CausalAttention)]
    seen = [min(seq_len, 2 * m.window) if m.window else seq_len for m in inners]
    attention = sum(m.num_heads * (m.head_dim + m.value_dim) * n for m, n in zip(inners, seen, strict=True))
    states = sum(m.flops_per_token for m in rest if isinstance(m, DeltaRule))
    return 6.0 * matrices + (3.0 if causal else 6.0) * attention + states + stated


def _by_statement(model: nn.Module, seq_len: int) -> tuple[list[nn.Module], float]:
    """The modules outside of those that state their FLOPs, and the sum of what the outermost of these state."""
    rest: list[nn.Module] = []
    stated, seen, ahead = 0.0, set[int](), [model]
    while ahead:
        module = ahead.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        own = traits_of(module).flops_per_token
        if own is None:
            rest.append(module)
            ahead += reversed(list(module.children()))
        else:
            stated += float(own(seq_len))
    return rest, stated


def _idle_parameters(model: nn.Module, among: Collection[nn.Module]) -> int:
    """Parameters of routed experts that a token does not go to, of the experts among these modules."""
    idle, known = 0, set(map(id, among))
    for stack in expert_stacks(model):
        if id(stack.experts) not in known:
            continue
        of_one = sum(p.numel() for p in stack.experts.parameters()) // stack.num_experts
        idle += of_one * (stack.num_experts - stack.experts_per_token)
    return idle
