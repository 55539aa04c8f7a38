"""Muon on the parts of matrices that this rank holds, and AdamW on everything else.

A step: the momentum of each matrix where its weight is; then, bucket by bucket, the momentum's pieces to the matrix's owner, the
update there, and its pieces back (`titan_train.optim.ownership` says who owns what). While one bucket is computed the next one
travels; AdamW's groups are updated beside the first message and the last. The owner computes what one process would, from the
same numbers: results do not depend on the layout but for the rounding of the gradients.

Limits: the update needs the gradient's norm, for clipping, so that none of it can begin during backward. Gradients are used up:
with Nesterov's momentum their memory holds the mean that is orthogonalized.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from titan_ckpt.state.sharding import local_part
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from titan_train.exchange import gather_values
from titan_train.optim.muon_step import MuonBucket, MuonMatrix, MuonStep
from titan_train.optim.newton_schulz import Rule
from titan_train.optim.ownership import Box, OwnedUnit, OwnershipPlan, alike, plan_ownership
from titan_train.optim.update import closure_loss, update_group
from titan_train.parallel.gradients import local_tensor


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982) and NorMuon (arXiv:2510.05491), with AdamW beside it.

    Args:
        param_groups: Each with ``kind``, "muon" or "adamw", and what AdamW needs: ``lr``, ``weight_decay``, ``betas``, ``eps``.
            Weight decay is decoupled: a weight shrinks by ``lr * weight_decay``. With ``cautious`` only where the update has
            the weight's sign.
        matrices: Every parameter of the groups of kind "muon", in the same order on every rank of ``group``.
        rule: How an update is computed from a momentum.
        momentum: Decay of the gradient's running mean.
        nesterov: Orthogonalize the mean of gradient and running mean.
        group: The ranks that together hold the whole matrices; it needs a backend for CPU tensors too. None: this one does.
        device: Where updates are computed; weights and state may be in host memory.
        fused: Update AdamW's groups with torch's fused kernel.
    """

    def __init__(
        self,
        param_groups: Iterable[dict[str, Any]],
        matrices: Sequence[MuonMatrix],
        *,
        rule: Rule,
        momentum: float = 0.95,
        nesterov: bool = True,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        fused: bool | None = None,
    ) -> None:
        """All state is made here, zero."""
        defaults = {
            "lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "kind": "adamw", "fused": fused,
            "amsgrad": False, "maximize": False,
        }  # fmt: skip
        super().__init__(list(param_groups), defaults)
        self._matrices = list(matrices)
        self._rule, self._momentum, self._nesterov = rule, momentum, nesterov
        self._group = group if group is not None and group.size() > 1 else None
        self._rank = 0 if self._group is None else self._group.rank()
        self._size = 1 if self._group is None else self._group.size()
        self._device = device
        self._held: list[list[list[Box]]] = []
        self._starts: list[list[tuple[Box, tuple[int, int, int]]]] = []
        self._plans: dict[tuple[bool, ...], tuple[OwnershipPlan, list[list[OwnedUnit]], list[MuonBucket]]] = {}
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                self.state[parameter] = self._new_state(parameter, param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient. Collective over the group."""
        loss = closure_loss(closure)
        settings: dict[nn.Parameter, dict[str, Any]] = {}
        others: list[dict[str, Any]] = []
        for param_group in self.param_groups:
            if param_group["kind"] == "adamw":
                others.append(param_group)
                for parameter in param_group["params"]:
                    # resumed from torch's AdamW, which has no state of what it did not train yet
                    if parameter.grad is not None and "exp_avg" not in self.state[parameter]:
                        self.state[parameter] |= self._new_state(parameter, param_group)
            else:
                settings |= dict.fromkeys(param_group["params"], param_group)
        # what hides the first message up and the last one down, beside which no bucket is computed
        updates = (functools.partial(update_group, self, param_group) for param_group in others)
        self._update_matrices([settings[matrix.parameter] for matrix in self._matrices], updates)
        for update in updates:
            update()
        return loss

    @property
    def is_elementwise(self) -> bool:
        """No matrices: `titan_train.optim.update.update` makes the step, which need not wait for the device."""
        return not self._matrices

    def plan(self) -> OwnershipPlan:
        """Who owns which matrix. Collective over the group the first time."""
        return self._planned((True,) * len(self._matrices))[0]

    def _new_state(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Tensor]:
        if group["kind"] == "adamw":
            step = torch.zeros((), device=parameter.device if group["fused"] else torch.device("cpu"))
            return {"step": step, "exp_avg": _zeros(parameter), "exp_avg_sq": _zeros(parameter)}
        state = {"muon_momentum": _zeros(parameter)}
        if self._rule.beta2 is not None:
            state["muon_row_mean"] = _zeros(parameter, row_mean=True)
        return state

    def _update_matrices(self, settings: Sequence[Mapping[str, Any]], others: Iterator[Callable[[], None]]) -> None:
        """All matrices that have a gradient; ``others`` are updates that one can be taken of while a message travels."""
        active = tuple(matrix.parameter.grad is not None for matrix in self._matrices)
        if not any(active):
            return
        _, own, buckets = self._planned(active)
        states = [self.state[matrix.parameter] for matrix in self._matrices]
        for matrix, state in zip(self._matrices, states, strict=True):
            if self._rule.beta2 is not None and "muon_row_mean" not in state:  # resumed from a run without it
                state["muon_row_mean"] = _zeros(matrix.parameter, row_mean=True)
            elif self._rule.beta2 is None:
                state.pop("muon_row_mean", None)  # resumed from a run with it
        work = MuonStep(
            self._matrices,
            self._starts,
            states,
            settings,
            self._rule,
            momentum=self._momentum,
            nesterov=self._nesterov,
            device=self._device or self._matrices[0].parameter.device,
        )
        arrive = buckets[0].send_up(work) if buckets else None
        if buckets:
            next(others, _nothing)()
        for units in own:
            work.compute(units, lambda piece: None, lambda piece, update, means: None)
        finish: Callable[[], None] | None = None
        for following in (*buckets[1:], None):
            if arrive is None:
                break
            next_arrive = None if following is None else following.send_up(work)
            next_finish = arrive()
            if finish is not None:
                finish()
            arrive, finish = next_arrive, next_finish
        if finish is not None:
            for update in others:
                update()
            finish()

    def _planned(self, active: tuple[bool, ...]) -> "tuple[OwnershipPlan, list[list[OwnedUnit]], list[MuonBucket]]":
        if not self._held:
            self._starts = [_places(matrix) for matrix in self._matrices]
            own = [[list(box) for box, _ in places] for places in self._starts]
            ranks = [own] if self._group is None else gather_values(own, self._group)
            self._held = [[[Box(*box) for box in boxes] for boxes in rank] for rank in ranks]
        if active not in self._plans:
            held = [[boxes if on else [] for boxes, on in zip(rank, active, strict=True)] for rank in self._held]
            stacks = [matrix.stack for matrix in self._matrices]
            plan = plan_ownership(stacks, held)
            own = alike([unit for unit in plan.local if unit.owner == self._rank], stacks)
            buckets = [
                MuonBucket(units, stacks, self._rank, self._size, self._group, self._rule) for units in plan.buckets
            ]
            self._plans[active] = plan, own, buckets
        return self._plans[active]


def _nothing() -> None:
    """No update is left."""


def _places(matrix: MuonMatrix) -> list[tuple[Box, tuple[int, int, int]]]:
    """The boxes of the whole parameter that this rank holds, and where each begins in the local tensor."""
    part = local_part(matrix.parameter.detach(), matrix.name, matrix.shard)
    found: list[tuple[Box, tuple[int, int, int]]] = []
    for chunk, start in part.boxes:
        pad = (0,) * (3 - len(start))
        expert, row, column = (*pad, *chunk.offsets)
        experts, rows, columns = (*((1,) * len(pad)), *chunk.sizes)
        found.append((Box(expert, row, column, experts, rows, columns), (*pad, *start)))  # pyright: ignore[reportArgumentType]
    return found


def _zeros(parameter: nn.Parameter, *, row_mean: bool = False) -> Tensor:
    """Zeros in the layout of a parameter; with ``row_mean`` one for each row."""
    held, whole = local_tensor(parameter.detach()), parameter.shape
    shape = (*held.shape[:-1], 1) if row_mean else tuple(held.shape)
    local = torch.zeros(shape, dtype=parameter.dtype, device=held.device)
    if not isinstance(parameter, DTensor):
        return local
    last = parameter.ndim - 1
    placements = [Replicate() if row_mean and getattr(p, "dim", None) == last else p for p in parameter.placements]
    size = torch.Size((*whole[:-1], 1) if row_mean else whole)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, parameter.device_mesh, placements, run_check=False, shape=size, stride=stride)
