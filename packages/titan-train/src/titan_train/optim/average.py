"""Averages of the weights over steps: an exponential moving one, and the mean over the newest checkpoints.

Late in training the weights wander around a better point than any of them is; their average is near it, without the decay of the
learning rate that would also lead there (Polyak averaging; model merging, arXiv:2505.12082). Neither kind changes training.

The moving average is one float32 tensor for each trained parameter, ``ema`` in the optimizer's state of it. So it is sharded,
saved, and restored on any layout as the optimizer's other moments are. It starts as the weights after the first step of a
parameter. Cost: 4 bytes a parameter, and one pass over the weights at each update.

Schedule-free AdamW has an average of its own, which takes the same ways (`titan_train.optim.schedule_free`).
"""

import contextlib
import logging
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from titan_ckpt import Checkpointer, DamageError, NoSuchStepError, TrainState
from titan_ckpt.comm import ByteComm
from torch import Tensor, nn

if TYPE_CHECKING:
    from titan_train.config import Config

log = logging.getLogger(__name__)

EMA, Z, SHARE = "ema", "schedule_free_z", "schedule_free_share"
"""Names in the optimizer's state of a parameter: of the moving average, and of what schedule-free AdamW's follows from."""


@torch.no_grad()
def update_ema(optimizer: torch.optim.Optimizer, decay: float, *, due: bool = True) -> None:
    """Move the average towards the weights; call it after a step.

    Args:
        optimizer: Its state holds the average.
        decay: What is left of the old average.
        due: False only starts the average of parameters that have none.
    """
    stateless = isinstance(optimizer, torch.optim.SGD)
    pairs: list[tuple[Tensor, Tensor]] = []
    for parameter in _trained(optimizer):
        # AdamW makes its state at a parameter's first step, and would take this for it
        if not (optimizer.state.get(parameter) or stateless):
            continue
        state = optimizer.state[parameter]
        if EMA not in state:
            state[EMA] = parameter.detach().float().clone()
        elif due:
            pairs.append((_local(state[EMA]), _local(parameter)))
    for average, weight in pairs:
        average.lerp_(weight.to(average.dtype), 1 - decay)


def averaged_weight(y: Tensor, z: Tensor, share: float) -> Tensor:
    """The average of `titan_train.optim.schedule_free`, x: the weights to use after training.

    Args:
        y: What training has in a weight.
        z: Its state of that name.
        share: That of x in y: ``beta1`` of the last step.
    """
    return y.lerp(z, 1 - 1 / share)


def has_ema(optimizer: torch.optim.Optimizer) -> bool:
    """Whether any parameter has a moving average."""
    return any(EMA in optimizer.state.get(parameter, {}) for parameter in _trained(optimizer))


def forget_ema(optimizer: torch.optim.Optimizer) -> None:
    """Drop the moving average, which nothing moves any more."""
    for parameter in _trained(optimizer):
        optimizer.state.get(parameter, {}).pop(EMA, None)


@contextlib.contextmanager
@torch.no_grad()
def averages_in_place(parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> Generator[None]:
    """A block in which the weights are the average that the optimizer's state has; they get their bits back after it."""
    with weights_kept(parts):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                take_average(parameter, optimizer.state.get(parameter, {}))
        yield


@torch.no_grad()
def take_average(parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """Turn a parameter into the average that its state has, if it has one."""
    if EMA in state:
        _local(parameter).copy_(_local(state[EMA]))
    elif Z in state:
        weight = _local(parameter)
        weight.copy_(averaged_weight(weight, _local(state[Z]), float(state[SHARE])))


@contextlib.contextmanager
@torch.no_grad()
def weights_kept(parts: Sequence[nn.Module]) -> Generator[None]:
    """A block that may write to weights and buffers; they get their bits back after it. Holds a second copy meanwhile."""
    _reshard(parts)
    tensors = _tensors(parts)
    kept = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        _reshard(parts)
        for tensor, value in zip(tensors, kept, strict=True):
            tensor.copy_(value)


@torch.no_grad()
def mean_over_checkpoints(checkpointer: Checkpointer, state: TrainState, steps: Sequence[int]) -> None:
    """Turn the weights that a model has into their mean with those of older checkpoints. Collective.

    Args:
        checkpointer: Of the run.
        state: ``model``, ``shards`` and ``tied`` alone; buffers keep their values.
        steps: The checkpoints, the same on every rank; none leaves the weights as they are. One that is damaged, or that its
            run deletes meanwhile, is left out, with a warning.
    """
    assert state.model is not None
    parts = [state.model] if isinstance(state.model, nn.Module) else list(state.model)
    weights = [_local(p) for part in parts for p in part.parameters()]
    buffers = [_local(b) for part in parts for b in part.buffers()]
    kept = [b.clone() for b in buffers]
    means = [w.detach().float().clone() for w in weights]
    count = 1
    for step in steps:
        try:
            checkpointer.restore(state, step, cast=True)
        except (DamageError, NoSuchStepError) as err:  # on every rank, and nothing was loaded
            log.warning("step %d is left out of the mean over checkpoints: %s", step, err)
            continue
        count += 1
        for mean, weight in zip(means, weights, strict=True):
            mean.lerp_(weight.float(), 1 / count)
    for weight, mean in zip(weights, means, strict=True):
        weight.copy_(mean)
    for buffer, value in zip(buffers, kept, strict=True):
        buffer.copy_(value)


def restore_averaged(
    checkpointer: Checkpointer,
    state: TrainState,
    config: "Config",
    step: int | None,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Restore a model for use after training, with `Config.evaluated_weights`. Collective.

    Args:
        checkpointer: Of the run.
        state: ``model`` and ``shards`` alone.
        config: The run's.
        step: None takes the newest checkpoint of which all that is read is intact.
        group: That of ``checkpointer``.

    Returns:
        The checkpoint's step.

    Raises:
        DamageError: The checkpoint is damaged, or every one is.
        ValueError: It has no moving average, and the run's weights are to be that.
    """
    use, holder = config.evaluated_weights, None
    if use not in ("none", "checkpoints"):
        assert isinstance(state.model, nn.Module)
        holder = torch.optim.SGD(state.model.parameters())
        state = replace(state, optim=holder, own_settings=True, optim_keys=(EMA, Z, SHARE))
    found = checkpointer.restore(state, "latest" if step is None else step, cast=True, fallback=step is None)
    if use == "checkpoints":
        saved: list[int] = ByteComm(group).from_rank0(
            checkpointer.steps, f"listing the checkpoints of {checkpointer.root}", lambda err: err
        )
        mean_over_checkpoints(checkpointer, state, older_steps(saved, found, config.average.checkpoints))
    elif holder is not None:
        if use == "ema" and not has_ema(holder):
            raise ValueError(
                f"average.use='ema': the checkpoint of step {found} has no moving average, as the run kept none by then. Take a "
                "checkpoint of a later step, or set average.use='none' in the run's config.toml."
            )
        for parameter, held in holder.state.items():
            take_average(parameter, held)
    return found


def older_steps(saved: Sequence[int], step: int, count: int) -> list[int]:
    """The checkpoints before ``step`` that are averaged with it, newest first.

    Those that the run went back from are left out: a smaller step was committed after them.

    Args:
        saved: All steps in the order of their commits.
        step: Of the run.
        count: How many are averaged, with that of ``step``.
    """
    found: list[int] = []
    for other in reversed(saved):
        if other < min(found, default=step):
            found.append(other)
    return found[: count - 1]


def _trained(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tensors(parts: Sequence[nn.Module]) -> list[Tensor]:
    every = [*(p for part in parts for p in part.parameters()), *(b for part in parts for b in part.buffers())]
    return [_local(tensor) for tensor in every]


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor  # here: `generate` averages nothing as a rule, and needs none of it

    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _reshard(parts: Sequence[nn.Module]) -> None:
    """Drop whole weights that FSDP may still hold from the last forward: the shards are about to change."""
    from titan_fsdp import reshard

    for part in parts:
        reshard(part)
