"""The optimizer's settings when a run resumes: those of the configuration, as the learning rate's are.

A checkpoint carries the settings that its optimizer had. A run that resumes with another weight decay would silently go on
with the old one.
"""

from collections.abc import Sequence
from typing import Any

import torch

# not the schedule's, and not those that say on which device a state lies, which has to fit the restored state
_LEFT = ("params", "lr", "fused", "foreach", "capturable")
_KINDS = {"betas": "adamw", "momentum": "sgd"}


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What was configured for each parameter group: weight decay, betas and the like."""
    return [{key: value for key, value in group.items() if key not in _LEFT} for group in optimizer.param_groups]


def put_back(settings: Sequence[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
    """After a checkpoint was restored into the optimizer: put back what `settings_of` found before.

    Raises:
        ValueError: The checkpoint was saved with another kind of optimizer, whose state this one cannot use.
    """
    for ours, group in zip(settings, optimizer.param_groups, strict=True):
        for key, saved in _KINDS.items():
            if key in group and key not in ours:
                name = next(kind for known, kind in _KINDS.items() if known in ours)
                raise ValueError(
                    f"optimizer.name={name!r}, and the checkpoint holds the state of {saved!r}, which {name!r} cannot use. "
                    f"Resume with optimizer.name={saved!r}, or start another run from the weights: titan-train export RUN "
                    "--to hf, then model.init='hf:DIR'."
                )
        if "frozen" not in ours:  # the schedule keeps it up to date where the configuration freezes anything
            group.pop("frozen", None)
        group.update({key: value for key, value in ours.items() if key != "frozen"})
