"""Tokens, seconds and FLOPs to rates.

A rate is the sum of tokens over the sum of seconds since the last reading, never a division by a nominal number of
steps: so the first reading, and one after a window that was cut short, are as right as any other. Only seconds handed
in count, so validation and checkpoints do not look like slow steps.
"""

import time
from collections.abc import Callable
from typing import TypedDict


class Rates(TypedDict):
    """The rate fields of a `StepRecord`."""

    tokens_per_s: float
    tokens_per_s_per_rank: float
    tflops_per_gpu: float | None
    mfu: float | None
    elapsed_s: float


class Throughput:
    """Adds up the steps since the last reading."""

    def __init__(
        self,
        *,
        world_size: int,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        elapsed_before_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the wall clock.

        Args:
            world_size: Ranks that share the tokens.
            flops_per_token: Model FLOPs of one token, forward and backward; None leaves TFLOP/s and MFU out.
            peak_flops: FLOP/s one device can reach at most (`device_peak_flops`); None leaves MFU out.
            elapsed_before_s: Seconds of training before this process, when a run is resumed.
            clock: Seconds, monotonic.

        Raises:
            ValueError: A count or a rate is not positive.
        """
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1.")
        for name, value in (("flops_per_token", flops_per_token), ("peak_flops", peak_flops)):
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be positive; None stands for unknown.")
        self._world_size = world_size
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._clock = clock
        self._started = clock() - elapsed_before_s
        self._tokens = 0
        self._seconds = 0.0
        self._last_tokens_per_s = 0.0

    def update(self, tokens: int, seconds: float) -> None:
        """Add one step: its tokens over all ranks, and how long it took."""
        self._tokens += tokens
        self._seconds += seconds

    def rates(self) -> Rates:
        """Rates over the steps since the last reading; with none since then, the last reading again."""
        if self._seconds > 0:
            self._last_tokens_per_s = self._tokens / self._seconds
            self._tokens, self._seconds = 0, 0.0
        tokens_per_s = self._last_tokens_per_s
        per_rank = tokens_per_s / self._world_size
        flops = None if self._flops_per_token is None else per_rank * self._flops_per_token
        return Rates(
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_rank=per_rank,
            tflops_per_gpu=None if flops is None else flops / 1e12,
            mfu=None if flops is None or self._peak_flops is None else flops / self._peak_flops,
            elapsed_s=self._clock() - self._started,
        )
