import io
import json
import resource
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from titan_ckpt import Checkpointer, TrainState, export_hf, import_dcp
from titan_ckpt.cli import main
from titan_ckpt.format.manifest import _self_digest
from titan_ckpt.interop.hf import import_hf_step
from titan_ckpt.interop.views import StoredView, unequal_elements
from titan_ckpt.load.reader import StepReader
from titan_ckpt.steps import commit
from titan_ckpt.steps.claim import Process
from titan_ckpt.terminal import ByteProgress
from titan_testing import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def save(root: str, step: int = 3, fill: float = 1.0, sharded: bool = False, loss: float = 1.5) -> None:
    model = nn.Linear(6, 5)
    nn.init.constant_(model.weight, fill)
    nn.init.zeros_(model.bias)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    Checkpointer(root).save(step, TrainState(model=model, rng=False, extra={"tokens": 9}), metrics={"loss": loss})


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
    folder, _ = commit.begin_save(tmp_path, 4, Process("elsewhere", 1, "1"))
    assert main(["gc", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    assert len(list(tmp_path.iterdir())) == 5
    assert main(["gc", str(tmp_path), "--keep-last", "1"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [folder.name, "step-00000003"]
    with pytest.raises(SystemExit):
        main(["gc", str(tmp_path), "--keep-last", "0"])
    assert "would keep no step" in capsys.readouterr().err


def test_gc_keeps_the_best_step_and_deletes_nothing_by_a_metric_that_no_step_has(tmp_path, capsys):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0)):
        save(str(tmp_path), step, loss=loss)
    assert main(["gc", str(tmp_path), "--keep-last", "1", "--keep-best", "los"]) == 2
    assert "no step has a metric 'los' to keep the best by; they have ['loss']" in capsys.readouterr().err
    assert Checkpointer(tmp_path).steps() == [1, 2, 3, 4]
    assert main(["gc", str(tmp_path), "--keep-last", "1", "--keep-best", "loss"]) == 0
    assert Checkpointer(tmp_path).steps() == [2, 4]
    assert main(["gc", str(tmp_path), "--keep-every", "3"]) == 0
    assert Checkpointer(tmp_path).steps() == [4]


def test_gc_says_deleted_only_of_what_is_gone(tmp_path, capsys, monkeypatch):
    for step in (1, 2):
        save(str(tmp_path), step)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(commit, "discard", refuse)
    assert main(["gc", str(tmp_path), "--keep-last", "1"]) == 2
    printed = capsys.readouterr()
    assert "deleted" not in printed.out
    assert "Permission denied" in printed.err


def test_wrong_paths_are_named(tmp_path, capsys):
    assert main(["ls", str(tmp_path / "no")]) == 2
    assert "no does not exist" in capsys.readouterr().err
    save(str(tmp_path))
    assert main(["verify", str(tmp_path / "step-00000009")]) == 2
    assert f"The steps in {tmp_path} are step-00000003." in capsys.readouterr().err
    assert main(["show", str(tmp_path / "step-00000003" / "MANIFEST.json")]) == 2
    assert "is a file. Give the folder." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_a_step_in_place_of_its_root_is_told_from_a_root_without_steps(tmp_path, capsys, command):
    save(str(tmp_path))
    assert main([command, str(tmp_path / "step-00000003")]) == 2
    assert f"step-00000003 is a step; the folder of the steps is {tmp_path}." in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["ls", str(tmp_path / "empty")]) == 0
    assert f"no steps in {tmp_path / 'empty'}" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["show", "export-hf", "diff"])
def test_a_root_in_place_of_a_step_is_an_error_that_lists_the_steps(tmp_path, capsys, command):
    for step in range(1, 7):
        save(str(tmp_path), step)
    rest = {"show": [], "export-hf": [str(tmp_path / "out")], "diff": [str(tmp_path / "step-00000001")]}[command]
    assert main([command, str(tmp_path), *rest]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path} is a folder of steps. Give one of them: step-00000003, " in told
    assert "step-00000006 are its newest" in told
    assert "damaged" not in told


def test_a_folder_that_is_neither_step_nor_root_is_not_called_damaged(tmp_path, capsys):
    for command in ("show", "verify"):
        assert main([command, str(tmp_path)]) == 2
        told = capsys.readouterr().err
        assert "it has no MANIFEST.json" in told
        assert "damaged" not in told
    (tmp_path / "step-00000001").mkdir()  # a step that has lost its manifest is
    assert main(["verify", str(tmp_path / "step-00000001")]) == 1
    assert main(["verify", str(tmp_path)]) == 1


def test_metrics_that_are_not_numbers_are_listed_as_they_are(tmp_path, capsys):
    save(str(tmp_path))
    file = tmp_path / "step-00000003" / "MANIFEST.json"
    value = json.loads(file.read_bytes())
    value["metrics"] = {"loss": 0.25, "note": "best", "none": None, "list": [1, 2]}
    del value["digest"]
    file.write_text(json.dumps({**value, "digest": _self_digest(value)}))
    main(["ls", str(tmp_path)])
    out = capsys.readouterr().out
    assert 'loss=0.25 note="best" none=null list=[1, 2]' in out


def exported(tmp_path):
    save(str(tmp_path / "run"))
    assert main(["export-hf", str(tmp_path / "run" / "step-00000003"), str(tmp_path / "hf")]) == 0
    return str(tmp_path / "hf")


def test_an_import_replaces_a_step_only_when_told(tmp_path, capsys):
    folder, root = exported(tmp_path), tmp_path / "root"
    assert main(["import-hf", folder, str(root)]) == 0
    first = StepReader(root / "step-00000000").manifest.save_id
    capsys.readouterr()
    assert main(["import-hf", folder, str(root)]) == 2
    told = capsys.readouterr().err
    assert "step 0 exists" in told
    assert "--force" in told
    assert StepReader(root / "step-00000000").manifest.save_id == first
    assert main(["import-hf", folder, str(root), "--step", "1"]) == 0
    assert main(["import-hf", folder, str(root), "--force"]) == 0
    assert sorted(Checkpointer(root).steps()) == [0, 1]
    assert StepReader(Checkpointer(root).path(0)).manifest.save_id != first


@pytest.mark.parametrize("command", ["import-hf", "import-dcp"])
@pytest.mark.parametrize("step", ["-1", "x"])
def test_a_negative_step_is_refused_before_anything_is_read(tmp_path, capsys, command, step):
    with pytest.raises(SystemExit) as caught:
        main([command, str(tmp_path / "none"), str(tmp_path), "--step", step])
    assert caught.value.code == 2
    assert f"{step} is not a step number. Use an integer from 0." in capsys.readouterr().err


def test_a_store_whose_package_is_missing_says_which(capsys, monkeypatch):
    fsspec = pytest.importorskip("fsspec", reason="the extra titan-ckpt[fsspec]")

    def missing(path):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(SystemExit):
        main(["ls", "s3://bucket/run"])
    assert "Install s3fs to access S3" in capsys.readouterr().err


def test_tensors_larger_than_a_piece_are_compared_whole(tmp_path):
    """Rows are compared a few at a time; the last pieces, the columns of another layout and 0-d tensors count too."""
    rows = 70_000
    for step in (1, 2):
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(rows, 64))
        model.register_buffer("calls", torch.tensor(step))
        if step == 2:
            with torch.no_grad():
                model.weight[0, 0] = model.weight[rows // 2, 5:9] = model.weight[-1, -1] = 1.0
        Checkpointer(tmp_path).save(step, TrainState(model=model, rng=False))
    a, b = (StepReader(tmp_path / f"step-0000000{step}") for step in (1, 2))
    compared: list[int] = []
    ours, theirs = (StoredView(reader, reader.index.tensors["model"]["weight"]) for reader in (a, b))
    assert unequal_elements(ours, theirs, compared.append) == 6
    assert sum(compared) == rows * 64 * 4
    assert len(compared) > 1
    ours, theirs = (StoredView(reader, reader.index.tensors["model"]["calls"]) for reader in (a, b))
    assert unequal_elements(ours, theirs) == 1


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None
from titan_ckpt.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_ls_and_verify_run_without_torch_and_numpy(tmp_path, command):
    save(str(tmp_path))
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, command, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_and_ls_take_a_fraction_of_a_second(tmp_path):
    save(str(tmp_path))
    for arguments in (["--help"], ["ls", str(tmp_path)]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "titan_ckpt", *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # of the processor, which other work on the machine does not add to
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


def test_progress_counts_bytes():
    progress = ByteProgress("verify", 1000)
    progress.advance(250)
    assert " 25% " in progress.text(1.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, of dcp.save without ranks
def test_imports_tell_every_byte_that_they_write(tmp_path):
    told: list[int] = []
    dcp.save({"w": torch.ones(1000), "v": torch.ones(7)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    import_dcp(tmp_path / "dcp", tmp_path / "root", progress=told.append)
    assert sum(told) == 4028
    told.clear()
    export_hf(tmp_path / "root" / "step-00000000", tmp_path / "hf")
    import_hf_step(tmp_path / "hf", tmp_path / "root", step=1, progress=told.append)
    assert sum(told) == 4028


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # torch's own, of dcp.save without ranks
@pytest.mark.parametrize("command", ["import-hf", "import-dcp", "diff", "verify", "export-hf"])
def test_every_long_command_shows_a_bar_on_a_terminal(tmp_path, monkeypatch, capsys, command):
    run, root = tmp_path / "run", str(tmp_path / "root")
    folder = exported(tmp_path)
    if command == "import-dcp":
        folder = str(tmp_path / "dcp")
        dcp.save({"w": torch.ones(1000)}, checkpoint_id=folder, no_dist=True)
    step = str(run / "step-00000003")
    rest = {"diff": [step, step], "verify": [step], "export-hf": [step, root]}.get(command, [folder, root])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("titan_ckpt.terminal._EVERY_S", 0.0)
    assert main([command, *rest]) == 0
    assert "% " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K"), "the bar is gone when the result is printed"


def test_nothing_but_results_is_printed_where_there_is_no_terminal(tmp_path, capsys):
    save(str(tmp_path))
    step = str(tmp_path / "step-00000003")
    for arguments in (["verify", step], ["diff", step, step]):
        assert main(arguments) == 0
        printed = capsys.readouterr()
        assert (printed.err, len(printed.out.splitlines())) == ("", 1)


def test_an_invalid_step_hides_no_other(tmp_path, capsys):
    for step in (1, 2, 3):
        save(str(tmp_path), step)
    (tmp_path / "step-00000002" / "MANIFEST.json").write_text("[" * 100_000)
    shutil.rmtree(tmp_path / "step-00000001" / "state")
    assert main(["ls", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 valid steps, 2 invalid" in out
    assert len(out.splitlines()) == 4, "a line a step"
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "step-00000003: intact" in out
    assert "step-00000002/MANIFEST.json" in out


def test_names_of_a_step_do_not_command_the_terminal(tmp_path, monkeypatch):
    model = nn.Module()
    model.register_parameter("evil\x1b]0;title\x07\x9b2J", nn.Parameter(torch.ones(2)))
    Checkpointer(str(tmp_path)).save(1, TrainState(model=model, rng=False, extra={"note\x1b[2J": "\x1b[2J"}))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", terminal)
    assert main(["show", str(tmp_path / "step-00000001"), "--tensors"]) == 0
    shown = terminal.getvalue()
    assert "evil\ufffd]0;title" in shown
    assert [c for c in shown if not c.isprintable() and c not in "\n\t"] == []
