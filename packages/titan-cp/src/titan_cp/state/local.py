"""A layer with a state on whole rows of one device, without a plan: its documents are a tensor, so nothing is read by the host.

The same chunks as `titan_cp.state.linear` (`titan_cp.state.chunks`), for training without context parallelism, in one graph
of ``torch.compile``, and for generation, which continues from a state and keeps the next one. A kernel of another package runs
instead where it is installed and equal (`titan_cp.state.kernels`); for packed rows it needs `boundaries`.
"""

import math
from collections.abc import MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from titan_cp.planning.costs import accumulator_dtype, no_autocast
from titan_cp.state.chunks import CHANNEL_CHUNK, HEAD_CHUNK, ChunkGrid, make_chunks, read_chunks
from titan_cp.state.kernels import choose_state_kernel


def local_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None = None,
    *,
    documents: Tensor | None = None,
    boundaries: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_attention` on whole rows.

    Args:
        q: ``[B, Hk, T, K]``.
        k: ``[B, Hk, T, K]``.
        v: ``[B, H, T, V]``; ``Hk`` divides ``H``.
        decay: Logarithm of what is left of the state at each token, at most 0, minus infinity for nothing: ``[B, H, T]``, or
            ``[B, H, T, K]``.
        beta: ``[B, H, T]``; None for no delta rule.
        documents: ``[B, T]``, integers: one number for the tokens of a document, another for those of the next. None: a
            row is one document.
        boundaries: The same as ends of the documents of all rows laid end to end, ``[N + 1]`` integers from 0 to ``B · T``,
            which may repeat. Only kernels of other packages read it; without it none is taken for packed rows. One made in
            inference mode must not be changed in place.
        state: What the first document of each row continues from, ``[B, H, K, V]``; None for zeros.
        scale: Factor on the queries; None for ``1/sqrt(K)``.

    Returns:
        The output, ``[B, H, T, V]`` in the dtype of ``v``; and the state after the last token, ``[B, H, K, V]`` float32
        (float64 for float64).

    Raises:
        ValueError: The shapes do not fit each other.
    """
    _check(q, k, v, decay, beta, documents)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if state is None and (documents is None) == (boundaries is None):
        kernel = choose_state_kernel((q, k, v, decay, beta), packed=documents is not None, reference=plain_rows)
        if kernel is not None:
            bounds = None if boundaries is None else _increasing(boundaries)
            with no_autocast(v.device):
                return kernel(q, k, v, decay, beta, bounds=bounds, scale=scale)
    return _in_chunks(q, k, v, decay, beta, documents, state, scale)


def plain_rows(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, *, bounds: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The chunked form as a kernel is called."""
    documents = None
    if bounds is not None:
        places = torch.arange(v.shape[0] * v.shape[2], device=v.device)
        documents = torch.searchsorted(bounds, places, right=True).unflatten(0, (v.shape[0], v.shape[2]))
    return _in_chunks(q, k, v, decay, beta, documents, None, scale)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None,
    documents: Tensor | None, state: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = accumulator_dtype(v.dtype)
    repeats, tokens = v.shape[1] // k.shape[1], v.shape[2]
    if state is None:
        state = v.new_zeros((*v.shape[:2], k.shape[-1], v.shape[-1]), dtype=wide)
    if not tokens:
        return v.clone(), state
    with no_autocast(v.device):
        q_wide, k_wide = q.to(wide) * scale, k.to(wide)
        if repeats > 1:
            q_wide, k_wide = (x.repeat_interleave(repeats, dim=1) for x in (q_wide, k_wide))
        decay_wide = (decay.unsqueeze(-1) if decay.ndim == 3 else decay).to(wide)
        grid = _grid(documents, tokens, HEAD_CHUNK if decay.ndim == 3 else CHANNEL_CHUNK, v.device)
        chunks = make_chunks(q_wide, k_wide, v.to(wide), decay_wide, None if beta is None else beta.to(wide), grid)
        first: list[Tensor] = []
        for chunk in range(grid.first[-1]):
            first.append(state)
            state = chunks.step(chunk, state, chunks.values[:, :, chunk])
        out = read_chunks(chunks, torch.stack(first, dim=2))[:, :, :tokens]
    return out.to(v.dtype), state


def _increasing(boundaries: Tensor) -> Tensor:
    """Without repetitions, int64: one wait of the host for the boundaries of a batch, whichever layer asks first."""
    version = None if boundaries.is_inference() else boundaries._version
    seen, found = _DISTINCT.get(boundaries, (None, None))
    if found is None or seen != version:
        with torch.inference_mode(False):  # it may be saved for a backward
            found = boundaries.long().unique_consecutive()
        _DISTINCT[boundaries] = version, found
    return found


_DISTINCT: MutableMapping[Tensor, tuple[int | None, Tensor]] = WeakTensorKeyDictionary()


def _grid(documents: Tensor | None, tokens: int, size: int, device: torch.device) -> ChunkGrid:
    size = min(size, tokens)
    count = -(-tokens // size)
    pairs = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if documents is None:
        every = torch.ones(1, 1, dtype=torch.bool, device=device)
        return ChunkGrid(size, (0, count), None, pairs, every, every)
    documents = (documents.diff(dim=1, prepend=documents[:, :1]) != 0).cumsum(1)  # numbers of later ones may repeat
    # filling belongs to the last document, so that the state goes through it unchanged
    filling = documents[:, -1:].expand(-1, count * size - tokens)
    of = torch.cat([documents, filling], dim=1).unflatten(1, (count, size)).unsqueeze(1)
    carried = torch.cat([of[:, :, :1, :1], of[:, :, :-1, -1:]], dim=2)
    same = of.unsqueeze(-1) == of.unsqueeze(-2)
    reads, writes = (of == carried).unsqueeze(-1), (of == of[..., -1:]).unsqueeze(-1)
    return ChunkGrid(size, (0, count), None, pairs & same, reads, writes)


def _check(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, documents: Tensor | None) -> None:
    if any(x.ndim != 4 for x in (q, k, v)) or v.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; each must be [batch, heads, tokens, "
            "channels], and the heads of k divide those of v. Transpose [B, T, H, D] to [B, H, T, D]."
        )
    rows = (*v.shape[:3],)
    expected = [
        ("q", q, [k.shape]),
        ("k", k, [(v.shape[0], k.shape[1], v.shape[2], k.shape[3])]),
        ("decay", decay, [rows, (*rows, k.shape[3])]),
    ]
    expected += [] if beta is None else [("beta", beta, [rows])]
    expected += [] if documents is None else [("documents", documents, [(v.shape[0], v.shape[2])])]
    for name, x, shapes in expected:
        if tuple(x.shape) not in [tuple(shape) for shape in shapes]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but the other arguments want "
                f"{' or '.join(str(list(shape)) for shape in shapes)}. decay and beta have the heads of v."
            )
