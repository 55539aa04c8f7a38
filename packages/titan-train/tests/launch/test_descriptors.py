"""Open files of a rank: gloo's connections, the limit, and what is said where it cannot be raised."""

import os
import resource
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from titan_testing import run_ranks
from titan_train.launch.rank import descriptors
from titan_train.launch.rank.descriptors import allow_open_files, connect_when_needed, open_files_needed

pytestmark = pytest.mark.timeout(900)  # runs that may share their cores with twenty others


def held():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def groups_of_all(lazy):
    """Descriptors that two groups of all ranks take, and those that are there after a sum over each."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    gate = dist.new_group(backend="gloo")  # a fast rank's sum would connect to a slow one that has not counted yet
    dist.barrier(gate)
    before = held()
    made = [dist.new_group(backend="gloo") for _ in range(2)]
    after = held()
    dist.barrier(gate)
    total = torch.ones(3)
    for group in made:
        dist.all_reduce(total, group=group)
    return after - before, held() - before, total.tolist()


def test_gloo_connects_to_the_peers_that_it_talks_to():
    eager = run_ranks(groups_of_all, 6, "0")
    lazy = run_ranks(groups_of_all, 6, "1")
    assert all(made >= 2 * 5 for made, _, _ in eager)  # one per peer and group
    assert all(made < 2 * 5 for made, _, _ in lazy)
    assert all(used <= made for (_, used, _), (made, _, _) in zip(lazy, eager, strict=True))
    assert all(total == [36.0] * 3 for _, _, total in [*eager, *lazy])


MANY = """
import datetime, os, resource, sys, threading
import torch
import torch.distributed as dist

ranks, groups, patience = int(sys.argv[1]), 3, datetime.timedelta(seconds=1000)
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
store, gate, sums, counts = dist.HashStore(), threading.Barrier(ranks), set(), {}


def count(what, rank):
    gate.wait()
    if rank == 0:
        counts[what] = len(os.listdir("/proc/self/fd")) // ranks
    gate.wait()


def be(rank):
    made = []
    for number in range(groups):
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = patience, 1
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=sys.argv[2] == "1")]
        made.append(dist.ProcessGroupGloo(dist.PrefixStore(str(number), store), rank, ranks, options))
    count("made", rank)
    for group in made:
        total = torch.ones(4)
        group.allreduce([total]).wait()
        sums.add(total[0].item())
    count("used", rank)


threads = [threading.Thread(target=be, args=(rank,)) for rank in range(ranks)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(counts["made"], counts["used"], *sums, flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [16, 344])
def test_three_groups_of_344_ranks_stay_far_below_1024_files_a_rank(ranks):
    """Every rank is a thread: the process has all their descriptors. 344 ranks that connect at once would have 1,041."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 25 * ranks:
        pytest.skip("the hard limit of open files is too low for all ranks in one process")
    words = [sys.executable, "-c", MANY, str(ranks)]
    lazy = subprocess.run([*words, "1"], capture_output=True, text=True, check=True, timeout=800).stdout
    made, used, total = map(float, lazy.split())
    assert made <= used <= 24
    assert used <= open_files_needed(1, ranks)
    assert total == ranks
    if ranks == 16:
        eager = subprocess.run([*words, "0"], capture_output=True, text=True, check=True, timeout=800).stdout
        assert float(eager.split()[0]) >= 3 * (ranks - 1)


def test_what_is_needed_grows_with_the_ranks_where_every_pair_connects_and_on_rank_0(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    assert open_files_needed(5, 341) > 1024 > open_files_needed(5, 256)
    connect_when_needed()
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"  # the user's word counts
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    connect_when_needed()
    assert open_files_needed(5, 100_000) < 1024 < open_files_needed(0, 512)


@pytest.fixture
def limits(monkeypatch):
    state = {"now": (256, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: state["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: state.update(now=both))
    return state


def test_the_soft_limit_is_raised_to_what_is_needed_and_never_lowered(limits):
    allow_open_files(1000)
    assert limits["now"] == (1000, 4096)
    allow_open_files(500)
    assert limits["now"] == (1000, 4096)


def test_a_hard_limit_that_is_too_low_is_named_with_the_way_out(limits, monkeypatch):
    monkeypatch.setattr(descriptors.platform, "node", lambda: "n17")
    with pytest.raises(
        ValueError, match=r"n17 may need 5000 open files .* hard limit there is 4096. Raise it: `ulimit -Hn"
    ):
        allow_open_files(5000)


def test_a_run_under_a_low_soft_limit_raises_it(job, undisturbed):
    script = (
        "import resource, sys, os; h = resource.getrlimit(7)[1]; resource.setrlimit(7, (128, h)); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *job.command("low-limit", "--train.steps", "4")],
        cwd=job.folder, env=job.environ(), capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
