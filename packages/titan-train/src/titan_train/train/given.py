"""What a program gives to a `titan_train.Trainer` in place of the configuration's own: batches, loss, optimizer.

A run folder records the configuration, not these: a resume, and a `Trainer` on every rank, must be given them again.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from titan_mesh import Mesh
from torch import Tensor

from titan_train.config import Config
from titan_train.config.ramp import BatchRamp
from titan_train.data.loader.data_loader import DataLoader
from titan_train.data.loader.iterated import IteratedBatches, Loader
from titan_train.data.loader.source import BatchSource
from titan_train.parallel.layout.batch import BatchPlan
from titan_train.task import Task

Batches = BatchSource | Iterable[Any]
"""Numbered samples, or microbatches in order: see `titan_train.data.loader.iterated.IteratedBatches`."""
Loss = Callable[[Tensor, Any], Tensor]
"""From the model's output and the batch's target to the sum of the loss over its labels, a scalar."""
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""From parameter groups (``params``, ``lr``, ``weight_decay``) to an optimizer of them."""


def build_loader(
    batches: Batches,
    ramp: BatchRamp | None = None,
    *,
    config: Config,
    plan: BatchPlan,
    mesh: Mesh | None,
    device: torch.device,
    vocab_size: int | None,
    steps: int | None = None,
) -> Loader:
    """Microbatches of one rank, of ``steps`` steps or without end; ``ramp`` for training."""
    ramp = ramp or BatchRamp((plan.global_batch,))
    shared = config.context.dynamic  # all data-parallel ranks read the same rows
    if not hasattr(batches, "build_batch"):
        if shared:
            raise ValueError(
                "context.dynamic=true and data that is this rank's microbatches: all ranks share the documents of a micro-batch, "
                "so each must be able to read any row. Pass a BatchSource, or set context.dynamic=false."
            )
        fixed = config.parallel.pp > 1 or config.parallel.cp > 1
        if steps is not None and isinstance(batches, Iterator):
            raise ValueError(
                "validation_data is a generator or another iterator, which is used up after one validation. Pass a list, a "
                "DataLoader, or a BatchSource."
            )
        return IteratedBatches(
            cast("Iterable[Any]", batches), ramp=ramp, dp_size=plan.dp_size, rows=plan.microbatch,
            seq_len=config.model.seq_len, fixed=fixed, vocab_size=vocab_size, device=device, steps=steps,
            name="data" if steps is None else "validation_data", dp_rank=mesh.rank_in("dp") if mesh else 0,
            documents=config.data.document_mask,
            multiple_of=config.parallel.tp if config.parallel.sequence_parallel else 1, seed=config.run.seed,
        )  # fmt: skip
    return DataLoader(
        cast("BatchSource", batches),
        global_batch=ramp,
        dp_rank=mesh.rank_in("dp") if mesh and not shared else 0,
        dp_size=1 if shared else plan.dp_size,
        microbatch=plan.microbatch * (plan.dp_size if shared else 1),
        prefetch=config.data.prefetch,
        device=device,
        steps=steps,
    )


def with_loss(config: Config, task: Task, loss: Loss) -> tuple[Config, Task]:
    """Configuration and task under which ``loss`` is computed, on whole logits.

    Raises:
        ValueError: Something else would compute the loss.
    """
    for setting, is_set, why in (
        ("parallel.tp", config.parallel.tp > 1, "each rank then has a part of the logits"),
        ("train.z_loss", config.train.z_loss > 0, "the loss is yours: add the term to it"),
        ("kernels.cross_entropy", config.kernels.cross_entropy != "auto", "that kernel computes another loss"),
        (
            "kernels.measured",
            bool(config.kernels.measured),
            "the file may choose a kernel of another loss; name kernels one by one",
        ),
    ):
        if is_set:
            raise ValueError(f"{setting} does not go with a loss of yours: {why}. Leave {setting} at its default.")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, fused_loss=False))
    return config, cast("Task", _WithLoss(task, loss))


class _WithLoss:
    """A task with another loss."""

    def __init__(self, task: Task, loss: Loss) -> None:
        self._task, self._loss = task, loss

    def loss(self, _config: Config, _vocab_size: int | None) -> Loss:
        return self._loss

    def loss_parts(self, _config: Config) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def make_optimizer(make: MakeOptimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer that a program builds.

    Raises:
        ValueError: It is not an optimizer of these groups.
    """
    wanted = list(groups)
    optimizer = make(wanted) if callable(make) else make
    if not callable(make) or not isinstance(cast("object", optimizer), torch.optim.Optimizer):
        raise ValueError(
            f"optimizer gave {type(optimizer).__name__}. Pass a function from parameter groups to a torch.optim.Optimizer, such "
            "as `lambda groups: torch.optim.RMSprop(groups)`: the parameters exist once the model is cut over the ranks."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if len(optimizer.param_groups) != len(wanted) or held != {id(p) for group in wanted for p in _parameters(group)}:
        raise ValueError(
            "optimizer does not hold the groups that it was given, as they are: the schedule and checkpoints follow them. Pass "
            "the list on, such as `lambda groups: torch.optim.RMSprop(groups)`."
        )
    return optimizer


def _parameters(group: dict[str, Any]) -> list[Tensor]:
    return [p[1] if isinstance(p, tuple) else p for p in group["params"]]
