"""torchrun starts the ranks; restarting them is ours."""

import signal
import socket

import pytest
import torch.distributed.elastic.multiprocessing.errors as errors
from titan_train.config import Config, LaunchConfig
from titan_train.launch.job import Attempt
from titan_train.launch.launchers.torchrun import TorchrunLauncher, root_cause

pytestmark = pytest.mark.timeout(900)  # runs that may share their cores with twenty others


def test_a_restart_under_torchrun_meets_at_a_new_store_and_ends_with_the_same_losses(
    job, undisturbed, listening_beyond_loopback
):
    """torchrun's own restarts hand the dead round's store on, and every retry fails; ours must not."""
    with listening_beyond_loopback() as seen:
        done = job.run("torchrun", "--launcher", "torchrun", "--faults", "kill rank=1 step=7")
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 was ended by SIGKILL" in done.stderr
    assert "restart  from step 4 (restart 1 of 5)" in done.stderr
    assert job.losses("torchrun") == undisturbed
    assert [attempt["end"] for attempt in job.attempts("torchrun")][-1] == "finished"
    assert seen == set()


def test_several_machines_need_a_place_to_meet():
    with pytest.raises(ValueError, match="host:port of machine 0"):
        LaunchConfig(launcher="torchrun", nnodes=2)


def test_a_meeting_place_that_is_taken_is_refused_before_any_rank_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        launch = LaunchConfig(launcher="torchrun", nnodes=2, nproc=1, endpoint=endpoint)
        launcher = TorchrunLauncher(launch, 1, "cpu", tmp_path)
        with pytest.raises(
            ValueError, match=f"launch.endpoint='{endpoint}' cannot be used on this machine: Address al"
        ):
            launcher.start(Attempt(0, Config(launch=launch), tmp_path, 2))


def test_a_killed_rank_is_the_cause_whatever_torchrun_saw_first(monkeypatch):
    """torchrun stamps whole seconds: of two failures in one second, it calls the lower rank the cause."""
    monkeypatch.setattr(errors.time, "time", lambda: 1e9)

    def log(*failures: tuple[int, int], before: str = "") -> str:
        found = {
            rank: errors.ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file="none")
            for rank, code in failures
        }
        return before + errors.ChildFailedError("worker", found).format_msg()

    closing = "W1122 10:00:00 1 torch/distributed/elastic/api.py:1] Sending process 101 closing signal SIGTERM\n"
    assert root_cause(log((0, 1), (1, -signal.SIGKILL))) == (1, -signal.SIGKILL)
    assert root_cause(log((0, 1), (1, -signal.SIGTERM), before=closing)) == (0, 1)
    assert root_cause(log((0, 1), (1, -signal.SIGKILL)), killed={101}) == (0, 1)
    assert root_cause(log((0, 1), (1, -signal.SIGABRT))) == (0, 1)
    assert root_cause("torchrun could not start") is None
