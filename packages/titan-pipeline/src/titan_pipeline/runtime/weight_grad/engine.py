"""Split a backward into input gradients now and weight gradients later, at a host cost linear in the layers.

Problem: torch's own split walks the autograd graph in Python and runs it twice, once for inputs, once per group of
parameters: 16 layers cost 4.7 times a plain backward, custom functions and checkpoints run several times, and nothing
is freed in between.

Idea: let the layers that own the big weights cooperate. While a stage runs, autograd does not see the weights of
``nn.Linear`` and ``nn.Embedding``; when the gradient of such a layer's output arrives, a note (parameters, input,
output gradient) goes into a queue. The I pass is then one ordinary backward that computes input gradients only; the
graph is freed when it ends, and only the notes stay. The W pass works through the queue and accumulates each parameter
in one go; tensor hooks and post-accumulate hooks of parameters fire, once. Layers that no rule knows are split operation
by operation, see `titan_pipeline.runtime.weight_grad.generic`. What neither covers gets its gradient in the I pass:
always correct, just not deferred. Norms belong to those by default: their gradient is one
small vector, and keeping their input for later would cost more memory than it saves time. With ``NORM_RULES`` its
accumulation waits for W too, for those who want a parameter untouched until then.

A linear layer needs no function of its own for that: its product runs with the detached weight, and a hook on its
output's node makes the note. The hook holds the input, which is right for a layer that saves it anyway and wrong where
somebody else decides what is saved: inside ``torch.utils.checkpoint`` or another saved-tensor hook, and where the input
needs no gradient, an autograd function takes its place. It saves the input by autograd's way, and runs again in the
recomputation: one recomputation per block. Gradients are bit-equal to autograd's: the products are the ones its formulas
use.

The parameter is not an input of such a function (autograd would call its hooks with None in the I pass); a dummy, the
engine's ``anchor``, takes its place, so that outputs require gradients even where the layer's input does not.

Pluggable: a rule is a function ``rule(engine, module, plain_forward, *args)`` for a module type. A float8 or
tensor-parallel layer brings its own function of ``(engine.anchor, x, weight.detach(), [weight], …)`` and calls
``engine.defer(parameter, compute)`` from its backward. Outside of a stage's forward and backward every layer runs its
plain forward, and autograd is untouched. A compiled region is one custom autograd function; those are split, where their
backward asks what is wanted, by `titan_pipeline.runtime.weight_grad.functions`.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titan_pipeline.runtime.weight_grad.compiled import asks_what_is_wanted, compiled_forward
from titan_pipeline.runtime.weight_grad.functions import COMPILED, FunctionSplit
from titan_pipeline.runtime.weight_grad.generic import SplitMode, contracting_parameters, split_forward
from titan_pipeline.runtime.weight_grad.queue import ELSEWHERE, Rule, WeightGradQueue
from titan_pipeline.runtime.weight_grad.rules import DEFAULT_RULES, left_alone


class WeightGradEngine:
    """Makes the layers of a module able to defer their weight gradients.

    Args:
        module: Its layers' ``forward`` is wrapped in place; `detach` undoes it.
        rules: Module type → rule, added to (or replacing) the defaults for ``nn.Linear`` and ``nn.Embedding``.
            A type matches exactly, not its subclasses.
        through_autograd: Always accumulate by autograd's own nodes. Needed where a library hooks those nodes rather
            than the parameters; costs about 9 us per parameter. Parameters with hooks of their own take that way
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
        self.queue: WeightGradQueue | None = None
        """Where notes go while a backward of the stage runs."""
        table: dict[type[nn.Module], Rule] = {**DEFAULT_RULES, **(rules or {})}
        compiled = {
            id(inner): asks_what_is_wanted(outer)
            for outer in module.modules() if _is_compiled(outer) for inner in outer.modules()
        }  # fmt: skip
        self.not_deferred: dict[str, str] = {}
        """Parameters whose gradients come with the input gradient, and why."""
        self._wrapped: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        self._mode = SplitMode(self)
        self._functions = FunctionSplit(self)
        self._names = {id(p): n for n, p in module.named_parameters()}
        self._sizes = {n: p.numel() for n, p in module.named_parameters() if p.requires_grad and p.dim() > 1}
        self._expected: dict[str, nn.Parameter] = {}
        self._ruled: dict[str, nn.Parameter] = {}
        """Of layers with a rule, until the first backward: they may be used outside of their layer's forward."""
        self._without: set[str] = set()
        """Those that had no gradient when it began."""
        self._compiled: set[int] = set()
        for name, layer in module.named_modules():
            rule = table.get(original_type(layer))
            asks = [compiled[id(inner)] for inner in layer.modules() if id(inner) in compiled]
            if asks and all(asks):  # what it defers is known after the first backward
                inside = {n: p for n, p in layer.named_parameters(name, recurse=False) if p.requires_grad}
                self._expected |= inside
                self._compiled.update(id(p) for p in inside.values())
            elif asks:
                self._leave_out(name, layer, COMPILED)
            elif rule is not None and "forward" not in layer.__dict__:
                self._wrap(layer, self._by_rule(layer, rule))
                if (reason := left_alone(rule, layer)) is not None:
                    self._leave_out(name, layer, reason)
                else:
                    own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
                    self._ruled |= {self._names[id(p)]: p for p in own}
            elif contracting_parameters(layer):
                self._wrap(layer, split_forward(self._mode, layer.forward))
                prefix = f"{name}." if name else ""
                self._expected |= {prefix + n: layer.get_parameter(n) for n in contracting_parameters(layer)}
            else:
                self._leave_out(name, layer, f"no rule for {original_type(layer).__name__}")

    def check_observed(self, queue: WeightGradQueue) -> None:
        """After a backward, before its queue runs: what was thought to wait and did not goes into `not_deferred`."""
        if self._ruled:
            late = queue.parameters()
            for name, parameter in self._ruled.items():
                if name in self._without and parameter.grad is not None and id(parameter) not in late:
                    self.not_deferred[name] = "used outside of its layer's forward, or a tensor subclass"
            self._ruled.clear()
        for name, parameter in self._expected.items():
            if id(parameter) in self._mode.deferred | self._functions.deferred or parameter.grad is None:
                continue
            whole = "its operations cannot be split: a recurrence, in place, a tensor subclass, or inside a checkpoint"
            self.not_deferred[name] = COMPILED if id(parameter) in self._compiled else whole
            if id(parameter) in self._mode.cheap:
                self.not_deferred[name] = "its gradient is cheap: a sum, a scale or the like"
                self._sizes.pop(name, None)
        self._expected.clear()
        for identity, reason in self._functions.refused.items():
            if identity in self._names:
                self.not_deferred[self._names[identity]] = reason
        self._functions.refused.clear()
        for identity in self._functions.deferred:
            self.not_deferred.pop(self._names.get(identity, ""), None)

    def arrange(self, outputs: Iterable[Any]) -> None:
        """After a forward that was recorded: let the custom functions in its graph defer too."""
        if torch.is_grad_enabled():
            self._functions.arrange(outputs)

    @property
    def deferred_share(self) -> float:
        """Share of the weight gradients that wait for W, by the parameters' elements; vectors count nothing.

        The FLOPs of a product's weight gradient are proportional to the weight's elements.
        """
        late = sum(n for name, n in self._sizes.items() if name not in self.not_deferred)
        total = sum(self._sizes.values())
        return late / total if total else 1.0

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Forwards run inside can defer; their backward must then run inside `deferring`."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    @contextmanager
    def deferring(self) -> Generator[WeightGradQueue, None, None]:
        """Weight gradients of the backward run inside go into the queue it yields (a checkpoint's forward too)."""
        self.queue = WeightGradQueue(self._through_autograd)
        self._without = {name for name, p in self._ruled.items() if p.grad is None}
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
            raise RuntimeError(ELSEWHERE)
        self.queue.notes.append(((parameter,), _alone, (compute, given)))

    def detach(self) -> None:
        """Give every layer its own forward back."""
        for layer, before in self._wrapped:
            del layer.__dict__["forward"]
            if before is not None:
                layer.forward = before
        self._wrapped.clear()

    def _leave_out(self, prefix: str, layer: nn.Module, reason: str) -> None:
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if parameter.requires_grad:
                self.not_deferred[name] = reason

    def _by_rule(self, layer: nn.Module, rule: Rule) -> Callable[..., Any]:
        plain = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.active or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return plain(*args, **kwargs)
            return rule(self, layer, plain, *args, **kwargs)

        return forward

    def _wrap(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        self._wrapped.append((layer, layer.__dict__.get("forward")))
        layer.forward = forward


def original_type(module: nn.Module) -> type[nn.Module]:
    """The module's class; for one that FSDP2 has wrapped (it makes a subclass in place), the class before."""
    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) and len(kind.__mro__) > 2 else kind


def _is_compiled(module: nn.Module) -> bool:
    """Whether the module went through ``torch.compile`` (a wrapper) or ``Module.compile`` (in place), or its ``forward`` did."""
    called = getattr(module, "_compiled_call_impl", None)
    return hasattr(module, "_orig_mod") or called is not None or compiled_forward(module) is not None


def _alone(compute: Callable[..., Tensor], given: tuple[Any, ...]) -> tuple[Tensor]:
    return (compute(*given),)
