"""`linear` and `linears`: the three products of a linear layer under autograd.

What is kept for backward is the input's transposed float8 codes (half the bytes of bfloat16; the input itself where the
recipe takes the weight gradient in high precision; nothing where no weight needs one) and the weight itself, a reference.
The weight's cast is taken from a `WeightCache` where there is one that still holds, and made again otherwise, with the same
bits. All casts and products are deterministic, so recomputing a forward gives the same bits too.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8.differentiable import differentiable_once
from titan_fp8.layers.accumulate import add_float8, main_grad_of
from titan_fp8.products import Products, QTensor, products_for, saved_scale, unwatched
from titan_fp8.recipe import Recipe
from titan_fp8.weights.cache import WeightCache
from titan_fp8.weights.gathered import GatheredWeight
from titan_fp8.weights.sharded import ShardedWeight


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "blockwise",
    *,
    cache: WeightCache | None = None,
    amax_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """``x · wᵀ + bias`` with float8 products, differentiable.

    Args:
        x: ``[..., K]``, any floating dtype; any number of rows, none included.
        w: ``[N, K]``, any floating dtype (float32 masters need no copy in bfloat16).
        bias: ``[N]``.
        recipe: A recipe or its name.
        cache: While it is open, keeps the weight's cast over forwards and backwards. Not used under ``torch.compile``,
            where the cast is part of the graph.
        amax_group: The ranks that hold the other parts of ``x``, ``w`` or the output's gradient, with one scale per
            tensor: every amax becomes the largest over the group, so that the result is that of the whole tensors.
            Each cast then costs an all-reduce of one float. Finer scales ignore it.

    Returns:
        ``[..., N]`` in ``x``'s dtype, or autocast's where that is on.

    Raises:
        ValueError: If the shapes do not fit.
    """
    (y,) = linears(x, [w], [bias], recipe, caches=[cache], amax_group=amax_group)
    return y


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    recipe: str | Recipe = "blockwise",
    *,
    caches: Sequence[WeightCache | None] | None = None,
    amax_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, ...]:
    """Several linear layers of one input, which is cast once: queries, keys and values, or gate and up.

    Args:
        x: ``[..., K]``.
        weights: Each ``[N_i, K]``.
        biases: One per weight; None where no layer has a bias.
        recipe: A recipe or its name.
        caches: One per weight; see `linear`.
        amax_group: See `linear`.

    Returns:
        One output per weight, ``[..., N_i]``; the same bits as `linear` of each. The input's gradient is their sum.

    Raises:
        ValueError: If the shapes do not fit.
    """
    chosen = Recipe.get(recipe)
    bias_list = [None] * len(weights) if biases is None else list(biases)
    cache_list = [open_cache(cache, w) for cache, w in zip(caches or [None] * len(weights), weights, strict=True)]
    check_shapes(x, weights, bias_list)
    training = torch.is_grad_enabled()
    call = Call(
        chosen,
        output_dtype(x),
        training and any(w.requires_grad for w in weights),
        training and x.requires_grad,
        amax_group,
        products_for(chosen, x, amax_group),
    )
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    outs = cast("tuple[Tensor, ...]", _Linears.apply(flat, call, tuple(cache_list), *weights, *bias_list))
    return tuple(unflatten(out, x) for out in outs)


def linear_deferred(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "blockwise",
    *,
    anchor: Tensor,
    defer: Callable[..., None],
    cache: WeightCache | None = None,
    amax_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`linear` whose backward computes the input gradient, and hands the weight's to the caller to run later.

    For pipeline schedules that run weight gradients apart. Backward calls ``defer(parameter, compute, *given)`` once
    for the weight and once for the bias; ``compute(*given)`` is its gradient. What is kept until then is in float8.

    Args:
        x: ``[..., K]``.
        w: ``[N, K]``; the parameter, which is passed back to ``defer``.
        bias: ``[N]``, likewise.
        recipe: A recipe or its name.
        anchor: Any tensor that requires a gradient (it gets none): the output is to be differentiable even where ``x``
            is not, and autograd is not to see the parameters.
        defer: Called during backward.
        cache: See `linear`.
        amax_group: See `linear`.

    Returns:
        ``[..., N]``, the same bits as `linear`.
    """
    chosen = Recipe.get(recipe)
    check_shapes(x, [w], [bias])
    path = products_for(chosen, x, amax_group)
    call = Call(chosen, output_dtype(x), w.requires_grad, x.requires_grad, amax_group, path)
    flat = x.reshape(-1, x.shape[-1])
    frozen_bias = None if bias is None else bias.detach()
    owners = (w, bias, defer)
    out = cast(Tensor, _Deferred.apply(anchor, flat, call, open_cache(cache, w), w.detach(), frozen_bias, owners))
    return unflatten(out, x)


class Call:
    """What one call of `linears` needs to know beyond its tensors."""

    def __init__(
        self,
        recipe: Recipe,
        out_dtype: torch.dtype,
        weight_grad: bool,
        input_grad: bool,
        amax_group: dist.ProcessGroup | None,
        products: Products | None = None,
    ) -> None:
        self.recipe = recipe
        self.out_dtype = out_dtype
        self.weight_grad = weight_grad
        self.input_grad = input_grad
        self.amax_group = amax_group
        self.products = products or Products(recipe)


def is_fused(recipe: Recipe) -> bool:
    """Whether what comes before a layer can be computed in the pass that casts."""
    return recipe.x.gran == "block1x128" and recipe.wgrad == "fp8"


class FusedCall(NamedTuple):
    """What layers need whose input is computed and cast in one pass."""

    rows: Tensor
    """``x`` as ``[M, K]``."""
    call: Call
    caches: tuple[WeightCache | None, ...]
    parameters: tuple[Tensor | None, ...]
    """Weights, then one bias (or None) per weight."""


def fused_call(
    recipe: Recipe,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    caches: Sequence[WeightCache | None] | None,
    *,
    more_input_grad: bool = False,
) -> FusedCall:
    """Check shapes, open caches. ``more_input_grad``: something besides ``x`` that the input follows from wants a gradient.

    Raises:
        ValueError: If the shapes do not fit.
    """
    count = len(weights)
    bias_list = [None] * count if biases is None else list(biases)
    check_shapes(x, weights, bias_list)
    training = torch.is_grad_enabled()
    call = Call(
        recipe,
        output_dtype(x),
        training and any(w.requires_grad for w in weights),
        training and (x.requires_grad or more_input_grad),
        None,
        products_for(recipe, x, None),
    )
    found = tuple(open_cache(cache, w) for cache, w in zip(caches or [None] * count, weights, strict=True))
    return FusedCall(x.reshape(-1, x.shape[-1]), call, found, (*weights, *bias_list))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, caches: tuple[WeightCache | None, ...], *parameters: Any) -> Any:
        xq = call.products.cast_input(x, for_weight_grad=call.weight_grad, amax_group=call.amax_group)
        ctx.x_dtype = x.dtype
        return multiply(ctx, call, caches, parameters, xq)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        dx, parameters = gradients(ctx, grads, ctx.saved_tensors, ctx.needs_input_grad[0], ctx.needs_input_grad[3:])
        return dx, None, None, *parameters


def multiply(
    ctx: Any, call: Call, caches: tuple[WeightCache | None, ...], parameters: Sequence[Any], xq: QTensor, *kept: Tensor
) -> tuple[Tensor, ...]:
    """The forward products of a cast input with each weight; what `gradients` needs goes to ``ctx``, and ``kept`` with it.

    Args:
        ctx: Of the autograd function; its ``x_dtype`` is the dtype of the input's gradient.
        call: What is not a tensor.
        caches: One per weight.
        parameters: Weights, then one bias (or None) per weight.
        xq: The input.
        kept: More tensors to save, before the others.
    """
    count = len(caches)
    weights, biases = parameters[:count], parameters[count:]
    outs = tuple(
        call.products.forward_product(xq, weight_cast(w, call, cache), call.out_dtype, bias)
        for w, bias, cache in zip(weights, biases, caches, strict=True)
    )
    ctx.call, ctx.caches, ctx.count = call, caches, count
    ctx.owners = _owners(weights, caches)
    ctx.rows, ctx.columns = xq.rows, xq.columns
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
    ctx.save_for_backward(*kept, xq.data_t, xq.scale_t, xq.hp, *weights)
    return outs


def gradients(
    ctx: Any, grads: Sequence[Tensor], saved: Sequence[Any], need_x: bool, need: Sequence[bool]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradient of the (uncast) input, and those of the parameters, for ``grads`` of `multiply`'s results.

    Args:
        ctx: As `multiply` left it.
        grads: One per output.
        saved: What `multiply` saved, without ``kept``.
        need_x: Whether the input's is wanted.
        need: Whether each parameter's is.
    """
    call: Call = ctx.call
    products = unwatched(call.products, grads)
    data_t, scale_t, hp, *weights = saved
    xq = QTensor(ctx.rows, ctx.columns, data_t=data_t, scale_t=saved_scale(scale_t), hp=hp)
    dx: Tensor | None = None
    dws: list[Tensor | None] = []
    dbs: list[Tensor | None] = []
    for i, (g, w, owner) in enumerate(zip(grads, weights, ctx.owners, strict=True)):
        need_w, need_b = need[i], need[ctx.count + i]
        dws.append(None)
        dbs.append(bias_gradient(g, ctx.bias_dtypes[i]) if need_b else None)
        if not need_x and not need_w:
            continue
        gq = products.cast_grad(g, for_weight_grad=need_w, amax_group=call.amax_group)
        if need_x:
            wq = weight_cast(w, call, ctx.caches[i], in_backward=True, owner=owner)
            part = products.input_gradient(gq, wq, ctx.x_dtype)
            dx = part if dx is None else dx + part
        main = main_grad_of(w if owner is None else owner) if need_w else None
        if main is not None:
            add_float8(main, products, gq, xq)
        elif need_w:
            dws[i] = products.weight_gradient(gq, xq, w.dtype)
    return dx, [*dws, *dbs]


def _owners(weights: Sequence[Tensor], caches: Sequence[WeightCache | None]) -> tuple[Tensor | None, ...]:
    """The parameters themselves, which know ``main_grad`` and are known to caches.

    Saved tensors need not be: activation checkpointing and offloading give backward a copy of each. None for what would be kept
    alive only by this, and in compiled graphs.
    """
    if torch.compiler.is_compiling():
        return (None,) * len(weights)
    return tuple(
        w if w.is_leaf and (w.requires_grad or cache is not None) else None
        for w, cache in zip(weights, caches, strict=True)
    )


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        call: Call,
        cache: WeightCache | None,
        w: Tensor,
        bias: Tensor | None,
        owners: tuple[Tensor, Tensor | None, Callable[..., None]],
    ) -> Tensor:
        products = call.products
        xq = products.cast_input(x, for_weight_grad=call.weight_grad, amax_group=call.amax_group)
        wq = weight_cast(owners[0], call, cache)
        out = products.forward_product(xq, wq, call.out_dtype, bias)
        ctx.call, ctx.cache, ctx.owners = call, cache, owners
        ctx.rows, ctx.columns, ctx.x_dtype = x.shape[0], x.shape[1], x.dtype
        kept = xq.for_weight_gradient()
        ctx.save_for_backward(kept.data_t, kept.scale_t, kept.hp, w)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Any) -> Any:
        (g,) = grads
        call: Call = ctx.call
        products = unwatched(call.products, grads)
        data_t, scale_t, hp, w = ctx.saved_tensors
        parameter, bias, defer = ctx.owners
        gq = products.cast_grad(g, for_weight_grad=parameter.requires_grad, amax_group=call.amax_group)
        dx = None
        if ctx.needs_input_grad[1]:
            # The cache knows the parameter, not the detached copy that autograd keeps.
            wq = weight_cast(w if ctx.cache is None else parameter, call, ctx.cache, in_backward=True)
            dx = products.input_gradient(gq, wq, ctx.x_dtype)
        if parameter.requires_grad:
            xq = QTensor(ctx.rows, ctx.columns, data_t=data_t, scale_t=saved_scale(scale_t), hp=hp)
            defer(parameter, _deferred_weight_gradient, products, gq.for_weight_gradient(), xq, w.dtype)
        if bias is not None and bias.requires_grad:
            defer(bias, bias_gradient, g, bias.dtype)
        return None, dx, None, None, None, None, None


@torch.no_grad()
def _deferred_weight_gradient(products: Products, g: QTensor, x: QTensor, dtype: torch.dtype) -> Tensor:
    return unwatched(products, ()).weight_gradient(g, x, dtype)


def open_cache(cache: WeightCache | None, w: Tensor) -> WeightCache | None:
    """The cache, where it keeps casts of ``w`` now."""
    return cache if cache is not None and cache.keeps(w) else None


def weight_cast(
    w: Tensor, call: Call, cache: WeightCache | None, *, in_backward: bool = False, owner: Tensor | None = None
) -> QTensor:
    """The float8 weight: as FSDP2 gathered it, from the cache (by its ``owner``, where ``w`` is a copy), or cast now."""
    if isinstance(w, GatheredWeight):
        return w.operand(call.recipe, for_input_grad=in_backward)
    owner = w if owner is None else owner
    if isinstance(w, ShardedWeight):
        w = w.tensor
    if isinstance(owner, ShardedWeight):
        owner = owner.tensor
    known = None if cache is None else cache.find(owner)
    if known is not None and not (in_backward and known.data_t is None):
        return known
    # Without a cache the forward's cast is dropped, and backward makes its own: each then needs one layout.
    both = in_backward or (cache is not None and call.input_grad)
    products = unwatched(call.products, (w,))
    wq = products.cast_weight(w, for_input_grad=both, amax_group=call.amax_group)
    if cache is not None and w is owner and cache.keeps(owner):  # a copy may be older than its owner
        cache.keep(owner, wq)
    return wq


def unflatten(out: Tensor, x: Tensor) -> Tensor:
    """``out[M, N]`` with ``x``'s leading sizes. No view, as ``nn.Linear``'s output is none: it may be changed in place."""
    return out if x.dim() == 2 else torch.ops.aten._unsafe_view.default(out, [*x.shape[:-1], out.shape[-1]])


def bias_gradient(g: Tensor, dtype: torch.dtype) -> Tensor:
    """``g`` summed over rows, in float32."""
    return g.sum(0, dtype=torch.float32).to(dtype)


def output_dtype(x: Tensor) -> torch.dtype:
    """``x``'s dtype, or autocast's where it is on for the device."""
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # meta has no autocast, and asking raises
        return x.dtype
    return torch.get_autocast_dtype(kind)


def check_shapes(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    """Refuse operands that do not fit, before anything is computed or sent."""
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} with shape {tuple(x.shape)}; a linear layer takes a floating-point tensor [..., K]."
        )
    if len(biases) != len(weights):
        raise ValueError(
            f"got {len(weights)} weights and {len(biases)} biases; pass one bias per weight, None where there is none."
        )
    for w, bias in zip(weights, biases, strict=True):
        if w.dim() != 2 or w.shape[1] != x.shape[-1]:
            raise ValueError(
                f"weight has shape {tuple(w.shape)} and x {tuple(x.shape)}: x's last size must be the weight's second. "
                "Weights are [out_features, in_features], as in torch.nn.Linear."
            )
        if bias is not None and bias.shape != w.shape[:1]:
            raise ValueError(
                f"bias has shape {tuple(bias.shape)}, the weight {tuple(w.shape)}; it must be [{w.shape[0]}]."
            )
