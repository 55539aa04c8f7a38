"""Attention within a sliding window, with or without sinks, of packed documents: by a mask, or by a kernel that needs none.

A window of ``w`` tokens shows a query its own token and the ``w - 1`` before it in its document. The plain form is torch's
attention with a mask of whole rows: right everywhere, and ``S * S`` scores a row. On CUDA two functions of torch leave out what
no query sees; each is compared with the plain form at its first call, and taken where it is equal:

- ``varlen_attn`` with its window: half precision, no sinks, values as wide as keys.
- ``flex_attention``, compiled, with blocks of the mask left out. Sinks are merged by the log-sum-exp: with a sink ``s`` an
  output is ``exp(lse) / (exp(lse) + exp(s))`` of what it was.

Neither has a backward on the CPU, so neither has been run here with gradients. In a compiled block the plain form runs.

Shapes: B rows, S tokens, H query heads, K key-value heads, D key width, E value width, N documents of all rows.
"""

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from titan_cp.backends import TrialKernel, choose_kernel
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from titan_train.models.common.attention import attend
from titan_train.models.common.packed import describe, example_rows, flash_problem, varlen, with_gradients
from titan_train.models.common.sinks import with_sink_key

Mask = Tensor | Callable[[], Tensor]
"""A mask, or a function that makes it where it is read, and keeps it for the next layer: kernels do without."""
_Windowed = Callable[[Tensor, Tensor, Tensor, Tensor, int, Tensor | None], Tensor]
"""``run(q, k, v, boundaries, window, sinks)``, tensors as in `windowed_attention`."""


def windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    boundaries: Tensor | None,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within a window.

    Args:
        q: ``[B, S, H, D]``.
        k: ``[B, S, K, D]``.
        v: ``[B, S, K, E]``.
        mask: Of documents and window, boolean, ``[B or 1, 1, S, S]``, True where a query may look; or what makes it. In a
            block that is compiled, a tensor.
        boundaries: Of the documents of all rows, as `packed_boundaries` gives them; None: a row is one document.
        window: Tokens that a query sees, itself included.
        sinks: A learned logit for each head, ``[H]``; None for none.

    Returns:
        ``[B, S, H, E]``.
    """
    if not torch.compiler.is_compiling():
        chosen = _choose(q, k, v, sinks)
        if chosen.name != "torch":
            if boundaries is None:
                boundaries = _row_boundaries(*q.shape[:2], q.device)
            return chosen.run(q, k, v, boundaries, window, sinks)
    return _with_mask(q, k, v, mask, sinks)


def _with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Mask, sinks: Tensor | None) -> Tensor:
    mask = mask if isinstance(mask, Tensor) else mask()
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if sinks is not None:
        q, k, v, mask = with_sink_key(q, k, v, mask, sinks)
    return attend(q, k, v, mask).transpose(1, 2)


def _choose(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> TrialKernel:
    def kernels() -> list[TrialKernel]:
        without_sinks = "has no sinks" if sinks is not None else None
        return [
            TrialKernel("torch's varlen_attn", _flash, flash_problem(q, v) or without_sinks),
            TrialKernel("flex_attention", _flex, None if q.is_cuda else "has no backward on the CPU"),
        ]

    case = ("windowed attention", *describe(q, k, v), "no sinks" if sinks is None else "sinks")
    trial = functools.partial(_trial, (q, k, v), sinks)
    return choose_kernel(case, kernels, TrialKernel("torch", plain_windowed), trial, like=q, dtype=q.dtype)


def _trial(like: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, run: _Windowed) -> dict[str, Tensor]:
    """Two rows of 100 tokens."""
    flat = example_rows(like, 200)
    q, k, v = (x.unflatten(0, (2, 100)) for x in flat)
    given: dict[str, Tensor] = {"q": flat[0], "k": flat[1], "v": flat[2]}
    boundaries = torch.tensor([0, 1, 40, 40, 100, 190, 200], dtype=torch.int32, device=flat[0].device)
    own = None
    if sinks is not None:
        own = torch.linspace(-1, 2, flat[0].shape[1], device=sinks.device).to(sinks.dtype).requires_grad_()
        given["sinks"] = own
    return with_gradients(run(q, k, v, boundaries, 24, own), given)


def plain_windowed(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, window: int, sinks: Tensor | None) -> Tensor:
    """`windowed_attention` by a mask of whole rows, made from the boundaries."""
    places = torch.arange(q.shape[1], device=q.device)
    distance = places[:, None] - places[None, :]
    of = _documents(boundaries, *q.shape[:2])
    mask = (of[:, :, None] == of[:, None, :]) & (distance >= 0) & (distance < window)
    return _with_mask(q, k, v, mask.unsqueeze(1), sinks)


def _flash(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, window: int, sinks: Tensor | None) -> Tensor:
    assert sinks is None
    flat = (x.flatten(0, 1) for x in (q, k, v))
    length = q.shape[1]
    return varlen((window - 1, 0))(*flat, boundaries, boundaries, length, length).unflatten(0, q.shape[:2])


def _flex(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, window: int, sinks: Tensor | None) -> Tensor:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    out, aux = _compiled(flex_attention, q.is_cuda)(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=_blocks(boundaries, window, *q.shape[:2]),
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        out = (out * torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None]).unsqueeze(-1)).to(out.dtype)
    return out.transpose(1, 2)


@functools.cache
def _compiled(function: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    """Uncompiled they make whole scores and masks of integers, which shows on the CPU what they compute."""
    return torch.compile(function) if on_gpu else function


def _blocks(boundaries: Tensor, window: int, rows: int, length: int) -> Any:
    """flex_attention's mask by blocks, made once for the layers of a forward."""
    from torch.nn.attention.flex_attention import create_block_mask

    made = _BLOCKS.setdefault(boundaries, {})
    if window not in made:
        of = _documents(boundaries, rows, length)

        def visible(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query - key < window) & (of[row, query] == of[row, key])

        create = _compiled(create_block_mask, boundaries.is_cuda)
        made[window] = create(visible, rows, None, length, length, device=boundaries.device)
    return made[window]


_BLOCKS: MutableMapping[Tensor, dict[int, Any]] = WeakTensorKeyDictionary()


def _documents(boundaries: Tensor, rows: int, length: int) -> Tensor:
    """Of each token, the number of its document: ``[B, S]``."""
    tokens = torch.arange(rows * length, device=boundaries.device, dtype=boundaries.dtype)
    return torch.searchsorted(boundaries, tokens, right=True).unflatten(0, (rows, length))


@functools.lru_cache(maxsize=4)
def _row_boundaries(rows: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
