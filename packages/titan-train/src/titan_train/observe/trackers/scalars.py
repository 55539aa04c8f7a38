"""A record as named numbers, the same names in every tracker."""

import math

from titan_train.observe.records import StepRecord, ValidationRecord

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
    """Name to value; what is unknown or not finite is left out."""
    routing = {f"moe/{name}": value for name, value in record.routing.items() if math.isfinite(value)}
    split = {f"time/{name.replace(' ', '_')}_s": value for name, value in record.split.items()}
    memory = {f"memory/{name}": value for name, value in record.memory.items()}
    return _scalars(record, _STEP) | routing | split | memory


def validation_scalars(record: ValidationRecord) -> dict[str, float]:
    """Name to value; what is unknown or not finite is left out."""
    parts = {f"validation/loss/{name}": value for name, value in record.parts.items() if math.isfinite(value)}
    return _scalars(record, _VALIDATION) | parts


def _scalars(record: StepRecord | ValidationRecord, tags: dict[str, str]) -> dict[str, float]:
    values = {tag: getattr(record, name) for tag, name in tags.items()}
    return {tag: value for tag, value in values.items() if value is not None and math.isfinite(value)}
