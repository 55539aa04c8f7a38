"""Every legal choice of degrees and batch.

Legal: tp divides the heads and stays inside one domain; cp leaves at least 1,024 tokens per rank and cuts the sequence into
2 x cp x tp equal parts; pp leaves each stage a block; ep divides the experts and the dp_shard x cp x tp ranks; the
microbatch divides a rank's share of the batch; a pipeline has a microbatch for each rank at least, and interleaved schedules
a multiple of pp.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from titan_train.config.optimizer import ADAMW_STATE_BYTES
from titan_train.models.shape import ExpertsShape, ModelShape
from titan_train.planner.cost.constants import Constants
from titan_train.planner.cost.schedules import schedules_for
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.setup import Precision, Setup, Stack, States
from titan_train.planner.shapes import returns_logits

_LEAST_TOKENS = 1024
_STAGES = (2, 4)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked for."""

    shape: ModelShape
    machine: Machine
    gpus: int
    seq_len: int
    global_batch: int
    stack: Stack = "compile"
    precisions: tuple[Precision, ...] = ("bf16",)
    states: tuple[States, ...] = ("fp32", "bf16", "int8")
    """Formats of AdamW's moments, the one of the list first; what the others buy has lists of its own."""
    fixed: dict[str, int] = field(default_factory=dict[str, int])
    """Degrees that are given, such as {"tp": 8}."""
    uncut: tuple[str, ...] = ()
    """Axes over which the model cannot be cut: `titan_train.planner.shapes.uncut_axes`."""
    max_memory_gib: float = 0.0
    """0 takes 92 % of the machine's memory: allocated is not reserved, and estimates of pipelines read low."""
    weight_bytes: float = 4.0
    """As in `Setup`."""
    state_bytes: tuple[float, float] = (8.0, 8.0)
    """As in `Setup`, with the first format of ``states``."""
    grad_bytes: int = 4
    """As in `Setup`."""
    min_speedup: float = 1.0
    """As in `Setup`."""
    task: Literal["pretrain", "lora"] = "pretrain"
    """As in `Setup`."""
    constants: Constants | None = None
    """A set of one's own (`titan-train plan calibrate`) instead of the shipped ones."""

    def __post_init__(self) -> None:
        for name in ("gpus", "seq_len", "global_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        unknown = set(self.fixed) - {"pp", "dp_replicate", "cp", "tp", "ep", "microbatch"}
        if unknown:
            raise ValueError(
                f"cannot fix {', '.join(sorted(unknown))}. Fix pp, dp_replicate, cp, tp, ep or microbatch; dp_shard follows."
            )

    def state_bytes_with(self, states: States) -> tuple[float, float]:
        """Bytes of optimizer state for each parameter of blocks and ends, with another format of AdamW's moments."""
        fewer = ADAMW_STATE_BYTES[self.states[0]] - ADAMW_STATE_BYTES[states]
        return self.state_bytes[0] - fewer, self.state_bytes[1] - fewer

    @property
    def limit_bytes(self) -> float:
        """Bytes that a setup may allocate on one device."""
        return self.max_memory_gib * 2**30 if self.max_memory_gib else 0.92 * self.machine.memory_bytes


def degrees(request: PlanRequest) -> Iterator[dict[str, int]]:
    """Legal degrees, without batch and schedule."""
    shape, gpus = request.shape, request.gpus
    experts = [b.ffn for b in shape.blocks if isinstance(b.ffn, ExpertsShape)]
    if not experts and request.fixed.get("ep", 1) > 1:
        return
    for tp in _values(request, "tp", min(request.machine.domain, 64)):
        if not all(block.splits(tp) for block in shape.blocks):
            continue
        for cp in _values(request, "cp", max(1, request.seq_len // _LEAST_TOKENS)):
            if request.seq_len % (2 * cp * tp) and cp * tp > 1:
                continue
            for pp in _values(request, "pp", shape.num_layers):
                if gpus % (tp * cp * pp):
                    continue
                dp = gpus // (tp * cp * pp)
                if request.global_batch % dp:
                    continue
                for replicate in _replicas(request, dp, tp * cp):
                    ranks = dp // replicate * cp * tp
                    copies = copied(request.stack, replicate, dp // replicate * cp)
                    for ep in _values(request, "ep", ranks) if experts else (1,):
                        if copies and ep > 1:  # experts go over ranks that shard parameters
                            continue
                        if ranks % ep or any(e.num_experts % ep for e in experts):
                            continue
                        yield {
                            "tp": tp,
                            "cp": cp,
                            "pp": pp,
                            "dp_replicate": replicate,
                            "dp_shard": dp // replicate,
                            "ep": ep,
                        }


def copied(stack: Stack, replicate: int, shards: int) -> bool:
    """Whether a run of these degrees is DDP: each data-parallel rank has a whole copy, and the stack is the trainer's."""
    return replicate > 1 and shards == 1 and not stack.startswith("te")


def batches(request: PlanRequest, chosen: dict[str, int]) -> Iterator[dict[str, int | str]]:
    """Microbatch and schedule for given degrees."""
    pp, dp = chosen["pp"], chosen["dp_replicate"] * chosen["dp_shard"]
    local = request.global_batch // dp
    for micro in divisors(local):
        if micro != request.fixed.get("microbatch", min(micro, 16)):
            continue
        m = local // micro
        if pp == 1:
            yield {"microbatch": micro, "schedule": "1f1b", "stages_per_rank": 1}
            continue
        if m < pp:
            continue
        for schedule, stages in schedules_for(pp, m, request.shape.num_layers, _STAGES):
            yield {"microbatch": micro, "schedule": schedule, "stages_per_rank": stages}


def base_setup(request: PlanRequest) -> Setup:
    """The choices that are not searched."""
    te, states = request.stack.startswith("te"), request.states[0]
    return Setup(
        states=states,
        seq_len=request.seq_len,
        global_batch=request.global_batch,
        stack=request.stack,
        sharding="zero1" if te else "fsdp",
        dispatcher="hybridep" if te else "alltoall",
        loss="fused" if te else "eager" if returns_logits(request.shape.name) else "chunked",
        weight_bytes=request.weight_bytes,
        state_bytes=request.state_bytes,
        grad_bytes=request.grad_bytes,
        min_speedup=request.min_speedup,
        task=request.task,
    )


def _values(request: PlanRequest, name: str, most: int) -> tuple[int, ...]:
    if name in request.fixed:
        return (request.fixed[name],)
    if name in request.uncut:
        return (1,)
    return tuple(n for n in divisors(request.gpus) if n <= most)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Of 24 devices also 3, 6 and 12 ranks make a degree."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _replicas(request: PlanRequest, dp: int, inner: int) -> tuple[int, ...]:
    """One copy, or copies whose shards fill one to four domains."""
    if "dp_replicate" in request.fixed:
        wanted = request.fixed["dp_replicate"]
        return (wanted,) if dp % wanted == 0 else ()
    found = {1}
    for domains in (1, 2, 4):
        shard = domains * request.machine.domain // inner
        if shard > 1 and dp % shard == 0 and dp > shard:
            found.add(dp // shard)
    return tuple(sorted(found))
