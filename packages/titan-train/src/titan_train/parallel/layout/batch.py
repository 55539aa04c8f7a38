"""How the global batch is divided over ranks and micro-batches."""

import math
from dataclasses import dataclass

from titan_mesh import Layout

from titan_train.config import Config
from titan_train.config.ramp import BatchRamp

_MOST_TOKENS = 2**24
_MOST_MICROBATCHES = 2**16


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """How one optimizer step's sequences are cut over ranks and micro-batches."""

    global_batch: int
    """Sequences in one optimizer step."""

    dp_size: int
    """Data-parallel ranks: dp_replicate x dp_shard."""

    microbatch: int
    """Sequences in one forward and backward of one rank."""

    ramp: BatchRamp
    """The sequences of each step, which rise to ``global_batch``."""

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in one optimizer step; a pipeline runs them all in one schedule."""
        return self.global_batch // (self.dp_size * self.microbatch)

    @property
    def accumulations(self) -> list[int]:
        """The same of every batch size of the ramp; the last is `accumulation`."""
        return [size // (self.dp_size * self.microbatch) for size in self.ramp.sizes]


def tokens_at_once(plan: BatchPlan, config: Config, layout: Layout) -> int:
    """Tokens of one forward of a rank."""
    return plan.microbatch * config.model.seq_len // layout.spec.cp


def plan_batch(config: Config, layout: Layout) -> BatchPlan:
    """Cut the global batch over the data-parallel ranks.

    Raises:
        ValueError: The batch does not divide, and the message names the nearest batch that does; or a micro-batch or their
            number is beyond any device.
    """
    dp_size = layout.spec.dp_replicate * layout.spec.dp_shard
    batch, micro = config.train.global_batch, config.train.microbatch
    ramp = config.train.ramp(config.model.seq_len)
    unit = dp_size * (micro or 1)
    for size in ramp.sizes[:-1]:
        if size % unit and not batch % unit:
            raise ValueError(
                f"train.ramp_from={config.train.ramp_from} leads over a batch of {size} sequences, which {dp_size} data-parallel "
                f"ranks{f' with train.microbatch={micro}' if micro else ''} cannot share evenly: every size must be a multiple "
                f"of {unit}. Choose train.ramp_from and train.ramp_by so."
            )
    if batch % unit:
        below, above = batch // unit * unit, (batch // unit + 1) * unit
        near = above if below == 0 or above - batch < batch - below else below
        per_rank = f" in micro-batches of train.microbatch={micro}" if micro else ""
        raise ValueError(
            f"train.global_batch={batch} cannot be cut evenly over {dp_size} data-parallel ranks{per_rank}: it must be a "
            f"multiple of {unit}. The nearest valid choice is {near}."
        )
    whole_share = 1 if layout.spec.pp > 1 else math.gcd(*ramp.sizes) // dp_size
    plan = BatchPlan(global_batch=batch, dp_size=dp_size, microbatch=micro or whole_share, ramp=ramp)
    tokens = tokens_at_once(plan, config, layout)
    if tokens > _MOST_TOKENS:
        raise ValueError(
            f"train.microbatch={plan.microbatch} sequences of model.seq_len={config.model.seq_len} are {tokens:.4g} tokens per "
            f"rank in one forward; no device holds more than {_MOST_TOKENS:,}. Lower train.microbatch or model.seq_len, or "
            "raise parallel.cp."
        )
    if plan.accumulation > _MOST_MICROBATCHES:
        raise ValueError(
            f"train.global_batch={batch} is {plan.accumulation:.4g} micro-batches per rank in one step; at most "
            f"{_MOST_MICROBATCHES:,} are supported. Raise train.microbatch, or lower train.global_batch."
        )
    return plan
