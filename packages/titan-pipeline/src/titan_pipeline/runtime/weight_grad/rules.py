"""The fast rules: how linear layers, embeddings and norms defer their weight gradients."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_pipeline.runtime.weight_grad.queue import ELSEWHERE, Deferring, Rule, others_save


class LinearHook:
    """On the node of a linear layer's output: turns the gradient that arrives, tensor hooks included, into a note."""

    __slots__ = ("__weakref__", "engine", "owners", "version", "x")

    def __init__(self, engine: Deferring, owners: tuple[Tensor, ...], x: Tensor) -> None:
        self.engine = engine
        self.owners = owners
        self.x: Tensor | None = x
        self.version = x._version

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        x, self.x = self.x, None
        queue = self.engine.queue
        if queue is None or x is None:
            raise RuntimeError(ELSEWHERE)
        (grad,) = grads
        if grad is None:
            return
        if x._version != self.version and any(owner.dim() == 2 for owner in self.owners):
            raise RuntimeError(
                f"the input of a linear layer, of shape {list(x.shape)}, has been modified by an inplace operation after the "
                "layer ran, and its weight gradient needs it as it was. Use the operation that makes a new tensor."
            )
        queue.notes.append((self.owners, _linear_grads, (self.owners, grad, x)))


class _Linear(torch.autograd.Function):
    """The same for a place where others decide what is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        owners: tuple[Tensor, ...],
        engine: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The parameters themselves, in a tuple that autograd does not look into: saved tensors come back as aliases,
        # inside a checkpoint as copies. Not by way of the layer, where FSDP may have put the shards back by then.
        ctx.owners = owners
        ctx.engine = engine
        # A view, as in `_linear_rule`, could not be changed in place: detached, it counts as a tensor of its own.
        return F.linear(x, weight, bias).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x = None
        if ctx.needs_input_grad[1]:
            rows = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
            same = grad.dtype == weight.dtype == x.dtype  # other than under autocast; each cast costs a microsecond
            weight = weight.conj()  # itself, if real
            grad_x = rows.mm(weight) if same else rows.mm(weight.to(grad.dtype)).to(x.dtype)
            if grad.dim() != 2:
                grad_x = grad_x.view(x.shape)
        LinearHook(ctx.engine, ctx.owners, x)(grads)
        return None, grad_x, None, None, None, None


def _linear_grads(owners: Sequence[Tensor], grad: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients of weight and bias; only of those that want one."""
    weight = owners[0]
    rows = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
    grads: list[Tensor] = []
    for owner in owners:
        if owner.dim() == 2:
            columns = (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).conj()  # itself, if real
            grads.append(rows.t().mm(columns if columns.dtype == rows.dtype else columns.to(rows.dtype)))
        else:
            grads.append(rows.sum(0))
    if isinstance(grad, DTensor):  # a tensor-parallel layer's: the products are partial or whole where they fall
        grads = [
            g.redistribute(placements=cast(DTensor, o).placements)
            for g, o in zip(_dtensors(grads), owners, strict=True)
        ]
    if rows.dtype != weight.dtype:
        return [g.to(weight.dtype) for g in grads]
    return grads


def _dtensors(grads: list[Tensor]) -> list[DTensor]:
    return cast(list[DTensor], grads)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, tokens: Tensor, weight: Tensor, padding: int, owner: list[Tensor], engine: Any
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.parameter, ctx.padding, ctx.engine = owner[0], padding, engine
        return F.embedding(tokens, weight, None if padding < 0 else padding)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (tokens,) = ctx.saved_tensors
        (grad,) = grads
        parameter, padding = ctx.parameter, ctx.padding
        compute = torch.ops.aten.embedding_dense_backward
        ctx.engine.defer(parameter, compute, grad, tokens, parameter.shape[0], padding, False)
        return None, None, None, None, None, None


class _Deferred(torch.autograd.Function):
    """A parameter whose gradient's accumulation, not its computation, waits."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, owner: list[Tensor], engine: Any) -> Tensor:
        ctx.parameter, ctx.engine = owner[0], engine
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        ctx.engine.defer(ctx.parameter, _itself, grad)
        return None, None, None, None


def _itself(grad: Tensor) -> Tensor:
    return grad


def _linear_rule(engine: Deferring, module: nn.Linear, plain: Callable[..., Tensor], input: Tensor) -> Tensor:
    weight, bias = module.weight, cast(nn.Parameter | None, module.bias)
    owners: tuple[Tensor, ...] = (weight,) if weight.requires_grad else ()
    if bias is not None and bias.requires_grad:
        owners = (*owners, bias)
    plain_tensors = type(weight) is nn.Parameter and type(input) in (Tensor, nn.Parameter)
    if not owners or not (plain_tensors or (isinstance(weight, DTensor) and isinstance(input, DTensor))):
        return plain(input)
    value, offset = weight.detach(), None if bias is None else bias.detach()
    if not input.requires_grad or others_save():
        return cast(Tensor, _Linear.apply(engine.anchor, input, value, offset, owners, engine))
    out = F.linear(input, value, offset)
    # In older releases (torch 2.11) the output of a layer with a bias is a view if it has more than two dimensions. An operation
    # in place replaces the node of a view, and keeps that of its base.
    base = out if out._base is None else out._base
    cast(Any, base.grad_fn).register_prehook(LinearHook(engine, owners, input.detach()))
    return out


def _embedding_rule(engine: Deferring, module: nn.Embedding, plain: Callable[..., Tensor], input: Tensor) -> Tensor:
    weight = module.weight
    if _special(module) or type(weight) is not nn.Parameter or not weight.requires_grad:
        return plain(input)
    padding = -1 if module.padding_idx is None else module.padding_idx
    return cast(Tensor, _Embedding.apply(engine.anchor, input, weight.detach(), padding, [weight], engine))


def _special(module: nn.Embedding) -> bool:
    return module.max_norm is not None or module.scale_grad_by_freq or module.sparse


def left_alone(rule: Rule, module: nn.Module) -> str | None:
    """Why a rule of this file runs a module as it is, or None."""
    if rule is _linear_rule and "weight" not in module._parameters:
        return "the weight of the linear layer is computed (pruned, say), so no rule defers its gradient"
    if rule is _embedding_rule and isinstance(module, nn.Embedding) and _special(module):
        return "no rule for an embedding with max_norm, scale_grad_by_freq or sparse"
    return None


def _layer_norm_rule(engine: Deferring, module: nn.LayerNorm, plain: Callable[..., Tensor], input: Tensor) -> Tensor:
    weight, bias = (_wait(engine, p) for p in (module.weight, module.bias))
    return F.layer_norm(input, module.normalized_shape, weight, bias, module.eps)


def _rms_norm_rule(engine: Deferring, module: nn.RMSNorm, plain: Callable[..., Tensor], x: Tensor) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, _wait(engine, module.weight), module.eps)


def _wait(engine: Deferring, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or type(parameter) is not nn.Parameter or not parameter.requires_grad:
        return parameter
    return cast(Tensor, _Deferred.apply(engine.anchor, parameter.detach(), [parameter], engine))


DEFAULT_RULES: dict[type[nn.Module], Rule] = {nn.Linear: _linear_rule, nn.Embedding: _embedding_rule}

NORM_RULES: dict[type[nn.Module], Rule] = {nn.LayerNorm: _layer_norm_rule, nn.RMSNorm: _rms_norm_rule}
