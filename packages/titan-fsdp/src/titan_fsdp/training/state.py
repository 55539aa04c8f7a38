"""State in and out of a wrapped model, under the names of the plain one; and evaluation."""

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fsdp.loaded import compute_device
from titan_fsdp.names import clean_fqn, unwrap
from titan_fsdp.torch_private import fsdp_modules


def reshard(model: nn.Module) -> None:
    """Free every unit's gathered parameters, so that the registered ones are the shards again."""
    for module in fsdp_modules(model):
        module.reshard()


@torch.no_grad()
def full_state_dict(model: nn.Module, rank0: bool = True) -> dict[str, Any]:
    """The model's full state on the CPU, keyed as the plain model's, gathered one tensor at a time.

    Extra state (``get_extra_state``) that is no tensor is copied as it is.

    Args:
        model: Wrapped or plain. All ranks that hold part of it must call.
        rank0: Only global rank 0 gets the tensors, the others an empty dict; False gives them to every rank.
    """
    reshard(model)
    wanted = not rank0 or not dist.is_initialized() or dist.get_rank() == 0
    result: dict[str, Any] = {}
    for name, value in unwrap(model).state_dict().items():
        full = _gathered(value) if isinstance(value, DTensor) else value
        if wanted:
            is_tensor = isinstance(full, Tensor)
            result[clean_fqn(name)] = full.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(full)
    return result


def _gathered(value: DTensor) -> Tensor:
    """The whole tensor. Shards that are offloaded to the CPU are gathered on the device that communicates, NCCL's."""
    device = compute_device(value)
    there = value if value.device.type == device.type else cast(DTensor, value.to(device))
    return there.full_tensor()


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Evaluate inside: dropout off, no gradients, and on leaving, gathered parameters freed and training as before.

    Units that keep their parameters after forward would keep them gathered after an evaluation, with no backward to
    free them. Use it between steps: gradients accumulated with ``keep="unsharded"`` and not yet reduced are lost.
    """
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        reshard(model)
        forget_forward_order(model)
        model.train(was_training[0][1])
        for module, training in was_training:
            module.training = training


def forget_forward_order(model: nn.Module) -> None:
    """Drop the order of units that FSDP2 recorded in forwards without backward.

    It is what backward prefetches by; left over, the next backward gathers a unit of the evaluation for nothing.
    torch 2.11 cannot drop it, and pays that gather once.
    """
    reset: Callable[[], None] | None = getattr(model, "reset_iter_state", None)
    if reset is not None:
        grads = [(p, p.grad) for p in model.parameters()]  # which resetting also drops
        reset()
        for parameter, grad in grads:
            parameter.grad = grad
