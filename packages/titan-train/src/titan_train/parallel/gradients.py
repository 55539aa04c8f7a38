"""Gradients of a step, once the last backward is done: finish partial sums, then the norm over all ranks.

Tensor parallelism leaves some gradients as partial sums (norms under sequence parallelism, replicas of key-value
heads). They are added here, all of one group in one collective, once in an optimizer step.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_train.models import named_parameters
from titan_train.parallel.param_shard import ParamShard

_LAYER = re.compile(r"^(?!mtp\.)(?:.*?\.)??(\d+)\.")


@dataclass(slots=True)
class Gradients:
    """The trainable parameters of this rank, and how their gradients become whole."""

    parts: Sequence[nn.Module]
    """The model, or this rank's pipeline stages."""
    cuts: Mapping[str, ParamShard] = field(default_factory=dict[str, ParamShard])
    """What tensor and expert parallelism cut."""
    copies: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of a tied weight, by any of its names: how many pipeline stages hold it."""
    world_size: int = 1
    """Ranks of the run."""
    pp: int = 1
    """Ranks of a pipeline, each of which holds other parameters."""
    _named: dict[str, nn.Parameter] = field(init=False)
    _layer_of: dict[str, int] = field(init=False, default_factory=dict[str, int])
    """Number in each parameter's name, -1 for none; empty until it is asked for."""
    _num_layers: int = field(init=False, default=0)
    _holders_of: dict[str, int] = field(init=False, default_factory=dict[str, int])
    """What `_holders` found, by name: it is asked for each parameter in each step."""
    _placed: dict[torch.device, tuple[tuple[str, ...], Tensor, Tensor]] = field(init=False, default_factory=dict)
    """What `_places` found, by the device of the gradients."""

    def __post_init__(self) -> None:
        every = itertools.chain.from_iterable(named_parameters(part) for part in self.parts)
        self._named = {name: parameter for name, parameter in every if parameter.requires_grad}

    @torch.no_grad()
    def finish(self) -> None:
        """Add up what is partial, and drop gradients of what no rank used. Collective over the groups concerned."""
        for part in self.parts:
            fsdp.drop_unreached(part)
        partial: dict[int, tuple[dist.ProcessGroup, list[nn.Parameter]]] = {}
        for name, parameter in self._named.items():
            cut = self.cuts.get(name)
            if cut is not None and cut.partial_over is not None:
                partial.setdefault(id(cut.partial_over), (cut.partial_over, []))[1].append(parameter)
        for group, parameters in partial.values():
            _all_reduce(parameters, group)

    @torch.no_grad()
    def local(self) -> dict[str, Tensor]:
        """What this rank has of each gradient that there is, by name; it shares memory."""
        return {name: local_tensor(p.grad) for name, p in self._named.items() if p.grad is not None}

    @torch.no_grad()
    def square_norm(self, local: Mapping[str, Tensor]) -> Tensor:
        """The share of this rank in the squared 2-norm of the whole gradient, float32; all ranks' shares add up to it.

        Each element counts once: a share is divided by the number of ranks that hold the same elements.

        Args:
            local: From `local`.
        """
        by_holders: dict[int, list[Tensor]] = {}
        for name, gradient in local.items():
            by_holders.setdefault(self._holders(name), []).append(gradient)
        total: Tensor | None = None
        for holders, gradients in by_holders.items():
            norm = _norm(gradients)
            part = norm * norm / holders
            total = part if total is None else total + part
        return torch.zeros(()) if total is None else total

    @torch.no_grad()
    def norms_by_layer(self, local: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """The 2-norm of the gradient of each numbered layer and, last, of all other parameters: float32 ``[L + 1]``.

        Collective over all ranks. Waits for the device the first time, to agree on L, and when other parameters have gradients
        than the last time. A layer is a number in a parameter's name, as in ``layers.7.attention.wq.weight``.

        Args:
            local: From `local`.
            device: Of the result.
        """
        if not self._layer_of:
            self._layer_of = {name: int(match[1]) if (match := _LAYER.search(name)) else -1 for name in self._named}
            count = torch.tensor([max(self._layer_of.values(), default=-1) + 1], device=device)
            if self.world_size > 1:
                dist.all_reduce(count, op=dist.ReduceOp.MAX)
            self._num_layers = int(count)
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, gradient in local.items():
            by_device.setdefault(gradient.device, {})[name] = gradient
        squares = torch.zeros(self._num_layers + 1, device=device)
        for where, of_names in by_device.items():
            in_layer, holders = self._places(where, tuple(of_names), device)
            norms = torch._foreach_norm([*of_names.values()], 2, torch.float32)  # pyright: ignore[reportPrivateImportUsage]
            shares = torch.stack(norms).to(device).square() / holders
            squares += torch.where(in_layer, shares, 0.0).sum(1)
        if self.world_size > 1:
            dist.all_reduce(squares)
        return squares.sqrt()

    def _places(self, where: torch.device, names: tuple[str, ...], device: torch.device) -> tuple[Tensor, Tensor]:
        """Which of these parameters each layer has, bool ``[L + 1, N]``, and how many ranks hold each, ``[N]``.

        Kept on ``device``, as a copy to it waits for it.
        """
        kept = self._placed.get(where)
        if kept is None or kept[0] != names:
            layers = torch.tensor([self._layer_of[name] % (self._num_layers + 1) for name in names])
            in_layer = layers == torch.arange(self._num_layers + 1)[:, None]
            holders = torch.tensor([self._holders(name) for name in names])
            kept = self._placed[where] = (names, in_layer.to(device), holders.to(device))
        return kept[1:]

    def _holders(self, name: str) -> int:
        """How many ranks hold the same elements of this parameter."""
        if name not in self._holders_of:
            cut = self.cuts.get(name)
            different = self.pp * _shards(self._named[name]) * (1 if cut is None else cut.pieces)
            self._holders_of[name] = self.world_size // different * self.copies.get(name, 1)
        return self._holders_of[name]


def local_tensor(tensor: Tensor) -> Tensor:
    """A tensor, or this rank's part of one that is sharded; it shares memory. Not for autograd."""
    # `to_local` without autograd, which also makes a parameter of a parameter's part: ten times as long
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]


@torch.no_grad()
def scale_gradients(local: Mapping[str, Tensor], factor: Tensor) -> None:
    """Multiply gradients, from `Gradients.local`, by ``factor``, in place."""
    for device in {gradient.device for gradient in local.values()}:
        scaled = [gradient for gradient in local.values() if gradient.device == device]
        torch._foreach_mul_(scaled, factor.to(device))  # pyright: ignore[reportPrivateImportUsage]


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """The local part of the gradient, to be changed in place; zeros where no backward reached it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_tensor(parameter.grad)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Their 2-norm together, float32: the norm of a bfloat16 tensor would be rounded to one."""
    wide = [g for g in gradients if g.dtype != torch.bfloat16]
    small = [g for g in gradients if g.dtype == torch.bfloat16]
    norms = torch._foreach_norm(small, 2, dtype=torch.float32) if small else []  # pyright: ignore[reportPrivateImportUsage]
    if not norms:
        return torch.nn.utils.get_total_norm(wide).float()
    return torch.nn.utils.get_total_norm([*norms, *wide]).float()


def _shards(parameter: nn.Parameter) -> int:
    """Different parts of it among the ranks of its mesh."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def _all_reduce(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradient of each parameter over ``group``, as one message.

    A parameter that no backward reached on any rank keeps no gradient: with one of zeros, the optimizer would decay it,
    as it does not in one process.
    """
    unreached = [p for p in parameters if p.grad is None]
    gradients = [_local_gradient(p) for p in parameters]
    flat = torch.cat([g.flatten().to(torch.promote_types(g.dtype, torch.float32)) for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
    for parameter in unreached:
        if not bool(_local_gradient(parameter).any()):
            parameter.grad = None
