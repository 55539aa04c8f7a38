from collections.abc import Callable

import pytest
from titan_train.observe import StepRecord


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    """Makes the record of a step; keyword arguments replace its values."""

    def make(step: int, **changes: object) -> StepRecord:
        values: dict[str, object] = {
            "step": step,
            "loss": 10.0 / step**0.3,
            "grad_norm": 0.8,
            "lr": 3e-4,
            "tokens": 8192,
            "samples_consumed": 8 * step,
            "tokens_per_s": 12345.6,
            "tokens_per_s_per_rank": 6172.8,
            "tflops_per_gpu": None,
            "mfu": None,
            "peak_mem_gib": 0.41,
            "data_wait_s": 0.001,
            "step_time_s": 0.1,
            "skipped": False,
            "elapsed_s": 0.1 * step,
        }
        return StepRecord(**(values | changes))

    return make
