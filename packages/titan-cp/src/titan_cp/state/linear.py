"""Linear attention with a state, over ranks: gated delta rule, KDA, Mamba-2 and gated linear attention in one function.

A head carries a state ``h``, ``[K, V]``, from token to token of a document::

    h ← exp(decay_t) h            decay per head, or per channel of the keys
    h ← h + k_t (β_t (v_t - k_tᵀ h))ᵀ     with the delta rule; otherwise h ← h + k_t v_tᵀ
    out_t = scale · q_tᵀ h

Within a rank it runs in chunks (`titan_cp.state.chunks`), across ranks as one scan (`titan_cp.state.scan`), on the tokens
that the plan of the softmax layers beside it gives to each rank. Where no document is cut, a kernel of another package runs
if it is installed and equal (`titan_cp.state.kernels`).
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from titan_cp.methods.compiling import graph_break
from titan_cp.planning.costs import accumulator_dtype, no_autocast
from titan_cp.planning.groups import check_group
from titan_cp.planning.plan import AttentionPlan
from titan_cp.planning.tokens import to_device
from titan_cp.state.chunks import CHANNEL_CHUNK, HEAD_CHUNK, chunk_grid, chunk_outputs, make_chunks, run_summary
from titan_cp.state.kernels import choose_state_kernel
from titan_cp.state.local import plain_rows
from titan_cp.state.pieces import DocumentPieces, plan_pieces
from titan_cp.state.scan import ScanSetup, scan_states


@graph_break
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    *,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
) -> Tensor:
    """A layer with a state, on this rank's tokens; the state goes through a document from rank to rank.

    ======================= ================== ============ =============================================================
    layer                   ``decay``          ``beta``     arguments
    ======================= ================== ============ =============================================================
    gated delta rule        per head           per token    ``q``, ``k`` normalised by the caller
    Kimi delta attention    per channel        per token    the same
    Mamba-2 (SSD)           per head           None         ``q=C, k=B, v=dt·x, decay=dt·A, scale=1``; add ``D·x`` after
    gated linear attention  per channel        None
    ======================= ================== ============ =============================================================

    Args:
        q: This rank's queries, shape ``[B, Hk, T, K]``.
        k: This rank's keys, shape ``[B, Hk, T, K]``.
        v: This rank's values, shape ``[B, H, T, V]``; ``Hk`` divides ``H``, and ``H / Hk`` heads in turn share a key head.
        decay: Logarithm of what is left of the state at each token, at most 0, minus infinity for nothing: ``[B, H, T]``, or
            ``[B, H, T, K]``.
        beta: How much of what a key recalls is replaced, ``[B, H, T]``; None for no delta rule.
        plan: A plan of this sequence length or packing: its ranks, documents and layout. Its heads, mask and method are
            those of the softmax layers and do not matter here.
        group: The whole context-parallel group, ``plan.size`` ranks in the plan's order, under USP too; None for one rank.
        scale: Factor on the queries; None for ``1/sqrt(K)``.

    Returns:
        ``[B, H, T, V]`` in the dtype of ``v``; states and sums are float32 (float64 for float64). Differentiable once.

    Raises:
        ValueError: If tensors or group do not fit each other or the plan, before any communication.
    """
    _check(q, k, v, decay, beta, plan)
    check_group(group, plan.size, plan.rank, "group")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    pieces = rank_pieces(plan)
    if not pieces.open_slots:  # the same on every rank
        kernel = choose_state_kernel((q, k, v, decay, beta), packed=True, reference=plain_rows)
        if kernel is not None:
            bounds = plan.index_once(("rows", v.shape[0], v.device), lambda: _boundaries(pieces, v))
            with no_autocast(v.device):
                return kernel(q, k, v, decay, beta, bounds=bounds, scale=scale)[0]
    wide = accumulator_dtype(v.dtype)
    repeats = v.shape[1] // k.shape[1]
    with no_autocast(v.device):
        q_wide, k_wide = q.to(wide) * scale, k.to(wide)
        if repeats > 1:
            q_wide, k_wide = (x.repeat_interleave(repeats, dim=1) for x in (q_wide, k_wide))
        decay_wide = (decay.unsqueeze(-1) if decay.ndim == 3 else decay).to(wide)
        size = HEAD_CHUNK if decay_wide.shape[-1] == 1 else CHANNEL_CHUNK
        grid = plan.index_once(("chunks", size, v.device), lambda: chunk_grid(pieces, size, v.device))
        chunks = make_chunks(q_wide, k_wide, v.to(wide), decay_wide, None if beta is None else beta.to(wide), grid)
        shape = (v.shape[0], v.shape[1], k.shape[-1], v.shape[-1])
        if pieces.open_slots:
            opened = [
                run_summary(chunks, run, range(begin, end))
                for run, begin, end in zip(pieces.runs, grid.first, grid.first[1:], strict=False)
                if run.open is not None
            ]
            m = (k.shape[-1], k.shape[-1]) if beta is not None else (decay_wide.shape[-1], 1)
            none = (v.new_zeros((0, *shape[:2], *m), dtype=wide), v.new_zeros((0, *shape), dtype=wide))
            keep, state = (torch.stack(x) for x in zip(*opened, strict=True)) if opened else none
            anchors = [x for x in (q, k, v, decay, beta) if x is not None]
            first = scan_states(keep, state, ScanSetup(plan, pieces, group), anchors)
        else:
            first = v.new_zeros((0, *shape), dtype=wide)
        return chunk_outputs(chunks, pieces, grid, first).to(v.dtype)


def rank_pieces(plan: AttentionPlan) -> DocumentPieces:
    """How the plan's documents are cut, for its rank; kept with the plan."""
    return plan.index_once("state pieces", lambda: plan_pieces(plan.shard_ranges, plan.cu_seqlens, plan.rank))


def _boundaries(pieces: DocumentPieces, v: Tensor) -> Tensor:
    """Ends of this rank's documents in all rows laid end to end, ``[N + 1]`` int64."""
    lengths = torch.tensor((0, *pieces.documents * v.shape[0]), dtype=torch.int64)
    return to_device(lengths.cumsum(0), v.device)


def _check(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, plan: AttentionPlan) -> None:
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(
            f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; each must be [batch, heads, "
            "local tokens, channels]. Transpose [B, T, H, D] to [B, H, T, D]."
        )
    batch, heads = v.shape[:2]
    key_heads, key_dim = k.shape[1], k.shape[-1]
    tokens = plan.local_len
    if heads % key_heads:
        raise ValueError(
            f"k has {key_heads} heads and v has {heads}: value heads cannot share key heads equally. The key heads must "
            "divide the value heads."
        )
    expected = [
        ("q", q, [(batch, key_heads, tokens, key_dim)]),
        ("k", k, [(batch, key_heads, tokens, key_dim)]),
        ("v", v, [(batch, heads, tokens, v.shape[-1])]),
        ("decay", decay, [(batch, heads, tokens), (batch, heads, tokens, key_dim)]),
    ]
    if beta is not None:
        expected.append(("beta", beta, [(batch, heads, tokens)]))
    for name, x, shapes in expected:
        if tuple(x.shape) not in shapes:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but the plan and the other arguments want "
                f"{' or '.join(str(list(shape)) for shape in shapes)}: [batch, heads, local tokens, …]. Shard with "
                "plan.shard; decay and beta have the heads of v."
            )
        if x.device != v.device or not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype} on {x.device}, v is on {v.device}. Use float tensors on one device.")
