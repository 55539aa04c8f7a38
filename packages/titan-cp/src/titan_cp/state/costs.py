"""What a state layer costs over ranks: bytes, steps, and a plan in words. Closed forms, no ranks needed.

Per rank, one layer, one batch row. ``N`` ranks, ``H`` heads, ``K`` key and ``V`` value channels, ``a`` bytes an accumulator
(4; 8 for float64), ``m`` the size of a head's map (``K²`` with the delta rule, ``K`` with a decay per channel, else 1)::

    states       each way  (N - 1) · slots · H (m + K V) a    slots: cut pieces of the rank that has most
    convolution  forward   rows sent · C b                    C channels, b bytes an element
                 backward  rows received · C a

Neither grows with the length: ``contiguous`` has one slot, ``zigzag`` two. Layouts that cut many documents have one for each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from titan_cp.backends.trial import kernel_choices
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.explain import size_text
from titan_cp.planning.plan import AttentionPlan
from titan_cp.state.convolution import rank_halo
from titan_cp.state.kernels import candidates
from titan_cp.state.linear import rank_pieces

STATE_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "gated_delta": "gated delta rule: a decay per head",
        "kda": "Kimi delta attention: the delta rule, a decay per channel",
        "mamba2": "Mamba-2 (SSD): a decay per head, no delta rule",
        "gated_linear": "gated linear attention: a decay per channel, no delta rule",
    }
)
"""The state layers that have a name, each in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StateCosts:
    """Bytes per rank for one state layer and one batch row, and its steps over ranks."""

    forward_bytes: int
    """States sent in the forward."""
    backward_bytes: int
    """Their gradients and maps, sent in the backward."""
    convolution_forward_bytes: int
    """Rows sent for the convolution in front; 0 without one."""
    convolution_backward_bytes: int
    steps: int
    """Small products, one after another, from the gathered maps to this rank's first states."""


def state_costs(
    plan: AttentionPlan,
    kind: str,
    *,
    num_heads: int,
    num_key_heads: int | None = None,
    key_dim: int = 128,
    value_dim: int = 128,
    convolution: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> StateCosts:
    """The cost of one state layer on the tokens of ``plan``.

    Args:
        plan: Who holds which tokens.
        kind: A name in `STATE_KINDS`.
        num_heads: Value heads (of this rank's tensors, if tensor parallelism has split them).
        num_key_heads: Key heads; None for as many.
        key_dim: Channels of a key head: the state's first dim.
        value_dim: Channels of a value head: the state's second dim.
        convolution: Taps of the convolution over queries, keys and values; 0 for none.
        dtype: Dtype of what the convolution takes.

    Raises:
        ValueError: If the kind does not exist or a number cannot work.
    """
    if kind not in STATE_KINDS:
        raise ValueError(f"kind={kind!r} does not exist. Use one of {list(STATE_KINDS)}.")
    key_heads = num_heads if num_key_heads is None else num_key_heads
    for name, value in (("num_heads", num_heads), ("num_key_heads", key_heads), ("key_dim", key_dim),
                        ("value_dim", value_dim)):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name}={value} is not a positive number. Use 1 or more.")
    if num_heads % key_heads:
        raise ValueError(
            f"num_key_heads={key_heads} does not divide num_heads={num_heads}: value heads could not share key heads "
            "equally. Use a divisor."
        )
    if convolution < 0:
        raise ValueError(f"convolution={convolution} is not a number of taps. Use 0 for no convolution.")
    element, wide = (torch.empty((), dtype=d).element_size() for d in (dtype, accumulator_dtype(dtype)))
    pieces = rank_pieces(plan)
    slot = (plan.size - 1) * num_heads * (_map_size(kind, key_dim) + key_dim * value_dim) * wide
    channels = 2 * key_heads * key_dim + num_heads * value_dim
    halo = rank_halo(plan, convolution) if convolution else None
    return StateCosts(
        forward_bytes=pieces.open_slots * slot,
        backward_bytes=pieces.continued_slots * slot,
        convolution_forward_bytes=halo.sent * channels * element if halo else 0,
        convolution_backward_bytes=halo.received * channels * wide if halo else 0,
        steps=len(pieces.forward),
    )


def explain_state(
    plan: AttentionPlan,
    kind: str,
    *,
    num_heads: int,
    num_key_heads: int | None = None,
    key_dim: int = 128,
    value_dim: int = 128,
    convolution: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """`state_costs` in words, a line each; print it. Arguments as there."""
    costs = state_costs(
        plan, kind, num_heads=num_heads, num_key_heads=num_key_heads, key_dim=key_dim, value_dim=value_dim,
        convolution=convolution, dtype=dtype,
    )  # fmt: skip
    pieces = rank_pieces(plan)
    padding = plan.pad_to - plan.seq_len
    documents = len(plan.cu_seqlens) - 1 - bool(padding)
    key_heads = num_heads if num_key_heads is None else num_key_heads
    wide = torch.empty((), dtype=accumulator_dtype(dtype)).element_size()
    state, held = num_heads * key_dim * value_dim * wide, _map_size(kind, key_dim) * num_heads * wide
    cut = pieces.open_slots
    most = f"{cut or 'no'} cut document piece{'s' * (cut != 1)} on the rank that has most"
    sent = f"{size_text(costs.forward_bytes)} forward, {size_text(costs.backward_bytes)} backward"
    lines = [
        f"sequence    {plan.seq_len} tokens, {documents} document{'s' * (documents > 1)}"
        + (f"; padded by {padding} to {plan.pad_to}" if padding else ""),
        f"ranks       {plan.size}, {plan.local_len} tokens each",
        f"layer       {kind}, {STATE_KINDS[kind]}",
        f"heads       {num_heads} value, {key_heads} key; state {key_dim} × {value_dim} per head",
        f"layout      {plan.layout}: equal tokens are equal work; {most}",
        f"state       {size_text(state)}, and {size_text(held)} for the map of a piece",
        f"sent        {sent}: independent of length",
        f"steps       one all-gather each way, then {costs.steps} small products in turn",
    ]
    if convolution:
        lines.append(
            f"convolution {size_text(costs.convolution_forward_bytes)} forward, "
            f"{size_text(costs.convolution_backward_bytes)} backward: up to {convolution - 1} rows per cut piece"
        )
    lines += [
        f"kernel      {place}: {_kernel_words(kind, torch.device(place), dtype, cut)}" for place in ("cuda", "cpu")
    ]
    lines.append("            (bytes are per rank, one layer, one batch row)")
    return "\n".join(lines)


def _kernel_words(kind: str, device: torch.device, dtype: torch.dtype, cut: int) -> str:
    if cut:
        return "torch, in chunks: other packages' kernels take no pieces of documents"
    kernel = candidates(kind, device, dtype)[0]
    tried = [choice for choice in kernel_choices() if choice.case[0] == kind]
    if any(choice.used.name == kernel.name for choice in tried):
        return f"{kernel.name}, equal to torch at its first call"
    if kernel.problem is None and not tried:
        return f"{kernel.name} if its first call equals torch's"
    return f"torch, in chunks: {kernel.name} {kernel.problem or tried[-1].reasons[kernel.name]}"


def _map_size(kind: str, key_dim: int) -> int:
    """Numbers that a head's map of a piece holds."""
    return {"gated_delta": key_dim**2, "kda": key_dim**2, "mamba2": 1, "gated_linear": key_dim}[kind]
