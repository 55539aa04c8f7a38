"""Build the optimizer of a run, and check what a checkpoint restored into it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from titan_fsdp import is_dtensor
from torch import nn

from titan_train.config.optimizer import OptimizerConfig
from titan_train.optim.groups import plan_groups
from titan_train.parallel.tied import ParameterNames

# fused AdamW and SGD exist for these; only AdamW's takes DTensors (checked on torch 2.11 and 2.15 by a test)
_FUSED_DEVICES = ("cuda", "cpu")
_KINDS = {"exp_avg": "adamw", "momentum_buffer": "sgd"}


def build_optimizer(
    model: nn.Module | Sequence[nn.Module],
    config: OptimizerConfig,
    *,
    names: ParameterNames | None = None,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer over a model's trainable parameters.

    Args:
        model: Already sharded and materialized: the optimizer holds the parameters it is given. Or the parts of one
            that this rank has (pipeline stages).
        config: Kind, hyperparameters, and exceptions by pattern.
        names: The whole model's, where ``model`` is part of one: a pattern may be for a parameter that another rank has.
        make: Builds an optimizer of yours from the groups; None builds ``config.name``.

    Returns:
        An optimizer whose groups carry ``lr`` (already scaled), ``weight_decay`` and ``param_names``, the clean names
        of their parameters.

    Raises:
        ValueError: A pattern is found in no parameter's name, patterns contradict each other for a tied weight, or the
            model has nothing to train.
    """
    groups = plan_groups(model, config, names=names)
    if not groups:
        kind = type(model).__name__ if isinstance(model, nn.Module) else "this rank's part of the model"
        raise ValueError(f"{kind} has no parameter with requires_grad: there is nothing to train.")
    param_groups: list[dict[str, Any]] = [
        {
            "params": list(zip(group.fqns, group.parameters, strict=True)),
            "lr": config.lr * group.lr_scale,
            "weight_decay": group.weight_decay,
            **({"frozen_steps": group.frozen_steps} if config.frozen_steps else {}),
        }
        for group in groups
    ]
    if make is not None:
        return make(param_groups)
    parameters = [p for group in groups for p in group.parameters]
    takes = all(p.device.type in _FUSED_DEVICES for p in parameters)
    takes = takes and (config.name == "adamw" or not any(is_dtensor(p) for p in parameters))
    fused = True if config.fused == "auto" and takes else None
    if config.name == "sgd":
        return torch.optim.SGD(param_groups, lr=config.lr, momentum=config.beta1, fused=fused)
    return torch.optim.AdamW(
        param_groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused
    )


def check_restored(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse the restored state of another kind of optimizer than ``name`` ("adamw" or "sgd").

    Settings are the configuration's: a checkpoint is restored with ``TrainState(own_settings=True)``. So weight decay and betas
    may change at a resume, parameters may be frozen or thawed, and tables of patterns may come and go. The kind must stay.

    Raises:
        ValueError: The checkpoint was saved with it.
    """
    saved = {kind for state in optimizer.state.values() for key, kind in _KINDS.items() if key in state} - {name}
    if saved:
        raise ValueError(
            f"optimizer.name={name!r}, and the checkpoint holds the state of {min(saved)!r}, which {name!r} cannot use. Resume "
            f"with optimizer.name={min(saved)!r}, or start another run from the weights: titan-train export RUN --to hf, then "
            "model.init='hf:DIR'."
        )
