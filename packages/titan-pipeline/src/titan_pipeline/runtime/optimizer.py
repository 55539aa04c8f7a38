"""The optimizer step of a pipeline: an exact global clip, or an optimistic step that is undone when it was wrong.

A gradient-norm clip needs the norm over all stages, so every rank waits for the slowest: a bubble no schedule can
fill. `clip_grad_norm` is that clip: exact, and the default.

`Optimistic` lets each rank step at once, as if neither clipping nor a non-finite gradient would be found, and checks
afterwards, when the news has had time to travel; most steps of a stable run need neither. If one did, the snapshot
taken before the step is put back and the step is redone properly. The result is bit-equal to the synchronous step
of any optimizer that draws no random numbers (the generator is not put back), because nothing is inverted: undoing AdamW
arithmetically leaves 4 % of parameters different and can make NaNs out of rows that never got a
gradient. The price is one copy of parameters, gradients (some optimizers change them in place) and optimizer state.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from titan_pipeline.runtime.executor import Executor
from titan_pipeline.runtime.stage.tied import tied_parameter


def clip_grad_norm(executor: Executor, max_norm: float, *, skip: Iterable[Tensor] = ()) -> float:
    """Scale the gradients of all stages so that their global 2-norm is at most ``max_norm``.

    Call on every rank, with the same ``max_norm``. A tied weight counts once, on its first stage. Gradients may be
    sharded (FSDP2, tensor-parallel) or partial sums: the norm is that of the whole.

    Args:
        executor: Its stages must have a ``module``.
        max_norm: Largest norm; infinity only measures.
        skip: Parameters to leave out.

    Returns:
        The norm before clipping, the same on every rank. Non-finite norms scale nothing.
    """
    skip = tuple(skip)
    parameters = _parameters(executor, skip)
    norm = _global_norm(executor, parameters)
    _scale(executor, norm, max_norm, skip)
    return norm


class Optimistic:
    """Step first, validate later; see the module docstring.

    Use: ``step()`` in place of clip and ``optimizer.step()``, then ``settle()`` on every rank before the next
    optimizer step or any use of the gradients (forwards of the next step may run in between only if you can repeat
    them: `settle` says whether the parameters changed). A scheduler may set the learning rate before or after `settle`.

    Args:
        executor: The pipeline.
        optimizer: This rank's optimizer.
        max_norm: Clip to this global norm.
    """

    def __init__(self, executor: Executor, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self._executor = executor
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._snapshot: _Snapshot | None = None
        self._stepped: list[dict[str, Any]] = []
        """Settings as the optimizer's step left them; a scheduler may change them before `settle`."""
        self.undone = 0
        """Steps that had to be redone or dropped so far."""

    def step(self) -> None:
        """Step at once with this rank's gradients as they are."""
        if self._snapshot is not None:
            raise RuntimeError("the last step is not settled yet. Call settle() on every rank first.")
        self._snapshot = _Snapshot(self._optimizer)
        self._optimizer.step()
        self._stepped = _settings(self._optimizer)

    def settle(self) -> tuple[float, bool]:
        """Validate the step with all ranks; call on every rank.

        Returns:
            The global norm, and whether the step stands as taken. If not, parameters and state are those of the exact
            step: clipped, or skipped when the norm is not finite.
        """
        if self._snapshot is None:
            raise RuntimeError("there is no step to settle. Call step() first.")
        before, self._snapshot = self._snapshot, None
        dropped = [parameter for parameter in _weights(self._optimizer) if parameter.grad is None]
        before.put_back_gradients(self._optimizer)
        norm = _global_norm(self._executor, _parameters(self._executor, ()))
        if math.isfinite(norm) and not norm > self._max_norm:
            _drop_gradients(dropped)
            return norm, True
        self.undone += 1
        scheduled = [
            {name: value for name, value in now.items() if value != stepped.get(name)}
            for now, stepped in zip(_settings(self._optimizer), self._stepped, strict=True)
        ]
        before.put_back(self._optimizer)
        if math.isfinite(norm):
            _scale(self._executor, norm, self._max_norm, ())
            self._optimizer.step()
        for group, settings in zip(self._optimizer.param_groups, scheduled, strict=True):
            group.update(settings)
        _drop_gradients(dropped)
        return norm, False


def _drop_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


class _Snapshot:
    """Parameters, gradients, state and settings. Not a ``state_dict``, which comes back in the weights' data type."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._weights = [p.detach().clone() for p in _weights(optimizer)]
        self._gradients = [None if p.grad is None else p.grad.detach().clone() for p in _weights(optimizer)]
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
        self._settings = _settings(optimizer)

    def put_back_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients as they were before the step."""
        for parameter, value in zip(_weights(optimizer), self._gradients, strict=True):
            if parameter.grad is None or value is None:  # an optimizer may drop its gradients
                parameter.grad = value
            else:
                parameter.grad.copy_(value)

    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Call once: the optimizer goes on with what is kept here."""
        with torch.no_grad():
            for parameter, value in zip(_weights(optimizer), self._weights, strict=True):
                parameter.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(self._state)
        for group, settings in zip(optimizer.param_groups, self._settings, strict=True):
            group.update(settings)


def _weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _parameters(executor: Executor, skip: Iterable[Tensor]) -> list[Tensor]:
    """Parameters of this rank with a gradient, tied copies other than the first left out."""
    left_out = {id(p) for p in skip}
    for weight in executor.tied:
        first, *others = sorted(weight.names)
        here = {s: id(tied_parameter(weight, s, _module(executor, s))) for s in weight.names if s in executor.stages}
        left_out |= {here[s] for s in others if s in here and here[s] != here.get(first)}
    return [p for p in _all_parameters(executor) if p.grad is not None and id(p) not in left_out]


def _all_parameters(executor: Executor) -> list[Tensor]:
    """Each parameter once, even if two stages of this rank share it."""
    return list({id(p): p for s in sorted(executor.stages) for p in _module(executor, s).parameters()}.values())


def _module(executor: Executor, stage: int) -> torch.nn.Module:
    module = getattr(executor.stages[stage], "module", None)
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"stage {stage} has no module to take parameters from. Clip inside your own stage instead.")
    return module


def _global_norm(executor: Executor, parameters: Sequence[Tensor]) -> float:
    """Sum in float64 in the order of ranks, so that every rank gets the same bits.

    Squares of sharded gradients (DTensor) are summed over the ranks of their own mesh first; gradients that are partial sums
    there (of a sequence-parallel norm's weight) are summed before they are squared. Every rank of a stage holds the same
    parameters in the same order, so these sums are collectives in the same order.
    """
    local = 0.0
    shards: dict[tuple[Any, tuple[Any, ...]], Tensor] = {}
    for p in parameters:
        grad = cast(Tensor, p.grad).detach()
        if isinstance(grad, DTensor):
            if any(q.is_partial() for q in grad.placements):
                grad = grad.redistribute(placements=[Replicate() if q.is_partial() else q for q in grad.placements])
            layout = (grad.device_mesh, tuple(q if q.is_replicate() else Partial() for q in grad.placements))
            square = _square(grad.to_local())
            shards[layout] = shards[layout] + square if layout in shards else square
        else:
            local += float(_square(grad))
    for (mesh, placements), square in shards.items():
        local += float(DTensor.from_local(square, mesh, placements).full_tensor())
    return math.sqrt(sum(report[0] for report in executor.gather((local,))))


def _square(grad: Tensor) -> Tensor:
    """The squared 2-norm in float64."""
    real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
    return real.double().square().sum()


def _scale(executor: Executor, norm: float, max_norm: float, skip: Iterable[Tensor]) -> None:
    if not math.isfinite(norm) or norm <= max_norm:
        return
    left_out = {id(p) for p in skip}
    with torch.no_grad():
        for p in _all_parameters(executor):
            if p.grad is not None and id(p) not in left_out:
                p.grad.mul_(max_norm / (norm + 1e-6))
