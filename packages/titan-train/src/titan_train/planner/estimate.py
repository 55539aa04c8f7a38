"""Estimate one setup: time by term, memory by use, tokens per second with an interval, MFU by both conventions."""

import math
from dataclasses import dataclass

from titan_train.models.shape import ModelShape
from titan_train.planner.cost.constants import Constants, prior
from titan_train.planner.cost.step import StepTime, step_time
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.memory.peak import MemoryPeak, memory_peak
from titan_train.planner.setup import Setup


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What a setup would do."""

    shape: ModelShape
    machine: Machine
    setup: Setup
    constants: Constants
    time: StepTime
    memory: MemoryPeak
    measured: str = ""
    """Which operators came from the machine's own tables; empty where it has none."""

    @property
    def tokens_per_s(self) -> float:
        """Per device."""
        return self.setup.global_batch * self.setup.seq_len / self.setup.world_size / self.time.total

    @property
    def interval(self) -> tuple[float, float]:
        """Tokens per second per device: 80 % of measured rows that were not fitted lie inside such an interval."""
        width = math.exp(1.2816 * self.constants.spread)
        return self.tokens_per_s / width, self.tokens_per_s * width

    def mfu(self, *, causal: bool) -> float:
        """Model FLOP/s over the bf16 peak; attention counted causally or in full."""
        return self.tokens_per_s * self.shape.flops_per_token(self.setup.seq_len, causal=causal) / self.machine.peak


def estimate(shape: ModelShape, machine: Machine, setup: Setup, constants: Constants | None = None) -> StepEstimate:
    """Estimate ``setup`` on ``machine``."""
    constants, tables = constants or prior(setup.stack), machine.tables
    if tables is not None:
        tables.answered.clear()
    time = step_time(shape, machine, constants, setup)
    measured = tables.describe() if tables is not None else ""
    return StepEstimate(shape, machine, setup, constants, time, memory_peak(shape, setup), measured)
