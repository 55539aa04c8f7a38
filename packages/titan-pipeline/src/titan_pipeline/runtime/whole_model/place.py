"""How a stage runs the model's own forward with only its part of the model.

The forward runs from its first line. Until it calls the stage's first layer, it is *before* the stage: modules with
parameters return `Absent` tensors of the right shape instead of running, all else (masks, positions, rotary embeddings)
runs as it is, on the inputs. The call of the first layer begins the stage's own part: its absent arguments are what the
stage before sent. The call of the next stage's first layer ends it: its arguments are what this stage sends. The last
stage returns what the model returns.

Between stages travel the inputs (integers and flags; of floating-point ones the shape only, unless a stage uses them), the
absent arguments of the first layer, and what else a later stage's part was seen to use.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from titan_pipeline.runtime.transport.plain import register_structure
from titan_pipeline.runtime.whole_model.absent import (
    Absent,
    AbsentRecipe,
    Base,
    TensorSpec,
    absents,
    changes_in_place,
    forced,
)
from titan_pipeline.runtime.whole_model.reads import KnownReads, Reads
from titan_pipeline.runtime.whole_model.trace import CallId, ModelTrace

ArgPath = tuple[str | int, int]
"""An argument (number or name) of a call, and the leaf in it."""


@register_structure
class MissingInput(NamedTuple):
    """Stands for an input of the model that is not sent on."""

    spec: TensorSpec
    base: Base


@register_structure
@dataclass(frozen=True, slots=True)
class StageBoundary:
    """What one stage sends to the next."""

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    """The model's arguments."""
    entry: dict[ArgPath, Tensor]
    """Arguments of the next stage's first layer."""
    more: dict[Base, Tensor]
    """What else later stages use."""


class _Reached(BaseException):
    """The forward has come to the next stage's first layer. Not an Exception, which models may catch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (args, kwargs)


class _NeedsData(Exception):
    """Shapes alone do not decide what a module returns."""


class PartRecorder:
    """While `split` tries a stage on the example: gives every value, and writes down which were asked for.

    Args:
        trace: Of the whole model.
        tensors: Its parameters and buffers by name.
        inputs: Leaves of the example by base.
    """

    def __init__(self, trace: ModelTrace, tensors: Mapping[str, Tensor], inputs: Mapping[Base, Tensor]) -> None:
        self.trace = trace
        self._tensors = tensors
        self._inputs = inputs
        self.asked: list[Base] = []
        self.entry_paths: list[ArgPath] = []

    def value(self, base: Base) -> Tensor:
        """The value, and a note that it was asked for."""
        if base not in self.asked:
            self.asked.append(base)
        if base[0] in ("param", "buffer"):
            return self._tensors[str(base[1])]
        if base[0] == "input":
            return self._inputs[base]
        _, name, number, leaf = cast(tuple[str, str, int, int], base)
        return tree_flatten(self.trace.calls[name, number].output)[0][leaf]


class StagePlace:
    """Which part of the model's forward a stage runs, and the state of the run.

    Args:
        index: The stage.
        entry: Call of its first layer; None for stage 0.
        exit: Call of the next stage's first layer; None for the last stage.
        trace: Of the whole model.
    """

    def __init__(self, index: int, entry: CallId | None, exit: CallId | None, trace: ModelTrace) -> None:
        self.index = index
        self.entry = entry
        self.exit = exit
        self.entered: frozenset[CallId] = frozenset(trace.calls[entry].stack) if entry else frozenset()
        self.entry_paths: list[ArgPath] = []
        self.exit_paths: list[ArgPath] = []
        self.passed_on: list[Base] = []
        """What later stages use, beside the arguments of the next stage's first layer."""
        self.stand_ins: frozenset[str] = frozenset()
        """Modules that are not run before the stage."""
        self.recorder: PartRecorder | None = None
        self._nested = {id: _calls_within(id, trace) for id in trace.calls} if entry else {}
        self._alike = {id: _alike(call) for id, call in trace.calls.items()} if entry else {}
        self._fake: FakeTensorMode | None = None
        self._shapes: dict[Any, dict[tuple[str, ...], tuple[list[Any], Any]]] = {}
        """By call and shapes of its arguments, then by what it reads from them, what another stage's module returns."""
        self._running = False
        self._before = False
        self._shaping = False
        self._counts: Counter[str] = Counter()
        self._values: dict[Base, Tensor] = {}
        self._entry_values: dict[ArgPath, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "StagePlace":
        """A stage that is copied keeps its plan, not its state."""
        made = object.__new__(StagePlace)
        made.__dict__.update(self.__dict__)
        made._fake, made._shapes, made._counts, made._values = None, {}, Counter(), {}
        memo[id(self)] = made
        return made

    def forget_shapes(self) -> None:
        """What modules of other stages return may have another data type or device from now on."""
        self._shapes.clear()

    # --- the run of one microbatch ---

    def run(self, plain: Callable[..., Any], args: tuple[Any, ...], extra: dict[str, Any]) -> Any:
        """The model's forward, from this stage's first layer to its last.

        Args:
            plain: The forward.
            args: Of the model, on stage 0; elsewhere the boundary.
            extra: Keyword arguments of this microbatch that every stage is given.
        """
        inputs, entry = self._begin(args)
        self._running, self._before = True, self.entry is not None
        self._counts.clear()
        self._entry_values = entry
        try:
            output = plain(*_arrived(inputs[0], self), **_arrived(inputs[1], self), **extra)
            if self.exit is not None or self._before:
                missed = self.entry if self._before else self.exit
                raise RuntimeError(
                    f"stage {self.index}: the forward ended without calling layer {cast(CallId, missed)[0]!r}. Layers that "
                    "are skipped at random or on a condition cannot be the first of a stage: turn that off, or move the cut."
                )
            return forced(output)
        except _Reached as reached:
            return self._boundary(inputs, *reached.call)
        finally:
            self._running = self._before = False
            self._values = {}
            self._entry_values = {}

    def try_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the stage on the example, with everything that it asks its `recorder` for."""
        if self.entry is None:
            module(*((kwargs,) if kwargs else args))
        else:
            module(StageBoundary(_sendable((args, kwargs)), {}, {}))

    def _begin(self, args: tuple[Any, ...]) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], dict[ArgPath, Tensor]]:
        if self.entry is None:
            named: dict[str, Any] = {}
            if len(args) == 1 and isinstance(args[0], Mapping):
                named, args = dict(cast(Mapping[str, Any], args[0])), ()
            self._values = dict(input_leaves(args, named))
            return (args, named), {}
        boundary = args[0]
        if not isinstance(boundary, StageBoundary):
            raise ValueError(
                f"stage {self.index} takes what stage {self.index - 1} returns, and was called with a "
                f"{type(boundary).__name__}."
            )
        self._values = dict(boundary.more)
        return boundary.inputs, boundary.entry

    def _boundary(
        self, inputs: tuple[tuple[Any, ...], dict[str, Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StageBoundary:
        leaves = leaves_by_path(args, kwargs)
        lost = [path for path in self.exit_paths if path not in leaves]
        if lost:
            raise RuntimeError(
                f"layer {cast(CallId, self.exit)[0]!r} was called without its arguments {lost}, which the example had. "
                "Split with an example that has the arguments of a step."
            )
        entry = {path: forced(leaves[path]) for path in self.exit_paths}
        more = {base: self.lookup(base) for base in self.passed_on}
        return StageBoundary(_sendable(inputs), entry, more)

    def call(
        self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module
    ) -> Any:
        """A module at a place that matters is called."""
        if not self._running or self._shaping:  # a recomputation, or only its shape is wanted
            return plain(*args, **kwargs)
        id = (name, self._counts[name])
        self._counts[name] += 1
        if self._before:
            if id == self.entry:
                self._before = False
                self._enter(args, kwargs)
            elif name in self.stand_ins and id not in self.entered:
                return _after_hooks(module, args, kwargs, self._stand_in(id, plain, args, kwargs))
        elif id == self.exit:
            raise _Reached(args, kwargs)
        if not self._before and any(True for _ in absents((args, kwargs))):
            args, kwargs = forced((args, kwargs))
        output = plain(*args, **kwargs)
        for base in self.passed_on:
            if base[:3] == ("call", *id):
                self._values[base] = forced(tree_flatten(output)[0][cast(int, base[3])])
        return output

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give the absent arguments of the first layer what came for them."""
        leaves = {p: x for p, x in leaves_by_path(args, kwargs).items() if type(x) is Absent}
        if self.recorder is not None:
            call = self.recorder.trace.calls[cast(CallId, self.entry)]
            known = leaves_by_path(call.args, call.kwargs)
            self._entry_values = {p: known[p] for p in leaves}
            self.recorder.entry_paths = list(leaves)
        for path, absent in leaves.items():
            if path not in self._entry_values:
                raise RuntimeError(
                    f"layer {cast(CallId, self.entry)[0]!r} was called with the argument {path}, which the example did not "
                    "have. Split with an example that has the arguments of a step."
                )
            absent.value = self._entry_values[path]

    # --- values ---

    def lookup(self, base: Base) -> Tensor:
        """See `AbsentOwner`."""
        if self._shaping:
            raise _NeedsData(str(base))
        if base in self._values:
            return self._values[base]
        if self.recorder is None and base[0] in ("param", "buffer"):
            raise RuntimeError(
                f"stage {self.index} uses {base[1]!r}, which another stage holds: the forward took another path than on the "
                "example of split(). Layers that are skipped at random or on a condition cannot be the first of a stage: "
                "turn that off, or move the cut."
            )
        if self.recorder is None:
            raise RuntimeError(
                f"stage {self.index} needs {base}, which no example of split() showed. Split with an example that has the "
                "arguments of a step."
            )
        self._values[base] = self.recorder.value(base)
        return self._values[base]

    def operate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `AbsentOwner`: run it on values in the stage's own part, note it down before."""
        name = getattr(func, "__name__", "")
        if name == "data_ptr" and not self._running:  # asked by recurrent layers that are moved: there is no memory
            return 0
        in_place = changes_in_place(name)
        own = self._running and not self._before and not self._shaping
        if own or name in _NEED_VALUES or (in_place and type(args[0]) is not Absent):
            args, kwargs = forced((args, kwargs))
            return func(*args, **kwargs)
        if in_place:
            target = cast(Absent, args[0])
            target.become(AbsentRecipe(func, (target.before(), *args[1:]), kwargs, in_place=True))
            return None if name == "__setitem__" else target
        try:
            leaves, structure = tree_flatten(self._shape_of(func, args, kwargs))
        except (DataDependentOutputException, DynamicOutputShapeException):
            args, kwargs = forced((args, kwargs))
            return func(*args, **kwargs)
        recipe = AbsentRecipe(func, args, kwargs, in_place=False)
        made = [
            Absent(TensorSpec.of(x), self, None, recipe, i) if isinstance(x, Tensor) else x
            for i, x in enumerate(leaves)
        ]
        return tree_unflatten(made, structure)

    def _shape_of(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._fake is None:
            self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        mode = self._fake

        def fake(x: Any) -> Any:
            return torch.empty(tuple(x.shape), dtype=x.dtype, device=x.device) if type(x) is Absent else x

        with torch.no_grad(), mode:
            args, kwargs = tree_map(fake, (args, kwargs))
            return func(*args, **kwargs)

    # --- modules of other stages ---

    def _stand_in(self, id: CallId, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What another stage's module would return, absent."""
        self._counts.update(self._nested.get(id, {}))
        known = self._shapes.setdefault((id, self._signature(args, kwargs)), {})
        leaves, structure = known.get(()) or self._shapes_after_reads(known, id, plain, args, kwargs)
        made = [
            Absent(x, self, ("call", *id, i)) if isinstance(x, TensorSpec) else x for i, x in enumerate(leaves)
        ]  # fmt: skip
        return tree_unflatten(made, structure)

    def _shapes_after_reads(
        self,
        known: dict[tuple[str, ...], tuple[list[Any], Any]],
        id: CallId,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[list[Any], Any]:
        """Run the module until it is clear whether what it returns is known."""
        reads = Reads(known)
        try:
            with reads:
                found = self._shapes_of_module(id, plain, args, kwargs)
        except KnownReads:
            return known[reads.seen]
        if len(known) >= _MOST_READS:
            known.clear()
        known[reads.seen] = found
        return found

    def _shapes_of_module(
        self, id: CallId, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], Any]:
        self._shaping = True
        try:
            leaves, structure = tree_flatten(plain(*args, **kwargs))
            return [TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves], structure
        except (_NeedsData, DataDependentOutputException, DynamicOutputShapeException):
            pass
        finally:
            self._shaping = False
        # what it computes depends on numbers; the shapes are those of arguments, as in the example
        alike, structure = self._alike[id]
        given = leaves_by_path(args, kwargs)
        if any(path not in given for path in alike if isinstance(path, tuple)):
            raise ValueError(
                f"the shapes that {id[0]!r} returns depend on numbers, and are not those of its arguments: a stage without "
                "this module cannot know them. Write the stages by hand."
            )
        return [TensorSpec.of(given[x]) if isinstance(x, tuple) else x for x in alike], structure

    def _signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(
            (path, tuple(x.shape), x.dtype, str(x.device)) if isinstance(x, Tensor)
            else (path, x if isinstance(x, bool | int | float | str | type(None)) else type(x))
            for path, x in leaves_by_path(args, kwargs).items()
        )  # fmt: skip


_MOST_READS = 256
"""For one module and one set of shapes, so many different reads are remembered."""

_NEED_VALUES = frozenset({
    "__bool__", "__int__", "__float__", "__complex__", "__index__", "item", "tolist", "numpy", "__array__", "equal",
    "allclose", "is_nonzero", "__contains__", "__repr__", "__format__", "data_ptr",
})  # fmt: skip


def leaves_by_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[ArgPath, Any]:
    """All leaves of a call's arguments."""
    named = [*enumerate(args), *kwargs.items()]
    return {(key, i): leaf for key, value in named for i, leaf in enumerate(tree_flatten(value)[0])}


def input_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Base, Tensor]]:
    """The floating-point tensors among the model's arguments."""
    return [
        (("input", *path), x) for path, x in leaves_by_path(args, kwargs).items()
        if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())
    ]  # fmt: skip


def _sendable(inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's arguments with their large tensors left out."""

    def one(key: str | int, value: Any) -> Any:
        leaves, structure = tree_flatten(value)
        made = [
            MissingInput(TensorSpec.of(x), ("input", key, i))
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) else x
            for i, x in enumerate(leaves)
        ]  # fmt: skip
        return tree_unflatten(made, structure)

    return tuple(one(i, a) for i, a in enumerate(inputs[0])), {k: one(k, v) for k, v in inputs[1].items()}


def _arrived(value: Any, place: StagePlace) -> Any:
    """Arguments as they came, with absent tensors for those that were left out."""
    return tree_map(
        lambda x: Absent(x.spec, place, x.base) if isinstance(x, MissingInput) else x, value,
        is_leaf=lambda x: isinstance(x, MissingInput),
    )  # fmt: skip


def _after_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Let the model's own forward hooks see a stand-in's result; torch's (FSDP's) belong to modules that run."""
    for number, hook in list(module._forward_hooks.items()):
        if str(getattr(hook, "__module__", "")).startswith("torch."):
            continue
        with_kwargs = number in module._forward_hooks_with_kwargs
        changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
        output = output if changed is None else changed
    return output


def _calls_within(id: CallId, trace: ModelTrace) -> Counter[str]:
    outer = trace.calls[id]
    return Counter(c.id[0] for c in trace.calls.values() if outer.begin < c.begin < outer.end)


def _alike(call: Any) -> tuple[list[Any], Any]:
    """For each leaf of a result the argument that has its shape and data type; plain values as they are."""
    given = {p: x for p, x in leaves_by_path(call.args, call.kwargs).items() if isinstance(x, Tensor)}
    leaves, structure = tree_flatten(call.output)
    none: ArgPath = ("", -1)
    return [
        next((p for p, x in given.items() if x.shape == leaf.shape and x.dtype == leaf.dtype), none)
        if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ], structure  # fmt: skip


class ModelSite:
    """Mixed into a module's class: its calls go through the stage's place."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `StagePlace.call`."""
        place, name = cast(tuple[StagePlace, str], self.__dict__["_pipeline_site"])
        return place.call(name, cast(Any, super()).__call__, args, kwargs, cast(nn.Module, self))


class StageRoot:
    """Mixed into the whole model's class: its forward runs one stage."""

    def forward(self, *args: Any, **extra: Any) -> Any:
        """See `StagePlace.run`."""
        place, _ = cast(tuple[StagePlace, str], self.__dict__["_pipeline_site"])
        return place.run(cast(Any, super()).forward, args, extra)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Absent tensors follow the others to another device or data type, and so does what modules return."""
        cast(tuple[StagePlace, str], self.__dict__["_pipeline_site"])[0].forget_shapes()
        for module in cast(nn.Module, self).modules():
            for name, tensor in list(module.__dict__.items()):
                if type(tensor) is Absent:
                    like = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
                    spec = TensorSpec(tuple(tensor.shape), like.dtype, str(like.device))
                    module.__dict__[name] = Absent(spec, tensor.owner, tensor.base)
        return cast(Any, super())._apply(fn, *args, **kwargs)


def place_at(module: nn.Module, mixin: type, place: StagePlace, name: str) -> None:
    """Let ``mixin`` take the module's calls."""
    kind = type(module)
    if not issubclass(kind, mixin):
        module.__class__ = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    module.__dict__["_pipeline_site"] = (place, name)
