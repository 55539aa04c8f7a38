"""Launching a Triton kernel without binding its arguments again.

Triton binds every launch: it sorts arguments, classifies each by type, alignment and value, and makes a string of all to
look the compiled kernel up. That is host time in every step, for the same answer. `launch` keeps the answer, keyed by
everything it depends on: the kernel, the device, the driver, each tensor's dtype and alignment, each number, and the
compile-time arguments. A launch it has seen goes straight to the compiled kernel's own launcher, with the same arguments.

An integer of 1 stays a run-time number (`_with_numbers`): as the constant that Triton would make of it, ptxas miscompiles casts.

Triton's own path is taken where it could differ: the first time, with profiling hooks or debugging on, in the
interpreter, and on versions of Triton whose launcher was not checked.
"""

# Triton's launchers have no types.
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor


class _Known(NamedTuple):
    driver: Any
    run: Any
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_CHECKED = ("3.6.", "3.9.")
"""Versions of Triton on which `launch` was compared with Triton's own path: those of torch 2.11 and 2.15."""

_MOST = 4096
_known: dict[tuple[Any, ...], _Known] = {}


def launch(kernel: Any, programs: tuple[int, ...], *arguments: Any, num_warps: int, **constants: Any) -> None:
    """``kernel[programs](*arguments, **constants)`` on the device of the first argument, on the current stream.

    Args:
        kernel: From ``triton.jit``; its run-time arguments come before its compile-time ones.
        programs: The grid, one to three numbers.
        arguments: The run-time arguments, a tensor or a TMA descriptor first.
        num_warps: Of a program.
        constants: The compile-time arguments.
    """
    device = device_index(getattr(arguments[0], "base", arguments[0]))
    if device is None:  # the interpreter, whose tensors are on the CPU
        _specialized(kernel, arguments)[programs](*arguments, num_warps=num_warps, **constants)
        return
    driver = triton.runtime.driver.active
    if driver.get_current_device() != device:
        with torch.cuda.device(device):
            launch(kernel, programs, *arguments, num_warps=num_warps, **constants)
        return
    key: list[Any] = [id(kernel), device, num_warps]
    for argument in arguments:
        if isinstance(argument, Tensor):
            key += (argument.dtype, argument.data_ptr() % 16)
        elif hasattr(argument, "block_shape"):
            key += (argument.base.dtype, *argument.block_shape)
        else:
            key.append(argument)
    key += constants.items()
    found = _known.get(whole := tuple(key))
    if found is None or found.driver is not driver or _watched(kernel):
        compiled = _specialized(kernel, arguments)[programs](*arguments, num_warps=num_warps, **constants)
        if compiled is not None and triton.__version__.startswith(_CHECKED):
            _remember(whole, driver, kernel, compiled, len(arguments), constants)
        return
    wide = (*programs, 1, 1)
    found.run(
        wide[0], wide[1], wide[2], driver.get_current_stream(device), found.function, found.metadata, None, None, None,
        *arguments, *found.constants,
    )  # fmt: skip


def _specialized(kernel: Any, arguments: tuple[Any, ...]) -> Any:
    """The kernel that Triton compiles for these arguments."""
    ones = tuple(
        name for name, value in zip(kernel.arg_names, arguments, strict=False) if type(value) is int and value == 1
    )
    return _with_numbers(kernel, ones) if ones and type(kernel) is triton.JITFunction else kernel


@functools.cache
def _with_numbers(kernel: Any, names: tuple[str, ...]) -> Any:
    """The kernel, with no constant for the integers of these names.

    Triton compiles an integer argument of 1 as a constant. In a matrix of one column it is then known at compile time that most
    of a thread's values are the padding's zeros, and several of its float8 conversions have the same operands. The ptxas of CUDA
    12.8 (Triton 3.6) and 12.9 merges such conversions into one that reads its own result; that of 13.4 (Triton 3.9) does not. On
    an H200 the padding's codes were whatever a register had held.
    All other integers keep their specialization: alignment to 16 makes 128-bit accesses.
    """
    twin = triton.jit(kernel.fn, do_not_specialize=names)
    twin.pre_run_hooks = kernel.pre_run_hooks  # one list: hooks added later are seen too
    return twin


def device_index(x: Tensor) -> int | None:
    """Which CUDA device; None on the CPU."""
    return x.get_device() if x.is_cuda else None


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launch on ``x``'s device; nothing to do for the interpreter, whose tensors are on the CPU."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _remember(
    key: tuple[Any, ...], driver: Any, kernel: Any, compiled: Any, num_arguments: int, constants: dict[str, Any]
) -> None:
    names = kernel.arg_names[num_arguments:]
    if set(names) != set(constants):
        raise TypeError(f"{kernel} takes {', '.join(names)} at compile time, but got {', '.join(constants)}.")
    if len(_known) >= _MOST:  # shapes that never come again
        _known.clear()
    _known[key] = _Known(
        driver, compiled.run, compiled.function, compiled.packed_metadata, tuple(constants[name] for name in names)
    )


def _watched(kernel: Any) -> bool:
    """Whether a profiler or debugger must see the launch."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return bool(kernel.pre_run_hooks or runtime.debug or any(getattr(hook, "calls", hook) for hook in hooks))
