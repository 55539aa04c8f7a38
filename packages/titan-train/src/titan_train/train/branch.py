"""What a branch takes of its parent, `checkpoint.start_from`: compared before any rank starts, from the checkpoint's index alone.

A branch continues the parent's weights, optimizer and data position, so all three must fit: the same tensors and arguments,
the same kind of optimizer, and the same samples in the same order. The ranks restore them, and refuse by the same rules what
was not here to be compared: data that is not prepared yet.
"""

import contextlib
from typing import Any

from titan_ckpt.load.reader import StepReader
from torch import nn

from titan_train.config import Config
from titan_train.data.loader.data_loader import check_position
from titan_train.optim import plan_groups
from titan_train.optim.build import check_kinds, check_saved_weights, kind_of, saved_kind
from titan_train.run_folder import checkpoint_folders, find_start
from titan_train.task import Task, TaskInputs
from titan_train.train.warm_start import check_saved_model, check_saved_settings


def check_branch(config: Config, whole: nn.Module, task: Task) -> None:
    """Refuse a branch that its parent's checkpoint does not fit.

    Args:
        config: The branch's, with ``checkpoint.start_from``.
        whole: Its whole model, on any device, with what is to be frozen.
        task: What it is trained on.

    Raises:
        ValueError: There is no such checkpoint, or it is of another model, another kind of optimizer, or other data.
    """
    start = config.checkpoint.start_from
    folder, step = find_start(start, "checkpoint.start_from")
    reader = StepReader(checkpoint_folders(folder)[step])
    asked = f"checkpoint.start_from={start!r}"
    check_saved_model(asked, folder, reader, whole)
    check_saved_settings(asked, folder, whole, config.model, None)
    check_saved_weights(reader, whole, asked)
    saved: dict[str, set[str]] = {}
    for key in reader.index.tensors["optim"]:
        fqn, _, name = key.partition("/")
        saved.setdefault(fqn, set()).update(saved_kind(name))
    own = {
        fqn: kind_of(config.optimizer, group, parameter)
        for group in plan_groups(whole, config.optimizer)
        for fqn, parameter in zip(group.fqns, group.parameters, strict=True)
    }
    check_kinds(config.optimizer.name, own, saved)
    if config.checkpoint.allow_data_change or any(source.stream for source in config.data.sources):
        return
    inputs: TaskInputs | None = None
    with contextlib.suppress(ValueError, OSError):  # not prepared yet
        if task.is_prepared(config):
            inputs = task.open(config)
    if inputs is not None and (position := _position(reader)) is not None:
        check_position(position, inputs.train)


def _position(reader: StepReader) -> dict[str, Any] | None:
    """The data's position that the first rank with one saved; None if none did."""
    ranks = range(reader.manifest.world_size)
    return next((state["data"] for rank in ranks if "data" in (state := reader.rank_state(rank))), None)
