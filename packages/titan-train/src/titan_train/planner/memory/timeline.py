"""Memory over time of a step, on the fullest rank: every allocation of its program, in order, with its category and block.

One microbatch of each of the rank's stages runs forward and backward on fake tensors, with FSDP2's own allocations between
them; a pipeline's schedule then plays these pieces. Shards of parameters, gradients and optimizer state stay throughout, as in
the account of `titan_train.planner.memory.peak`. Without a pipeline one microbatch is shown: the others repeat it.
"""

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import titan_fsdp as fsdp
from titan_pipeline import Action, Kind
from torch import nn

from titan_train.config import Config
from titan_train.parallel.layout.run import RunPlan
from titan_train.parallel.stages import stage_layers, take_stage
from titan_train.parallel.tied import meaning_all_copies
from titan_train.planner.memory.closed import RankEstimate
from titan_train.planner.memory.ranks import RankProgram
from titan_train.planner.memory.rehearsed import pretended_groups

_THROUGHOUT = ("parameters", "gradients", "optimizer", "workspace")
_MOST_EVENTS = 200_000


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory from one event to another."""

    start: int
    """Number of the event that allocates it."""
    end: int
    """Number of the event that frees it; that after the last for what stays."""
    size: int
    """Bytes."""
    category: str
    """parameters, gradients, optimizer, workspace: throughout; gathered, activations, temporary."""
    where: str
    """The block."""
    operator: str


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """All allocations of one rank in a step."""

    title: str
    allocations: tuple[Allocation, ...]
    num_events: int
    marks: tuple[tuple[int, str], ...]
    """Event numbers at which forward or backward of a stage and microbatch begins."""
    note: str = ""
    """What is not shown."""

    def levels(self) -> dict[str, list[int]]:
        """Bytes by category after each event."""
        changes = {a.category: [0] * (self.num_events + 1) for a in self.allocations}
        for a in self.allocations:
            changes[a.category][a.start] += a.size
            changes[a.category][a.end] -= a.size
        for line in changes.values():
            for number in range(1, len(line)):
                line[number] += line[number - 1]
        return {category: line[: self.num_events] for category, line in changes.items()}

    @property
    def peak(self) -> tuple[int, int]:
        """The fullest event, and its bytes."""
        totals = [sum(at) for at in zip(*self.levels().values(), strict=True)]
        number = max(range(self.num_events), key=totals.__getitem__)
        return number, totals[number]


def step_timeline(config: Config, plan: RunPlan, whole: nn.Module, ranks: Sequence[RankEstimate]) -> MemoryTimeline:
    """Run the fullest rank's program on fake tensors and record what it allocates.

    Args:
        config: The run's configuration.
        plan: Its layout and schedule.
        whole: Its model on the meta device, with what is to be frozen; it is copied, not changed.
        ranks: What each pipeline rank holds.
    """
    config = meaning_all_copies(config, whole)
    layout, schedule = plan.layout, plan.schedule
    fullest = max(ranks, key=lambda rank: rank.peak)
    held = {name: int(fullest.memory.parts.get(name, 0)) for name in _THROUGHOUT}
    title, traces = config.model.name, dict[int, fsdp.MemoryTrace]()
    with pretended_groups(layout.spec.tp, layout.spec.ep) as (group, experts):
        rank = RankProgram(config, layout, plan.mode, plan.batch, whole, group, experts, closed_form=True)
        if schedule is None:
            actions = [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]
            traces[0] = rank.record(functools.partial(copy.deepcopy, whole), last=True)
        else:
            held |= {name: int(fullest.memory.parts.get(name, 0)) for name in ("gathered", "messages")}
            actions = schedule.compute_only().ranks[fullest.pipeline_rank]
            layers, last = stage_layers(config, whole, schedule), schedule.num_stages - 1
            kinds = rank.kinds(layers)
            title += f", pipeline rank {fullest.pipeline_rank}"
            alike: dict[object, int] = {}
            for stage in schedule.stages_of(fullest.pipeline_rank):
                here = layers[stage]
                same = alike.setdefault(kinds[stage], stage)
                if same == stage:
                    take = functools.partial(take_stage, whole, here, first=stage == 0, last=stage == last)
                    traces[stage] = rank.record(take, last=stage == last)
                traces[stage] = traces[same]
    played = play(held, actions, traces)
    if schedule is None:
        (forward, _), (backward, _) = played.marks
        played = replace(played, marks=((forward, "forward"), (backward, "backward")))
    offload = "offloaded activations are shown where they are made" if config.activations.offload else ""
    loss = "the loss in chunks of a CPU, smaller than a GPU's" if config.train.fused_loss else ""
    return replace(played, title=title, note="; ".join(filter(None, (played.note, offload, loss))))


def play(held: Mapping[str, int], actions: Sequence[Action], traces: Mapping[int, fsdp.MemoryTrace]) -> MemoryTimeline:
    """The pieces of the stages in the order of a rank's schedule.

    A backward that is split frees in its second half what forward kept: weight gradients still read it.

    Args:
        held: Bytes throughout the step, by category.
        actions: What the rank does, in order.
        traces: One microbatch of each stage.
    """
    done: list[Allocation] = []
    started: dict[tuple[int, int, int], tuple[int, fsdp.MemoryEvent]] = {}
    marks: list[tuple[int, str]] = []
    clock, note = len(held), ""

    def run(action: Action, events: Iterable[fsdp.MemoryEvent]) -> None:
        nonlocal clock
        marks.append((clock, str(action)))
        for event in events:
            key = action.stage, action.microbatch, event.key
            if event.size > 0:
                started[key] = clock, event
            else:
                start, made = started.pop(key)
                done.append(Allocation(start, clock, made.size, made.category, made.where, made.operator))
            clock += 1

    for number, action in enumerate(actions):
        trace = traces[action.stage]
        if clock + len(trace.forward) + len(trace.backward) > _MOST_EVENTS:
            note = f"the first {number} of {len(actions)} forwards and backwards; the others repeat them"
            break
        kept = {event.key for event in trace.forward} if action.kind in (Kind.I, Kind.W) else set[int]()
        if action.kind is Kind.F:
            run(action, trace.forward)
        elif action.kind is Kind.W:
            run(action, [event for event in trace.backward if event.key in kept])
        else:
            run(action, [event for event in trace.backward if event.key not in kept])
    for start, made in started.values():
        done.append(Allocation(start, clock, made.size, made.category, made.where, made.operator))
    done += [
        Allocation(n, clock, size, name, "throughout", name) for n, (name, size) in enumerate(held.items()) if size
    ]
    return MemoryTimeline("", tuple(sorted(done, key=lambda a: a.start)), clock, tuple(marks), note)
