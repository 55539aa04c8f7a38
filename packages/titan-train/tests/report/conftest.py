import json
from collections.abc import Callable
from pathlib import Path

import pytest
from titan_train.observe import JsonlTracker, RunInfo, StepRecord, ValidationRecord


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """Writes the folder of a run with the given number of steps, as a training run leaves it."""

    def make(steps: int, *, name="quickstart", status="finished", error=None, **changes) -> Path:
        run_dir = tmp_path / name
        tracker = JsonlTracker(run_dir)
        info = RunInfo(run_dir, device="cpu", world_size=2, parameters=5_243_136, command=["titan-train", "run", "x"])
        config = f"[run]\nname = {json.dumps(name)}\n[train]\nsteps = 40\n[data.weights]\na = 0.5\n"
        (run_dir / "config.toml").write_text(config)
        (run_dir / "layout.txt").write_text("axis      size\ndp_shard     2\n")
        for step in range(1, steps + 1):
            tracker.log_step(make_record(step, **changes))
            if step % 10 == 0:
                tracker.log_validation(ValidationRecord(step=step, loss=5.0, bits_per_byte=2.0, tokens=64))
                tracker.log_event("checkpoint_saved", step=step, seconds=0.25)
        tracker.close()
        if status is not None:
            info.finish(status, step=steps, error=error)
        return run_dir

    return make


def make_record(step: int, **changes: object) -> StepRecord:
    values: dict[str, object] = {
        "step": step,
        "loss": 10.0 / step**0.3,
        "grad_norm": 0.8,
        "lr": 3e-4,
        "tokens": 1000,
        "samples_consumed": 8 * step,
        "tokens_per_s": 2000.0,
        "tokens_per_s_per_rank": 1000.0,
        "tflops_per_gpu": None,
        "mfu": None,
        "peak_mem_gib": 0.41,
        "data_wait_s": 0.05,
        "step_time_s": 0.5,
        "skipped": False,
        "elapsed_s": 0.5 * step,
    }
    return StepRecord(**(values | changes))
