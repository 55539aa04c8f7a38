"""Which checkpoint of a run is its newest, and going back to an earlier one."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from titan_ckpt import Checkpointer, TrainState
from titan_train.config import Config, dump_config
from titan_train.generation.run import saved_step
from titan_train.run_folder import check_rewind, checkpoint_folders, find_start, newest_checkpoint, stage_rewind
from titan_train.run_folder import rewind as module
from titan_train.run_folder.rewind import set_aside
from torch import nn


def save(run_dir: Path, *steps: int) -> None:
    checkpointer = Checkpointer(run_dir / "checkpoints")
    for step in steps:
        checkpointer.save(step, TrainState(model=nn.Linear(2, 2), rng=False))


@pytest.fixture
def run_dir(tmp_path):
    """A run that went back from 200 to 150 and saved 165."""
    run = tmp_path / "run"
    save(run, 100, 200, 165)
    (run / "config.toml").write_text(dump_config(Config()))
    (run / "metrics.jsonl").write_text("{}\n")
    return run


def test_the_newest_checkpoint_is_the_one_saved_last_not_that_of_the_highest_step(run_dir):
    assert list(checkpoint_folders(run_dir)) == [100, 200, 165]
    assert newest_checkpoint(run_dir) == 165
    assert find_start(str(run_dir), "checkpoint.start_from") == (run_dir, 165)
    assert find_start(f"run:{run_dir}", "model.init") == (run_dir, 165)
    assert find_start(f"{run_dir}@200", "checkpoint.start_from") == (run_dir, 200)
    assert saved_step(run_dir, None) == 165


def test_a_disk_that_does_not_answer_is_no_missing_checkpoint_also_where_pathlib_says_so(run_dir, monkeypatch):
    real = os.stat

    def stat(path, *args, **options):
        if not isinstance(path, int) and Path(path).name == "MANIFEST.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args, **options)

    for name, hiding in (("is_file", os.path.isfile), ("is_dir", os.path.isdir), ("exists", os.path.exists)):
        monkeypatch.setattr(Path, name, hiding)  # from Python 3.14 on
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(OSError, match="Input/output error"):
        newest_checkpoint(run_dir)


def test_the_tenth_revision_of_a_checkpoint_is_newer_than_the_ninth(run_dir):
    step = checkpoint_folders(run_dir)[165]
    for revision in (2, 9, 10):
        shutil.copytree(step, step.with_name(f"{step.name}.r{revision}"))
    assert checkpoint_folders(run_dir)[165] == step.with_name(f"{step.name}.r10")


def test_a_folder_without_a_manifest_is_no_checkpoint(run_dir):
    (run_dir / "checkpoints" / "step-00000300").mkdir()
    (run_dir / "checkpoints" / ".tmp-00000300-0123456789abcdef").mkdir()
    assert newest_checkpoint(run_dir) == 165
    assert checkpoint_folders(run_dir / "elsewhere") == {}


def test_the_newest_checkpoint_is_found_without_torch(run_dir):
    code = (
        "import sys; from pathlib import Path; from titan_train.run_folder import newest_checkpoint; "
        "print(newest_checkpoint(Path(sys.argv[1])), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, run_dir], capture_output=True, text=True, check=True)
    assert done.stdout == "165 False\n"


def go_back(run_dir: Path, step: int) -> list[str]:
    """Go back; what was set aside."""
    staged = run_dir / "staged"
    staged.mkdir(exist_ok=True)
    check_rewind(run_dir, step)
    stage_rewind(staged, step)
    set_aside(run_dir, staged)
    return sorted(path.name for path in (run_dir / "set_aside").glob("*/step-*"))


@pytest.mark.parametrize(
    ("step", "aside", "left"),
    [
        (100, ["step-00000165", "step-00000200"], [100]),
        (165, ["step-00000200"], [100, 165]),
        (200, ["step-00000165"], [100, 200]),
    ],
)
def test_what_was_saved_later_or_is_of_a_later_step_is_set_aside(run_dir, step, aside, left):
    assert go_back(run_dir, step) == aside
    assert list(checkpoint_folders(run_dir)) == left
    assert newest_checkpoint(run_dir) == step
    assert Checkpointer(run_dir / "checkpoints").restore(TrainState(model=nn.Linear(2, 2), rng=False)) == step


def test_checkpoints_on_another_disk_are_set_aside_there_and_linked(run_dir, tmp_path, monkeypatch):
    (run_dir / "checkpoints").rename(tmp_path / "disk")
    (run_dir / "checkpoints").symlink_to(tmp_path / "disk")
    real = Path.rename

    def rename(path, target):
        if (tmp_path / "disk" in path.resolve().parents) != (tmp_path / "disk" in Path(target).resolve().parents):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path), None, str(target))
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert go_back(run_dir, 100) == ["step-00000165", "step-00000200"]
    assert newest_checkpoint(run_dir) == 100
    (aside,) = (run_dir / "set_aside").iterdir()
    assert (aside / "metrics.jsonl").is_file()
    assert json.loads((aside / "step-00000200" / "MANIFEST.json").read_bytes())["step"] == 200
    kept = (aside / "step-00000200").resolve()
    assert tmp_path / "disk" in kept.parents
    checkpointer = Checkpointer(run_dir / "checkpoints", keep_last=1)
    checkpointer.save(110, TrainState(model=nn.Linear(2, 2), rng=False))
    assert checkpointer.steps() == [110]
    assert kept.is_dir()


def test_another_error_while_setting_aside_is_raised(run_dir, monkeypatch):
    def refuse(path, target):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        go_back(run_dir, 165)
    assert module.staged_rewind(run_dir / "staged") == 165


def test_going_back_again_works_after_an_older_folder_was_deleted(run_dir):
    for _ in range(2):
        go_back(run_dir, 100)
        save(run_dir, 200)
    shutil.rmtree(run_dir / "set_aside" / "001-after-100")
    go_back(run_dir, 100)
    assert sorted(path.name for path in (run_dir / "set_aside").iterdir()) == ["002-after-100", "003-after-100"]


def test_the_best_checkpoint_is_named_though_another_one_is_damaged(run_dir):
    state = TrainState(model=nn.Linear(2, 2), rng=False)
    for step, loss in ((300, 2.0), (400, 3.0)):
        Checkpointer(run_dir / "checkpoints").save(step, state, metrics={"validation_loss": loss})
    next(checkpoint_folders(run_dir)[400].glob("model-*.safetensors")).unlink()
    assert find_start(f"{run_dir}@best", "checkpoint.start_from") == (run_dir, 300)
