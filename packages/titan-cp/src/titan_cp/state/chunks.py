"""State layers within a rank, a chunk of tokens at a time: plain torch operations, the twin of every kernel.

Problem: token by token, a state layer is as many small products as there are tokens.

Idea: over a chunk the state changes by an affine map, ``h' = A h + b``, and what its tokens write is known from products
within the chunk alone. With the cumulated log-decay ``G`` (per head or per channel), ``P_ij = exp(G_i - G_j)``::

    scores  (q_i · k_j) P_ij, j <= i                             values of the chunk, as its queries see them
    U, W    (I + tril(β_i (k_i · k_j) P_ij, -1))⁻¹ [β v, β k exp(G)]     delta rule; otherwise U = v, W = 0
    out     (q exp(G)) h + scores (U - W h)
    h'      exp(G_last) h + (k exp(G_last - G))ᵀ (U - W h)

Documents begin and end anywhere: pairs of different documents are masked, a token reads ``h`` only if it is of the document
that ``h`` is of, and writes to ``h'`` only if it is of the document that the chunk ends with. A document of one token costs
one token. Chunks begin anew at each run (`titan_cp.state.pieces`), whose first state comes from another rank.

Every exponent is at most 0, so nothing overflows, and a decay is bounded from below, so that a reset (minus infinity) leaves
the others exact. Sums are float32 (float64 for float64).

Source: the chunked form of "Gated Delta Networks" (arXiv 2412.06464), "Kimi Linear" (arXiv 2510.26692), "Gated Linear
Attention" (arXiv 2312.06635), and Mamba-2's state space duality (arXiv 2405.21060).
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_cp.planning.tokens import to_device
from titan_cp.state.pieces import DocumentPieces, Run

HEAD_CHUNK, CHANNEL_CHUNK = 64, 16
"""Tokens per chunk. Per-channel decays need a ``[chunk, chunk, K]`` tensor for each chunk, so theirs are shorter."""


class ChunkGrid(NamedTuple):
    """Where each local token lies in the chunks, and which tokens belong together."""

    size: int
    """Tokens per chunk."""
    first: tuple[int, ...]
    """The first chunk of each run, and the number of chunks."""
    places: Tensor | None
    """Of each local token, its place among all chunks' tokens, int64; None: in order, the last chunk filled up."""
    pairs: Tensor
    """Whether query ``i`` may read key ``j``: one document, ``j <= i``; ``[chunks, size, size]``, broadcast over batch and
    heads like the next two."""
    reads: Tensor
    """Whether a token is of the document that the chunk's first state is of, ``[chunks, size, 1]``."""
    writes: Tensor
    """Whether it is of the document that the chunk ends with, ``[chunks, size, 1]``."""


def chunk_grid(pieces: DocumentPieces, size: int, device: torch.device) -> ChunkGrid:
    """Chunks of ``size`` tokens over a rank's runs; each run's last chunk is filled up with tokens that change nothing."""
    counts = [-(-(run.stop - run.start) // size) for run in pieces.runs]
    first = np.concatenate([[0], np.cumsum(counts)])
    lengths = np.array([run.stop - run.start for run in pieces.runs])
    run_of = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    places = first[run_of] * size + np.arange(len(run_of)) - starts[run_of]
    document = np.repeat(np.arange(len(pieces.documents)), pieces.documents)
    # filling belongs to the run's last document, so that the state goes through it unchanged
    filled = np.repeat(document[starts + lengths - 1], np.array(counts) * size)
    filled[places] = document
    filled = filled.reshape(-1, size)
    carried = np.concatenate([[-1], filled[:-1, -1]])
    for run, chunk in zip(pieces.runs, first.tolist(), strict=False):
        carried[chunk] = -1 if run.continued is None else filled[chunk, 0]
    of = torch.from_numpy(filled)
    pairs = (of[:, :, None] == of[:, None, :]) & torch.ones(size, size, dtype=torch.bool).tril()
    reads = (of == torch.from_numpy(carried)[:, None]).unsqueeze(-1)
    writes = (of == of[:, -1:]).unsqueeze(-1)
    tensors = (to_device(x, device) for x in (torch.from_numpy(places), pairs, reads, writes))
    return ChunkGrid(size, tuple(first.tolist()), *tensors)


class Chunks(NamedTuple):
    """What the chunks' maps are made of; ``N`` chunks of ``C`` tokens."""

    queries: Tensor
    """As they read the chunk's first state, ``[B, H, N, C, K]``."""
    scores: Tensor
    """``[B, H, N, C, C]``."""
    values: Tensor
    """``U``, ``[B, H, N, C, V]``."""
    corrections: Tensor | None
    """``W``, ``[B, H, N, C, K]``: what the first state changes of the values; None without the delta rule."""
    keys: Tensor
    """As they write to the chunk's last state, ``[B, H, N, C, K]``."""
    keeps: Tensor
    """How much of the first state is left in the last, ``[B, H, N, K or 1, 1]``."""

    def step(self, chunk: int, state: Tensor, values: Tensor) -> Tensor:
        """The last state of ``chunk``, ``[B, H, K, V]``, from its first."""
        if self.corrections is not None:
            values = values - self.corrections[:, :, chunk] @ state
        return self.keeps[:, :, chunk] * state + self.keys[:, :, chunk].transpose(-1, -2) @ values


def make_chunks(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, grid: ChunkGrid) -> Chunks:
    """The maps of all chunks; arguments as in `linear_attention`, equal heads, ``q`` scaled, ``decay [B, H, T, K or 1]``."""
    q, k, v, decay = (_to_chunks(x, grid) for x in (q, k, v, bounded_decay(decay)))
    total = decay.cumsum(-2)
    between = total.unsqueeze(-2) - total.unsqueeze(-3)  # [B, H, N, C, C, K or 1]
    weights = between.masked_fill(~grid.pairs.unsqueeze(-1), float("-inf")).exp()
    read = torch.where(grid.reads, total.exp(), 0.0)
    written = torch.where(grid.writes, (total[..., -1:, :] - total).exp(), 0.0)
    values, corrections = v, None
    if beta is not None:
        beta = _to_chunks(beta.unsqueeze(-1), grid)
        k_beta = k * beta
        system = _weighted(k_beta, k, weights).tril(-1)
        right = torch.cat([v * beta, k_beta * read], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        values, corrections = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return Chunks(q * read, _weighted(q, k, weights), values, corrections, k * written, read[..., -1, :].unsqueeze(-1))


def bounded_decay(decay: Tensor) -> Tensor:
    """Log-decay, no further down than where its exponential is 0: sums with a huge one would keep nothing of the others."""
    return decay.clamp(min=-746.0 if decay.dtype == torch.float64 else -104.0)


def run_summary(chunks: Chunks, run: Run, span: range) -> tuple[Tensor, Tensor]:
    """The affine map of a run, ``last state = keep ∘ first state + state``.

    Args:
        chunks: The chunks of all runs.
        run: The run.
        span: Its chunks.

    Returns:
        ``keep``: ``[B, H, K, K]`` with the delta rule, otherwise ``[B, H, K or 1, 1]``; and ``state``, ``[B, H, K, V]``.
    """
    batch, heads, _, _, key_dim = chunks.keys.shape
    width = chunks.values.shape[-1]
    values, state = chunks.values, chunks.values.new_zeros(batch, heads, key_dim, width)
    both = chunks.corrections is not None and run.continued is not None
    if both:  # the state and the map of the first state side by side
        eye = torch.eye(key_dim, dtype=state.dtype, device=state.device).expand(batch, heads, -1, -1)
        state = torch.cat([state, eye], dim=-1)
        values = torch.nn.functional.pad(values, (0, key_dim))
    for chunk in span:
        state = chunks.step(chunk, state, values[:, :, chunk])
    if both:
        return state[..., width:], state[..., :width]
    if chunks.corrections is not None:
        return state.new_zeros(batch, heads, key_dim, key_dim), state
    return chunks.keeps[:, :, span.start : span.stop].prod(2), state


def chunk_outputs(chunks: Chunks, pieces: DocumentPieces, grid: ChunkGrid, first_states: Tensor) -> Tensor:
    """What the local queries read, ``[B, H, T, V]``; ``first_states [slots, B, H, K, V]`` are those of continued runs."""
    # One state more, for runs that begin with a document: also where this rank has no continued run, its exchange with the
    # others stays in the graph, as every rank must come to its backward.
    zeros = first_states.new_zeros((1, *first_states.shape[1:]))
    initial = torch.cat([first_states, zeros])
    states: list[Tensor] = []
    for run, begin, end in zip(pieces.runs, grid.first, grid.first[1:], strict=False):
        state = initial[-1 if run.continued is None else run.continued]
        for chunk in range(begin, end):
            states.append(state)
            if chunk + 1 < end:
                state = chunks.step(chunk, state, chunks.values[:, :, chunk])
    assert grid.places is not None
    return read_chunks(chunks, torch.stack(states, dim=2)).index_select(2, grid.places)


def read_chunks(chunks: Chunks, first: Tensor) -> Tensor:
    """What the queries of all chunks read, ``[B, H, N * C, V]``; ``first [B, H, N, K, V]`` are the chunks' first states."""
    values = chunks.values
    if chunks.corrections is not None:
        values = values - chunks.corrections @ first
    return (chunks.queries @ first + chunks.scores @ values).flatten(2, 3)


def _to_chunks(x: Tensor, grid: ChunkGrid) -> Tensor:
    """``[B, H, T, D]`` to ``[B, H, N, C, D]``, zeros where a chunk is filled up."""
    if grid.places is None:
        whole = grid.first[-1] * grid.size
        return torch.nn.functional.pad(x, (0, 0, 0, whole - x.shape[2])).unflatten(2, (-1, grid.size))
    filled = x.new_zeros((*x.shape[:2], grid.first[-1] * grid.size, x.shape[3]))
    return filled.index_copy(2, grid.places, x).unflatten(2, (-1, grid.size))


def _weighted(x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """``sum_d x_id y_jd w_ijd``, ``[..., C, C]``."""
    if weights.shape[-1] == 1:
        return x @ y.transpose(-1, -2) * weights.squeeze(-1)
    return torch.einsum("...id,...jd,...ijd->...ij", x, y, weights)
