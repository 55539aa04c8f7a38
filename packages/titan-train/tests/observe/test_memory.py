import subprocess
import sys

import pytest
import torch
from titan_train.observe import peak_memory_gib


def test_cpu_memory_is_the_processs_high_water_mark():
    # A fresh process, so that this one's own peak does not hide the growth.
    code = (
        "from types import SimpleNamespace; from titan_train.observe import peak_memory_gib\n"
        "cpu = SimpleNamespace(type='cpu'); before = peak_memory_gib(cpu)\n"
        "x = bytearray(b'x') * (256 << 20); held = peak_memory_gib(cpu); del x\n"
        "print(before, held, peak_memory_gib(cpu))\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, held, after = map(float, output.split())
    assert held - before == pytest.approx(0.25, abs=0.05)  # what the allocator may keep around it
    assert after > held - 0.01  # the kernel counts pages in batches per thread
    assert peak_memory_gib(torch.device("cpu")) > 0.05  # torch itself is resident here


@pytest.mark.gpu
def test_gpu_memory_is_the_most_the_allocator_handed_out():
    device = torch.device("cuda", 0)
    before = peak_memory_gib(device)
    block = torch.empty(2**30, dtype=torch.uint8, device=device)
    del block
    assert peak_memory_gib(device) >= max(before, 1.0)
