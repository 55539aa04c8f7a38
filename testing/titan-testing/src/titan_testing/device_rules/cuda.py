"""Stand-ins for `torch.cuda`, and the modes that let tensors in host memory pass for a device's."""

import contextlib
import threading
import time
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_testing.device_rules.streams import Event, Memory, Stream

_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_READS = {"tolist", "item", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__"}


class DeviceMode(TorchFunctionMode):
    """A tensor "on cuda" lies in host memory and says that it does not."""

    def __init__(self, machine: Any) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        machine = self._machine
        if machine.hosts.here() is None:
            return func(*args, **kwargs)
        name = func.__name__
        if name == "__get__":
            memory = machine.memory_of(args[0]) if func in (_DEVICE, _IS_CUDA) else None
            if memory is not None:
                return True if func == _IS_CUDA else torch.device("cuda", memory.index)
            return func(*args, **kwargs)
        if name in _READS:
            if machine.holds(args[0]):
                machine.sync(machine.current(), f"reading a value with {name}")
                return machine.quietly(lambda: func(*args, **kwargs))
            return func(*args, **kwargs)
        if name in ("cpu", "cuda", "to"):
            return self._move(func, name, args, kwargs)
        if name == "pin_memory":
            return args[0].clone()
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        index = machine.index(device)
        result = func(*args, **{**kwargs, "device": "cpu"})
        if index is not None:
            if name in ("tensor", "as_tensor"):
                machine.sync(machine.current(index), "a copy from pageable memory")
                result = result.clone()
            machine.allocate(result, index)
        return result

    def _move(self, func: Any, name: str, args: Any, kwargs: Any) -> Tensor:
        machine = self._machine
        x, *rest = args
        device = {"cpu": "cpu", "cuda": kwargs.get("device", "cuda")}.get(name, kwargs.get("device"))
        if name == "to" and rest and isinstance(rest[0], torch.device | str | Tensor):
            first = rest.pop(0)
            device = first.device if isinstance(first, Tensor) else first
            kwargs = {**kwargs, "dtype": first.dtype} if isinstance(first, Tensor) else kwargs
        if name == "to":
            rest = [r for r in rest if isinstance(r, torch.dtype)]
            dtype = kwargs.get("dtype", rest[0] if rest else None)
            moved = (
                x
                if dtype is None or dtype == x.dtype
                else x.to(dtype=dtype)
                if device is not None
                else func(*args, **kwargs)
            )
            x = moved
        if device is None:
            return func(*args, **kwargs) if name == "to" and x is args[0] else x
        index: int | None = machine.index(device)
        holder: Memory | None = machine.memory_of(x)
        if index == (None if holder is None else holder.index):
            return x
        if not kwargs.get("non_blocking"):
            machine.sync(machine.current(index if holder is None else holder.index), f"a copy with .{name}()")
        if holder is not None:  # to the host
            machine.kernel("copy to the host", [x], [])
            return machine.quietly(lambda: x.detach().clone())
        assert index is not None
        copy = machine.quietly(lambda: x.detach().clone())
        machine.allocate(copy, index)
        machine.kernel("copy from the host", [], [copy])
        return copy


class KernelMode(TorchDispatchMode):
    """What runs on tensors of a device is a kernel on the current stream."""

    def __init__(self, machine: Any) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        machine = self._machine
        if machine.hosts.here() is None:
            return func(*args, **kwargs)
        given = [(x, machine.memory_of(x)) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        held = [x for x, memory in given if memory is not None]
        if not held or func.is_view:
            return func(*args, **kwargs)
        written = [
            args[i]
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write and i < len(args) and isinstance(args[i], Tensor)
        ]
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            machine.sync(machine.current(), "reading a value")
        machine.kernel(name, held, [x for x in written if machine.holds(x)])
        if name == "copy_" and len(held) == 1 and not (len(args) > 2 and args[2]) and not kwargs.get("non_blocking"):
            machine.sync(machine.current(), "a copy between host and device")
        result = func(*args, **kwargs)
        if not written:
            index = machine.memory_of(held[0]).index
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    machine.allocate(x, index)
        return result


def cuda_functions(machine: Any) -> list[tuple[Any, str, Any]]:
    """What to patch, as ``(where, name, stand-in)``."""
    Event.current = machine.current

    def index(device: Any = None, optional: bool = False, allow_cpu: bool = False) -> int:
        del optional, allow_cpu
        found = machine.index("cuda" if device is None else device)
        assert found is not None, f"{device} is no CUDA device"
        return found

    def set_stream(stream: Stream) -> None:
        if machine.contexts().current() != stream.device_index:
            machine.contexts().switch(stream.device_index)
        machine.hosts.here().current[stream.device_index] = stream

    def synchronize(device: Any = None) -> None:
        machine.sync_device(index(device))

    def new_stream(device: Any = None, **_: Any) -> Stream:
        at = index(device)
        with torch.cuda.device(at):  # as the constructor of torch's does
            number = len(machine.streams)
            return machine.new_stream(machine.rank(), at, f"side stream {number} of rank {machine.rank()}")

    def exchange(device: int) -> int:
        return machine.contexts().switch(device) if device >= 0 else -1

    def leave(device: int) -> int:
        return machine.contexts().leave(device) if device >= 0 else -1

    def current_stream(device: Any = None) -> Stream:
        return machine.current(index(device))

    functions = {
        "_get_device_index": index, "set_stream": set_stream, "synchronize": synchronize, "Stream": new_stream,
        "Event": Event, "_exchange_device": exchange, "_maybe_exchange_device": leave, "current_stream": current_stream,
        "current_device": lambda: machine.contexts().current(),
        "set_device": lambda device: machine.contexts().switch(index(device)),
        "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    here: list[tuple[Any, str, Any]] = [(torch.cuda, name, value) for name, value in functions.items()]
    here += [(torch, "Event", Event), (torch.accelerator, "synchronize", synchronize)]
    here += [(torch.accelerator, "current_stream", current_stream)]
    hosts = machine.hosts
    for owner, name, stand_in in (
        (threading.Condition, "wait", hosts.wait),
        (threading.Thread, "join", hosts.join),
    ):
        here.append((owner, name, _method(stand_in)))
    engine: Any = torch.autograd
    core: Any = torch._C

    def within_mode(function: Any) -> Any:
        """As it is, with the mode on: torch takes it off while it handles a call, inside which such functions run."""

        def run(*args: Any, **kwargs: Any) -> Any:
            within = any(isinstance(mode, DeviceMode) for mode in _get_current_function_mode_stack())
            with contextlib.nullcontext() if within or hosts.here() is None else DeviceMode(machine):
                return function(*args, **kwargs)

        return run

    here.append((engine, "_engine_run_backward", within_mode(engine._engine_run_backward)))
    saved, push = "_push_saved_tensors_default_hooks", core._autograd._push_saved_tensors_default_hooks
    here.append((core._autograd, saved, lambda pack, unpack: push(within_mode(pack), within_mode(unpack))))
    here.append((time, "sleep", hosts.sleep))
    here.append((threading.Thread, "start", _method(machine.start_thread)))
    # before any mode is asked, torch looks at the stream's type
    here.append((torch.Tensor, "record_stream", lambda x, stream: machine.memory_of(x).recorded.add(stream)))
    return here


def _method(function: Any) -> Any:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)
