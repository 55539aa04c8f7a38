"""Triton kernels compiled ahead of time, without a GPU: no spills, 128-bit memory accesses, the tensor cores' opcodes."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Seconds on idle cores; the first test waits for the one subprocess that does all the work.
pytestmark = pytest.mark.timeout(900)

# Named here, not imported: the script imports triton's compiler, which this process need not load.
CASTS = [
    "cast_block_dual",
    "cast_block_dual-ragged",
    "cast_block_dual-exact",
    "cast_block",
    "cast_mx_dual",
    "cast_weight",
    "cast_weight-rows",
    "cast_weights",
    "cast_with_amax-tensor",
    "cast_with_amax-row",
    "cast_row",
    "cast_grouped",
    "cast_grouped-mx",
    "cast_grouped-tensor",
    "cast_grouped-row",
    "rmsnorm_cast",
    "swiglu_cast",
    "swiglu_backward_cast",
    "layernorm_cast",
    "gelu_cast",
]
READS = [
    "softmax_sums",
    "amax",
    "row_column_amax",
    "grouped_amax-tensor",
    "grouped_amax-row",
    "rms_rstd",
    "layer_stats",
]
OCCUPIED = ["cast_mx_dual", "cast_grouped-mx", "transpose_codes"]
ELEMENTWISE = [
    "rmsnorm",
    "rmsnorm_backward",
    "swiglu",
    "swiglu_backward",
    "rotation-halves",
    "rotation-neighbours",
    "softmax_gradient",
]
PRODUCTS = ["grouped_mm-block", "grouped_mm-row", "grouped_mm-tensor", "grouped_wgrad"]
HOPPER = ["grouped_mm_hopper-block", "grouped_mm_hopper-row", "grouped_mm_hopper-tensor", "grouped_wgrad_hopper"]
KERNELS = [*CASTS, *READS, *PRODUCTS, *HOPPER, *ELEMENTWISE, "transpose_codes"]
# Instructions that spill, at most, in Triton 3.6 or 3.9. On an H200 these casts are faster so than with more warps that spill
# nothing: 3.2 TB/s for 1.9 (weights), 1.7 for 1.5 (the backward of SwiGLU). The product spills in 3.9 alone.
SPILLS = {"cast_weight": 8, "cast_weights": 10, "swiglu_backward_cast": 72, "grouped_mm_hopper-block": 31}


def _run(script, *arguments):
    script = Path(__file__).with_name(script)
    # Triton 3.10 changes the default and 3.9 warns of it; the kernels do not depend on it.
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def hopper():
    return _run("aot.py", "90")


def _spills(kernel):
    return {opcode: count for opcode, count in kernel["opcodes"].items() if opcode.startswith(("LDL", "STL"))}


def test_every_kernel_is_compiled(hopper):
    assert sorted(hopper) == sorted(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_spills_nothing_on_hopper_but_where_that_was_measured_to_be_faster(hopper, name):
    assert sum(_spills(hopper[name]).values()) <= SPILLS.get(name, 0)
    assert name in SPILLS or hopper[name]["stack_bytes"] == hopper[name]["local_bytes"] == 0


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_takes_no_more_registers_and_shared_memory_than_the_table_says(hopper, name):
    table = json.loads(Path(__file__).with_name("resources_sm90a.json").read_text())
    if version("triton") != table["triton"]:
        pytest.skip(f"the table is of triton {table['triton']}")
    assert hopper[name]["registers"] <= table["kernels"][name]["registers"]
    assert hopper[name]["shared_bytes"] <= table["kernels"][name]["shared_bytes"]


@pytest.fixture(scope="module")
def blackwell():
    return _run("aot.py", "100", *OCCUPIED)


@pytest.mark.parametrize("chip", ["hopper", "blackwell"])
@pytest.mark.parametrize("name", OCCUPIED)
def test_mx_casts_leave_room_for_three_programs_on_a_multiprocessor(name, chip, request):
    kernel = request.getfixturevalue(chip)[name]
    assert kernel["registers"] <= 128
    assert kernel["ctas_per_sm"] >= 3
    assert not _spills(kernel)


@pytest.mark.parametrize("name", [*CASTS, *ELEMENTWISE, "transpose_codes"])
def test_cast_reads_and_writes_128_bits_at_a_time(hopper, name):
    opcodes = hopper[name]["opcodes"]
    loaded, stored = _bulk(opcodes, "LDG"), _bulk(opcodes, "STG")
    # The narrower accesses that remain are scales, offsets and table entries: never the matrix.
    # An MX cast moves a quarter of a tile in each turn of its loop.
    assert opcodes["LDG.E.128"] >= 2
    assert opcodes["STG.E.128"] >= 2
    assert loaded["wide"] > loaded["narrow"]
    assert stored["wide"] > stored["narrow"]


@pytest.mark.parametrize("name", READS)
def test_reduction_reads_128_bits_at_a_time(hopper, name):
    loads = _matching(hopper[name]["opcodes"], "LDG")
    assert loads["LDG.E.128"] >= 4
    # what these load besides are the groups' ends, and a label and its logit
    assert name.startswith(("grouped_amax", "softmax_sums")) or set(loads) == {"LDG.E.128"}


@pytest.mark.parametrize("name", CASTS)
def test_cast_uses_the_saturating_hardware_conversion(hopper, name):
    assert "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C" in hopper[name]["opcodes"]


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_takes_a_code_from_a_pair_that_ptxas_may_not_have_converted_yet(hopper, name):
    assert hopper[name]["halved_pairs"] == 0


@pytest.mark.parametrize("name", [*PRODUCTS, *HOPPER])
def test_product_uses_float8_tensor_cores_fed_by_tma(hopper, name):
    opcodes = hopper[name]["opcodes"]
    assert _matching(opcodes, "QGMMA")
    assert _matching(opcodes, "UTMALDG")
    assert not _matching(opcodes, "HMMA")
    assert "STG.E.128" in opcodes


@pytest.mark.parametrize("name", [*PRODUCTS, *HOPPER])
def test_product_promotes_partial_sums_to_float32(hopper, name):
    # 128 x 128 sums over 256 threads: 64 additions (row, tensor) or multiply-adds (block) each for every 128 terms.
    opcodes = hopper[name]["opcodes"]
    assert opcodes.get("FADD", 0) + opcodes.get("FFMA", 0) >= 64


@pytest.mark.slow
def test_every_kernel_also_compiles_for_blackwell():
    kernels = _run("aot.py", "100")
    assert sorted(kernels) == sorted(set(KERNELS) - set(HOPPER))
    assert not [name for name, kernel in kernels.items() if _spills(kernel) and name not in SPILLS]
    table = json.loads(Path(__file__).with_name("resources_sm100a.json").read_text())
    if version("triton") == table["triton"]:
        for name, limits in table["kernels"].items():
            assert kernels[name]["registers"] <= limits["registers"], name
            assert kernels[name]["shared_bytes"] <= limits["shared_bytes"], name


def test_a_size_of_one_is_no_constant_that_makes_conversions_of_equal_operands():
    # The reason: `_with_numbers` in kernels/triton/launch.py.
    result = _run("launches.py", "one_column")
    assert result["conversions"] >= 6
    assert result["constants"] == {}
    assert result["of_equals"] == []


@pytest.mark.slow
def test_every_launch_binds_and_compiles_for_every_kind_of_shape():
    result = _run("launches.py")
    # More kernels than there are sources: an integer that is 1 or not a multiple of 16 is another kernel.
    assert result["launches"] > result["kernels"] > len(KERNELS)
    assert result["of_equals"] == []
    assert result["halved_pairs"] == []


def _matching(opcodes, prefix):
    return {opcode: count for opcode, count in opcodes.items() if opcode.startswith(prefix)}


def _bulk(opcodes, prefix):
    """Bytes moved by 128-bit and by narrower instructions."""
    bits = {"64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8, "128": 128}
    moved = {"wide": 0, "narrow": 0}
    for opcode, count in _matching(opcodes, prefix).items():
        width = next((bits[part] for part in opcode.split(".") if part in bits), 32)
        moved["wide" if width == 128 else "narrow"] += count * width // 8
    return moved
