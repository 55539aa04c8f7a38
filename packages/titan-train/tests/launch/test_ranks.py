import contextlib
import datetime
import errno
import math
import multiprocessing.resource_tracker
import os
import signal
import socket
import tempfile
from types import SimpleNamespace

import pytest
from titan_testing import run_ranks
from titan_train.cli import check, run
from titan_train.config import Config, LaunchConfig, ParallelConfig, load_config
from titan_train.config.launch import RayConfig
from titan_train.launch.node.agent import NodeAgent, NodeJob, NodeRanks
from titan_train.launch.rank import info, worker
from titan_train.launch.rank.info import (
    RankInfo,
    count_gpus,
    device_type,
    mig_instances,
    ranks_from_torchrun,
    ranks_per_node,
    under_torchrun,
)
from titan_train.train import trainer

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
}  # fmt: skip


class Forked:
    """A rank's process, and how many seconds after a kill it ends."""

    exitcode = None

    def __init__(self, pid, dies_s=0):
        self.pid, self.sentinel, self.dies_s = pid, pid, dies_s

    def kill(self):
        self.join(0)

    def join(self, timeout):
        self.exitcode = -signal.SIGKILL if self.dies_s <= timeout else None
        self.dies_s -= timeout


def node_ranks(folder, monkeypatch, *forks, **words):
    """Starts two ranks by an agent that forks these; an error among them is raised."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    forks = list(forks)

    def fork(*_):
        if isinstance(forks[0], Exception):
            raise forks.pop(0)
        return forks.pop(0)

    agent = SimpleNamespace(stuck="", fork=fork)
    return lambda: NodeRanks(agent, NodeJob(0, "", str(folder), 0, 2, 2, "cpu"), **words)


def test_a_rank_that_sigkill_does_not_end_is_named_and_no_more_start_there(tmp_path, monkeypatch):
    tracker = SimpleNamespace(_pid=814)  # Python waits for it at exit, and the rank holds its pipe
    monkeypatch.setattr(multiprocessing.resource_tracker, "_resource_tracker", tracker)
    start = node_ranks(tmp_path, monkeypatch, Forked(811), Forked(812, dies_s=math.inf), Forked(813))
    ranks = start()
    with pytest.raises(
        RuntimeError, match=r"SIGKILL has not ended rank 1 \(process 812\) in 600 s: stuck in the kernel"
    ):
        ranks.end()
    assert tracker._pid is None
    assert list(tmp_path.iterdir()) == []
    ranks.end()
    with pytest.raises(RuntimeError, match=r"rank 1 \(process 812\)"):
        start()


def test_a_rank_that_ends_minutes_after_sigkill_is_waited_for(tmp_path, monkeypatch, capsys):
    start = node_ranks(tmp_path, monkeypatch, Forked(811), Forked(812, dies_s=500), Forked(813), Forked(814))
    start().end()
    said = "waiting  for rank 1 (process 812) to end after SIGKILL, 600 s at most: a file system or a device does not answer"
    assert capsys.readouterr().err == f"{said}\n"
    start().end()
    assert capsys.readouterr().err == ""


def test_where_one_rank_cannot_be_started_those_before_it_are_ended(tmp_path, monkeypatch):
    first, full = Forked(811), OSError(errno.EMFILE, "Too many open files")
    listener = socket.create_server(("127.0.0.1", 0))
    start = node_ranks(tmp_path, monkeypatch, first, full, listener=listener)
    with pytest.raises(OSError, match="Too many open files"):
        start()
    assert first.exitcode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert listener.fileno() == -1


@pytest.mark.parametrize("err", [EOFError("unexpected EOF"), BrokenPipeError()])
def test_a_server_that_ends_while_it_forks_is_an_error_of_the_system(err):
    def start():
        raise err

    agent = NodeAgent.__new__(NodeAgent)
    agent._context = SimpleNamespace(Process=lambda **_: SimpleNamespace(start=start))
    with pytest.raises(ConnectionError, match="the server that ranks are forked from ended"):
        agent._started(print, (), "rank-0")


def test_torchruns_variables_are_read():
    assert under_torchrun(TORCHRUN)
    assert not under_torchrun({"RANK": "0"})
    ranks = ranks_from_torchrun(LaunchConfig(device="cpu"), TORCHRUN)
    assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.local_world_size, ranks.store) == (3, 1, 4, 2, None)


def test_faults_that_no_rank_would_inject_are_refused_under_a_torchrun():
    config = load_config("debug", ["--launch.faults", "kill rank=1 step=7"])
    with pytest.raises(ValueError, match=r"launch.faults='kill rank=1 step=7' does nothing under a torchrun of yours"):
        run._be_a_torchrun_worker(config, None)


def test_a_number_of_ranks_other_than_torchruns_is_refused():
    with pytest.raises(ValueError, match=r"launch.nproc=4, but torchrun started 2"):
        ranks_from_torchrun(LaunchConfig(nproc=4, device="cpu"), TORCHRUN)


@pytest.fixture
def two_gpus(tmp_path):
    """The files of a machine with two GPUs."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def test_gpus_are_counted_without_torch(two_gpus):
    tmp_path = two_gpus
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0


def test_gpus_of_wsl_are_those_that_nvidia_smi_lists(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert count_gpus({}, tmp_path) == 0  # of another maker
    smi = tmp_path / "usr/lib/wsl/lib/nvidia-smi"
    smi.parent.mkdir(parents=True)
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA RTX (UUID: GPU-1)'\necho 'GPU 1: NVIDIA RTX (UUID: GPU-2)'\n")
    smi.chmod(0o755)
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1


def test_of_gpus_cut_into_instances_a_process_has_one(two_gpus, monkeypatch):
    (two_gpus / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0").mkdir(parents=True)
    (two_gpus / "proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci0").mkdir(parents=True)
    assert mig_instances(two_gpus) == 2
    assert count_gpus({}, two_gpus) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, two_gpus) == 1
    monkeypatch.setattr(info, "count_gpus", lambda: 1)
    monkeypatch.setattr(info, "mig_instances", lambda: 2)
    with pytest.raises(
        ValueError, match=r"nproc=2, but the GPUs of this machine are cut into instances \(MIG\).*nvidia-smi -mig 0"
    ):
        ranks_per_node(LaunchConfig(nproc=2))


@pytest.mark.skipif(count_gpus() > 0, reason="this machine has a GPU")
def test_without_a_gpu_ranks_are_cpu_ranks_and_cuda_is_refused():
    assert device_type(LaunchConfig()) == "cpu"
    assert ranks_per_node(LaunchConfig(nproc=3)) == 3
    assert ranks_per_node(LaunchConfig()) == 1
    with pytest.raises(ValueError, match="no NVIDIA GPU"):
        device_type(LaunchConfig(device="cuda"))


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"pp": 2, "dp_shard": 2}, {"mode": "ddp", "dp_replicate": 3}])
def test_check_and_run_agree_on_the_ranks_of_a_cpu(degrees, gpus, monkeypatch):
    monkeypatch.setattr(check, "count_gpus", lambda: gpus)
    config = Config(parallel=ParallelConfig(**degrees), launch=LaunchConfig(device="cpu"))
    _, checked = check._on_devices(config, None)
    assert checked == ranks_per_node(config.launch, config.parallel.num_ranks) == max(1, config.parallel.num_ranks)


@pytest.mark.parametrize(("degrees", "ranks"), [({}, 2), ({"tp": 2, "dp_shard": 4}, 8)])
def test_check_and_run_agree_on_the_ranks_of_the_cpus_of_two_machines(degrees, ranks):
    launch = LaunchConfig(launcher="machines", nnodes=2, endpoint="host:29500", device="cpu")
    config = Config(parallel=ParallelConfig(**degrees), launch=launch)
    _, checked = check._on_devices(config, None)
    assert checked == 2 * ranks_per_node(config.launch, config.parallel.num_ranks) == ranks


def test_more_machines_than_this_one_need_a_launcher_that_reaches_them():
    with pytest.raises(ValueError, match="--launcher ray, or --launcher machines"):
        ranks_per_node(LaunchConfig(nnodes=2))


def test_on_a_ray_cluster_the_ranks_of_a_node_must_be_given():
    with pytest.raises(ValueError, match=r"give the ranks per node, such as --launch.nproc 8"):
        ranks_per_node(LaunchConfig(launcher="ray", ray=RayConfig(address="head:6379")))
    assert ranks_per_node(LaunchConfig(launcher="ray", nproc=8, ray=RayConfig(address="head:6379"))) == 8


def test_ranks_wait_for_a_late_one_as_long_as_start_up_may_take(tmp_path, monkeypatch):
    """Eight seconds, the mesh's own default, are too short where a node reads torch from a cold disk."""
    given = {}

    class Seen(Exception):
        pass

    def build(layout, **words):
        given.update(words)
        raise Seen

    monkeypatch.setattr(trainer, "build", build)
    config = load_config("debug", ["--launch.timeout-s", "77", "--parallel.mode", "fsdp", "--launch.device", "cpu"])
    with pytest.raises(Seen):
        trainer.Trainer(config, run_dir=tmp_path)
    assert given["agree_within"] == given["timeout"] == datetime.timedelta(seconds=77)


@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_of_a_pipeline_load_kernels_when_they_start(pp):
    assert run_ranks(_kernel_loading, 1, pp, init=False) == [None if pp == 1 else "EAGER"]


def _kernel_loading(pp):
    os.environ.pop("CUDA_MODULE_LOADING", None)
    config = Config(parallel=ParallelConfig(pp=pp))
    with worker._process_group(config, RankInfo(0, 0, 1, 1, "cpu", os.environ["TITAN_TEST_STORE"]), None):
        return os.environ.get("CUDA_MODULE_LOADING")


def test_a_request_while_a_rank_waits_for_its_last_save_is_no_failure(tmp_path, monkeypatch):
    class Saving:
        step, finished, found = 3, False, ()

        def __init__(self, config, run_dir, monitor):
            pass

        def __enter__(self):
            return self

        def fit(self):
            pass

        def __exit__(self, *_):
            Saving.found = tuple(map(signal.getsignal, numbers))

    numbers = signal.SIGTERM, signal.SIGUSR1
    monkeypatch.setattr("titan_train.train.Trainer", Saving)
    monkeypatch.setattr(worker, "_process_group", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(worker.faulthandler, "enable", lambda: None)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        ranks = RankInfo(0, 0, 1, 1, "cpu", None)
        assert worker.train_rank(Config(), ranks, tmp_path) == (3, False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert Saving.found == (signal.SIG_IGN, signal.SIG_IGN)
