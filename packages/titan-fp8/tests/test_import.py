"""What importing the package costs."""

import subprocess
import sys

_SCRIPT = """
import sys, torch
before = set(sys.modules)
import titan_fp8
print(*sorted(set(sys.modules) - before))
"""


def test_import_adds_nothing_heavy_to_torch() -> None:
    """DTensor brings sympy, most of a second of CPU; triton and cuda-bindings wait for a device."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _SCRIPT], capture_output=True, text=True, check=True)
    added = done.stdout.split()
    assert "titan_fp8" in added
    heavy = ("sympy", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "triton", "cuda", "numpy")
    assert not [name for name in added if name.startswith(heavy)]


def test_every_public_name_can_be_imported() -> None:
    import titan_fp8

    assert all(getattr(titan_fp8, name) is not None for name in titan_fp8.__all__)
