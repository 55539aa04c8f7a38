"""Every Triton kernel equals its reference, bit for bit, in Triton's interpreter: data and scales; and what pads them.

The conversion itself is the kernels' integer rule here and the hardware's on a device; `test_on_device.py` compares that.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("numpy")

# Seconds on idle cores; the first test waits for the one subprocess that does all the work.
pytestmark = pytest.mark.timeout(900)

DTYPES = ("e4m3", "e5m2")
EXHAUSTIVE = [
    *(f"round-{values}-{dtype}" for values in ("bf16", "midpoints") for dtype in DTYPES),
    *(f"scales-{dtype}-{rule}" for dtype in DTYPES for rule in ("pow2", "exact")),
    *(f"cast_block_dual-every-bf16-{order}-{dtype}" for order in ("in-order", "shuffled") for dtype in DTYPES),
    *(f"cast_tensor_dual-midpoints-{dtype}" for dtype in DTYPES),
    "widen-every-bf16",
    "round_like-every-bf16",
]
OPS = (
    "amax", "cast_tensor", "cast_tensor_dual", "cast_row_dual", "cast_row", "cast_block", "cast_block_dual",
    "cast_weight_block", "cast_weight_rows", "cast_weights_block", "cast_mx", "cast_mx_dual",
)  # fmt: skip
CASTS = [
    *(f"{op}-{shape}-{how}" for op in OPS for shape in ("128x256", "140x147") for how in ("e4m3-pow2", "e5m2-exact")),
    *(f"cast_block_dual-{what}" for what in ("float32", "float16", "strided", "empty")),
    *(f"{op}-empty" for op in ("cast_tensor_dual", "cast_row_dual", "cast_row")),
    "cast_row-long",
    *(f"transpose_codes-{shape}-{multiple}" for shape in ("128x256", "140x147") for multiple in (16, 128)),
    *(
        f"cast_grouped{how}"
        for groups in ("unaligned", "skewed", "none", "full")
        for how in (f"-{groups}", *(f"-{s}-{groups}-{d}" for s in ("tensor", "row", "mx32") for d in ("e4m3", "e5m2")))
    ),
]
# Relative to the largest value. Sums in another order and another exponential move a float32 by a few units in the last
# place (2^-23 of a term); a code can then move by one step of float8 in the rare value that was on a rounding boundary.
ONE_STEP = 2.0**-4
# A float32 sum of n positive terms is within n * 2^-24 of the exact one in any order, so two are within twice that; a
# reciprocal root halves it. 147 columns.
RSTD = 147 * 2.0**-24
# 140 rows, terms of either sign: the bound is relative to the sum of magnitudes, at most 140 times the mean magnitude, where
# the largest of 147 such sums is about 2.5 * sqrt(140) times it.
DWEIGHT = 2 * 140 * 2.0**-24 * 140 / (2.5 * 140**0.5)
# In units of the float64 bound: n * 2^-24 of the sum of magnitudes, for a float32 sum of n products in any order.
WITHIN_THE_BOUND = 1.0
ERRORS = {
    "rmsnorm_rstd": RSTD,
    "rmsnorm_cast_block": ONE_STEP,
    "rmsnorm_backward-dx": 2.0**-8,  # one bfloat16 step
    "rmsnorm_backward-dweight": DWEIGHT,
    "rmsnorm-rstd": RSTD,
    # One step of bfloat16, where a value was on a rounding boundary.
    "rmsnorm": 2.0**-8,
    "swiglu": 2.0**-8,
    "swiglu_backward-gate": 2.0**-8,
    "swiglu_backward-up": 2.0**-8,
    "swiglu_cast_block": ONE_STEP,
    **{f"layernorm_cast_block{which}": ONE_STEP for which in ("", "-of_samples")},
    **{f"layernorm_{sum_}{which}": 4 * RSTD for sum_ in ("mean", "rstd") for which in ("", "-of_samples")},
    "gelu_cast_block": ONE_STEP,
    "swiglu_backward_cast_block-gate": ONE_STEP,
    "swiglu_backward_cast_block-up": ONE_STEP,
    **{
        f"{result}{rows}": limit
        for rows in ("", "-one_block", "-long")
        for result, limit in (
            ("softmax_sums-largest", 0.0),
            ("softmax_sums-total", 1e-6),
            ("softmax_sums-at_label", 0.0),
            ("softmax_gradient", 2.0**-8),
        )
    },
    # two products and their sum, each rounded to float32, and the angle's sine and cosine
    **{
        f"rotate-{layout}-{size}": 4 * 2.0**-24
        for layout in ("tokens_first", "heads_first", "channels_first")
        for size in ("2x5", "2x1", "1x5")
    },
    "rotate-heads_far_apart": 0.0,
    "grouped_scaled_mm-block1x128": WITHIN_THE_BOUND,
    "grouped_scaled_mm-row": WITHIN_THE_BOUND,
    "grouped_scaled_mm-tensor": WITHIN_THE_BOUND,
    "grouped_scaled_mm_wgrad": WITHIN_THE_BOUND,
}


POISONED_SHAPES = ("1x1", "3x5", "1x256", "130x1", "130x200")
POISONED_OPS = (
    "amax", "cast_tensor", "cast_tensor_dual", "cast_row", "cast_row_dual", "cast_block", "cast_block_dual",
    "cast_weight_block", "cast_weight_rows", "cast_weights_block", "cast_mx", "cast_mx_dual", "transpose_codes",
    "cast_grouped-block1x128", "cast_grouped-mx32", "cast_grouped-tensor", "cast_grouped-row",
)  # fmt: skip
POISONED_FUSED = (
    "rmsnorm_cast_block", "swiglu_cast_block", "swiglu_backward_cast_block", "layernorm_cast_block", "gelu_cast_block",
)  # fmt: skip
POISONED = [
    *(f"{op}-{shape}-{dtype}" for op in POISONED_OPS for shape in POISONED_SHAPES for dtype in ("e4m3", "e5m2")),
    *(f"{op}-{shape}" for op in POISONED_FUSED for shape in POISONED_SHAPES),
]


def run(script):
    script = Path(__file__).with_name(script)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def interpreted():
    return run("interpreted.py")


@pytest.fixture(scope="module")
def poisoned():
    return run("poisoned.py")


def test_every_case_is_named_here(interpreted):
    assert sorted(interpreted["mismatches"]) == sorted([*EXHAUSTIVE, *CASTS])
    assert sorted(interpreted["errors"]) == sorted(ERRORS)


@pytest.mark.parametrize("case", EXHAUSTIVE)
def test_kernel_equals_the_reference_for_every_value(interpreted, case):
    assert interpreted["mismatches"][case] == 0


@pytest.mark.parametrize("case", CASTS)
def test_kernel_equals_the_reference_bit_for_bit(interpreted, case):
    assert interpreted["mismatches"][case] == 0


@pytest.mark.parametrize("case", ERRORS)
def test_kernel_is_within_rounding_of_the_reference(interpreted, case):
    assert interpreted["errors"][case] <= ERRORS[case]


def test_every_poisoned_case_is_named_here(poisoned):
    assert sorted(poisoned) == sorted(POISONED)


@pytest.mark.parametrize("case", POISONED)
def test_cast_into_garbage_equals_the_reference_with_its_padding(poisoned, case):
    assert poisoned[case] == 0


def test_rows_are_copied_where_offsets_in_a_tile_would_not_fit_32_bits():
    from titan_fp8.kernels.triton.round import row_major

    assert row_major(torch.empty_strided((2, 8), (2**25, 1), device="meta")).is_contiguous()
    near = torch.empty_strided((2, 8), (2**23, 1), device="meta")
    assert row_major(near) is near


def test_logits_of_a_subclass_are_refused_and_of_meta_tensors_only_the_memory_counts():
    from titan_fp8 import softmax_gradient_, softmax_sums

    class Marked(torch.Tensor):
        pass

    logits, labels, sums = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"Marked.* to_local"):
        softmax_sums(logits.as_subclass(Marked), labels)
    with pytest.raises(ValueError, match="Marked"):
        softmax_gradient_(logits.as_subclass(Marked), labels, *sums)
    assert softmax_sums(logits.to("meta"), labels.to("meta"))[0].shape == (2,)
