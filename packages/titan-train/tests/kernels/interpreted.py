"""Every kernel of the registry that is made of Triton, run by its interpreter on the CPU; prints one JSON object.

A script, because TRITON_INTERPRET=1 must be set before triton is imported. Each case's value is the largest difference of any
result or gradient from the plain form, relative to the largest value.
"""

import json

import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from titan_train.kernels import forms
from titan_train.kernels.measure import example_inputs, run_both_ways
from titan_train.kernels.registry import OPERATIONS, kernels_of
from triton.runtime import interpreter

TOKENS = 12


class Scalar(float):
    """A run-time number that kernels may convert: compiled ones have such, the interpreter hands Python's."""

    def to(self, _):
        return self


_convert = interpreter._implicit_cvt
interpreter._implicit_cvt = lambda value: Scalar(value) if isinstance(value, float) else _convert(value)
rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # the interpreter has no functions of CUDA's library


def differences():
    """Of every kernel but the plain forms, in float32: the interpreter gets products of bfloat16 wrong."""
    found = {}
    for operation in OPERATIONS:
        inputs = example_inputs(operation, torch.device("cpu"), TOKENS)
        plain, *others = kernels_of(operation)
        expected = run_both_ways(plain.load(), inputs)
        for kernel in others:
            ours = run_both_ways(kernel.load(), inputs)
            assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in expected], kernel
            found[f"{operation}-{kernel.name}"] = [
                float((a.double() - b.double()).abs().max() / b.double().abs().max())
                for a, b in zip(ours, expected, strict=True)
            ]
    return found


def halves_written_out(q, k, cos, sin):
    """The formula: the plain form's fused additions on the CPU round once less."""

    def turned(x):
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    return turned(q), turned(k)


def rotations():
    """Of the Triton kernel of rotary positions: cases whose values or gradients have other bits than the formula's."""
    generator = torch.Generator().manual_seed(2)
    other = []
    for layout, (kernel, plain) in {
        "halves": (forms.rope_titan, halves_written_out),
        "neighbours": (forms.rope_neighbours_titan, forms.rope_neighbours_torch),
    }.items():
        for width, heads, batch, tables in ((20, 3, 2, 2), (48, 1, 1, 1), (96, 5, 2, 1), (128, 40, 1, 1)):
            angles = torch.randn(tables, 3, 1, width // 2, generator=generator)
            angles = angles if layout == "halves" else angles.squeeze(2)
            for dtype in (torch.float32, torch.float16):
                # a slice, as latent attention has them: heads and tokens are further apart than they are wide
                whole = torch.randn(batch, 3, heads, width + 4, generator=generator).to(dtype)
                q, k = whole[..., :width].requires_grad_(), whole[..., 4:].requires_grad_()
                inputs = (q, k, angles.cos(), angles.sin())
                ours, theirs = run_both_ways(kernel, inputs), run_both_ways(plain, inputs)
                if not all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)):
                    other.append(f"{layout}-{width}-{heads}-{dtype}")
    return other


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps({"differences": differences(), "rotations": rotations()}))
