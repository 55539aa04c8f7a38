"""Every cast into memory full of garbage, in Triton's interpreter and in the reference; prints one JSON object.

Run as a script with TRITON_INTERPRET=1, like `interpreted.py`. A result that a kernel leaves unwritten is what was there before,
often zero: the padding then looks right by luck. Here every uninitialised tensor is filled, with other bytes for the kernel than
for the reference, so that what either leaves unwritten differs. Each case's value is its count of differing elements.
"""

import json

import torch
from interpreted import E4M3, E5M2, NAMES, allow_loops_over_tensors, mismatches, round_kernel
from titan_fp8 import reference
from titan_fp8.kernels.triton import block, fused, grouped_cast, layer_norm, mx, row, tensor, transpose, weights
from torch.overrides import TorchFunctionMode

SHAPES = ((1, 1), (3, 5), (1, 256), (130, 1), (130, 200))


class Garbage(TorchFunctionMode):
    """Fill what ``torch.empty`` and its like return with one byte."""

    def __init__(self, byte):
        super().__init__()
        self.byte = byte

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"):
            out.untyped_storage().fill_(self.byte)
        return out


def run(op, module, *arguments):
    """Both results of an op; 0x7F and 0xFF are NaN in every float8 format."""
    with Garbage(0x7F):
        got = getattr(module, op)(*arguments)
    with Garbage(0xFF):
        expected = getattr(reference, op)(*arguments)
    return got, expected


def casts(rows, columns, dtype, pow2):
    """Every cast of one matrix."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    how, offs = (dtype, pow2), torch.tensor([0, rows // 2, rows], dtype=torch.int32)
    calls = {
        "amax": (tensor, x),
        "cast_tensor": (tensor, x, *how),
        "cast_tensor_dual": (tensor, x, *how),
        "cast_row": (row, x[:16], *how),  # one program per row: slow to interpret
        "cast_row_dual": (tensor, x, *how),
        "cast_block": (block, x, *how),
        "cast_block_dual": (block, x, *how),
        "cast_weight_block": (weights, x, *how),
        "cast_weight_rows": (weights, x, *how),
        "cast_weights_block": (weights, [x, torch.stack([x, x])], *how),
        "cast_mx": (mx, x, dtype),
        "cast_mx_dual": (mx, x, dtype),
        "transpose_codes": (transpose, x.view(torch.uint8), 128),
        **{f"cast_grouped-{s}": (grouped_cast, x, offs, *how, s) for s in ("block1x128", "mx32", "tensor", "row")},
    }
    return {name: mismatches(*run(name.partition("-")[0], *call)) for name, call in calls.items()}


def fused_casts(rows, columns):
    """Codes and scales of fused casts beyond the matrix; inside they are only close to the reference's."""
    x, u, g = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    gain, how = -torch.ones(columns).bfloat16(), (E4M3, True)  # zero times a negative gain is minus zero
    calls = {
        "rmsnorm_cast_block": (fused, x, gain, 1e-5, *how),
        "swiglu_cast_block": (fused, x, u, *how),
        "swiglu_backward_cast_block": (fused, g, x, u, *how),
        "layernorm_cast_block": (layer_norm, x, gain[None], gain[None], 1e-5, *how),
        "gelu_cast_block": (layer_norm, x, *how),
    }
    results = {}
    for op, (module, *arguments) in calls.items():
        got, expected = run(op, module, *arguments)
        results[op] = mismatches(beyond(got, rows, columns), beyond(expected, rows, columns))
    return results


def beyond(results, rows, columns):
    """Codes and scales of the padding, of one or two casts in both layouts."""
    parts, sizes = [], (rows, columns)
    for place in range(0, len(results) // 4 * 4, 2):
        codes, scale = results[place : place + 2]
        parts += [codes[sizes[0] :], codes[:, sizes[1] :], scale[sizes[0] :]]
        sizes = sizes[::-1]
    return parts


if __name__ == "__main__":
    round_kernel[(1,)](torch.zeros(1), torch.zeros(1, dtype=torch.uint8), 1, True)  # imports the interpreter
    allow_loops_over_tensors()
    found = {}
    for rows, columns in SHAPES:
        for dtype, pow2 in ((E4M3, False), (E5M2, True)):
            for name, wrong in casts(rows, columns, dtype, pow2).items():
                found[f"{name}-{rows}x{columns}-{NAMES[dtype]}"] = wrong
        found.update({f"{name}-{rows}x{columns}": wrong for name, wrong in fused_casts(rows, columns).items()})
    print(json.dumps(found))
