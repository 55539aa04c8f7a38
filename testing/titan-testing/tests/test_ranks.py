import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from titan_testing import RankFailure, RankTimeout, assert_close, ranks, run_ranks


def all_reduce_rank(scale):
    value = torch.full((3,), float(dist.get_rank() + 1) * scale)
    dist.all_reduce(value)
    return dist.get_rank(), value


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"bad luck on {rank}")
    dist.barrier()


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.1)
    return "alive"


def environment():
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}, dist.is_initialized()


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_ranks_reduce_and_results_come_back_in_rank_order(n):
    results = run_ranks(all_reduce_rank, n, 2.0)
    assert [rank for rank, _ in results] == list(range(n))
    for _, value in results:
        assert_close(value, torch.full((3,), 2.0 * n * (n + 1) / 2))


def test_the_first_failing_rank_is_the_error():
    with pytest.raises(RankFailure, match=r"rank 1 of 4 failed first:(.|\n)*ValueError: bad luck on 1"):
        run_ranks(raise_on, 4, 1)


def test_ranks_that_gloo_could_not_connect_start_once_more(monkeypatch):
    starts = []

    def start(*arguments):
        starts.append(arguments)
        if len(starts) in failing:
            raise ranks._NotConnected("rank 0 of 2 failed first: connectFullMesh")
        return really(*arguments)

    really, failing = ranks._start, {1}
    monkeypatch.setattr(ranks, "_start", start)
    assert [rank for rank, _ in run_ranks(all_reduce_rank, 2, 1.0)] == [0, 1]
    assert starts[0] == starts[1]
    failing = {3, 4}
    with pytest.raises(RankFailure, match="connectFullMesh"):
        run_ranks(all_reduce_rank, 2, 1.0)
    with pytest.raises(RankFailure, match="bad luck"):  # a rank that raises is not started again
        run_ranks(raise_on, 2, 1)
    assert len(starts) == 5


def test_a_hang_ends_at_the_limit_with_every_stack():
    started = time.monotonic()
    with pytest.raises(RankTimeout, match=r"--- rank 0(.|\n)*in hang_on"):
        run_ranks(hang_on, 2, 0, timeout_s=2.0)
    assert time.monotonic() - started < 10


def test_a_killed_rank_is_a_failure_unless_allowed():
    with pytest.raises(RankFailure, match=r"rank 1 of 2 failed first:\nexit code -9"):
        run_ranks(die_on, 2, 1)


def test_environment_is_set_and_init_can_be_left_out():
    results = run_ranks(environment, 2, init=False)
    assert results[1] == ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, False)


def test_a_function_a_rank_cannot_import_is_refused():
    with pytest.raises(ValueError, match="Move it to module level"):
        run_ranks(lambda: 1, 2)


def test_a_script_can_run_its_own_functions_on_ranks(tmp_path):
    script = tmp_path / "measure.py"
    script.write_text(
        "import torch.distributed as dist\nfrom titan_testing import run_ranks\n\n"
        "def rank():\n    return dist.get_rank()\n\n"
        "if __name__ == '__main__':\n    print(run_ranks(rank, 2))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[0, 1]", done.stderr


def test_assert_close_names_every_tensor_that_is_off():
    want = {"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(2)}
    got = {"a": torch.zeros(2), "b": torch.ones(2) + 1, "c": torch.tensor([1.0, float("nan")])}
    with pytest.raises(AssertionError, match=r"b: max abs error 1.000e\+00(.|\n)*c: max abs error nan"):
        assert_close(got, want)
