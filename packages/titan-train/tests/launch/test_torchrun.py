"""torchrun starts the ranks; restarting them is ours."""

import socket

import pytest
from titan_train.config import Config, LaunchConfig
from titan_train.launch.job import Attempt
from titan_train.launch.launchers.torchrun import TorchrunLauncher


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
