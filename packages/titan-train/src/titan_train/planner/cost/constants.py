"""Efficiencies: which part of a machine's peak a kind of work reaches, for one software stack and precision.

Every value is a prior from public measurements of single kernels, unless a fitted set replaces it
(`titan_train.planner.calibrate`). The priors' sources are in
`benchmarks/results/planner_accuracy_202611.md`.
"""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import tomli_w

from titan_train.files import read_toml
from titan_train.planner.setup import Stack

_RATES = {
    "matmul", "matmul8", "matmul4", "attention", "attention_backward", "bandwidth", "local", "network", "exchange",
    "exchange_fused", "expert_rows", "context",
}  # fmt: skip
"""Constants that times are divided by."""
_FORMER = {"microbatch_s": 0.0, "software": 1.0}
"""Constants that files of older versions hold, always with these values."""
_MOST_SPREAD = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """One set."""

    matmul: float = 0.70
    """Part of the bf16 peak that a large product reaches."""
    matmul8: float = 0.60
    """Part of the fp8 peak, casts not counted."""
    matmul4: float = 0.45
    attention: float = 0.45
    """Part of the bf16 peak that causal attention reaches, forward, on the FLOPs it needs."""
    attention_backward: float = 0.80
    """Backward's rate over forward's."""
    attention8: bool = False
    """Attention's products run in float8 too, where the precision is float8."""
    bandwidth: float = 0.90
    """Part of the memory bandwidth that streaming kernels reach."""
    local: float = 0.78
    """Part of the local link that collectives reach."""
    network: float = 0.85
    exchange: float = 0.85
    """Part of what collectives reach that an all-to-all reaches."""
    exchange_fused: float = 1.0
    """Part of the network's own rate that a fused dispatcher (DeepEP, HybridEP) reaches; inside a domain it is ``local``."""
    pointwise: float = 1.0
    """Bytes that norms, gates and residuals move, over those of fully fused kernels."""
    expert_rows: float = 256.0
    """Rows per expert at which a grouped product reaches half of ``matmul``."""
    routing_passes: float = 4.0
    """Times that routed tokens are read and written beside the products, forward."""
    expert_scale: float = 1.0
    """Seconds of a routed layer, all of it, over the model's own estimate."""
    hide_tp: float = 0.5
    """Part of tensor parallelism's transfers that async TP hides."""
    hide_ep: float = 0.6
    """Part of the experts' transfers that their overlap hides."""
    contention: float = 0.15
    """Compute slow-down while collectives run beside it, per second of overlap."""
    context: float = 0.85
    """Attention's rate on context-parallel blocks, over whole sequences."""
    kernel_s: float = 5e-6
    kernels: int = 26
    """Kernels that the host launches for one block's forward."""
    sync_s: float = 0.0
    """Seconds that the host waits in a routed layer for the number of tokens."""
    routed_launch_s: float = 0.004
    """Seconds that the host needs to launch one routed block, forward and backward."""
    step_s: float = 0.010
    """Host work of one step."""
    cast_bytes: float = 6.0
    """Bytes per element to cast an operand to float8, both layouts."""
    spread: float = 0.25
    """Standard deviation of the logarithm of measured over estimated, on rows that were not fitted."""
    source: str = "prior"


_STACKS: dict[str, Constants] = {
    "eager": Constants(pointwise=3.64, kernels=70, matmul=0.65, routing_passes=10.0, sync_s=3e-4),
    "compile": Constants(routing_passes=6.0, sync_s=3e-4),
    "te": Constants(
        pointwise=1.3, kernels=40, cast_bytes=4.0, routed_launch_s=0.007, matmul8=0.68, routing_passes=8.0, sync_s=3e-4
    ),
    "te_graphs": Constants(
        pointwise=1.2, kernels=0, routed_launch_s=0.0065, cast_bytes=4.0, matmul8=0.72, routing_passes=8.0
    ),
    "te_full": Constants(
        pointwise=1.2,
        kernels=0,
        routed_launch_s=0.0,
        cast_bytes=4.0,
        matmul8=0.72,
        routing_passes=6.0,
        attention=0.54,
        attention8=True,
    ),
    "xla": Constants(kernels=10),
}


def prior(stack: Stack) -> Constants:
    """The uncalibrated set of a software stack."""
    return _STACKS[stack]


def save_constants(constants: Constants, path: Path) -> None:
    """Write a set."""
    path.write_bytes(tomli_w.dumps(asdict(constants)).encode())


def load_constants(path: str | Path) -> Constants:
    """Read a set.

    Raises:
        ValueError: Missing file, unknown constant or a value that nothing can have.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no constants file {str(path)!r}: write one with titan-train plan calibrate.")
    table = {name: value for name, value in read_toml(file).items() if _FORMER.get(name) != value}
    unknown = set(table) - {f.name for f in fields(Constants)}
    if unknown:
        raise ValueError(f"{path} has unknown constants {', '.join(sorted(unknown))}.")
    for name, value in table.items():
        wanted = str if name == "source" else (int, float)
        if not isinstance(value, wanted) or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{path}: {name} = {value!r} is not a {'text' if name == 'source' else 'finite number'}.")
        least, most = 1e-9 if name in _RATES else 0.0, _MOST_SPREAD if name == "spread" else 1e9
        if isinstance(value, int | float) and not least <= value <= most:
            raise ValueError(f"{path}: {name} = {value!r} must be a number from {least:g} to {most:g}.")
    return Constants(**table)
