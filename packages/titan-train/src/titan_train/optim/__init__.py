"""Optimizers with parameter groups by pattern, and learning-rate schedules."""

from typing import TYPE_CHECKING

from titan_train.lazy import first_use

if TYPE_CHECKING:
    from titan_train.optim.build import build_optimizer, check_restored
    from titan_train.optim.groups import ParameterGroup, plan_groups
    from titan_train.optim.schedule import Scheduler, build_scheduler, lr_factor

__all__ = [
    "ParameterGroup",
    "Scheduler",
    "build_optimizer",
    "build_scheduler",
    "check_restored",
    "lr_factor",
    "plan_groups",
]

__getattr__ = first_use(__name__)
