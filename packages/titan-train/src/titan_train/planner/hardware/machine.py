"""Read a machine's TOML file."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from titan_train.files import read_toml
from titan_train.planner.hardware.tables import OperatorTables, read_tables
from titan_train.values import did_you_mean

_ALIASES = {
    "h100-80gb-sxm": "h100",
    "h100_sxm": "h100",
    "h100-96gb-500w": "h100_500w",
    "a100-80gb": "a100",
    "a100-40gb": "a100_40",
    "rtx_4090": "rtx4090",
    "4090": "rtx4090",
}


@dataclass(frozen=True, slots=True)
class LinkClass:
    """One class of links: seconds for n bytes are ``latency_s`` + n / ``bytes_per_s``."""

    bytes_per_s: float
    latency_s: float
    ring_s: tuple[float, float] | None = None
    """Latency of a gather or reduce-scatter over a ring, where it was measured: of its first step, and of each further."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One kind of device, and the links between many of them. SI units."""

    name: str
    title: str
    source: str
    peak: float
    """FLOP/s of dense bfloat16 products at the nominal clock, for MFU."""
    bf16: float
    """The same at the clock that the power limit lets it hold."""
    fp8: float
    fp4: float
    vector: float
    """FLOP/s of float32 outside the matrix units: exponentials, running sums. It grew little from H100 to B200."""
    memory_bytes: float
    """Usable memory of one device."""
    bandwidth: float
    """Bytes per second from its own memory."""
    host_bandwidth: float
    """Bytes per second to the host's memory, one direction."""
    domain: int
    """Devices that the local link joins."""
    local: LinkClass
    network: LinkClass
    tables: OperatorTables | None = None
    """Measured operators, where the file has them."""

    def __hash__(self) -> int:
        """Of the name alone: a search asks for it 40,000 times."""
        return hash(self.name)


def list_machines() -> list[str]:
    """Names of the shipped machines."""
    files = resources.files("titan_train.planner.hardware").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def load_machine(name: str) -> Machine:
    """Read the shipped machine called ``name``, or the TOML file at that path.

    Raises:
        ValueError: Unknown machine or malformed file.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ValueError(
                f"no hardware file {name!r}. Give a shipped name ({', '.join(list_machines())}) or a path."
            )
        return _parse(read_toml(path), name)
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in list_machines():
        raise ValueError(
            f"unknown hardware {name!r}. {did_you_mean(key, list_machines())}Known: {', '.join(list_machines())}. For "
            "another machine write a file with titan-train doctor --bench and give its path."
        )
    return _shipped(key)


@cache
def _shipped(key: str) -> Machine:
    text = resources.files("titan_train.planner.hardware").joinpath(f"{key}.toml").read_text()
    return _parse(tomllib.loads(text), key)


def machine_of_device(device: str) -> Machine | None:
    """The shipped machine of a device's name as PyTorch reports it ("NVIDIA H100 80GB HBM3", "cpu"); None if unknown."""
    words = device.lower().replace("-", " ").split()
    if "a100" in words and any(word.startswith("40gb") for word in words):
        return load_machine("a100_40")
    if "4090" in words:
        return load_machine("rtx4090")
    return next((load_machine(name) for name in list_machines() if name in words), None)


def _ring(link: dict[str, Any], name: str) -> tuple[float, float] | None:
    match link.get("ring_us"):
        case None:
            return None
        case [int() | float() as first, int() | float() as further] if first >= 0 and further >= 0:
            return first * 1e-6, further * 1e-6
        case given:
            raise ValueError(
                f"hardware file {name!r}: ring_us = {given!r} must be two microseconds: "
                "of a ring's first step and of each further."
            )


def _parse(table: dict[str, Any], name: str) -> Machine:
    try:
        compute, memory = table["compute"], table["memory"]
        local, network = table["links"]["local"], table["links"]["network"]
        held = float(compute.get("clock_share", 1.0))
        machine = Machine(
            name=table["name"],
            title=table["title"],
            source=table["source"],
            peak=compute["bf16_tflops"] * 1e12,
            bf16=compute["bf16_tflops"] * held * 1e12,
            fp8=compute["fp8_tflops"] * held * 1e12,
            fp4=compute.get("fp4_tflops", 0.0) * held * 1e12,
            vector=compute.get("vector_tflops", compute["bf16_tflops"] / 16) * held * 1e12,
            memory_bytes=memory["capacity_gib"] * 2**30,
            bandwidth=memory["bandwidth_tb_s"] * 1e12,
            host_bandwidth=memory["host_gb_s"] * 1e9,
            domain=int(local["ranks"]),
            local=LinkClass(local["gb_s"] * 1e9, local["latency_us"] * 1e-6, _ring(local, name)),
            network=LinkClass(network["gb_s"] * 1e9, network["latency_us"] * 1e-6),
            tables=read_tables(table.get("tables", {}), name),
        )
    except KeyError as err:
        raise ValueError(f"hardware file {name!r} lacks the key {err}: compare it with a shipped file.") from err
    except TypeError as err:
        raise ValueError(f"hardware file {name!r}: rates, bandwidths and memory must be numbers ({err}).") from err
    positive = (
        machine.bf16,
        machine.vector,
        machine.bandwidth,
        machine.host_bandwidth,
        machine.memory_bytes,
        machine.domain,
    )
    links = (machine.local, machine.network)
    if min(*positive, *(link.bytes_per_s for link in links)) <= 0:
        raise ValueError(f"hardware file {name!r}: rates, bandwidths, memory and ranks must be positive.")
    if min(machine.fp8, machine.fp4, *(link.latency_s for link in links)) < 0:
        raise ValueError(f"hardware file {name!r}: float8 and float4 rates and latencies must not be negative.")
    return machine
