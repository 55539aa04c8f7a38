"""Which GPU and cores a rank takes, and what CUDA reads from the environment, without a GPU."""

import os
from types import SimpleNamespace

import pytest
import torch
from titan_train.config import Config
from titan_train.launch.place.ray.cluster import forwarded
from titan_train.launch.rank.device import (
    bind_to_numa,
    cores_beside,
    cores_of,
    prepare_gpu,
    set_cuda_defaults,
)
from titan_train.rank_device import device_index
from titan_train.train.process import set_up_process

GPU = "0000:99:00.0"


@pytest.fixture
def sockets(tmp_path):
    """/sys of a machine with two sockets; the GPU is on the second, with the last half of this process's cores."""
    mine = sorted(os.sched_getaffinity(0))
    (tmp_path / f"bus/pci/devices/{GPU}").mkdir(parents=True)
    (tmp_path / f"bus/pci/devices/{GPU}/numa_node").write_text("1\n")
    for node, cores in enumerate((mine[: len(mine) // 2], mine[len(mine) // 2 :])):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(
            ",".join(map(str, cores)) + ",100000-100003\n"
        )
    yield tmp_path
    os.sched_setaffinity(0, mine)


def test_a_rank_keeps_to_the_cores_beside_its_gpu_that_it_may_use(sockets):
    mine = sorted(os.sched_getaffinity(0))
    bind_to_numa(GPU, sockets)
    assert os.sched_getaffinity(0) == set(mine[len(mine) // 2 :])
    bind_to_numa("0000:01:00.0", sockets)  # a device that the system does not know changes nothing
    (sockets / f"bus/pci/devices/{GPU}/numa_node").write_text("-1\n")
    assert cores_beside(GPU, sockets) is None
    assert os.sched_getaffinity(0) == set(mine[len(mine) // 2 :])


def test_lists_of_cores_are_read_as_the_kernel_writes_them():
    assert cores_of("0-2,96,100-101\n") == {0, 1, 2, 96, 100, 101}
    assert cores_of("\n") == set()


@pytest.mark.parametrize("bind", [True, False])
def test_a_task_that_sees_one_gpu_takes_it_whatever_its_number(monkeypatch, bind):
    selected, asked = [], []
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x99, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr("titan_train.launch.rank.device.bind_to_numa", asked.append)
    prepare_gpu(5, bind_numa=bind)
    assert selected == [0]
    assert asked == [GPU] * bind


def test_more_ranks_than_visible_gpus_are_refused():
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"rank 4 of this machine has no GPU: its process sees 4.*--gpus-per-task=1"):
        device_index(4, 4)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_cudas_settings_have_defaults_that_the_users_own_replace(name):
    environ = {}
    set_cuda_defaults(environ, pipeline=False)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    set_cuda_defaults(environ, pipeline=True)
    assert environ["CUDA_MODULE_LOADING"] == "EAGER"
    own = {name: "max_split_size_mb:64", "CUDA_MODULE_LOADING": "LAZY"}
    kept = dict(own)
    set_cuda_defaults(own, pipeline=True)
    assert own == kept


def test_ranks_on_rays_nodes_have_the_settings_of_the_command(monkeypatch):
    pytest.importorskip("ray")
    passed = {
        "PYTORCH_ALLOC_CONF": "a", "TRITON_CACHE_DIR": "b", "NCCL_DEBUG": "c", "FI_PROVIDER": "d", "UCX_TLS": "e",
        "CUDA_MODULE_LOADING": "f",
    }  # fmt: skip
    for key, value in (passed | {"SECRET_TOKEN": "x"}).items():
        monkeypatch.setenv(key, value)
    found = forwarded(SimpleNamespace(ray=SimpleNamespace(env=())))
    assert passed.items() <= found.items()
    assert "SECRET_TOKEN" not in found


@pytest.mark.parametrize(("local_rank", "visible", "index"), [("3", 1, 0), ("1", 2, 1), (None, 2, 1)])
def test_a_trainer_computes_on_the_gpu_that_is_its_ranks(local_rank, visible, index, monkeypatch):
    """One visible GPU is every rank's own; without ``LOCAL_RANK`` the GPU is the one that the program selected."""
    selected = [1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: selected[-1])
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(torch, "manual_seed", lambda _: None)  # would start CUDA
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert set_up_process(Config()) == torch.device("cuda", index)
    assert selected[-1] == index
