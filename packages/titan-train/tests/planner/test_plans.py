"""The plans that people ask for: each is found, fits, and passes `titan-train check` as it was written."""

import pytest
from titan_train.cli import main

PLANS = {
    "8B on 8 at 8k": ("llama3_8b", 8, "h100", 8192, 64),
    "8B on 8 at 128k": ("llama3_8b", 8, "h100", 131_072, 8),
    "70B on 256": ("llama3_70b", 256, "h100", 8192, 512),
    "405B on 512": ("llama3_405b", 512, "h100", 8192, 512),
    "DeepSeek-V3 on 1,024": ("deepseek_v3", 1024, "h100", 4096, 8192),
    "30B-A3B on 8": ("qwen3_30b_a3b", 8, "h100", 4096, 512),
    "1B on one of 24 GB": ("llama3_1b", 1, "rtx4090", 2048, 64),
    "FLUX on 64": ("flux_dev", 64, "h100", 4608, 256),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_passes_check_as_it_was_written(name: str, tmp_path, capsys) -> None:
    model, gpus, machine, seq_len, batch = PLANS[name]
    words = ["plan", model, "--devices", gpus, "--hardware", machine, "--seq-len", seq_len, "--global-batch", batch]
    assert main([*map(str, words), "--out", str(tmp_path / "plan")]) == 0
    printed = capsys.readouterr().out
    assert "takes" in printed or "as fast" in printed  # why the second loses
    assert main(["check", str(tmp_path / "plan.toml")]) == 0
    checked = capsys.readouterr().out
    peak = max(float(value) for line in checked.splitlines() if line.startswith("  peak ") for value in _numbers(line))
    usable = {"h100": 79.1, "rtx4090": 23.5}[machine]
    assert peak <= usable


def _numbers(line: str) -> list[str]:
    return [word for word in line.split() if word.replace(".", "").isdecimal()]
