"""Every Triton kernel compiled ahead of time for a chip that is not there; run as a script, prints one JSON object.

A subprocess of the tests, because compiling takes a kernel's `JITFunction`, which a process with TRITON_INTERPRET=1 has
not. The assembly is read with the disassembler inside triton's wheel.
"""

import collections
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from titan_fp8.kernels.triton import (
    block,
    cross_entropy,
    elementwise,
    fused,
    grouped_cast,
    grouped_mm,
    grouped_mm_hopper,
    layer_norm,
    mx,
    rotation,
    row,
    tensor,
    transpose,
    weights,
)
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

E4M3 = {"E4M3": True, "POW2": True, "HARDWARE": True}
X, CODES, SCALE, BITS, INT, TILES = "*bf16", "*u8", "*fp32", "*i32", "i32", "tensordesc<fp8e4nv[128, 128]>"
ODD = "i32 "  # an integer that need not be a multiple of 16
CODE_STAGES = f"tensordesc<fp8e4nv[{{}}, 128],{grouped_mm_hopper._CODES!r}>"
SCALE_STAGES = f"tensordesc<fp32[1, 128],{grouped_mm_hopper._SCALES!r}>"
DUAL = {"q": CODES, "scale": SCALE, "qt": CODES, "scale_t": SCALE}
SIZES = dict.fromkeys(("M", "K", "stride_x", "stride_q", "stride_qt"), INT)
STRIDES_GATE = dict.fromkeys(("stride_grad", "stride_gate", "stride_up"), INT)
DUAL_UP = {f"{name}_up": kind for name, kind in DUAL.items()}

# name: (kernel, its run-time arguments, its compile-time arguments, warps)
KERNELS = {
    "cast_block_dual": (block.cast_block_kernel, {"x": X, **DUAL, **SIZES}, {"DUAL": True, "MASKED": False, **E4M3}, 4),
    "cast_block_dual-ragged": (block.cast_block_kernel, {"x": X, **DUAL, **SIZES}, {"DUAL": True, "MASKED": True, **E4M3}, 4),
    "cast_block_dual-exact": (
        block.cast_block_kernel, {"x": X, **DUAL, **SIZES}, {"DUAL": True, "MASKED": False, **E4M3, "POW2": False}, 4,
    ),
    "cast_block": (block.cast_block_kernel, {"x": X, **DUAL, **SIZES}, {"DUAL": False, "MASKED": False, **E4M3}, 4),
    "cast_mx_dual": (
        mx.cast_mx_kernel, {"x": X, **DUAL, "scale": CODES, "scale_t": CODES, **SIZES},
        {"DUAL": True, "MASKED": False, "E4M3": True, "HARDWARE": True}, 8,
    ),
    "cast_weight": (
        weights.cast_weight_kernel,
        {"w": X, **DUAL, "N": INT, "K": INT, "stride_w": INT, "experts_w": INT, "experts_q": INT, "experts_scale": ODD,
         "experts_scale_t": ODD},
        {"DUAL": True, "MASKED": False, **E4M3}, 4,
    ),
    "cast_weight-rows": (
        weights.cast_weight_kernel,
        {"w": X, **DUAL, "N": INT, "K": INT, "stride_w": INT, "experts_w": INT, "experts_q": INT, "experts_scale": ODD,
         "experts_scale_t": ODD},
        {"DUAL": False, "MASKED": False, **E4M3}, 4,
    ),
    "transpose_codes": (
        transpose.transpose_kernel,
        {"codes": CODES, "out": CODES, "N": INT, "K": INT, "stride": INT, "stride_out": INT, "K_OUT": INT, "tiles_k": ODD},
        {"MASKED": False}, 4,
    ),
    "cast_weights": (
        weights.cast_weights_kernel, {"table": "*i64"},
        {"NUM_MATRICES": 7, "PADDED_MATRICES": 8, "FIELDS": 9, "INPUT": tl.bfloat16, "MASKED": False, **E4M3}, 4,
    ),
    "amax": (
        tensor.amax_kernel, {"x": X, "amax_bits": BITS, "numel": INT},
        {"BLOCK": 8192, "BLOCKS": 4, "MASKED": False, "HARDWARE": True}, 8,
    ),
    "row_column_amax": (
        tensor.row_column_amax_kernel,
        {"x": X, "row_amax_bits": BITS, "column_amax_bits": BITS, "M": INT, "K": INT, "stride_x": INT, "tiles_k": INT},
        {"MASKED": False, "HARDWARE": True}, 4,
    ),
    **{
        f"cast_with_amax-{name}": (
            tensor.cast_with_amax_kernel, {"x": X, "amax": SCALE, "amax_t": SCALE, **DUAL, **SIZES, "tiles_k": INT},
            {"VECTOR": name == "row", "DUAL": True, "MASKED": False, **E4M3}, 4,
        )
        for name in ("tensor", "row")
    },
    "cast_row": (
        row.cast_row_kernel, {"x": X, "q": CODES, "scale": SCALE, "M": INT, "K": INT, "stride_x": INT, "stride_q": INT},
        {"BLOCK": 4096, "BLOCKS": 1, "MASKED": False, **E4M3}, 4,
    ),
    "cast_grouped": (
        grouped_cast.cast_grouped_kernel,
        {"x": X, "tiles": BITS, **DUAL, **SIZES, "E": INT, "tiles_k": INT}, E4M3, 4,
    ),
    "cast_grouped-mx": (
        grouped_cast.cast_grouped_mx_kernel,
        {"x": X, "tiles": BITS, **DUAL, "scale": CODES, "scale_t": CODES, **SIZES, "E": INT, "tiles_k": INT},
        {"E4M3": True, "HARDWARE": True}, 8,
    ),
    **{
        f"grouped_amax-{name}": (
            grouped_cast.grouped_amax_kernel,
            {"x": X, "tiles": BITS, "row_bits": BITS, "column_bits": BITS, "K": INT, "E": INT, "stride_x": INT,
             "stride_q": INT, "tiles_k": INT},
            {"VECTOR": name == "row", "HARDWARE": True}, 4,
        )
        for name in ("tensor", "row")
    },
    **{
        f"cast_grouped-{name}": (
            grouped_cast.cast_grouped_with_amax_kernel,
            {"x": X, "tiles": BITS, "row_amax": SCALE, "column_amax": SCALE, **DUAL, **SIZES, "E": INT, "tiles_k": INT},
            {"VECTOR": name == "row", **E4M3}, 4,
        )
        for name in ("tensor", "row")
    },
    "rmsnorm": (
        elementwise.rmsnorm_kernel,
        {"x": X, "weight": X, "y": X, "rstd": SCALE, "K": INT, "stride_x": INT, "eps": "fp32"},
        {"BLOCK": 4096, "MASKED": False, "HARDWARE": True}, 4,
    ),
    "swiglu": (
        elementwise.swiglu_kernel, {"gate": X, "up": X, "out": X, "numel": INT},
        {"BLOCK": 4096, "MASKED": False, "HARDWARE": True}, 8,
    ),
    "swiglu_backward": (
        elementwise.swiglu_backward_kernel, {"grad": X, "gate": X, "up": X, "dgate": X, "dup": X, "numel": INT},
        {"BLOCK": 4096, "MASKED": False, "HARDWARE": True}, 8,
    ),
    "softmax_sums": (
        cross_entropy.softmax_sums_kernel,
        {"logits": X, "labels": "*i64", "largest": SCALE, "total": SCALE, "at_label": SCALE, "V": INT, "stride": INT},
        {"BLOCK": 8192, "HARDWARE": True}, 8,
    ),
    "softmax_gradient": (
        cross_entropy.softmax_gradient_kernel,
        {"logits": X, "labels": "*i64", "largest": SCALE, "factor": SCALE, "hit": SCALE, "V": INT, "stride": INT},
        {"BLOCK": 4096, "HARDWARE": True}, 8,
    ),
    **{
        f"rotation-{pairs}": (
            rotation.rotate_kernel,
            {"x": X, "cos": SCALE, "sin": SCALE, "out": X, "num_heads": INT, "half": INT, "table_rows": INT,
             "stride_token": INT, "stride_head": INT},
            {"HEADS": 16, "WIDTH": 64, "MASKED": False, "INVERSE": False, "NEIGHBOURS": pairs == "neighbours"}, 4,
        )
        for pairs in ("halves", "neighbours")
    },
    "rms_rstd": (
        fused.rms_rstd_kernel, {"x": X, "rstd": SCALE, "K": INT, "stride_x": INT, "eps": "fp32"},
        {"BLOCK": 4096, "BLOCKS": 1, "HARDWARE": True}, 4,
    ),
    "rmsnorm_cast": (
        fused.rmsnorm_cast_kernel, {"x": X, "weight": X, "rstd": SCALE, **DUAL, **SIZES}, {"MASKED": False, **E4M3}, 4,
    ),
    "rmsnorm_backward": (
        fused.rmsnorm_backward_kernel,
        {"grad": X, "x": X, "weight": X, "rstd": SCALE, "dx": X, "partial_dweight": SCALE, "M": INT, "K": INT,
         "stride_grad": INT, "stride_x": INT},
        {"ROWS": 63, "BLOCK": 4096, "HARDWARE": True}, 8,
    ),
    "swiglu_cast": (
        fused.swiglu_cast_kernel, {"gate": X, "up": X, **DUAL, **SIZES, **STRIDES_GATE}, {"MASKED": False, **E4M3}, 8,
    ),
    "layer_stats": (
        layer_norm.layer_stats_kernel,
        {"x": X, "mean": SCALE, "rstd": SCALE, "K": INT, "stride_x": INT, "eps": "fp32"},
        {"BLOCK": 4096, "BLOCKS": 1, "HARDWARE": True}, 4,
    ),
    "layernorm_cast": (
        layer_norm.layernorm_cast_kernel,
        {"x": X, "gain": X, "shift": X, "mean": SCALE, "rstd": SCALE, **DUAL, **SIZES, "rows_each": INT},
        {"MASKED": False, **E4M3}, 4,
    ),
    "gelu_cast": (layer_norm.gelu_cast_kernel, {"x": X, **DUAL, **SIZES}, {"MASKED": False, **E4M3}, 8),
    **{
        f"grouped_mm-{scaling}": (
            grouped_mm.grouped_mm_kernel,
            {"a": TILES, "b": TILES, "scale_a": SCALE, "scale_b": SCALE, "tiles": BITS, "out": X, "M": INT, "N": INT,
             "E": ODD, "tiles_n": ODD, "stride_scale_b": INT, "experts_scale_b": INT},
            {"K_BLOCKS": 16, "SCALING": scaling, "BANDS": 8, "HARDWARE": True}, 8,
        )
        for scaling in ("block", "row", "tensor")
    },
    "grouped_wgrad": (
        grouped_mm.grouped_wgrad_kernel,
        {"a": TILES, "b": TILES, "scale_a": SCALE, "scale_b": SCALE, "offs_padded": BITS, "out": X, "N": INT, "K": INT,
         "tiles_n": ODD, "tiles_k": ODD},
        {"HARDWARE": True}, 8,
    ),
    **{
        f"grouped_mm_hopper-{scaling}": (
            grouped_mm_hopper.grouped_mm_kernel,
            {"a": CODE_STAGES.format(128), "b": CODE_STAGES.format(256), "scale_a": SCALE, "scale_b": SCALE, "tiles": BITS,
             "out": X, "M": ODD, "N": INT, "E": ODD, "most_tiles": ODD, "tiles_n": ODD, "k_blocks": ODD,
             "stride_scale_b": ODD, "experts_scale_b": ODD},
            {"SCALING": scaling, "COLUMNS": 256, "BANDS": 8, "STAGES": 4}, 4,
        )
        for scaling in ("block", "row", "tensor")
    },
    "grouped_wgrad_hopper": (
        grouped_mm_hopper.grouped_wgrad_kernel,
        {"a": CODE_STAGES.format(128), "b": CODE_STAGES.format(128), "scale_a": SCALE, "scale_b": SCALE_STAGES,
         "offs_padded": BITS, "out": X, "N": INT, "K": INT, "E": ODD, "tiles_n": ODD, "tiles_k": ODD},
        {"BANDS": 8, "STAGES": 6}, 4,
    ),
    "swiglu_backward_cast": (
        fused.swiglu_backward_cast_kernel, {"grad": X, "gate": X, "up": X, **DUAL, **DUAL_UP, **SIZES, **STRIDES_GATE},
        {"MASKED": False, **E4M3}, 8,
    ),
}  # fmt: skip


def compile_kernel(kernel, arguments, constants, warps, capability, stages=3):
    """The assembly's instruction counts, registers and spills."""
    names = kernel.arg_names
    # As at run time: torch's addresses and these sizes are multiples of 16.
    aligned = [name for name in names if arguments.get(name, "fp32").startswith(("*", INT)) and arguments[name] != ODD]
    signature = {name: arguments.get(name, "constexpr").strip() for name in names}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    sass, usage = (cuobjdump(compiled, option) for option in ("-sass", "-res-usage"))
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", sass, re.MULTILINE)
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage).groups()
    return {
        "registers": int(registers),
        "stack_bytes": int(stack),
        "local_bytes": int(local),
        "shared_bytes": compiled.metadata.shared,
        "warps": warps,
        "ctas_per_sm": ctas_per_sm(int(registers), warps, compiled.metadata.shared),
        "opcodes": collections.Counter(opcodes),
        "halved_pairs": halved_pairs(compiled),
    }


def halved_pairs(compiled):
    """Shifts that take the second code from a pair: ptxas 12.8 does so before it has converted, where it merges two pairs."""
    return len(re.findall(r"\bshr\.u16\b", compiled.asm["ptx"]))


def cuobjdump(compiled, option):
    """What the disassembler of triton's wheel prints of a compiled kernel."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        done = subprocess.run([program, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def ctas_per_sm(registers, warps, shared_bytes):
    """Programs that one multiprocessor holds at once; the limits are the same on sm_90 and sm_100 (CUDA C++ guide, 20.2).

    65,536 registers, given to a warp in units of 256; 64 warps; 32 programs; 227 KiB of shared memory, 1 KiB of which each
    program costs besides its own.
    """
    of_warp = -(-registers * 32 // 256) * 256
    return min(65536 // (of_warp * warps), 64 // warps, 32, 227 * 1024 // (shared_bytes + 1024))


def kernels_of(capability):
    """The names of the kernels that run there."""
    return [name for name in KERNELS if capability // 10 == 9 or "hopper" not in name]


def table(capability):
    """A line of Markdown for each kernel."""
    for name in kernels_of(capability):
        k = compile_kernel(*KERNELS[name], capability)
        opcodes = k["opcodes"]
        spills = sum(count for opcode, count in opcodes.items() if opcode.startswith(("LDL", "STL")))
        wide = f"{opcodes['LDG.E.128']} / {opcodes['STG.E.128']}"
        cells = (k["warps"], k["registers"], spills, k["shared_bytes"], k["ctas_per_sm"], wide, sum(opcodes.values()))
        print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)


def main(names, capability):
    print(json.dumps({name: compile_kernel(*KERNELS[name], capability) for name in names}))


if __name__ == "__main__":
    if sys.argv[2:] == ["table"]:
        table(int(sys.argv[1]))
    else:
        main(sys.argv[2:] or kernels_of(int(sys.argv[1])), int(sys.argv[1]))
