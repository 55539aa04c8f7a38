"""`doctor` on machines that are files: a kernel's /sys and /proc, and what nvidia-smi prints."""

import shutil
from types import SimpleNamespace

import pytest
from titan_train.cli.cluster import diagnose_cluster

BANNER = "| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2     |"
LINKED = """        \x1b[4mGPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity\x1b[0m
GPU0     X      NV18    PXB     0-47    0
GPU1    NV18     X      SYS     48-95   1
NIC0    PXB     SYS      X
"""
PEERS = """        GPU0    GPU1
 GPU0   X       OK
 GPU1   OK      X
"""


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


@pytest.fixture
def node(tmp_path):
    """Two GPUs on two sockets, and an active adapter."""
    for number, gpu in enumerate(("0000:19:00.0", "0000:99:00.0")):
        folder = f"sys/bus/pci/devices/{gpu}"
        write(
            tmp_path, {f"{folder}/vendor": "0x10de", f"{folder}/class": "0x030200", f"{folder}/numa_node": str(number)}
        )
        (tmp_path / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    write(
        tmp_path,
        {"sys/bus/pci/devices/0000:00:01.0/vendor": "0x8086", "sys/bus/pci/devices/0000:00:01.0/class": "0x06"},
    )
    port = "sys/class/infiniband/mlx5_0/ports/1"
    write(
        tmp_path,
        {f"{port}/state": "4: ACTIVE", f"{port}/rate": "400 Gb/sec (4X NDR)", "proc/modules": "nvidia_peermem 1 0"},
    )
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def found(root, *, cuda="12.8", memlock=None, answers=None):
    texts = {"nvidia-smi": BANNER, "nvidia-smi topo -m": LINKED, "nvidia-smi topo -p2p r": PEERS} | (answers or {})
    lines = diagnose_cluster(cuda, memlock, root=root, ask=lambda words: texts.get(" ".join(words), ""))
    return {line.name: (line.level, line.text) for line in lines}


def test_a_good_machine_is_ok_in_every_line(node, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 30))
    lines = found(node)
    assert {level for level, _ in lines.values()} == {"ok"}
    assert lines["driver"][1] == "535.104.05, for CUDA up to 12.2; torch uses 12.8"  # of one major version
    assert lines["nvlink"][1] == "between all GPUs (NV18)"
    assert lines["numa"][1] == "2 nodes, node 0: 1 GPUs; node 1: 1 GPUs; ranks keep to their GPU's (launch.bind_numa)"
    assert lines["infiniband"][1] == "mlx5_0/1 400 Gb/sec (4X NDR)"
    assert {"peer access", "locked memory", "/dev/shm"} <= lines.keys()


@pytest.mark.parametrize(
    ("files", "options", "line", "level", "says"),
    [
        ({}, {"cuda": "13.0"}, "driver", "missing", "for CUDA 13.0: install a newer driver, or torch for CUDA 12"),
        ({}, {"cuda": None}, "driver", "note", "install a CUDA build of torch"),
        ({}, {"answers": {"nvidia-smi topo -m": LINKED.replace("NV18", "SYS")}}, "nvlink", "note", "1 of 1 pairs of GPUs"),
        ({}, {"answers": {"nvidia-smi topo -m": ""}}, "nvlink", "note", "unknown"),
        ({}, {"answers": {"nvidia-smi topo -p2p r": PEERS.replace("OK", "CNS")}}, "peer access", "note", "GPUs 0-1 (CNS)"),
        ({"sys/bus/pci/devices/0000:19:00.0/numa_node": "-1"}, {}, "numa", "note", "ranks are not bound"),
        ({"sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN"}, {}, "infiniband", "note", "down: mlx5_1/1. Check cable"),
        ({"proc/modules": "ext4 1 0"}, {}, "gpudirect", "note", "sudo modprobe nvidia_peermem"),
        ({}, {"memlock": 64 << 20}, "locked memory", "note", "at most 64 MiB: InfiniBand needs it without limit"),
        ({"proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access": "x"}, {}, "mig", "note", "sudo nvidia-smi -mig 0"),
        ({}, {}, "/dev/shm", "note", "docker run --shm-size=16g"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_to_do(node, monkeypatch, files, options, line, level, says):
    total = 64 << (20 if line == "/dev/shm" else 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=total))
    write(node, files)
    lines = found(node, **options)
    assert lines[line][0] == level
    assert says in lines[line][1]
    assert [name for name, (level, _) in lines.items() if level != "ok"] == [line]


def test_a_machine_without_gpus_has_no_line_of_theirs(tmp_path):
    lines = found(tmp_path, memlock=8 << 20, answers={"nvidia-smi": ""})
    assert lines == {"locked memory": ("ok", "at most 8 MiB; InfiniBand would need it without limit")}
