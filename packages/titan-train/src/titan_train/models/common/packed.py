"""Attention of packed documents (causal) or images (not), one by one: no mask, memory linear in the tokens.

All documents of all rows of a batch are concatenated along one dimension; ``boundaries`` are where they begin. A document of n
tokens costs its own n * n / 2 scores; a mask of whole rows would cost S * S per row, and their bytes. Boundaries may repeat: a
document between two equal ones is empty, so a batch needs no exact count, and on a GPU the boundaries never have to come to the
host.

- CUDA, half precision, values as wide as keys: torch's variable-length FlashAttention (`torch.nn.attention.varlen`).
- CUDA otherwise (float32; latent attention, whose values are narrower): the memory-efficient kernel's variable-length
  form. Values are not padded. ``tests/models/test_packed_attention.py`` names the versions that it was checked on.
- Both are compared with `plain_attention` at their first call (`titan_cp.backends.choose_kernel`), which runs where neither
  is equal.
- CPU: one call of the flash kernel for each run of documents of one length. It is one operator, so that a compiled block
  sees no loop and no lengths.

Shapes: T tokens of the batch, H query heads, K key-value heads, D key width, E value width, N documents.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from titan_cp.backends import TrialKernel, choose_kernel
from torch import Tensor

_CAUSAL_FROM_TOP_LEFT, _FULL = 1, 0
_FLASH_HEAD_DIM = 256


def packed_boundaries(cu_seqlens: Tensor, seq_len: int) -> Tensor:
    """Where documents begin in the batch laid out flat, from the boundaries of each row.

    Args:
        cu_seqlens: ``[B, N + 1]`` int32, each row from 0 to S, padded by repeating S.
        seq_len: S.

    Returns:
        ``[B * (N + 1)]`` int32, from 0 to ``B * S``, not decreasing.
    """
    rows = torch.arange(cu_seqlens.shape[0], device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return (cu_seqlens + rows.unsqueeze(1) * seq_len).flatten()


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, *, causal: bool = True
) -> Tensor:
    """Each token attends to what precedes it in its document, and to itself.

    Args:
        q: ``[T, H, D]``.
        k: ``[T, K, D]``; K divides H.
        v: ``[T, K, E]``; E is at most D.
        boundaries: ``[N + 1]`` int32 on the same device, from 0 to T, not decreasing.
        longest: No document is longer; an upper bound will do.
        causal: False: each token attends to all of its document, as the patches of an image do.

    Returns:
        ``[T, H, E]``, in the dtype of ``q``.
    """
    # kernels read channels that are neighbours in memory, and do not say so
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if not q.is_cuda:
        return cast(Tensor, torch.ops.titan_train.document_attention(q, k, v, boundaries, causal)[0])
    untried = _flash if flash_problem(q, v) is None else _efficient
    if torch.compiler.is_compiling():
        return untried(q, k, v, boundaries, longest, causal)
    return _choose(q, k, v, causal, untried)(q, k, v, boundaries, longest, causal)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, causal: bool) -> Tensor:
    """`packed_attention` from whole scores, a document at a time; the host waits for their lengths."""
    del longest
    groups, wide = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    parts: list[Tensor] = []
    for start, stop in pairwise(boundaries.tolist()):
        queries, keys, values = (x[start:stop].to(wide).transpose(0, 1) for x in (q, k, v))
        keys, values = (x.repeat_interleave(groups, dim=0) for x in (keys, values))
        scores = queries @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), float("-inf"))
        parts.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(parts).to(q.dtype)


def flash_problem(q: Tensor, v: Tensor) -> str | None:
    """Why torch's variable-length FlashAttention cannot attend with these queries and values, or None."""
    if not q.is_cuda:
        return f"needs CUDA tensors, got {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"needs half precision, got {str(q.dtype).removeprefix('torch.')}"
    if v.shape[-1] < q.shape[-1]:
        return f"needs values as wide as keys, got {v.shape[-1]} and {q.shape[-1]}"
    return None if q.shape[-1] <= _FLASH_HEAD_DIM else f"has no more than {_FLASH_HEAD_DIM} channels per head"


def _choose(q: Tensor, k: Tensor, v: Tensor, causal: bool, untried: "_Packed") -> "_Packed":
    def kernels() -> list[TrialKernel]:
        flash = TrialKernel("torch's varlen_attn", _flash, flash_problem(q, v))
        return [flash, TrialKernel("memory-efficient attention", _efficient)]

    case = ("packed attention", *describe(q, k, v), "causal" if causal else "full")
    chosen = choose_kernel(
        case, kernels, TrialKernel("torch", plain_attention), functools.partial(_trial, (q, k, v), causal), like=q,
        dtype=q.dtype, untried=TrialKernel("untried", untried),
    )  # fmt: skip
    return chosen.run


def describe(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, ...]:
    """What may decide which code a kernel of attention runs, heads last but one: a part of a `titan_cp.backends.trial.Case`."""
    dtype = str(q.dtype).removeprefix("torch.")
    return str(q.device), dtype, f"{q.shape[-1]} × {v.shape[-1]}", f"{q.shape[-2] // k.shape[-2]} heads per key"


def example_rows(like: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Random ``[tokens, heads, width]`` of the widths and dtypes of queries, keys and values, two key heads, with gradients."""
    groups = like[0].shape[-2] // like[1].shape[-2]
    generator = torch.Generator(like[0].device).manual_seed(0)
    made: list[Tensor] = []
    for x, heads in zip(like, (2 * groups, 2, 2), strict=True):
        drawn = torch.randn(tokens, heads, x.shape[-1], generator=generator, device=x.device)
        made.append(drawn.to(x.dtype).requires_grad_())
    return made


def with_gradients(out: Tensor, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The output of a trial and the gradients of its inputs by their names."""
    generator = torch.Generator(out.device).manual_seed(1)
    probe = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    gradients = torch.autograd.grad(out, list(wanted.values()), probe)
    return {
        "the output": out.detach(),
        **{f"the gradient of {name}": x for name, x in zip(wanted, gradients, strict=True)},
    }


def _trial(like: Sequence[Tensor], causal: bool, run: "_Packed") -> dict[str, Tensor]:
    q, k, v = example_rows(like, 200)
    boundaries = torch.tensor([0, 1, 64, 64, 70, 200], dtype=torch.int32, device=q.device)
    return with_gradients(run(q, k, v, boundaries, 130, causal), {"q": q, "k": k, "v": v})


def _flash(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, causal: bool) -> Tensor:
    return varlen((-1, 0 if causal else -1))(q, k, v, boundaries, boundaries, longest, longest)


def _efficient(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, causal: bool) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # this kernel does not group heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return cast(Tensor, _Efficient.apply(q, k, v, boundaries, longest, causal))


_Packed = Callable[[Tensor, Tensor, Tensor, Tensor, int, bool], Tensor]


@functools.cache
def varlen(window: tuple[int, int]) -> Callable[..., Tensor]:
    """The public function of torch with the arguments that this version has for attention of grouped heads.

    Args:
        window: Tokens before and after its own that a query sees; -1 for all.
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": window}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    return cast(Callable[..., Tensor], functools.partial(varlen_attn, **options))


class _Efficient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, causal: bool) -> Tensor:
        ctx.mask = _CAUSAL_FROM_TOP_LEFT if causal else _FULL
        out, lse, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
            q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, boundaries, boundaries, longest, longest, 0.0,
            ctx.mask, True,
        )  # fmt: skip
        ctx.longest = longest
        ctx.save_for_backward(q, k, v, out, lse, seed, offset, boundaries)
        return out.squeeze(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, seed, offset, boundaries = ctx.saved_tensors
        found = torch.ops.aten._efficient_attention_backward(
            grads[0].unsqueeze(0), q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, out, boundaries, boundaries,
            ctx.longest, ctx.longest, lse, 0.0, seed, offset, ctx.mask, False,
        )  # fmt: skip
        return *(grad.squeeze(0) for grad in found[:3]), None, None, None


@torch.library.custom_op("titan_train::document_attention", mutates_args=())
def _document_attention(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output ``[T, H, E]`` and log-sum-exp ``[H, T]`` on the CPU."""
    out = q.new_empty((*q.shape[:2], v.shape[-1]))
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, length in _documents(boundaries):
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(q, rows, length),
            _heads_first(k, rows, length),
            _widened(_heads_first(v, rows, length), q.shape[-1]),
            0.0,
            causal,
        )
        out[rows] = part.transpose(1, 2).flatten(0, 1)[..., : v.shape[-1]]
        lse[:, rows] = part_lse.transpose(0, 1).flatten(1)
    return out, lse


@_document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty((q.shape[1], q.shape[0]), dtype=dtype)


@torch.library.custom_op("titan_train::document_attention_backward", mutates_args=())
def _document_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, boundaries: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    wide, groups = q.shape[-1], q.shape[1] // k.shape[1]
    for rows, length in _documents(boundaries):
        keys, values = (_heads_first(x, rows, length) for x in (k, v))
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _widened(_heads_first(grad, rows, length), wide), _heads_first(q, rows, length), keys,
            _widened(values, wide), _widened(_heads_first(out, rows, length), wide),
            lse[:, rows].unflatten(1, (-1, length)).transpose(0, 1), 0.0, causal,
        )  # fmt: skip
        of_q[rows] = dq.transpose(1, 2).flatten(0, 1)
        for into, part in ((of_k, dk), (of_v, dv)):
            grouped = part[..., : into.shape[-1]].unflatten(1, (-1, groups))
            own = grouped.sum(2) if groups > 1 else grouped.squeeze(2)
            into[rows] = own.transpose(1, 2).flatten(0, 1)
    return of_q, of_k, of_v


@_document_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, boundaries: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.causal = inputs[4]
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Any:
    if grad is None:
        return None, None, None, None, None
    found = torch.ops.titan_train.document_attention_backward(grad, *ctx.saved_tensors, ctx.causal)
    return *found, None, None


_document_attention.register_autograd(_backward, setup_context=_save)


def _documents(boundaries: Tensor) -> list[tuple[slice, int]]:
    """Neighbouring documents of one length, as the tokens of all of them and that length: one call each."""
    found: list[tuple[slice, int]] = []
    for start, stop in pairwise(boundaries.tolist()):
        length = stop - start
        if found and length == found[-1][1]:
            found[-1] = (slice(found[-1][0].start, stop), length)
        elif length:
            found.append((slice(start, stop), length))
    return found


def _heads_first(x: Tensor, rows: slice, length: int) -> Tensor:
    """Some documents of ``[T, H, D]`` as ``[documents, H, length, D]``."""
    return x[rows].unflatten(0, (-1, length)).transpose(1, 2)


def _widened(x: Tensor, width: int) -> Tensor:
    """The CPU's kernel wants values as wide as keys: zeros, for one call at a time."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
