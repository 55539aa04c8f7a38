"""No cast leaves anything of its results unwritten, for matrices smaller than a block and ragged ones: codes, scales, padding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("numpy")

# Seconds on idle cores; the first test waits for the one subprocess that does all the work.
pytestmark = pytest.mark.timeout(900)

SHAPES = ("1x1", "3x5", "1x256", "130x1", "130x200")
OPS = (
    "amax", "cast_tensor", "cast_tensor_dual", "cast_row", "cast_row_dual", "cast_block", "cast_block_dual",
    "cast_weight_block", "cast_weight_rows", "cast_weights_block", "cast_mx", "cast_mx_dual", "transpose_codes",
    "cast_grouped-block1x128", "cast_grouped-mx32", "cast_grouped-tensor", "cast_grouped-row",
)  # fmt: skip
FUSED = (
    "rmsnorm_cast_block", "swiglu_cast_block", "swiglu_backward_cast_block", "layernorm_cast_block", "gelu_cast_block",
)  # fmt: skip
CASES = [
    *(f"{op}-{shape}-{dtype}" for op in OPS for shape in SHAPES for dtype in ("e4m3", "e5m2")),
    *(f"{op}-{shape}" for op in FUSED for shape in SHAPES),
]


@pytest.fixture(scope="module")
def poisoned():
    script = Path(__file__).with_name("poisoned.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_case_is_named_here(poisoned):
    assert sorted(poisoned) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_cast_into_garbage_equals_the_reference_with_its_padding(poisoned, case):
    assert poisoned[case] == 0
