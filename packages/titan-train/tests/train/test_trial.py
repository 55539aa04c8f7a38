import pytest
from titan_train.config import parse_config
from titan_train.optim.schedule import check_schedule
from titan_train.parallel.layout.run import fit_warmup


@pytest.mark.parametrize(
    ("schedule", "steps", "warmup"),
    [
        ({"warmup_steps": 20}, 10, 2),
        ({"warmup_steps": 20}, 1, 1),
        ({"name": "wsd", "warmup_steps": 200, "decay_steps": 100}, 50, 10),
        ({"name": "wsd", "warmup_steps": 200, "decay_steps": 0}, 50, 10),
    ],
)
def test_a_trial_run_shortens_its_warm_up_and_says_so(schedule, steps, warmup):
    config, note = fit_warmup(parse_config({"schedule": schedule, "train": {"steps": steps}}))
    assert config.schedule.warmup_steps == warmup
    assert note.endswith(f"is more than train.steps={steps}: shortened to {warmup} for this run")
    check_schedule(config.schedule, steps)


@pytest.mark.parametrize("warmup", [-1, 0, 10])
def test_a_warm_up_that_fits_is_left_alone(warmup):
    config = parse_config({"schedule": {"warmup_steps": warmup}, "train": {"steps": 10}})
    assert fit_warmup(config) == (config, "")
