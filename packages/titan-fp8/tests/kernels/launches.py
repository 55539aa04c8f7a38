"""Every launch of a Triton kernel bound and compiled as on a Hopper GPU, without one; prints what was found.

With ``one_column``, only casts of matrices with a size of 1.

The wrappers get CPU tensors of many shapes; in place of a driver stands one that knows only its target, and a launch
stops once the kernel is compiled. That covers what the interpreter and compiling by hand skip: how arguments bind, and
that a kernel is compiled anew where an integer is 1 (which stays a number) or not a multiple of 16.
"""

import json
import re
import sys

import torch
import triton
from aot import cuobjdump, halved_pairs
from titan_fp8 import reference
from titan_fp8.kernels.triton import (
    block,
    cross_entropy,
    elementwise,
    fused,
    grouped_cast,
    grouped_mm,
    layer_norm,
    mx,
    rotation,
    row,
    tensor,
    transpose,
    weights,
)
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class DriverOfNoDevice:
    """What binding and compiling ask of a driver."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def compile_instead_of_launching():
    """Make every launch stop after compilation; the compiled kernels are collected in the list that is returned."""
    compiled = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        # The nested kernels of a module are called by the compiler, never run: only launches come here.
        if "HARDWARE" in kwargs:
            kwargs["HARDWARE"] = True
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(DriverOfNoDevice())
    return compiled


def call_everything():
    for shape in ((256, 512), (1, 1), (300, 147)):
        x, u, g = (torch.randn(shape).bfloat16() for _ in range(3))
        for dtype, pow2 in ((E4M3, True), (E5M2, False)):
            tensor.cast_tensor(x, dtype, pow2)
            tensor.cast_tensor_dual(x, dtype, pow2)
            tensor.cast_row_dual(x, dtype, pow2)
            row.cast_row(x, dtype, pow2)
            block.cast_block(x, dtype, pow2)
            block.cast_block_dual(x, dtype, pow2)
            weights.cast_weight_block(x, dtype, pow2)
            weights.cast_weight_rows(x, dtype, pow2)
            weights.cast_weights_block([x, torch.stack([x, x])], dtype, pow2)
        mx.cast_mx(x, E4M3)
        transpose.transpose_codes(x.view(torch.uint8), 128)
        mx.cast_mx_dual(x, E4M3)
        weight, rstd = torch.ones(shape[1]), torch.ones(shape[0])
        fused.rmsnorm_cast_block(x, weight, 1e-5, E4M3, True)
        fused.rmsnorm_backward(g, x, weight, rstd)
        elementwise.rmsnorm(x, weight, 1e-5)
        elementwise.swiglu(x, u)
        elementwise.swiglu_backward(g, x, u)
        labels = torch.zeros(shape[0], dtype=torch.int64)
        largest, total, _ = cross_entropy.softmax_sums(x, labels)
        cross_entropy.softmax_gradient_(x.clone(), labels, largest, 1 / total, rstd)
        rotation.rotate(
            torch.randn(1, *shape, 64).bfloat16(), torch.ones(1, shape[0], 1, 32), torch.ones(1, shape[0], 1, 32)
        )
        fused.swiglu_cast_block(x, u, E4M3, True)
        fused.swiglu_backward_cast_block(g, x, u, E4M3, True)
        layer_norm.layernorm_cast_block(x, weight[None], weight[None], 1e-5, E4M3, True)
        layer_norm.gelu_cast_block(x, E4M3, True)
        call_grouped(x, g, experts=1)
        call_grouped(x, g, experts=3)
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(256, 256).to(dtype)
        block.cast_block_dual(x, E4M3, True)
        weights.cast_weight_block(x, E4M3, True)
        weights.cast_weights_block([x], E4M3, True)
        tensor.cast_tensor_dual(x, E4M3, True)
        grouped_cast.cast_grouped(x, torch.full((3,), 256, dtype=torch.int32), E4M3, True, "block1x128")
    row.cast_row(torch.randn(16, 20000).bfloat16(), E4M3, True)


def call_casts_of_one_column():
    for x in (torch.ones(1, 1).bfloat16(), torch.ones(300, 1).bfloat16()):
        block.cast_block(x, E4M3, False)
        weights.cast_weight_block(x, E4M3, False)
        weights.cast_weight_rows(x, E5M2, True)
        mx.cast_mx(x, E4M3)
        layer_norm.gelu_cast_block(x, E4M3, True)
        grouped_cast.cast_grouped(x, torch.ones(1, dtype=torch.int32), E4M3, True, "block1x128")


def call_grouped(x, g, experts):
    offs = torch.full((experts,), x.shape[0], dtype=torch.int32)
    for scaling in ("block1x128", "mx32", "tensor", "row"):
        grouped_cast.cast_grouped(x, offs, E4M3, True, scaling)
    w = torch.randn(experts, *x.shape).bfloat16()
    tensor_q, tensor_scale = reference.cast_tensor(reference.pad_matrix(w[0], 128), E4M3, True)
    rows = [reference.cast_row(reference.pad_matrix(expert, 128), E4M3, True) for expert in w]
    weights = {
        "block1x128": ("block128", reference.cast_weight_block(w, E4M3, True)[:2]),
        "row": ("row", tuple(torch.stack(part) for part in zip(*rows, strict=True))),
        "tensor": ("tensor", (tensor_q.repeat(experts, 1, 1), tensor_scale)),
    }
    for scaling, (weight_scaling, weight) in weights.items():
        q, scale, *_ = reference.cast_grouped(x, offs, E4M3, True, scaling)
        for out_dtype in (torch.bfloat16, torch.float32):
            grouped_mm.grouped_scaled_mm(q, scale, *weight, offs, scaling, weight_scaling, out_dtype)
    _, _, xt, scale_x, ends = reference.cast_grouped(x, offs, E4M3, True, "block1x128")
    _, _, gt, scale_g, _ = reference.cast_grouped(g, offs, E5M2, True, "block1x128")
    grouped_mm.grouped_scaled_mm_wgrad(gt, scale_g, xt, scale_x, ends, "block1x128", torch.bfloat16)


def constant_arguments(kernel):
    """Run-time arguments of a compiled kernel that became constants."""
    return [p.name for p in kernel.src.fn.params if not p.is_constexpr and kernel.src.signature[p.name] == "constexpr"]


def conversions_of_equals(kernel):
    """Float8 conversions of a pair of the same register, which ptxas 12.9 merges with one another, wrongly. One alone is that of
    lanes that a thread with one value leaves undefined: nothing reads its result.
    """
    found = re.findall(r"F2FP\.SATFINITE\S+ \w+, (\w+)(?:\.reuse)?, \1\b.*", cuobjdump(kernel, "-sass"))
    return found if len(found) > 1 else []


if __name__ == "__main__":
    compiled = compile_instead_of_launching()
    call_casts_of_one_column() if sys.argv[1:] == ["one_column"] else call_everything()
    kernels = {kernel.hash: kernel for kernel in compiled}
    found = {
        "launches": len(compiled),
        "kernels": len(kernels),
        "conversions": sum("cvt.rn.satfinite" in kernel.asm["ptx"] for kernel in kernels.values()),
        "constants": {k.metadata.name: constant_arguments(k) for k in kernels.values() if constant_arguments(k)},
        "halved_pairs": sorted({k.metadata.name for k in kernels.values() if halved_pairs(k)}),
        "of_equals": sorted({k.metadata.name for k in kernels.values() if conversions_of_equals(k)}),
    }
    print(json.dumps(found))
