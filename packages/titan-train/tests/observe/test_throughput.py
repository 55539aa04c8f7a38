import time
from types import SimpleNamespace

import pytest
import torch
from titan_train.config import parse_config
from titan_train.observe import Throughput, read_history
from titan_train.train.observer import StepInfo, StepResult
from titan_train.train.run_log import RunLog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_right_for_the_first_step_and_for_a_window_cut_short():
    throughput = Throughput(world_size=4, flops_per_token=1e6, peak_flops=1e9)
    throughput.update(1000, 2.0)
    first = throughput.rates()
    assert first["tokens_per_s"] == 500
    assert first["tokens_per_s_per_rank"] == 125
    assert first["tflops_per_gpu"] == pytest.approx(125e6 / 1e12)
    assert first["mfu"] == pytest.approx(0.125)
    for seconds in (1.0, 3.0, 4.0):  # three steps, unequal: 3000 tokens in 8 s, whatever a nominal window says
        throughput.update(1000, seconds)
    assert throughput.rates()["tokens_per_s"] == 375


def test_a_reading_without_a_new_step_repeats_the_last_one():
    throughput = Throughput(world_size=1)
    assert throughput.rates()["tokens_per_s"] == 0
    throughput.update(10, 2.0)
    assert throughput.rates()["tokens_per_s"] == throughput.rates()["tokens_per_s"] == 5


def test_an_unknown_device_has_no_mfu_and_unknown_flops_have_neither():
    unknown_device = Throughput(world_size=1, flops_per_token=1e6, peak_flops=None)
    unknown_device.update(10, 1.0)
    assert unknown_device.rates()["mfu"] is None
    assert unknown_device.rates()["tflops_per_gpu"] == pytest.approx(1e-5)
    unknown_model = Throughput(world_size=1, flops_per_token=None, peak_flops=1e12)
    unknown_model.update(10, 1.0)
    assert unknown_model.rates()["mfu"] is None
    assert unknown_model.rates()["tflops_per_gpu"] is None


def test_elapsed_time_counts_from_the_start_of_training_over_a_resume():
    clock = Clock()
    throughput = Throughput(world_size=1, elapsed_before_s=50.0, clock=clock)
    clock.now += 7
    assert throughput.rates()["elapsed_s"] == 57


@pytest.mark.parametrize("wrong", [{"world_size": 0}, {"flops_per_token": 0.0}, {"peak_flops": -1.0}])
def test_throughput_rejects_numbers_that_would_make_nonsense_rates(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        Throughput(**({"world_size": 1} | wrong))


def test_a_logged_rate_is_over_all_steps_since_the_last_logged_one(tmp_path):
    config = parse_config({"train": {"steps": 2}, "metrics": {"log_every": 2}, "model": {"seq_len": 100}})
    report = SimpleNamespace(flops_per_token=None, fused=None)
    run_log = RunLog(config, SimpleNamespace(found=None))
    run_log.open(tmp_path, 0)
    run_log.on_start(SimpleNamespace(model=SimpleNamespace(report=report), device=torch.device("cpu")))
    for step, seconds in ((1, 1.0), (2, 3.0)):
        info = StepInfo(
            step=step, result=StepResult(1.0, 1.0, 100, False, (), {}), learning_rates=[1e-3], sequences=1,
            samples_consumed=step, data_wait_s=0.0, started=time.perf_counter() - seconds,
        )  # fmt: skip
        run_log.on_step(info)
    run_log.on_end()
    history = read_history(tmp_path)
    assert history.steps == [2]
    assert history.curves["tokens_per_s"].mean[0] == pytest.approx(50, rel=0.05)  # 200 tokens in 4 s
