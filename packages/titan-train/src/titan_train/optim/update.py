"""AdamW on the shards of this rank, which skips a step that is not finite by itself.

Problem: whether a step is applied depends on the loss and the norm, which are on the device. A host that reads them first
lets the device idle while it then launches the update: 10.8 ms for 291 sharded parameters, as each operand of torch's fused
kernel goes through DTensor's dispatch.

Idea: an update by elements needs no layout, so the same kernel gets the local parts: the same bits in a third of the time. And
it takes a flag on the device (torch's ``found_inf``, made for loss scaling): if that is 1, weights, means and counts of steps
stay as they are. So the host launches the update and reads afterwards.

Limits: torch's fused AdamW, on one device, and only once each parameter has its state: the first update, which makes it, and the
first one of a parameter that thaws are ``optimizer.step()``.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

from titan_train.parallel.gradients import local_tensor


def closure_loss(closure: Callable[[], float] | None) -> float | None:
    """What ``optimizer.step(closure)`` returns: the loss of the closure, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def can_update(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether `update` can make the next step of ``optimizer``, with its gradients as they are now."""
    if type(optimizer) is not AdamW and not getattr(optimizer, "is_elementwise", False):
        return False
    for group in optimizer.param_groups:
        if not group["fused"] or group["amsgrad"]:
            return False
        for parameter in group["params"]:
            if parameter.grad is not None and (
                "exp_avg" not in optimizer.state[parameter] or parameter.device.type != device.type
            ):
                return False
    return True


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, not_finite: Tensor) -> None:
    """One step of an optimizer that `can_update`, without waiting for the device.

    Args:
        optimizer: Its state and parameters are changed in place.
        not_finite: 1 to leave all as it is, else 0: a float32 scalar on the parameters' device.
    """
    for group in optimizer.param_groups:
        update_group(optimizer, group, not_finite)


@torch.no_grad()
def update_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], not_finite: Tensor | None = None) -> None:
    """AdamW on one group of parameters, whose state is there.

    Args:
        optimizer: Holds the state.
        group: Its parameters and settings.
        not_finite: As for `update`, of a group with ``fused``; None updates.
    """
    trained = [p for p in group["params"] if p.grad is not None]
    if not trained:
        return
    states: list[dict[str, Any]] = [optimizer.state[p] for p in trained]
    beta1, beta2 = group["betas"]
    weights, gradients = [local_tensor(p) for p in trained], [local_tensor(p.grad) for p in trained]
    means = [local_tensor(state["exp_avg"]) for state in states]
    cautious = group.get("cautious", False) and group["weight_decay"] > 0
    if cautious:
        rate = group["lr"] * group["weight_decay"]
        for weight, gradient, mean in zip(weights, gradients, means, strict=True):
            decay_towards(
                weight, mean.lerp(gradient, 1 - beta1), rate if not_finite is None else rate * (1 - not_finite)
            )
    adamw(
        weights,
        gradients,
        means,
        [local_tensor(state["exp_avg_sq"]) for state in states],
        [],
        [local_tensor(state["step"]) for state in states],
        fused=group["fused"],
        found_inf=not_finite,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=0.0 if cautious else group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def decay_towards(weight: Tensor, update: Tensor, rate: float | Tensor) -> None:
    """Cautious weight decay (arXiv:2510.12402): decay the elements whose update, which is subtracted, has their sign.

    Args:
        weight: Before the update; changed in place.
        update: Of the same shape; only its signs count.
        rate: Learning rate times weight decay; a scalar on the same device where the host does not know it.
    """
    weight.mul_(1 - rate * (update * weight >= 0))  # NaN: no decay


def plain_tensor(tensor: Tensor | None) -> Tensor:
    """The values of `local_tensor` as a plain tensor, also of a weight that FSDP2 gathers in float8; they share memory."""
    assert tensor is not None
    local = local_tensor(tensor)
    flatten: Any = getattr(local, "__tensor_flatten__", None)
    while flatten is not None:
        local = getattr(local, flatten()[0][0])
        flatten = getattr(local, "__tensor_flatten__", None)
    return local.detach()
