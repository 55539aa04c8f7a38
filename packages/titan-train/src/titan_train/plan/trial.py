"""A trial run of a few steps, with the schedule of a long one."""

import dataclasses

from titan_train.config import Config


def fit_warmup(config: Config) -> tuple[Config, str]:
    """Shorten a warm-up that is longer than the run, as happens when only ``train.steps`` is lowered for a trial.

    Returns:
        The configuration, and one line that says what was changed; empty if nothing was.
    """
    schedule, steps = config.schedule, config.train.steps
    if schedule.warmup_steps <= steps:
        return config, ""
    warmup = max(1, steps // 5)
    shorter = dataclasses.replace(
        schedule, warmup_steps=warmup, decay_steps=-1 if schedule.decay_steps > 0 else schedule.decay_steps
    )
    note = f"schedule.warmup_steps={schedule.warmup_steps} is more than train.steps={steps}: shortened to {warmup} for this run"
    return dataclasses.replace(config, schedule=shorter), note
