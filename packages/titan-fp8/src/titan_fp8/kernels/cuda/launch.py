"""Launching the CUDA C++ kernels on torch's tensors and stream; `titan_fp8.dispatch` gives what they cannot do to the next.

A kernel is the default where NVRTC compiles it (`build_problem`). When a device first runs a variant, the binary is loaded and
its results are compared with the reference, bit for bit. One that fails either is not tried again: the next implementation
runs, and one warning says so.
"""

import ctypes
import functools
import logging
import threading
from typing import Any

import torch
from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from titan_fp8 import reference
from titan_fp8.kernels.cuda.compile import compile_source
from titan_fp8.reference.results import empty_block_dual

_log = logging.getLogger("titan_fp8")
_TYPES = (ctypes.c_void_p,) * 5 + (ctypes.c_longlong,) * 3
_kernels: dict[tuple[torch.device, torch.dtype, bool], Any] = {}
"""The kernel of a device and variant; None where it does not work."""
_thread = threading.local()
"""Of each thread: whether it has a CUDA context."""


def cast_block_dual(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """See `titan_fp8.reference.cast_block_dual`.

    None for what the kernel is not written for: other dtypes, sizes that are not multiples of 128, unaligned rows.
    """
    kernel = _kernel(x.device, dtype, pow2) if _fits(x) else None
    return None if kernel is None else _launch(kernel, x, dtype)


@functools.cache
def build_problem(arch: str) -> str | None:
    """Why the default variant cannot be compiled for ``arch``, or None. Warns, once."""
    try:
        compile_source("cast_block_dual", arch, _defines(torch.float8_e4m3fn, True))
    except (ImportError, OSError, RuntimeError) as err:
        problem = f"cannot be compiled for {arch}: {_first_line(err)}"
        _log.warning("the CUDA cast %s; the Triton kernel runs instead", problem)
        return problem
    return None


def _fits(x: Tensor) -> bool:
    aligned = x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype == torch.bfloat16 and x.shape[0] % 128 == x.shape[1] % 128 == 0 and aligned and x.numel() > 0


def _kernel(device: torch.device, dtype: torch.dtype, pow2: bool) -> Any:
    """The kernel, loaded and checked; None where it does not work."""
    key = (device, dtype, pow2)
    if key not in _kernels:
        if torch.cuda.is_current_stream_capturing():
            return None  # the check waits for the device, which would break the capture
        try:
            kernel = _load(device, _defines(dtype, pow2))
            _compare_with_the_reference(kernel, device, dtype, pow2)
        except (ImportError, OSError, RuntimeError) as err:
            kernel = None
            _log.warning("the CUDA cast fails on %s: %s; the Triton kernel runs instead", device, _first_line(err))
        _kernels[key] = kernel
    return _kernels[key]


def _load(device: torch.device, defines: tuple[str, ...]) -> Any:
    """The compiled kernel, in ``device``'s primary context (torch's)."""
    major, minor = torch.cuda.get_device_capability(device)
    binary = compile_source("cast_block_dual", f"sm_{major}{minor}a", defines)
    with torch.cuda.device(device):
        module = _checked(driver.cuModuleLoadData(binary.cubin))
        return _checked(driver.cuModuleGetFunction(module, b"cast_block_dual"))


def _compare_with_the_reference(kernel: Any, device: torch.device, dtype: torch.dtype, pow2: bool) -> None:
    """Cast every bfloat16 value once: 4 tiles.

    Raises:
        RuntimeError: If a bit differs.
    """
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[torch.randperm(65536, generator=torch.Generator().manual_seed(0))].view(256, 256)
    expected = reference.cast_block_dual(x, dtype, pow2)
    for ours, theirs in zip(_launch(kernel, x.to(device), dtype), expected, strict=True):
        bits = [part.cpu().contiguous().view(torch.uint8) for part in (ours, theirs)]
        if not torch.equal(*bits):
            raise RuntimeError("its results differ from the reference's")


def _launch(kernel: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, scale, qt, scale_t = results = empty_block_dual(x, dtype)
    if torch.cuda.current_device() != x.get_device():
        with torch.cuda.device(x.device):
            return _launch(kernel, x, dtype)
    values = (
        x.data_ptr(), q.data_ptr(), scale.data_ptr(), qt.data_ptr(), scale_t.data_ptr(), *x.shape, x.stride(0)
    )  # fmt: skip
    _bind_context(x.get_device())
    stream = torch.cuda.current_stream().cuda_stream
    _checked(driver.cuLaunchKernel(kernel, x.numel() // 128**2, 1, 1, 256, 1, 1, 0, stream, (values, _TYPES), 0))
    return results


def _bind_context(device: int) -> None:
    """Make torch's (the primary) context current in this thread, once.

    A launch through the driver needs one. torch binds none in autograd's thread of device 0, its default, until a call of
    the runtime does: where the allocator serves from its cache, none came before.
    """
    if not getattr(_thread, "bound", False):
        if int(_checked(driver.cuCtxGetCurrent())) == 0:
            primary = driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device)))
            _checked(driver.cuCtxSetCurrent(_checked(primary)))
        _thread.bound = True


def _defines(dtype: torch.dtype, pow2: bool) -> tuple[str, ...]:
    return (f"E4M3={int(dtype == torch.float8_e4m3fn)}", f"POW2={int(pow2)}")


def _first_line(err: Exception) -> str:
    return (str(err) or type(err).__name__).splitlines()[0].rstrip(":")


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"the CUDA driver refused: {text.decode() if text else status}")
    return values[0] if values else None
