"""Compute a suspect step again, to tell hardware from data.

Problem: a loss that is not finite, or jumps, comes from the data, from the numerics, or from a processor that computed
wrongly, once or always. The remedies differ, and the loss alone does not show which it was.

Idea (Megatron-LM's rerun state machine): the same step again, on the same ranks, then with each rank's data moved to its
neighbour in data parallelism.

    another result on the same rank              transient hardware: it computed wrongly once
    the same there, another on the neighbour     persistent hardware
    the same everywhere                          data or numerics

Each rank compares its own part of the loss, so that the rank is named. Results are the same if they agree to rounding: a
GPU's sums may be in another order, a step is only suspect for far more than that.

Cost: none until a step is suspect, besides a copy of the random state; then one or two more forwards and backwards.

Limits: tensor, context and pipeline ranks compute one loss together, so a rank is named with those that share its batch.
Statistics of delayed float8 scaling see the step each time it is computed.
"""

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from titan_train.data.loader.source import TaskBatch, TensorBatch
from titan_train.exchange import from_rank_before
from titan_train.train.step_random import RandomState

Verdict = Literal["transient hardware", "persistent hardware", "data or numerics", "reproduced"]
_WINDOW, _WARM_UP = 16, 4  # losses that a jump is measured against, and the fewest of them
# One rank's part of the loss is a sum of at most some 1e6 float32 losses in a fixed order, or on a GPU in any: rounding is
# 6e-8 a term and adds up like its square root at the most that was seen. The gradient's norm adds shards in another order,
# and bfloat16 gradients, whose rounding is 4e-3 a term, over many parameters.
_SAME_LOSS, _SAME_NORM = 6e-5, 1e-2


@dataclasses.dataclass(frozen=True, slots=True)
class RerunVerdict:
    """What executing a step again showed."""

    verdict: Verdict
    """``reproduced``: the same again, and there is no other rank to try the data on."""
    ranks: tuple[int, ...]
    """The ranks whose result changed, or whose data it is."""
    reason: str
    """Why the step was suspect."""
    losses: tuple[float, ...]
    """The whole loss, first and each time again."""

    @property
    def skips(self) -> bool:
        """The step must not update: a rank computes wrongly."""
        return self.verdict == "persistent hardware"

    @property
    def text(self) -> str:
        """One sentence."""
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        findings = {
            "transient hardware": f"transient hardware fault on {who}: the same data gave another result",
            "persistent hardware": f"persistent hardware fault on {who}: its data gives another result elsewhere",
            "data or numerics": f"data or numerics: the batch of {who} gives the same everywhere",
            "reproduced": "the same again; with one data-parallel rank, data and hardware cannot be told apart",
        }
        return f"the step was computed again ({self.reason}): {findings[self.verdict]}"

    def fields(self) -> dict[str, Any]:
        """The JSON values of the event ``rerun``."""
        return {
            "verdict": self.verdict,
            "ranks": list(self.ranks),
            "reason": self.reason,
            "losses": [loss if math.isfinite(loss) else str(loss) for loss in self.losses],
            "text": self.text,
        }


Figures = tuple[float, float, float]
"""One execution of a step: the loss, the gradient's norm, and this rank's part of the loss."""


class Rerun:
    """Executes suspect steps again."""

    def __init__(self, factor: float, device: torch.device, data_group: dist.ProcessGroup | None) -> None:
        """Nothing is suspect yet.

        Args:
            factor: Execute a step again whose loss is not finite, or above so many times the last ones' mean.
            device: Where the batches are.
            data_group: Ranks that hold the same parts of the model and read other batches; None if there is no other.
        """
        self._suspicion = Suspicion(factor)
        self._device = device
        self._group = data_group

    def remember(self) -> None:
        """Keep the random state that the step is about to begin with."""
        self._state = RandomState(self._device)

    def __call__(
        self, batches: Sequence[TaskBatch], first: Figures, execute: Callable[[Sequence[TaskBatch]], Figures]
    ) -> RerunVerdict | None:
        """If a step is suspect, execute it again here, then on other ranks; the last execution counts. Collective then.

        Args:
            batches: This rank's micro-batches.
            first: Its first execution.
            execute: Forgets the last execution and makes another one.

        Returns:
            What it showed; None if the step is not suspect.
        """
        reason = self._suspicion.of(*first[:2])
        if not reason:
            return None
        verdict = self._execute_again(batches, first, execute, reason)
        if not verdict.skips:
            self._suspicion.count(verdict.losses[-1])
        return verdict

    def _execute_again(
        self,
        batches: Sequence[TaskBatch],
        first: Figures,
        execute: Callable[[Sequence[TaskBatch]], Figures],
        reason: str,
    ) -> RerunVerdict:
        loss, norm, own = first
        self._state.restore()
        loss_again, norm_again, own_again = execute(batches)
        parts, parts_again = gather(own, self._device), gather(own_again, self._device)
        whole = (loss, loss_again)
        verdict = judge(parts, parts_again, (norm, norm_again), reason, whole)
        if verdict is not None:
            return verdict
        group = self._group
        if group is None:
            return RerunVerdict("reproduced", tuple(range(len(parts))), reason, whole)
        lent, draws = neighbours_batches(batches, self._state, group, self._device)
        ranks = dist.get_process_group_ranks(group)
        source = [int(rank) for rank in gather(float(ranks[(group.rank() - 1) % group.size()]), self._device)]
        draws.restore()
        loss_there, norm_there, own_there = execute(lent)
        elsewhere = gather(own_there, self._device)
        return judge_elsewhere(parts_again, elsewhere, source, (norm_again, norm_there), reason, (*whole, loss_there))


class Suspicion:
    """Which losses are suspect: not finite, or far above those before."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def of(self, loss: float, grad_norm: float) -> str:
        """Why a step is suspect; empty if it is not, and then it counts for the next ones."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "loss or gradient not finite"
        usual = sum(self._losses) / len(self._losses) if len(self._losses) >= _WARM_UP else math.inf
        if loss > self._factor * usual:
            return f"loss {loss:.4g} after {usual:.4g}"
        self.count(loss)
        return ""

    def count(self, loss: float) -> None:
        """Compare the next losses with this one too: of a suspect step, that of its last execution."""
        if math.isfinite(loss):
            self._losses.append(loss)


def gather(value: float, device: torch.device) -> list[float]:
    """A number of every rank. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    every = mine.new_empty(dist.get_world_size())
    dist.all_gather_into_tensor(every, mine)
    return every.tolist()


def neighbours_batches(
    batches: Sequence[TaskBatch], state: RandomState, group: dist.ProcessGroup, device: torch.device
) -> tuple[list[TaskBatch], RandomState]:
    """What the rank before in data parallelism computes on: its batches, on this device, and its random numbers.

    Collective over ``group``.
    """
    fields = [{name: _sent(getattr(batch, name)) for name in _names(batch)} for batch in batches]
    lent, host, cuda = from_rank_before([fields, state.host, state.cuda], group)
    draws = copy.copy(state)  # Python's and numpy's generators are alike on every rank
    draws.host, draws.cuda = host, cuda
    return [_like(batch, values, device) for batch, values in zip(batches, lent, strict=True)], draws


def judge(
    first: Sequence[float], again: Sequence[float], norms: tuple[float, float], reason: str, whole: tuple[float, float]
) -> RerunVerdict | None:
    """Compare two executions on the same ranks.

    Args:
        first: Each rank's part of the loss, first.
        again: The same, again.
        norms: The gradient's norm, first and again.
        reason: Why the step was suspect.
        whole: The whole loss, first and again.

    Returns:
        The verdict if they differ; None if another rank must try.
    """
    changed = tuple(rank for rank, (a, b) in enumerate(zip(first, again, strict=True)) if not same(a, b))
    if changed or not same(*norms, _SAME_NORM):
        return RerunVerdict("transient hardware", changed or tuple(range(len(first))), reason, whole)
    return None


def judge_elsewhere(
    here: Sequence[float],
    elsewhere: Sequence[float],
    source: Sequence[int],
    norms: tuple[float, float],
    reason: str,
    whole: tuple[float, ...],
) -> RerunVerdict:
    """Compare a step with the same data on other ranks.

    Args:
        here: Each rank's part of the loss, from its own data.
        elsewhere: Each rank's part, from the data of ``source``.
        source: For each rank, the rank whose data it computed.
        norms: The gradient's norm, both times.
        reason: Why the step was suspect.
        whole: The whole loss of each execution.
    """
    differ = [(rank, owner) for rank, owner in enumerate(source) if not same(here[owner], elsewhere[rank])]
    if differ:
        # a wrong rank spoils its own data's result and that of the data it was lent, a right one at most one of the two
        spoilt = [rank for pair in differ for rank in pair]
        worst = max(spoilt.count(rank) for rank in spoilt)
        most = [rank for rank in dict.fromkeys(spoilt) if spoilt.count(rank) == worst]
        values = {rank: max(_badness(here[rank]), _badness(elsewhere[rank])) for rank in most}
        # of two ranks each has computed both data: the wrong one's results are far out both times
        both = {rank: min(_badness(here[rank]), _badness(elsewhere[rank])) for rank in most}
        top = max(both.values())
        return RerunVerdict(
            "persistent hardware", tuple(sorted(rank for rank in values if both[rank] == top)), reason, whole
        )
    if not same(*norms, _SAME_NORM):
        return RerunVerdict("persistent hardware", tuple(range(len(here))), reason, whole)
    most_bad = max(map(_badness, here))
    return RerunVerdict(
        "data or numerics", tuple(rank for rank, x in enumerate(here) if _badness(x) >= 0.99 * most_bad), reason, whole
    )


def same(a: float, b: float, tolerance: float = _SAME_LOSS) -> bool:
    """Whether two results agree to rounding; what is not finite agrees with what is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _badness(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


_ARRAY = "numpy.ndarray"
_BATCH = ("inputs", "keywords", "target", "samples_consumed")


def _names(batch: TaskBatch) -> Sequence[str]:
    """What a batch consists of: its fields, or what every batch has."""
    if dataclasses.is_dataclass(batch):
        return [field.name for field in dataclasses.fields(batch)]
    return _BATCH


def _sent(value: Any) -> Any:
    """A field as `from_rank_before` takes it: a NamedTuple, such as a target, as a tuple, and numpy's array as a tensor."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(value)}
    return tuple(value) if pytree.is_namedtuple_instance(value) else value


def _like(batch: TaskBatch, values: dict[str, Any], device: torch.device) -> TaskBatch:
    """A batch of the same kind with these values, on the device."""
    moved = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device), values)
    for name in moved:
        kind = type(getattr(batch, name))
        if pytree.is_namedtuple_class(kind):
            moved[name] = kind(*moved[name])
        if isinstance(values[name], dict) and _ARRAY in values[name]:
            moved[name] = values[name][_ARRAY].numpy()
    if dataclasses.is_dataclass(batch):
        return dataclasses.replace(cast("Any", batch), **moved)
    return TensorBatch(**moved)
