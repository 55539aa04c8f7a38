"""torchrun starts the ranks; restarting them is ours."""

import pytest
from titan_train.config import LaunchConfig


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
