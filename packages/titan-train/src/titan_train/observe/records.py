"""What is known about one step and one validation, as records and as named numbers; and what takes them."""

import math
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step, as seen by the whole run."""

    step: int
    """Optimizer steps made, this one included; the first is 1."""
    loss: float
    """Mean loss over the valid tokens of all ranks, nats per token; not finite when the step was skipped for it."""
    grad_norm: float
    """Norm of the whole gradient before clipping."""
    lr: float
    """Learning rate used by this step: ``optimizer.lr`` as scheduled, before what scales or freezes some parameters."""
    tokens: int
    """Tokens of this step, over all ranks."""
    samples_consumed: int
    """Sequences consumed since the start of training, this step's included."""
    tokens_per_s: float
    """Tokens per second of all ranks together, while stepping (no validation, no checkpoints)."""
    tokens_per_s_per_rank: float
    """`tokens_per_s` divided by the number of ranks."""
    tflops_per_gpu: float | None
    """Model TFLOP/s of one rank; None where the model's FLOPs per token are unknown."""
    mfu: float | None
    """Model FLOPs utilisation in [0, 1]; None where the device's peak is unknown."""
    peak_mem_gib: float
    """Most memory this rank has held: allocated on its GPU, or resident in the process on CPU."""
    data_wait_s: float
    """Seconds of this step spent waiting for data."""
    step_time_s: float
    """Seconds of this step, waiting for data included."""
    skipped: bool
    """Whether the update was left out because the loss or the gradient was not finite."""
    elapsed_s: float
    """Seconds since training began, validation and checkpoints included."""
    routing: dict[str, float] = field(default_factory=dict[str, float])
    """How evenly the experts of a mixture of experts were used, from `routing_statistics`."""
    mtp_losses: list[float] = field(default_factory=list[float])
    """Mean loss of each module that predicts a token further ahead, nats per token."""
    context: dict[str, float] = field(default_factory=dict[str, float])
    """How packed documents lay on the ranks that share them, from `ContextParallelism.dealt`."""
    split: dict[str, float] = field(default_factory=dict[str, float])
    """Where the time of the last steps went, seconds of a step at the median rank: ``forward``, ``backward``, …, and for
    each mesh axis ``tp exposed`` and ``tp hidden``. Only on every ``metrics.split_every``-th step."""
    memory: dict[str, float] = field(default_factory=dict[str, float])
    """Memory of this rank: ``active_gib``, ``reserved_gib``, ``peak_gib``, and ``retries`` of the allocator. On the same
    steps as `split`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRecord:
    """One pass over the validation batches."""

    step: int
    """Optimizer steps made before it."""
    loss: float
    """Mean loss over all its valid tokens, nats per token."""
    bits_per_byte: float | None
    """Loss per UTF-8 byte of text in bits, comparable between tokenizers; None where bytes are not known."""
    tokens: int
    """Tokens it scored, over all ranks."""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    """The loss by parts of the data, by name: of diffusion, by time. Empty where the task has none."""


class Tracker(Protocol):
    """Where metrics go. Called by one rank only; those of ``metrics.trackers`` on threads of their own."""

    def log_step(self, record: StepRecord) -> None:
        """Record one step."""
        ...

    def log_validation(self, record: ValidationRecord) -> None:
        """Record one validation."""
        ...

    def log_event(self, kind: str, *, step: int, **fields: object) -> None:
        """Record that something happened, such as ``checkpoint_saved``; ``fields`` are JSON values."""
        ...

    def close(self) -> None:
        """Write what is buffered and release the files. Safe to call twice."""
        ...


_STEP = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/lr": "lr",
    "train/samples": "samples_consumed",
    "speed/tokens_per_s": "tokens_per_s",
    "speed/tokens_per_s_per_rank": "tokens_per_s_per_rank",
    "speed/tflops_per_gpu": "tflops_per_gpu",
    "speed/mfu": "mfu",
    "speed/step_time_s": "step_time_s",
    "speed/data_wait_s": "data_wait_s",
    "memory/peak_mem_gib": "peak_mem_gib",
}
_VALIDATION = {"validation/loss": "loss", "validation/bits_per_byte": "bits_per_byte"}


def step_scalars(record: StepRecord) -> dict[str, float]:
    """A step as named numbers, the same names in every tracker; what is unknown or not finite is left out."""
    routing = {f"moe/{name}": value for name, value in record.routing.items() if math.isfinite(value)}
    split = {f"time/{name.replace(' ', '_')}_s": value for name, value in record.split.items()}
    memory = {f"memory/{name}": value for name, value in record.memory.items()}
    ahead = {f"train/mtp_loss/{k}": value for k, value in enumerate(record.mtp_losses, 1) if math.isfinite(value)}
    context = {f"context/{name}": value for name, value in record.context.items()}
    return _scalars(record, _STEP) | routing | ahead | context | split | memory


def validation_scalars(record: ValidationRecord) -> dict[str, float]:
    """The same of a validation."""
    parts = {f"validation/loss/{name}": value for name, value in record.parts.items() if math.isfinite(value)}
    return _scalars(record, _VALIDATION) | parts


def _scalars(record: StepRecord | ValidationRecord, tags: dict[str, str]) -> dict[str, float]:
    values = {tag: getattr(record, name) for tag, name in tags.items()}
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
