"""A weight init made from what the model's own code says.

Two conventions exist. A submodule's ``reset_parameters()`` (torch's own layers; ``_reset_parameters`` in a few) fills
what the submodule holds. A model's ``_init_weights(module)`` (Hugging Face's models and many others) is applied to
each module below it, and overrides the first. Both are run here in the order in which building the model on the CPU
runs them: every reset, children first, then every ``_init_weights``, children first.

A parameter that neither fills takes what its module's constructor gives it (see `titan_fsdp.weights.rebuild`).

One run on meta tensors records which call writes which tensor. To fill one tensor, only the calls that write it are
run again, with every other tensor still on meta: one full tensor is in memory at a time.

Limit: what a constructor does after that, such as scaling some weights in its last lines, is not known here.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from titan_fsdp.names import unwrap
from titan_fsdp.weights.rebuild import rebuild
from titan_fsdp.weights.twin import build_twin

Init = Callable[[str, Tensor, torch.Generator], None]
"""Fills the full tensor of the parameter of that FQN, in place, drawing only from the generator."""

_RESETS = ("reset_parameters", "_reset_parameters")


def conventional_init(model: nn.Module) -> Init:
    """The init that ``model``'s own ``reset_parameters`` and ``_init_weights`` methods amount to.

    Each parameter is drawn with its own generator. The values do not depend on ranks or on other parameters.

    Args:
        model: Any model, wrapped or not, on any device. It is not changed, and may change afterwards.

    Returns:
        A function that fills one full plain parameter in place.

    Raises:
        ValueError: The initial value of a parameter is unknown. The message names the parameter and its module.
    """
    conventions = Conventions(unwrap(model))
    conventions.check_parameters()

    def init(fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        # These methods draw from the global generator: lend it one draw of ours, then put its state back.
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        conventions.fill(fqn, tensor, seed)

    return init


@dataclass(frozen=True)
class _Call:
    """One method call that may write tensors, on the twin."""

    what: str
    path: str
    run: Callable[[], Any]


@dataclass
class Conventions:
    """Which of the model's own methods fill which tensor, and how to run them."""

    model: nn.Module
    calls: dict[str, list[_Call]] = field(default_factory=dict[str, list[_Call]])
    """FQN of a parameter or buffer to the calls that write it, in order."""
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Path of a module whose method raised on meta tensors to the error."""

    def __post_init__(self) -> None:
        self.twin = build_twin(self.model)
        self.paths = dict(self.twin.named_modules())
        with torch.no_grad():
            for call in _calls(self.twin):
                self._record(call)

    def check_parameters(self) -> None:
        """Raise ValueError unless every parameter of the model is filled by a method, or by its module's constructor."""
        for path, module in self.paths.items():
            leaves = [leaf for leaf, parameter in module._parameters.items() if parameter is not None]
            if leaves and path in self.failed:
                raise ValueError(
                    f"module {path or 'root'!r} ({type(module).__name__}): {self.failed[path]} on meta tensors, so "
                    "its parameters cannot be filled one at a time. Pass init=function(fqn, tensor, generator)."
                )
            missing = [leaf for leaf in leaves if not self.calls.get(join(path, leaf))]
            if missing:
                self._use_constructor(path, module, missing)

    def _use_constructor(self, path: str, module: nn.Module, leaves: list[str]) -> None:
        """Fill ``leaves`` with what the constructor puts there: a class token, a scale."""
        try:
            with torch.random.fork_rng([]):
                rebuild(self.chain(path), leaves)
        except ValueError as err:
            raise ValueError(
                f"module {path or 'root'!r} ({type(module).__name__}) has parameters {leaves} and no "
                f"reset_parameters() or _init_weights() that fills them, and {err}. Their initial values are unknown. "
                "Add a reset_parameters() method to the class, or pass init=function(fqn, tensor, generator)."
            ) from err
        for leaf in leaves:

            def build(leaf: str = leaf) -> None:
                module._parameters[leaf] = nn.Parameter(rebuild(self.chain(path), [leaf])[leaf], requires_grad=False)

            self.calls[join(path, leaf)] = [_Call(f"{type(module).__name__}()", path, build)]

    def chain(self, path: str) -> list[tuple[str, nn.Module]]:
        """The twin's module at ``path`` and those around it, innermost first, each with the path from it to the first."""
        parts = path.split(".") if path else []
        return [(".".join(parts[i:]), self.paths[".".join(parts[:i])]) for i in range(len(parts), -1, -1)]

    def fill(self, fqn: str, tensor: Tensor, seed: int) -> None:
        """Fill parameter ``fqn`` in place, with the global random state seeded and then restored.

        Raises:
            ValueError: The calls leave elements as they were, or need other tensors' values.
        """
        path, _, leaf = fqn.rpartition(".")
        if fqn not in self.calls:
            raise ValueError(f"parameter {fqn!r} is unknown: the init was made for another model.")
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        value = self._run(path, {leaf: nn.Parameter(tensor.detach(), requires_grad=False)}, self.calls[fqn], seed)[leaf]
        if value.data_ptr() != tensor.data_ptr():
            tensor.copy_(value)
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise ValueError(
                f"{self.calls[fqn][-1].what} of module {path or 'root'!r} leaves elements of {fqn!r} unset. "
                "Pass init=function(fqn, tensor, generator)."
            )

    def buffers(self, path: str, leaves: list[str], seed: int) -> dict[str, Tensor]:
        """The values of those buffers of module ``path`` that its methods fill entirely, on the CPU.

        A buffer counts as filled if the result is the same whatever it held before.
        """
        calls = list({id(c): c for leaf in leaves for c in self.calls.get(join(path, leaf), [])}.values())
        if not calls or path in self.failed:
            return {}
        held = {n: b for n, b in self.paths[path]._buffers.items() if b is not None}
        results: list[dict[str, Tensor]] = []
        for poison in (0, 1):
            fresh = {n: torch.full(b.shape, poison, dtype=b.dtype, device="cpu") for n, b in held.items()}
            try:
                results.append(self._run(path, fresh, calls, seed))
            except ValueError:
                return {}
        first, second = results
        return {n: first[n] for n in leaves if _same_bits(first[n], second[n]) and first[n].shape == held[n].shape}

    def _record(self, call: _Call) -> None:
        module = self.paths[call.path]
        before = {**module._parameters, **module._buffers}
        with _Writes() as writes:
            try:
                call.run()
            except Exception as err:
                self.failed[call.path] = f"{call.what} raised {type(err).__name__} ({str(err).splitlines()[0]})"
        for path, inner in module.named_modules(prefix=call.path):
            for group in (inner._parameters, inner._buffers):
                for leaf, tensor in group.items():
                    if tensor is not None and tensor.is_meta and _storage(tensor) in writes.storages:
                        self.calls.setdefault(join(path, leaf), []).append(call)
        groups: list[dict[str, Any]] = [module._parameters, module._buffers]
        for group in groups:
            for leaf, tensor in group.items():
                if tensor is not before.get(leaf):  # the method put a new tensor there
                    self.calls[join(call.path, leaf)] = [call]
                    group[leaf] = before[leaf]

    def _run(self, path: str, tensors: dict[str, Any], calls: list[_Call], seed: int) -> dict[str, Any]:
        """Put ``tensors`` into twin module ``path``, run ``calls``, and return what is then in their places."""
        module = self.paths[path]
        homes: dict[str, dict[str, Any]] = {
            leaf: module._parameters if leaf in module._parameters else module._buffers for leaf in tensors
        }
        before = {leaf: homes[leaf][leaf] for leaf in tensors}
        device = next(iter(tensors.values())).device
        try:
            for leaf, tensor in tensors.items():
                homes[leaf][leaf] = tensor
            with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=_fork_type(device)):
                torch.manual_seed(seed)
                with torch.no_grad():
                    for call in calls:
                        call.run()
            return {leaf: homes[leaf][leaf] for leaf in tensors}
        except Exception as err:
            raise ValueError(
                f"{', '.join(tensors)} of module {path or 'root'!r} cannot be filled alone: "
                f"{' and '.join(c.what for c in calls)} raised {type(err).__name__} ({str(err).splitlines()[0]}). "
                "Pass init=function(fqn, tensor, generator)."
            ) from err
        finally:
            for leaf, tensor in before.items():
                homes[leaf][leaf] = tensor


def join(path: str, leaf: str) -> str:
    """The FQN of ``leaf`` in the module at ``path``."""
    return f"{path}.{leaf}" if path else leaf


def _calls(twin: nn.Module) -> Iterator[_Call]:
    ordered = list(_children_first(twin, "", None, set()))
    for path, module, _ in ordered:
        for name in _RESETS:
            if callable(getattr(module, name, None)):
                yield _Call(f"{name}()", path, getattr(module, name))
                break
        if _arguments(getattr(module, "_init_weights", None)) == 0:
            yield _Call("_init_weights()", path, module._init_weights)  # pyright: ignore[reportArgumentType]
    for path, module, model in ordered:
        if model is not None:
            yield _Call("_init_weights()", path, lambda model=model, module=module: model._init_weights(module))


def _children_first(module: nn.Module, path: str, model: Any, seen: set[int]) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module once, children first, with the nearest module at or above it that has ``_init_weights(module)``."""
    if id(module) in seen:
        return
    seen.add(id(module))
    if _arguments(getattr(module, "_init_weights", None)) == 1:
        model = module
    for name, child in module.named_children():
        yield from _children_first(child, join(path, name), model, seen)
    yield path, module, model


def _arguments(method: Any) -> int | None:
    """How many arguments ``method`` must be given; None if it is not a method, or has others than positional ones."""
    if not callable(method):
        return None
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return None
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return len(required) if all(p.kind is not p.KEYWORD_ONLY for p in required) else None


class _Writes(TorchDispatchMode):
    """Collects the storages of the tensors that operators write in place."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` and note what it writes."""
        kwargs = kwargs or {}
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, Tensor):
                        self.storages.add(_storage(tensor))
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*(_bytes(t) for t in (a, b)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _fork_type(device: torch.device) -> str:
    return device.type if device.type != "cpu" else "cuda"  # with no devices given, only the CPU's state is kept
