"""Launching the CUDA C++ kernels on torch's tensors and stream."""

import ctypes
import functools
from typing import Any

import torch
from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

from titan_fp8.dispatch import implementation
from titan_fp8.kernels.cuda.compile import compile_source
from titan_fp8.ops.casts import empty_block_dual


def cast_block_dual(x: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `titan_fp8.reference.cast_block_dual`.

    What the kernel is not written for (other dtypes, sizes that are not multiples of 128, unaligned rows) goes to
    ``backend="auto"``.
    """
    q, scale, qt, scale_t = results = empty_block_dual(x, dtype)
    aligned = x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if x.dtype != torch.bfloat16 or x.shape != q.shape or not aligned or x.numel() == 0:
        return implementation("cast_block_dual", x.device)(x, dtype, pow2)
    with torch.cuda.device(x.device):
        defines = (f"E4M3={int(dtype == torch.float8_e4m3fn)}", f"POW2={int(pow2)}")
        kernel = _kernel("cast_block_dual", x.device.index, defines)
        pointers = [tensor.data_ptr() for tensor in (x, q, scale, qt, scale_t)]
        values = (*pointers, *x.shape, x.stride(0))
        types = (ctypes.c_void_p,) * 5 + (ctypes.c_longlong,) * 3
        stream = torch.cuda.current_stream().cuda_stream
        _checked(driver.cuLaunchKernel(kernel, x.numel() // 128**2, 1, 1, 256, 1, 1, 0, stream, (values, types), 0))
    return results


@functools.cache
def _kernel(name: str, device: int, defines: tuple[str, ...]) -> Any:
    """The compiled kernel, loaded into ``device``'s current context (torch's)."""
    major, minor = torch.cuda.get_device_capability(device)
    binary = compile_source(name, f"sm_{major}{minor}a", defines)
    module = _checked(driver.cuModuleLoadData(binary.cubin))
    return _checked(driver.cuModuleGetFunction(module, name.encode()))


def _checked(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"the CUDA driver refused a launch: {text.decode() if text else status}")
    return values[0] if values else None
