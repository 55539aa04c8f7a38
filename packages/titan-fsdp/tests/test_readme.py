"""The README's code runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_example_runs_in_one_process() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False, timeout=150)
        assert done.returncode == 0, done.stderr
        assert "mode hsdp: shard 64 × replicate 4" in done.stdout
