"""Memory that a step freed is there for the next."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from titan_train.rank_device import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(3)
def step():
    return sum(float(a[-1]) for a in [np.ones(2**21) for _ in range(8)])
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_step_after_another_takes_no_new_pages():
    faults = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True)
        if done.returncode == 3:
            pytest.skip("this allocator cannot be asked")
        assert done.returncode == 0, done.stderr
        faults[how] = int(done.stdout)
    if faults["leave"] < 16:  # 128 MiB in 16 pages or fewer: an allocator that keeps by itself
        pytest.skip("this allocator keeps what is freed")
    assert faults["keep"] <= faults["leave"] // 8
