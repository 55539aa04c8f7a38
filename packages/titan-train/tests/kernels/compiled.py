"""The rotation kernel compiled ahead of time for a chip that is not there; prints one JSON object.

A script, because the compiler takes a kernel as a process without TRITON_INTERPRET=1 makes it.
"""

import collections
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from titan_train.kernels.rotation import rotate_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZES = ("num_heads", "half", "table_rows", "stride_token", "stride_head")


def compile_rotation(capability, layout):
    """Registers, spills, and the widths in bits of the accesses to memory."""
    kinds = {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "out": "*bf16", **dict.fromkeys(SIZES, "i32")}
    constants = {
        "HEADS": 16, "WIDTH": 64, "MASKED": False, "INVERSE": False, "NEIGHBOURS": layout == "neighbours",
    }  # fmt: skip
    names = rotate_kernel.arg_names
    source = ASTSource(
        fn=rotate_kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in kinds},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    binary = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        shown = [
            subprocess.run([binary, option, file.name], capture_output=True, text=True, check=True)
            for option in ("-sass", "-res-usage")
        ]
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", shown[0].stdout, re.MULTILINE)
    registers, stack, local = re.search(
        r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", shown[1].stdout + shown[1].stderr
    ).groups()
    return {
        "registers": int(registers), "stack_bytes": int(stack), "local_bytes": int(local),
        "loads": widths(opcodes, "LDG"), "stores": widths(opcodes, "STG"),
    }  # fmt: skip


def widths(opcodes, prefix):
    """How often memory is accessed by so many bits."""
    known = ("128", "64", "U16", "S16", "U8", "S8")
    return collections.Counter(
        next((part for part in opcode.split(".") if part in known), "32")
        for opcode in opcodes
        if opcode.startswith(prefix)
    )


if __name__ == "__main__":
    print(json.dumps(compile_rotation(int(sys.argv[1]), sys.argv[2])))
