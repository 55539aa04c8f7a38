"""`titan-train run` as a person uses it: started, killed, stopped, continued."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from titan_train.cli import run as run_module
from titan_train.config import load_config
from titan_train.launch.supervise import supervisor
from titan_train.observe import RunInfo

pytestmark = pytest.mark.timeout(1800)  # runs that may share their cores with twenty others
TITAN_TRAIN = [sys.executable, "-m", "titan_train"]
TINY = """
[model]
name = "llama3_debug"
seq_len = 32
[tokenizer]
kind = "bytes"
[data]
cache_dir = "cache"
validation_fraction = 0.0
[[data.sources]]
name = "text"
kind = "text"
paths = ["text.txt"]
[train]
steps = 12
global_batch = 4
[checkpoint]
every = 5
[launch]
device = "cpu"
nproc = 2
[metrics]
progress = "lines"
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(3000)))
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def run(folder, *words, timeout=800):
    done = subprocess.run(
        [*TITAN_TRAIN, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
        check=False,
    )
    assert "nanobind" not in done.stderr, done.stderr  # lines about leaks, which would bury an error
    return done


def start(folder, *words):
    return subprocess.Popen(
        [*TITAN_TRAIN, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    )


def wait_for(condition, seconds=400.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def lines_of(folder, name="tiny"):
    file = folder / "runs" / name / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def ranks_of(process):
    """Process ids of the ranks that a launcher started: the grandchildren with the ranks' names do not exist, so by parent."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        pid, parent = int(text.split()[0]), int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(pid)
    servers = children.get(process.pid, [])
    return sorted(pid for server in servers for pid in children.get(server, []))


def test_the_end_shows_the_first_a_middle_and_the_last_sample(folder, capsys):
    from titan_train.cli.run import _print_samples

    samples = folder / "samples"
    samples.mkdir()
    for step in range(2, 13, 2):
        found = {"step": step, "texts": [{"prompt": "def", "text": f"def f{step}():\n    return \x1b[2J"}]}
        (samples / f"step_{step:08}.json").write_text(json.dumps(found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("titan_train.cli.run.newest_checkpoint", lambda _: 12)
        _print_samples(folder)
        out = capsys.readouterr().out
        assert [line.split()[2] for line in out.splitlines() if "after step" in line] == ["2", "8", "12"]
        assert "\x1b" not in out
        shutil.rmtree(samples)
        _print_samples(folder)
    assert capsys.readouterr().out == ""


def test_a_run_leaves_checkpoint_report_and_metrics_and_says_what_to_do_next(folder):
    done = run(folder, "run", "tiny.toml")
    assert done.returncode == 0, done.stderr
    run_dir = folder / "runs" / "tiny"
    for name in ("config.toml", "run.json", "layout.txt", "metrics.jsonl", "report.html"):
        assert (run_dir / name).is_file(), name
    assert "titan-train generate runs/tiny --prompt" in done.stdout
    assert f"report   {(run_dir / 'report.html').as_uri()}" in done.stdout
    assert len([line for line in done.stdout.splitlines() if re.match(r"step=\d+", line)]) == 12

    again = run(folder, "run", "tiny.toml")
    assert again.returncode == 0
    assert "is complete: step 12 of 12" in again.stdout

    longer = run(folder, "run", "tiny.toml", "--train.steps", "14")
    assert longer.returncode == 0, longer.stderr
    assert "changed  train.steps: 12 -> 14" in longer.stdout
    assert "resumed from step 12" in longer.stdout

    refused = run(folder, "run", "tiny.toml", "--checkpoint.resume", "never")
    assert refused.returncode
    assert "checkpoint.resume='never', but runs/tiny holds a checkpoint of step 14" in refused.stderr
    assert not refused.stdout, "no rank was started"


def test_the_last_hint_fits_the_run():
    from titan_train.cli.run import _first_words
    from titan_train.config import load_config

    chats = [
        "--data.sources.0.kind",
        "jsonl",
        "--data.sources.0.paths",
        "a.jsonl",
        "--data.sources.0.messages-key",
        "m",
    ]
    assert _first_words(load_config("quickstart")) == '--prompt "def main("'
    assert _first_words(load_config("debug", ["--validation.prompts", "a $x"])) == "--prompt 'a $x'"
    assert _first_words(load_config("debug", chats)) == '--chat --prompt "Hello"'


def test_a_failing_ranks_error_is_shown_once_with_its_rank(folder):
    (folder / "broken.py").write_text(
        "import torch.distributed as dist\n"
        "from titan_train.config import ModelConfig\n"
        "from titan_train.models import build_model\n"
        "from torch import nn\n"
        "def build(vocab_size) -> nn.Module:\n"
        "    model = build_model(ModelConfig(), vocab_size=vocab_size)\n"
        "    def fail(module, args):\n"
        "        if dist.get_rank() == 1:\n"
        "            raise KeyError('no such expert')\n"
        "    model.register_forward_pre_hook(fail)\n"
        "    return model\n"
    )
    done = run(folder, "run", "tiny.toml", "--model.name", "broken:build", "--code", ".")
    assert done.returncode == 1
    text = done.stdout + done.stderr
    assert text.count("rank 1 of 2 failed: KeyError: 'no such expert'") == 1
    assert text.count("Traceback (most recent call last)") == 1


def test_a_users_mistake_ends_before_any_rank_starts(folder):
    done = run(folder, "run", "tiny.toml", "--train.global-batch", "3")
    assert done.returncode == 2
    assert "train.global_batch=3" in done.stderr
    assert "nearest valid choice is 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_killed_rank_ends_the_run_with_a_message_and_the_next_run_resumes(folder):
    process = start(folder, "run", "tiny.toml", "--train.steps", "100000", "--launch.max-restarts", "0")
    try:
        wait_for(lambda: list((folder / "runs" / "tiny" / "checkpoints").glob("step-0000001*/MANIFEST.json")))
        victim = ranks_of(process)[1]
        os.kill(victim, signal.SIGKILL)
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "nanobind" not in output
    assert output.count("was ended by SIGKILL") == 1
    saved = int(re.search(r"The last finished checkpoint is step (\d+)", output)[1])
    assert saved >= 10

    resumed = run(folder, "run", "tiny.toml", "--train.steps", str(saved + 2))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed from step {saved}" in resumed.stdout


def test_sigterm_saves_and_exits_0_and_the_next_run_continues(folder):
    process = start(folder, "run", "tiny.toml", "--train.steps", "100000", "--checkpoint.every", "0")
    try:
        wait_for(lambda: len(lines_of(folder)) > 5)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, output
    assert "nanobind" not in output
    step = int(re.search(r"asked to stop: saved step (\d+)", output)[1])
    resumed = run(folder, "run", "tiny.toml", "--train.steps", str(step + 1))
    assert f"resumed from step {step}" in resumed.stdout


def test_a_run_whose_folder_is_deleted_meanwhile_says_what_is_left(folder):
    process = start(folder, "run", "tiny.toml", "--train.steps", "100000", "--checkpoint.every", "0")
    try:
        wait_for(lambda: len(lines_of(folder)) > 5)
        shutil.rmtree(folder / "runs" / "tiny")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert "config.toml was deleted or moved away while the run went on" in output
    assert "Traceback" not in output
    assert list((folder / "runs" / "tiny" / "checkpoints").glob("step-*/MANIFEST.json"))


def test_sigusr1_saves_and_goes_on(folder):
    process = start(folder, "run", "tiny.toml", "--train.steps", "100000", "--checkpoint.every", "0")
    try:
        wait_for(lambda: len(lines_of(folder)) > 5)
        process.send_signal(signal.SIGUSR1)
        wait_for(lambda: list((folder / "runs" / "tiny" / "checkpoints").glob("step-*/MANIFEST.json")))
        before = len(lines_of(folder))
        wait_for(lambda: len(lines_of(folder)) > before + 3)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0


def test_ranks_save_and_stop_when_the_launcher_is_killed(folder):
    process = start(folder, "run", "tiny.toml", "--train.steps", "100000", "--checkpoint.every", "0")
    try:
        wait_for(lambda: len(lines_of(folder)) > 5)
        ranks = ranks_of(process)
    finally:
        process.kill()
    process.communicate(timeout=400)
    assert len(ranks) == 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert list((folder / "runs" / "tiny" / "checkpoints").glob("step-*/MANIFEST.json"))


def contents(run_dir):
    """What a person or a later run reads, by name."""
    names = ("config.toml", "run.json", "metrics.jsonl", "layout.txt", "report.html")
    return {name: (run_dir / name).read_bytes() for name in names}


def test_a_second_run_on_the_same_folder_is_refused_in_one_line_and_harms_nothing(folder):
    process = start(folder, "run", "tiny.toml", "--train.steps", "100000", "--checkpoint.every", "0")
    try:
        wait_for(lambda: len(lines_of(folder)) > 3)
        second = run(folder, "run", "tiny.toml", "--train.steps", "100000", "--optimizer.lr", "0.5")
        assert second.returncode == 2
        (line,) = second.stderr.splitlines()
        assert line.startswith(f"error: runs/tiny is in use: process {process.pid} on host ")
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "lr = 0.5" not in (folder / "runs" / "tiny" / "config.toml").read_text()
    assert not (folder / "runs" / "tiny" / "lease.json").exists()
    steps = [json.loads(line)["step"] for line in lines_of(folder) if '"step"' in line and '"loss"' in line]
    assert steps == list(range(1, len(steps) + 1))


DELAYS = [0.0, 0.4, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.1, 0.2, 0.8, 1.6, 3.2))]


@pytest.mark.parametrize("delay", DELAYS)
def test_of_two_staggered_starts_one_trains_and_the_folder_is_all_its_own(folder, delay):
    rates = ["0.001", "0.05"]
    common = ("run", "tiny.toml", "--train.steps", "100000", "--checkpoint.every", "0")
    common = (*common, "--schedule.warmup-steps", "0", "--optimizer.lr")
    processes = []
    try:
        for rate in rates:
            processes.append(start(folder, *common, rate))
            time.sleep(delay)
        wait_for(lambda: any(process.poll() is not None for process in processes))
        (loser,) = [process for process in processes if process.poll() is not None]
        (winner,) = [process for process in processes if process is not loser]
        assert loser.returncode == 2
        (line,) = [line for line in loser.stdout.read().splitlines() if line.startswith("error: ")]
        assert f"is in use: process {winner.pid} on host " in line
        wait_for(lambda: len(lines_of(folder)) > 4)
        winner.send_signal(signal.SIGTERM)
        winner.communicate(timeout=400)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert winner.returncode == 0
    rate = float(rates[processes.index(winner)])
    config = tomllib.loads((folder / "runs" / "tiny" / "config.toml").read_text())
    assert config["optimizer"]["lr"] == rate
    steps = [line for line in map(json.loads, lines_of(folder)) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert all(abs(line["lr"] / rate - 1) < 0.01 for line in steps)  # the decay is over 100,000 steps
    report = run(folder, "report", "runs/tiny")
    assert report.returncode == 0, report.stderr


def test_a_refused_resume_leaves_the_run_as_it_was(folder):
    assert run(folder, "run", "tiny.toml").returncode == 0
    before = contents(folder / "runs" / "tiny")
    written = (folder / "runs" / "tiny" / "report.html").stat().st_mtime_ns
    refused = run(folder, "run", "tiny.toml", "--model.name", "gpt_debug", "--train.steps", "14")
    assert refused.returncode == 1
    assert (folder / "runs" / "tiny" / "report.html").stat().st_mtime_ns == written
    assert "Traceback" not in refused.stderr
    assert contents(folder / "runs" / "tiny") == before
    assert not (folder / "runs" / "tiny" / "staged").exists()
    sample = run(folder, "generate", "runs/tiny", "--prompt", "line", "--max-new-tokens", "4")
    assert sample.returncode == 0, sample.stderr
    assert run(folder, "report", "runs/tiny").returncode == 0


def test_a_run_whose_checkpoints_are_all_damaged_says_in_one_message_which_and_what_to_do(folder):
    assert run(folder, "run", "tiny.toml").returncode == 0
    for index in (folder / "runs" / "tiny" / "checkpoints").glob("step-*/INDEX.json.zst"):
        index.write_bytes(b"torn")
    done = run(folder, "run", "tiny.toml", "--train.steps", "20")
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :]
    assert "Traceback" not in error
    assert len(error.splitlines()) == 7
    assert [step in error for step in ("step-00000005: INDEX", "step-00000010: INDEX", "step-00000012: INDEX")] == [
        True
    ] * 3
    assert "Bring one of these folders back from a copy, or choose another run.name" in error
    assert "run the same command" not in error  # which never could


def test_the_same_command_is_a_worker_under_a_torchrun_of_the_users(folder):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--rdzv-backend",
    ]
    command += [
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "-m",
        "titan_train",
        "run",
        "tiny.toml",
        "--launch.nproc",
        "0",
    ]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=170, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if re.match(r"step=\d+", line)]) == 12
    assert (folder / "runs" / "tiny" / "report.html").is_file()
    command += ["--model.name", "gpt_debug", "--train.steps", "14"]
    refused = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=170, env=environment(), check=False
    )
    assert refused.returncode != 0
    assert not (folder / "runs" / "tiny" / "staged").exists()


def test_help_imports_neither_torch_nor_the_configuration():
    code = "import sys; from titan_train.cli import main; main(['--help']); "
    code += "sys.exit(bool({'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(("nodes", "unit"), [(1, 1), (2, 4)])
def test_ranks_of_one_machine_leave_singly_and_of_several_by_machines(tmp_path, monkeypatch, nodes, unit):
    units = []

    class Stub:
        def __init__(self, *_, unit, **__):
            units.append(unit)

        def run(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "Supervisor", Stub)
    words = ["--launch.launcher", "machines", "--launch.nnodes", str(nodes), "--launch.endpoint", "a:1"]
    config = load_config("debug", ["--launch.nproc", "4", "--launch.elastic", *words])
    run = run_module._Run(config, tmp_path, SimpleNamespace(prepare=lambda _: None), None, 4, 4 * nodes)
    with pytest.raises(KeyboardInterrupt):
        run_module._supervise(run, SimpleNamespace(check=None), SimpleNamespace(device="cpu"), supervisor.Before())
    assert units == [unit]


def test_a_run_begun_again_before_its_first_checkpoint_has_a_report_and_a_refused_one_has_none(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(
        "titan_train.report.build_report", lambda folder: built.append(folder) or folder / "report.html"
    )
    (tmp_path / "metrics.jsonl").write_text("")
    RunInfo(tmp_path, device="cpu", world_size=1)  # the first command, killed before a checkpoint
    before = run_module._attempts(tmp_path)
    run = run_module._Run(load_config("debug", []), tmp_path, None, None, 1, 1)
    run_module._finish(run, RunInfo(tmp_path, device="cpu", world_size=1), 1, before)
    assert built == [tmp_path]
    run_module._finish(run, RunInfo.running(tmp_path), 1, run_module._attempts(tmp_path))
    assert built == [tmp_path]
