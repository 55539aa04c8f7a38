"""What a run records and shows the person who started it, and which steps are traced."""

import re
from dataclasses import dataclass
from typing import Literal

from titan_train.values import Count, CountOrOff, check_values

_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsConfig:
    """What a run records and shows. `metrics.jsonl` is always written."""

    log_every: Count = 1
    """Write metrics.jsonl every this many steps; the last step is always written."""

    split_every: CountOrOff = 20
    """Record every this many steps where the time of a step goes, by phase and mesh axis, and what holds the run up; 0
    disables."""

    activations_every: CountOrOff = 0
    """Record every this many steps the size of each block's activations, and of float8 layers the largest magnitude and the
    share that underflows, on rank 0; 0 disables. Slows these steps."""

    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    """auto redraws a block on a terminal and prints a key=value line every five seconds elsewhere; lines prints every step."""

    report: bool = True
    """Write report.html, one self-contained file, when the run ends."""

    tensorboard: bool = False
    """Write TensorBoard events to the run's folder too (needs the extra titan-train[tensorboard])."""

    wandb: bool = False
    """Send metrics to Weights & Biases too (needs the extra titan-train[wandb])."""

    wandb_project: str = "titan"
    """Project of the Weights & Biases run."""

    trackers: tuple[str, ...] = ()
    """Further places for metrics: mlflow, trackio, prometheus, opentelemetry (each needs the extra of its name), tensorboard,
    wandb, or one that an installed package adds."""

    def __post_init__(self) -> None:
        check_values("metrics", self)
        if self.wandb and not self.wandb_project:
            raise ValueError(
                "metrics.wandb_project is empty, but metrics.wandb is on; name a project, such as 'titan'."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileConfig:
    """A trace of a few steps, one file per rank, for Perfetto (ui.perfetto.dev) and `titan-train report --trace`."""

    steps: str = ""
    """First and last step to trace, such as "10:13"; empty disables. Files go to the run's folder, traces/."""

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last step; None if nothing is traced."""
        match = _RANGE.fullmatch(self.steps)
        return (int(match[1]), int(match[2])) if match else None

    def __post_init__(self) -> None:
        if self.steps and (self.range is None or not 1 <= self.range[0] <= self.range[1]):
            raise ValueError(
                f"profile.steps={self.steps!r} must be FIRST:LAST, two steps from 1 on in rising order, such as 10:13."
            )
        if self.range is not None and self.range[1] - self.range[0] >= 100:
            raise ValueError(
                f"profile.steps={self.steps!r} spans {self.range[1] - self.range[0] + 1} steps. A trace of more than 100 is too "
                "large to open. Trace a few, such as 10:13."
            )
