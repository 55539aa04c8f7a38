"""Memory over time of one microbatch: every allocation and free of forward and backward, in order. No ranks, no memory.

The model runs forward and backward on fake tensors. What an operator makes is an allocation, and it is freed when the last
tensor that holds it dies, as in torch's allocator. Between them stand FSDP2's own at the borders of its units: gathered
parameters, flat buffers, gradients not yet reduced, by the timeline of `titan_fsdp.planning.estimate`. Limits: temporaries
inside one operator are not seen, and shards (parameters, gradients, optimizer state) live throughout and are not in it.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_fsdp.names import named_modules, named_parameters
from titan_fsdp.planning.data import PlanData
from titan_fsdp.planning.estimate import fake_input, full_grads, gather_buffer, kept_gathered, pretend_on_cpu
from titan_fsdp.torch_private import fake_tensors, surround


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """An allocation, or its free."""

    key: int
    """Of the allocation; its free has the same."""
    size: int
    """Bytes; negative where they are freed."""
    category: str
    """``activations`` outlive forward; ``gathered`` are parameters and flat buffers, ``gradients`` whole ones; all else is
    ``temporary``."""
    where: str
    """The unit whose forward or backward runs."""
    operator: str
    """torch's operator, or what FSDP2 does."""


@dataclass(frozen=True, slots=True)
class MemoryTrace:
    """One microbatch, in order. What forward leaves is freed in backward; backward leaves nothing."""

    forward: tuple[MemoryEvent, ...]
    backward: tuple[MemoryEvent, ...]


def record_memory(
    plan: PlanData,
    model: nn.Module,
    inputs: Sequence[Any],
    loss: Callable[[Any], Tensor] | None,
    *,
    gathers: bool = True,
    compiled: bool = False,
) -> MemoryTrace:
    """See `WrapPlan.record_memory`."""
    dtype = plan.policy.mp.param_dtype
    bare = model.to("meta").to(dtype)
    with fake_tensors():
        pretend_on_cpu(bare)
        args = [fake_input(a, dtype) if isinstance(a, Tensor) else a for a in inputs]
        if compiled:  # the compiler's own tensors are not the program's
            _backward(_forward(bare, args, loss))
            bare.zero_grad()
        recorder = _Recorder([*bare.parameters(), *bare.buffers(), *(a for a in args if isinstance(a, Tensor))])
        units = _Units(plan, bare, recorder, gathers)
        with recorder:
            units.begin()
            result = _forward(bare, args, loss)
            forward = recorder.take(outliving="activations")
            units.turn()
            _backward(result)
            del result
            units.end()
        for argument in args:  # gradients that an earlier pipeline stage receives
            if isinstance(argument, Tensor):
                argument.grad = None
        return MemoryTrace(forward, recorder.take(outliving="temporary", freed=True))


def _forward(model: nn.Module, args: Sequence[Any], loss: Callable[[Any], Tensor] | None) -> Any:
    output = model(*args)
    return output if loss is None else loss(output)


def _backward(result: Any) -> None:
    ends = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])


class _Recorder(TorchDispatchMode):
    """Sees each storage when an operator makes it and when it dies."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self.where = "root"
        self._order: list[tuple[int, int]] = []  # key, +1 allocated or -1 freed
        self._facts: list[list[Any]] = []  # by key: size, category, where, operator
        self._open: set[int] = set()
        # by address of the storage: its key and a reference that tells its end; -1 holds what was there before
        self._live: dict[int, tuple[int, Any]] = {_address(t): (-1, t.untyped_storage()) for t in known}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs under this mode too; torch would fall back to eager."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._saw(leaf, str(func))
        return result

    def _saw(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        key = None if address in self._live else self.allocate(storage.nbytes(), "temporary", operator)
        if key is not None:
            self._live[address] = key, weakref.ref(storage, functools.partial(self._died, address))

    def _died(self, address: int, _: Any) -> None:
        key, _ = self._live.pop(address)
        self.free(key)

    def allocate(self, size: int, category: str, operator: str) -> int | None:
        if not size:
            return None
        key = len(self._facts)
        self._facts.append([size, category, self.where, operator])
        self._order.append((key, 1))
        self._open.add(key)
        return key

    def free(self, key: int | None) -> None:
        if key is not None and key in self._open:
            self._open.discard(key)
            self._order.append((key, -1))

    def call(self, tensor: Tensor, category: str, size: int) -> None:
        """Say what a tensor is, and how large on the real rank."""
        key, _ = self._live.get(_address(tensor), (-1, None))
        if key >= 0:
            self._facts[key][:2] = size, category

    def take(self, *, outliving: str, freed: bool = False) -> tuple[MemoryEvent, ...]:
        """The events since the last call; temporaries that are still there become ``outliving``, or are ``freed``."""
        for key in sorted(self._open):
            if self._facts[key][1] == "temporary":
                self._facts[key][1] = outliving
            if freed:
                self.free(key)
        events = [MemoryEvent(key, sign * self._facts[key][0], *self._facts[key][1:]) for key, sign in self._order]
        self._order = []
        return tuple(events)


class _Units:
    """What FSDP2 allocates around its units. With ``gathers`` false (a pipeline gathers once a step) only whose turn it is."""

    def __init__(self, plan: PlanData, model: nn.Module, recorder: _Recorder, gathers: bool) -> None:
        self._units, self._recorder, self._gathers = plan.units, recorder, gathers
        self._gathered: dict[int, int | None] = {}
        self._parts: dict[int, int | None] = {}
        self._buffer: int | None = None
        self._reducing: deque[int | None] = deque()
        self._most_reducing = plan.policy.comm.reduce_scatter_buffers
        self._backward: list[int] = []  # units whose backward runs, outermost first
        modules, parameters = named_modules(model), dict(named_parameters(model))
        self._parameters = [[(parameters[p.fqn], p.numel) for p in unit.params] for unit in plan.units]
        for unit, owned in zip(plan.units, self._parameters, strict=True):
            for parameter, numel in owned:
                if parameter.requires_grad:
                    hook = functools.partial(self._accumulated, numel * unit.param_dtype.itemsize)
                    parameter.register_post_accumulate_grad_hook(hook)
        for number, unit in enumerate(plan.units[:-1]):
            for fqn in unit.fqns:
                self._surround(modules[fqn], number, first=fqn == unit.fqns[0], last=fqn == unit.fqns[-1])

    def _surround(self, module: nn.Module, number: int, *, first: bool, last: bool) -> None:
        """Around the module's call."""

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before = self._recorder.where
            if first:
                self._forward(number)
            self._recorder.where = self._units[number].name
            output = call(*args, **kwargs)
            if last and self._gathers and self._units[number].reshard is not False:
                self._recorder.free(self._gathered.pop(number, None))
                kept = kept_gathered(self._units[number])  # where they are sharded over fewer ranks
                self._parts[number] = self._recorder.allocate(kept, "gathered", "shards of fewer ranks")
            self._recorder.where = before
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._turn_of(number))
            return output

        surround(module, around)

    def _gather(self, number: int, buffer: int | None) -> None:
        """Copy a unit's parameters out of their flat buffer; then the buffer before it is not needed any more."""
        if not self._gathers:
            return
        unit, recorder = self._units[number], self._recorder
        if number not in self._gathered:
            self._gathered[number] = recorder.allocate(unit.gather_bytes, "gathered", "all-gather: parameters")
        recorder.free(self._parts.pop(number, None))
        recorder.free(self._buffer)
        self._buffer = buffer

    def _flat(self, number: int) -> int | None:
        size = gather_buffer(self._units[number]) if self._gathers else 0
        return self._recorder.allocate(size, "gathered", "all-gather: flat buffer")

    def _forward(self, number: int) -> None:
        self._gather(number, self._flat(number))

    def begin(self) -> None:
        """The root is gathered first and stays."""
        self._forward(len(self._units) - 1)

    def turn(self) -> None:
        """Backward begins."""
        self._recorder.free(self._buffer)
        self._buffer = None

    def _turn_of(self, number: int) -> None:
        """Backward of a unit begins: those that do not contain it have ended."""
        if number in self._backward:
            return
        name = self._units[number].fqns[0]
        inside = [n for n in self._backward if any(name.startswith(f"{fqn}.") for fqn in self._units[n].fqns)]
        for ended in [n for n in self._backward if n not in inside]:
            self._reduce(ended)
        self._backward = [*inside, number]
        self._recorder.where = f"{self._units[number].name}, backward"
        before = number - 1
        self._gather(number, self._flat(before) if before >= 0 and self._units[before].reshard is not False else None)

    def _reduce(self, number: int) -> None:
        """The unit's whole gradients go into the reduction's input, which lives until a later unit's reduction."""
        unit, recorder = self._units[number], self._recorder
        recorder.free(self._gathered.pop(number, None))
        if self._gathers and full_grads(unit):
            if len(self._reducing) == self._most_reducing:
                recorder.free(self._reducing.popleft())
            size = unit.reduce_numel * unit.reduce_dtype.itemsize
            self._reducing.append(recorder.allocate(size, "gradients", "reduce-scatter: input"))
        for parameter, _ in self._parameters[number]:
            parameter.grad = None

    def _accumulated(self, size: int, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._recorder.call(parameter.grad, "gradients", size)
            if not self._gathers:
                parameter.grad = None

    def end(self) -> None:
        """Backward is over: what is left is reduced, the root last."""
        self._recorder.where = "root, backward"
        for number in [*self._backward, len(self._units) - 1]:
            self._reduce(number)
        for key in (self._buffer, *self._reducing):
            self._recorder.free(key)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
