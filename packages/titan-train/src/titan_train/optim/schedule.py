"""Learning-rate schedules as a pure function of the step.

Warm-up-stable-decay (MiniCPM, arXiv:2404.06395; 1 - sqrt decay, arXiv:2405.18392) keeps the peak rate until a final
decay, so a run can be extended without having planned its length. Cosine (arXiv:1608.03983) falls all the way.

Step k, counted from 0, of a run of T steps with W warm-up steps has the factor (k + 1) / W while k < W, so that the
first step already learns and step W - 1 is at the peak. A decay over D steps that starts at step T - D has progress
t = (k - (T - D)) / D, so that its first step is still at the peak and step T, one past the last, at the minimum.
"""

import math
from typing import TYPE_CHECKING, Any, Literal

from titan_train.config.optimizer import ScheduleConfig

if TYPE_CHECKING:
    import torch

Shape = Literal["linear", "sqrt", "cosine"]


def lr_factor(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    decay_shape: Shape = "linear",
    min_lr_factor: float = 0.0,
) -> float:
    """The fraction of the peak learning rate that a step uses.

    Args:
        step: From 0. Beyond ``total_steps`` the factor stays at the end of the decay.
        total_steps: Steps of the run, T.
        warmup_steps: Steps of the linear rise, W.
        decay_steps: Steps of the final decay, D; 0 stays at the peak. Cosine schedules set it to T - W.
        decay_shape: 1 - t, 1 - sqrt(t) or (1 + cos(pi t)) / 2 of the decay's progress t.
        min_lr_factor: Where the decay ends.

    Returns:
        A number in [0, 1].
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if decay_steps == 0 or step < total_steps - decay_steps:
        return 1.0
    t = min(1.0, (step - (total_steps - decay_steps)) / decay_steps)
    shapes = {"linear": 1.0 - t, "sqrt": 1.0 - math.sqrt(t), "cosine": (1.0 + math.cos(math.pi * t)) / 2}
    falling = shapes[decay_shape]
    return min_lr_factor + (1.0 - min_lr_factor) * falling


class Scheduler:
    """Sets an optimizer's learning rates, step by step; its whole state is the number of the step.

    The peak rates are those the optimizer was built with, so that after a resume the configuration counts, not what
    an old optimizer state carried.
    """

    def __init__(self, optimizer: "torch.optim.Optimizer", config: ScheduleConfig, total_steps: int) -> None:
        """Set the rates of step 0; see `build_scheduler`."""
        self._optimizer = optimizer
        self._peak_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._frozen_steps = [int(group.pop("frozen_steps", 0)) for group in optimizer.param_groups]
        self._schedule = check_schedule(config, total_steps)
        self._step = 0
        self._apply()

    def step(self) -> None:
        """Go on to the next step: call after every optimizer step, also after one that was skipped."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group, as now set."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """The number of the next step."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved step: load the optimizer's state first, as this sets its learning rates."""
        self._step = int(state["step"])
        self._apply()

    def _apply(self) -> None:
        factor = lr_factor(self._step, **self._schedule)
        for group, peak, frozen in zip(self._optimizer.param_groups, self._peak_lrs, self._frozen_steps, strict=True):
            group["lr"] = 0.0 if self._step < frozen else peak * factor
            if any(self._frozen_steps):  # for `drop_frozen_gradients`
                group["frozen"] = self._step < frozen


def frozen_parameters(optimizer: "torch.optim.Optimizer") -> "list[torch.nn.Parameter]":
    """What ``optimizer.frozen_steps`` does not train yet."""
    return [p for group in optimizer.param_groups if group.get("frozen", False) for p in group["params"]]


def drop_frozen_gradients(optimizer: "torch.optim.Optimizer") -> None:
    """Drop the gradients whose parameters ``optimizer.frozen_steps`` does not train yet.

    Without a gradient the optimizer passes a parameter over: neither weight nor running means nor the count of steps, by which
    AdamW corrects young means, move. The gradient's norm is that of what is trained.
    """
    for parameter in frozen_parameters(optimizer):
        parameter.grad = None


def build_scheduler(optimizer: "torch.optim.Optimizer", config: ScheduleConfig, total_steps: int) -> Scheduler:
    """Build the schedule of a run.

    Args:
        optimizer: As built, before any state is loaded: its groups' rates are the peaks.
        config: Shape and lengths.
        total_steps: Optimizer steps of the whole run.

    Raises:
        ValueError: Warm-up and decay do not fit into the run.
    """
    return Scheduler(optimizer, config, total_steps)


def check_schedule(config: ScheduleConfig, total_steps: int) -> dict[str, Any]:
    """The keyword arguments of `lr_factor` that a configuration means.

    Raises:
        ValueError: Warm-up and decay do not fit into the run.
    """
    if total_steps < 1:
        raise ValueError(f"train.steps={total_steps} must be at least 1; the nearest valid choice is 1.")
    warmup = total_steps // 50 if config.warmup_steps == -1 else config.warmup_steps
    if warmup > total_steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup} is more than train.steps={total_steps}: the run would end before its "
            f"peak. The nearest valid choice is {total_steps}."
        )
    decay, shape = 0, config.decay_shape
    if config.name == "cosine":
        decay, shape = total_steps - warmup, "cosine"
    elif config.name == "wsd":
        decay = min(total_steps // 5, total_steps - warmup) if config.decay_steps == -1 else config.decay_steps
        if warmup + decay > total_steps:
            raise ValueError(
                f"schedule.decay_steps={decay} and {warmup} warm-up steps do not fit into train.steps={total_steps}. "
                f"The nearest valid choice is decay_steps={total_steps - warmup}."
            )
    return {
        "total_steps": total_steps,
        "warmup_steps": warmup,
        "decay_steps": decay,
        "decay_shape": shape,
        "min_lr_factor": config.min_lr_factor,
    }
