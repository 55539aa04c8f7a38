import subprocess
import sys

import pytest
from titan_ckpt import Checkpointer, TrainState, _commit
from titan_ckpt._cli import main
from titan_ckpt._progress import Progress
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def save(root: str, step: int = 3, fill: float = 1.0, sharded: bool = False) -> None:
    model = nn.Linear(6, 5)
    nn.init.constant_(model.weight, fill)
    nn.init.zeros_(model.bias)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    Checkpointer(root).save(step, TrainState(model=model, rng=False, extra={"tokens": 9}), metrics={"loss": 1.5})


def test_ls_and_show_say_what_is_there(tmp_path, capsys):
    save(str(tmp_path))
    assert main(["ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "loss=1.5" in out
    assert "1 valid steps, 0 invalid, 0 unfinished" in out
    assert main(["show", str(tmp_path / "step-00000003"), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "weight  F32 [5, 6] in 1 parts" in out
    assert '"tokens": 9' in out


def test_verify_finds_the_damaged_place_and_ls_the_invalid_step(tmp_path, capsys):
    save(str(tmp_path))
    file = tmp_path / "step-00000003" / "model-r00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    assert main(["verify", str(tmp_path)]) == 0
    file.write_bytes(data)
    assert main(["verify", str(tmp_path)]) == 1
    assert "model-r00000.safetensors block 0 (from byte 0): does not match its digest" in capsys.readouterr().out
    file.write_bytes(data[:-1])
    assert main(["ls", str(tmp_path)]) == 1
    assert "INVALID" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "step-00000003")]) == 1


def test_diff_compares_across_layouts(tmp_path, capsys):
    save(str(tmp_path), 1)
    run_ranks(save, 2, str(tmp_path), 2, sharded=True)
    save(str(tmp_path), 3, fill=2.0)
    step = [str(tmp_path / f"step-0000000{i}") for i in range(4)]
    assert main(["diff", step[1], step[2]]) == 0
    assert "all tensors are equal" in capsys.readouterr().out
    assert main(["diff", step[2], step[3]]) == 1
    assert "model weight: 30 of 30 elements" in capsys.readouterr().out


def test_gc_deletes_leftovers_and_surplus_only_when_told(tmp_path, capsys):
    for step in (1, 2, 3):
        save(str(tmp_path), step)
    (tmp_path / ".trash-step-00000000-0123abcd").mkdir()
    folder, _ = _commit.begin_save(tmp_path, 4, _commit.Process("elsewhere", 1, "1"))
    assert main(["gc", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    assert len(list(tmp_path.iterdir())) == 5
    assert main(["gc", str(tmp_path), "--keep-last", "1"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, "step-00000003"]
    assert main(["gc", str(tmp_path), "--keep-last", "0"]) == 2
    assert "would delete every step" in capsys.readouterr().err


def test_wrong_paths_are_named(tmp_path, capsys):
    assert main(["ls", str(tmp_path / "no")]) == 2
    assert "is not a folder" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from titan_ckpt._cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_ls_and_verify_run_without_torch(tmp_path, command):
    save(str(tmp_path))
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_progress_counts_bytes():
    progress = Progress("verify", 1000)
    progress.advance(250)
    assert " 25% " in progress.text(1.0)
