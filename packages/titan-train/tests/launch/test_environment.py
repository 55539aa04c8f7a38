"""Variables of the environment that decide how ranks meet are refused in words before a library fails on them."""

import os
import socket
import subprocess
import sys

import pytest
from titan_train.config import Config, LaunchConfig, ParallelConfig
from titan_train.launch.rank import environment, worker
from titan_train.launch.rank.environment import check_environment, check_meeting_place
from titan_train.launch.rank.info import RankInfo, ranks_from_torchrun

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize("value", ["0", "-1", "two", "", "1.5", "4,2", "99999999999"])
def test_a_number_of_threads_that_openmp_cannot_use_is_refused(value):
    with pytest.raises(ValueError, match=rf"variable OMP_NUM_THREADS='{value}' must be a whole number from 1 on"):
        check_environment({"OMP_NUM_THREADS": value})
    check_environment({"OMP_NUM_THREADS": " 4"})


@pytest.mark.parametrize(
    ("name", "value", "reach"),
    [
        ("RANK", "2", "from 0 to 1"), ("RANK", "x", "from 0 to 1"), ("WORLD_SIZE", "0", "from 1 on"),
        ("WORLD_SIZE", "", "from 1 on"), ("LOCAL_RANK", "-1", "from 0 to 1"), ("LOCAL_RANK", "7", "from 0 to 1"),
        ("LOCAL_WORLD_SIZE", "3", "from 1 to 2"),
    ],
)  # fmt: skip
def test_ranks_that_cannot_be_are_refused(name, value, reach):
    with pytest.raises(ValueError, match=rf"variable {name}='{value}' must be a whole number {reach}"):
        ranks_from_torchrun(LaunchConfig(device="cpu"), TORCHRUN | {name: value})


def test_a_meeting_place_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setattr(environment, "_RESOLVE_S", 0.0)
    check_meeting_place(TORCHRUN)
    for port in ("0", "65536", "http", ""):
        with pytest.raises(ValueError, match=f"MASTER_PORT='{port}' must be a whole number from 1 to 65535"):
            check_meeting_place(TORCHRUN | {"MASTER_PORT": port})
    for address in ("", "no host", "nowhere.invalid", "a" * 300):
        with pytest.raises(ValueError, match=f"MASTER_ADDR='{address}' is not an address that this machine knows"):
            check_meeting_place(TORCHRUN | {"MASTER_ADDR": address})


def test_a_host_that_becomes_known_later_is_waited_for(monkeypatch):
    answers = [OSError("not yet"), OSError("not yet"), []]

    def ask(*_, **__):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    monkeypatch.setattr("time.sleep", lambda _: None)
    check_meeting_place(TORCHRUN | {"MASTER_ADDR": "pod-0"})
    assert answers == []


def test_an_interface_that_this_machine_lacks_is_refused_with_those_it_has(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "eth1")])
    for value in ("lo", "eth0,eth1", ""):
        check_environment({"GLOO_SOCKET_IFNAME": value})
    with pytest.raises(
        ValueError, match=r"GLOO_SOCKET_IFNAME='ib0' is not a network interface .* which has lo, eth0, eth1"
    ):
        check_environment({"GLOO_SOCKET_IFNAME": "ib0"})
    for value in ("eth", "=eth1", "^docker", "ib,eth"):
        check_environment({"NCCL_SOCKET_IFNAME": value}, cuda=True)
    for value in ("ib", "=eth"):
        check_environment({"NCCL_SOCKET_IFNAME": value})
        with pytest.raises(ValueError, match="NCCL_SOCKET_IFNAME"):
            check_environment({"NCCL_SOCKET_IFNAME": value}, cuda=True)


@pytest.mark.parametrize(
    "variables",
    [
        {"OMP_NUM_THREADS": "0"},
        {"GLOO_SOCKET_IFNAME": "nope0"},
        TORCHRUN | {"RANK": "x"},
        TORCHRUN | {"MASTER_PORT": "0"},
    ],
)
def test_the_command_says_so_without_a_traceback(tmp_path, variables):
    words = ["run", "quickstart", "--run.dir", str(tmp_path / "runs"), "--launch.device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "titan_train", *words], env=os.environ | variables, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")  # libgomp says its own word before
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("asked", ["", "eth7"])
def test_ranks_that_meet_through_a_file_talk_over_loopback(monkeypatch, tmp_path, asked):
    class Seen(Exception):
        pass

    def init(*_, **__):
        raise Seen

    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environ = {name: value for name, value in os.environ.items() if name not in names}
    environ |= {"NCCL_SOCKET_IFNAME": asked} if asked else {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr("torch.distributed.init_process_group", init)
    with (
        pytest.raises(Seen),
        worker._process_group(Config(), RankInfo(0, 0, 1, 1, "cpu", str(tmp_path / "store")), None),
    ):
        pass
    assert [environ[name] for name in names] == ["lo", asked or "lo"]


@pytest.mark.parametrize(
    ("offload", "ranks", "asked", "threads"),
    [
        ("cpu", 8, "1", [4]),
        ("cpu-nopin", 1, None, [16]),
        ("cpu", 64, "1", [1]),
        ("cpu", 8, "3", []),
        ("none", 8, "1", []),
    ],
)
def test_ranks_with_their_optimizer_in_host_memory_share_the_cores(
    monkeypatch, tmp_path, offload, ranks, asked, threads
):
    """Of 32 cores, 16 beside the GPU."""

    class Seen(Exception):
        pass

    def init(*_, **__):
        raise Seen

    cores, set_to = [range(32)], []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores[0])
    monkeypatch.setattr(worker, "prepare_gpu", lambda *_, **__: cores.insert(0, range(16)))
    monkeypatch.setattr(worker, "check_environment", lambda **_: None)
    monkeypatch.setattr("torch.set_num_threads", set_to.append)
    monkeypatch.setattr("torch.distributed.init_process_group", init)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    monkeypatch.setattr(os, "environ", environ | ({} if asked is None else {"OMP_NUM_THREADS": asked}))
    config = Config(parallel=ParallelConfig(offload=offload))
    with (
        pytest.raises(Seen),
        worker._process_group(config, RankInfo(0, 0, ranks, ranks, "cuda", str(tmp_path / "store")), None),
    ):
        pass
    assert set_to == threads
