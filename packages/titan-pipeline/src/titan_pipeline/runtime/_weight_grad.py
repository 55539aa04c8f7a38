"""Split a backward into input gradients now and weight gradients later, at a host cost linear in the layers.

Problem: torch's own split walks the autograd graph in Python and runs it twice, once for inputs, once per group of
parameters: 16 layers cost 4.7 times a plain backward, custom functions and checkpoints run several times, and nothing
is freed in between.

Idea: let the layers that own the big weights cooperate. While a stage runs, autograd does not see the weights of
``nn.Linear`` and ``nn.Embedding``; when the gradient of such a layer's output arrives, a note (parameters, input,
output gradient) goes into a queue. The I pass is then one ordinary backward that computes input gradients only; the
graph is freed when it ends, and only the notes stay. The W pass works through the queue and accumulates each parameter
in one go; tensor hooks and post-accumulate hooks of parameters fire, once. A parameter used by any other operation gets
its gradient in the I pass: always correct, just not deferred. Norms belong to those by default: their gradient is one
small vector, and keeping their input for later would cost more memory than it saves time. With ``NORM_RULES`` its
accumulation waits for W too, for those who want a parameter untouched until then.

A linear layer needs no function of its own for that: its product runs with the detached weight, and a hook on its
output makes the note. The hook holds the input, which is right for a layer that saves it anyway and wrong where
somebody else decides what is saved: inside ``torch.utils.checkpoint`` or another saved-tensor hook, and where the input
needs no gradient, an autograd function takes its place. It saves the input by autograd's way, and runs again in the
recomputation: one recomputation a block. Gradients are bit-equal to autograd's: the products are the ones its formulas
use.

The parameter is no input of such a function (autograd would call its hooks with None in the I pass); a dummy, the
engine's ``anchor``, takes its place, so that outputs require gradients even where the layer's input does not.

Pluggable: a rule is a function ``rule(engine, module, plain_forward, *args)`` for a module type. A float8 or
tensor-parallel layer brings its own function of ``(engine.anchor, x, weight.detach(), [weight], …)`` and calls
``engine.defer(parameter, compute)`` from its backward. Outside of a stage's forward and backward every layer runs its
plain forward, and autograd is untouched. Inside a compiled region too: its backward is one piece.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_pipeline.runtime._accumulate import accumulate

_ELSEWHERE = (
    "a forward recorded by a WeightGradEngine got its backward elsewhere, and its weight gradients would be lost. Run "
    "it through the stage, or inside engine.deferring()."
)

Rule = Callable[..., Any]
"""``rule(engine, module, plain_forward, *args, **kwargs)``: the module's output, deferring if the engine asks to."""


Note = tuple[Sequence[Tensor], Callable[..., Sequence[Tensor]], tuple[Any, ...]]
"""Parameters, and what gives their gradients: ``compute(*given)``."""


class Queue:
    """The weight gradients one microbatch still owes."""

    def __init__(self, through_autograd: bool = False) -> None:
        self.notes: list[Note] = []
        self._through_autograd = through_autograd

    def run(self) -> None:
        """Compute them, in the order they were noted, and accumulate each parameter once."""
        totals: dict[int, tuple[Tensor, Tensor]] = {}
        with torch.no_grad():
            for parameters, compute, given in self.notes:
                for parameter, grad in zip(parameters, compute(*given), strict=True):
                    known = totals.get(id(parameter))
                    totals[id(parameter)] = (parameter, grad if known is None else known[1] + grad)
            self.notes.clear()
            accumulate(totals.values(), self._through_autograd)


class WeightGradEngine:
    """Makes the layers of a module able to defer their weight gradients.

    Args:
        module: Its layers' ``forward`` is wrapped in place; `detach` undoes it.
        rules: Module type → rule, added to (or replacing) the defaults for ``nn.Linear`` and ``nn.Embedding``.
            A type matches exactly, not its subclasses.
        through_autograd: Always accumulate by autograd's own nodes. Needed where a library hooks those nodes rather
            than the parameters; costs about 9 us a parameter. Parameters with hooks of their own take that way
            regardless. (DistributedDataParallel does not need it: a stage arms its reducer after the last gradient.)
    """

    def __init__(
        self,
        module: nn.Module,
        rules: Mapping[type[nn.Module], Rule] | None = None,
        *,
        through_autograd: bool = False,
    ) -> None:
        self._through_autograd = through_autograd
        self.anchor = torch.zeros((), requires_grad=True)
        """Differentiable input of deferring functions, in the place of the parameter."""
        self.active = False
        self.queue: Queue | None = None
        """Where notes go while a backward of the stage runs."""
        table: dict[type[nn.Module], Rule] = {**DEFAULT_RULES, **(rules or {})}
        compiled = {id(inner) for outer in module.modules() if _is_compiled(outer) for inner in outer.modules()}
        self.not_deferred: dict[str, str] = {}
        """Parameters whose gradients come with the input gradient, and why."""
        self._wrapped: list[nn.Module] = []
        for name, layer in module.named_modules():
            rule = table.get(original_type(layer))
            if id(layer) in compiled:
                self._leave_out(name, layer, "inside a compiled module, whose backward is one piece")
            elif rule is None:
                self._leave_out(name, layer, f"no rule for {original_type(layer).__name__}")
            elif "forward" in layer.__dict__:
                self._leave_out(name, layer, "the module's forward is already replaced by another library")
            else:
                self._wrap(layer, rule)

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Forwards run inside can defer; their backward must then run inside `deferring`."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    @contextmanager
    def deferring(self) -> Generator[Queue, None, None]:
        """Weight gradients of the backward run inside go into the queue it yields (a checkpoint's forward too)."""
        self.queue = Queue(self._through_autograd)
        self.active = True
        try:
            yield self.queue
        finally:
            self.queue = None
            self.active = False

    def defer(self, parameter: Tensor, compute: Callable[..., Tensor], *given: Any) -> None:
        """Note a weight gradient for later: ``compute(*given)``, which keeps what is given alive until then.

        Raises:
            RuntimeError: If no backward of a stage is running.
        """
        if self.queue is None:
            raise RuntimeError(_ELSEWHERE)
        self.queue.notes.append(((parameter,), _alone, (compute, given)))

    def detach(self) -> None:
        """Give every layer its own forward back."""
        for layer in self._wrapped:
            del layer.__dict__["forward"]
        self._wrapped.clear()

    def _leave_out(self, prefix: str, layer: nn.Module, reason: str) -> None:
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if parameter.requires_grad:
                self.not_deferred[name] = reason

    def _wrap(self, layer: nn.Module, rule: Rule) -> None:
        plain = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.active or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return plain(*args, **kwargs)
            return rule(self, layer, plain, *args, **kwargs)

        layer.forward = forward
        self._wrapped.append(layer)


def original_type(module: nn.Module) -> type[nn.Module]:
    """The module's class; for one that FSDP2 has wrapped (it makes a subclass in place), the class before."""
    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) and len(kind.__mro__) > 2 else kind


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module went through ``torch.compile`` (a wrapper) or ``Module.compile`` (in place)."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _others_save() -> bool:
    """Whether a saved-tensor hook (a checkpoint, an offload) is active. Undocumented; checked on torch 2.11 and 2.15 by
    ``test_active_saved_tensor_hooks_are_recognised``. Where it is missing, the answer that is always right is yes.
    """
    inner: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    top = getattr(inner._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(False) is not None


def grouped_linear(engine: WeightGradEngine | None, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One matrix product a group of rows, as in a mixture of experts, with a deferrable weight gradient.

    Args:
        engine: The stage's engine; None, or one whose stage is not running, does not defer.
        x: Rows sorted by group, shape ``[N, K]``.
        weight: Shape ``[G, K, M]``.
        offsets: End of each group, shape ``[G]``, integer, ``offsets[-1] == N``.

    Returns:
        Shape ``[N, M]``.
    """
    ends = offsets.tolist()
    if engine is None or not engine.active or not weight.requires_grad:
        return _by_group(x, ends, lambda g, rows: rows.mm(weight[g]))
    return cast(Tensor, _GroupedLinear.apply(engine.anchor, x, weight.detach(), [weight], ends, engine))


class LinearHook:
    """On the output of a linear layer: turns the arriving gradient into a note."""

    __slots__ = ("__weakref__", "engine", "owners", "x")

    def __init__(self, engine: WeightGradEngine, owners: tuple[Tensor, ...], x: Tensor) -> None:
        self.engine = engine
        self.owners = owners
        self.x: Tensor | None = x

    def __call__(self, grad: Tensor) -> None:
        x, self.x = self.x, None
        queue = self.engine.queue
        if queue is None:
            raise RuntimeError(_ELSEWHERE)
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
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x = None
        if ctx.needs_input_grad[1]:
            rows = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
            same = grad.dtype == weight.dtype == x.dtype  # other than under autocast; each cast costs a microsecond
            grad_x = rows.mm(weight) if same else rows.mm(weight.to(grad.dtype)).to(x.dtype)
            if grad.dim() != 2:
                grad_x = grad_x.view(x.shape)
        LinearHook(ctx.engine, ctx.owners, x)(grad)
        return None, grad_x, None, None, None, None


def _linear_grads(owners: Sequence[Tensor], grad: Tensor, x: Tensor) -> list[Tensor]:
    """Gradients of weight and bias; only of those that want one."""
    weight = owners[0]
    rows = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
    grads: list[Tensor] = []
    for owner in owners:
        if owner.dim() == 2:
            columns = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
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


def _alone(compute: Callable[..., Tensor], given: tuple[Any, ...]) -> tuple[Tensor]:
    return (compute(*given),)


def _itself(grad: Tensor) -> Tensor:
    return grad


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, owner: list[Tensor], ends: list[int], engine: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.ends, ctx.engine = owner[0], ends, engine
        return _by_group(x, ends, lambda g, rows: rows.mm(weight[g]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        ends = ctx.ends
        grad_x = _by_group(grad, ends, lambda g, rows: rows.mm(weight[g].t())) if ctx.needs_input_grad[1] else None
        ctx.engine.defer(ctx.parameter, _grouped_weight_grad, x, grad, ends)
        return None, grad_x, None, None, None, None


def _grouped_weight_grad(x: Tensor, grad: Tensor, ends: list[int]) -> Tensor:
    starts = [0, *ends[:-1]]
    return torch.stack([x[a:b].t().mm(grad[a:b]) for a, b in zip(starts, ends, strict=True)])


def _by_group(rows: Tensor, ends: list[int], product: Callable[[int, Tensor], Tensor]) -> Tensor:
    starts = [0, *ends[:-1]]
    return torch.cat([product(g, rows[a:b]) for g, (a, b) in enumerate(zip(starts, ends, strict=True))])


def _linear_rule(engine: WeightGradEngine, module: nn.Linear, plain: Callable[..., Tensor], x: Tensor) -> Tensor:
    weight, bias = module.weight, cast(nn.Parameter | None, module.bias)
    owners: tuple[Tensor, ...] = (weight,) if weight.requires_grad else ()
    if bias is not None and bias.requires_grad:
        owners = (*owners, bias)
    plain_tensors = type(weight) is nn.Parameter and type(x) in (Tensor, nn.Parameter)
    if not owners or not (plain_tensors or (isinstance(weight, DTensor) and isinstance(x, DTensor))):
        return plain(x)
    value, offset = weight.detach(), None if bias is None else bias.detach()
    if not x.requires_grad or _others_save():
        return cast(Tensor, _Linear.apply(engine.anchor, x, value, offset, owners, engine))
    out = F.linear(x, value, offset)
    out.register_hook(LinearHook(engine, owners, x.detach()))
    return out


def _embedding_rule(engine: WeightGradEngine, module: nn.Embedding, plain: Callable[..., Tensor], x: Tensor) -> Tensor:
    weight = module.weight
    special = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    if special or type(weight) is not nn.Parameter or not weight.requires_grad:
        return plain(x)
    padding = -1 if module.padding_idx is None else module.padding_idx
    return cast(Tensor, _Embedding.apply(engine.anchor, x, weight.detach(), padding, [weight], engine))


def _layer_norm_rule(engine: WeightGradEngine, module: nn.LayerNorm, plain: Callable[..., Tensor], x: Tensor) -> Tensor:
    weight, bias = (_wait(engine, p) for p in (module.weight, module.bias))
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _rms_norm_rule(engine: WeightGradEngine, module: nn.RMSNorm, plain: Callable[..., Tensor], x: Tensor) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, _wait(engine, module.weight), module.eps)


def _wait(engine: WeightGradEngine, parameter: Tensor | None) -> Tensor | None:
    if parameter is None or type(parameter) is not nn.Parameter or not parameter.requires_grad:
        return parameter
    return cast(Tensor, _Deferred.apply(engine.anchor, parameter.detach(), [parameter], engine))


DEFAULT_RULES: dict[type[nn.Module], Rule] = {nn.Linear: _linear_rule, nn.Embedding: _embedding_rule}

NORM_RULES: dict[type[nn.Module], Rule] = {nn.LayerNorm: _layer_norm_rule, nn.RMSNorm: _rms_norm_rule}
