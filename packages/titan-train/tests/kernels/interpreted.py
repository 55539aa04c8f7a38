"""Every kernel of the registry that is made of Triton, run by its interpreter on the CPU; prints one JSON object.

A script, because TRITON_INTERPRET=1 must be set before triton is imported. Each case's value is the largest difference of any
result or gradient from the plain form, relative to the largest value.
"""

import json

import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from titan_train.kernels import OPERATIONS, kernels_of
from titan_train.kernels.measure import example_inputs, run_both_ways
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


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(differences()))
