"""A step's predicted timeline of all ranks, as a trace for ui.perfetto.dev: one process a rank, nested slices.

A rank's schedule of forwards and backwards is simulated with the cost of its own layers; inside each stand its layers, and
inside those their operators and exposed transfers. Behind the schedule follow what data parallelism does not hide, host copies,
the optimizer and the host. The whole takes exactly the estimate's step: the estimate's bubble is a closed form, so the
schedule's part is stretched to it, by the factor in each process's name. Ranks that differ in other axes than pp do the same.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_pipeline import Action, Costs, Kind, Schedule, Simulation, balanced_cut, simulate

from titan_train.planner.cost.block import BlockCost, block_cost
from titan_train.planner.cost.schedules import schedule_of
from titan_train.planner.cost.step import TERMS, context_of, head_seconds, second_token
from titan_train.planner.estimate import StepEstimate

_MOST_EVENTS = 200_000
_AROUND = ("dp", "offload", "optimizer", "host")
"""Terms that follow the schedule."""
_WEIGHTS = ("products", "experts")
"""Operators half of whose backward are gradients of weights."""

Slices = list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Seconds by operator of one layer of a stage."""

    name: str
    forward: dict[str, float]
    backward: dict[str, float]


def step_trace(e: StepEstimate) -> str:
    """The trace's JSON.

    Raises:
        ValueError: The schedule cannot serve these numbers.
    """
    setup = e.setup
    schedule = _schedule(e)
    stages = _stages(e, schedule.num_stages)
    played = simulate(schedule, _costs(stages))
    around = sum(e.time.terms[name] for name in _AROUND)
    stretch = (e.time.total - around) / played.makespan
    detail = _detail(e, stages, played)
    same = setup.world_size // setup.pp
    ranks = [list(_slices(e, stages, played, rank, stretch, detail)) for rank in range(setup.pp)]
    whole = sum(map(len, ranks)) * same <= _MOST_EVENTS
    events: list[dict[str, Any]] = []
    for number in range(setup.world_size) if whole else range(0, setup.world_size, same):
        place = number // same
        which = f"rank {number}" if whole else f"ranks {number} to {number + same - 1}, which do the same"
        name = f"{which} (pp {place}; schedule x {stretch:.3f})" if setup.pp > 1 else which
        events.append({"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        )
        for text, kind, start, seconds in ranks[place]:
            ts, dur = round(1e6 * start, 3), round(1e6 * seconds, 3)
            events.append({"ph": "X", "name": text, "cat": kind, "pid": number, "tid": 0, "ts": ts, "dur": dur})
    if setup.pp > 1:
        events += _messages(played, stretch, same)
    about = {"setup": setup.describe(), "seconds": e.time.total, "terms": e.time.terms}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "titan": about}, separators=(",", ":"))


def _stages(e: StepEstimate, count: int) -> list[list[_Layer]]:
    """The layers of each pipeline stage; the head is a layer of the last."""
    context, setup = context_of(e.shape, e.machine, e.constants, e.setup), e.setup
    costs = [block_cost(context, block) for block in e.shape.blocks]
    exposed = 1 - (e.constants.hide_ep if setup.ep_overlap else 0.0)

    def layer(name: str, cost: BlockCost, times: float = 1.0) -> _Layer:
        def seconds(part: dict[str, float]) -> dict[str, float]:
            return {n: times * s * (exposed if n == "ep" else 1.0) for n, s in part.items()}

        again = {n if n in ("tp", "cp", "ep") else f"recompute: {n}": s for n, s in seconds(cost.recompute).items()}
        behind = seconds(cost.backward)
        return _Layer(name, seconds(cost.forward), {n: again.get(n, 0) + behind.get(n, 0) for n in {**again, **behind}})

    every = [cost for block, cost in zip(e.shape.blocks, costs, strict=True) for _ in range(block.count)]
    layers = [layer(f"layer {n}", cost) for n, cost in enumerate(every)]
    more = [layer("next tokens", cost, e.shape.mtp) for cost in second_token(context, e.shape, costs)]
    head = head_seconds(context, e.shape)
    more.append(_Layer("head", {"head": head / 3}, {"head": 2 * head / 3}))
    weights = [sum(x.forward.values()) + sum(x.backward.values()) for x in layers]
    weights[-1] += sum(sum(x.forward.values()) + sum(x.backward.values()) for x in more)
    stages = [[layers[n] for n in part] for part in balanced_cut(weights, count)]
    stages[-1] += more
    return stages


def _schedule(e: StepEstimate) -> Schedule:
    setup = e.setup
    if setup.pp == 1:
        actions = tuple(Action(kind, 0, m) for m in range(setup.microbatches) for kind in (Kind.F, Kind.B))
        return Schedule("one rank", setup.microbatches, (0,), (actions,))
    return schedule_of(setup.schedule, setup.pp, setup.stages_per_rank, setup.microbatches)


def _costs(stages: list[list[_Layer]]) -> Costs:
    forward = tuple(sum(sum(x.forward.values()) for x in stage) for stage in stages)
    backward = tuple(sum(sum(x.backward.values()) for x in stage) for stage in stages)
    weights = tuple(sum(x.backward.get(n, 0.0) / 2 for x in stage for n in _WEIGHTS) for stage in stages)
    inputs = tuple(b - w for b, w in zip(backward, weights, strict=True))
    none = (0.0,) * len(stages)
    return Costs(forward=forward, input_grad=inputs, weight_grad=weights, activation=none, weight_context=none)


def _detail(e: StepEstimate, stages: list[list[_Layer]], played: Simulation) -> int:
    """Levels below an action that the trace has room for: 2 layers and operators, 1 operators, 0 neither."""
    actions = sum(map(len, played.timeline))
    layers = actions * sum(map(len, stages)) / len(stages)
    operators = max(len(x.backward) for stage in stages for x in stage)
    return 2 if layers * (operators + 1) < _MOST_EVENTS else 1 if actions * operators < _MOST_EVENTS else 0


def _slices(
    e: StepEstimate, stages: list[list[_Layer]], played: Simulation, rank: int, stretch: float, detail: int
) -> Iterator[tuple[str, str, float, float]]:
    """Name, kind, start and seconds of each slice of one pipeline rank, outer before inner."""
    for slot in played.timeline[rank]:
        action, start = slot.action, stretch * slot.start
        yield (
            f"{_NAMES[action.kind]} {action.microbatch}, stage {action.stage}",
            action.kind.value,
            start,
            (stretch * (slot.end - slot.start)),
        )
        inside = _inside(stages[action.stage], action.kind) if detail else ()
        if detail == 1:
            inside = [("", _together(parts for _, parts in inside))]
        for layer, parts in inside:
            if detail == 2:
                yield layer, "layer", start, stretch * sum(seconds for _, seconds in parts)
            for name, seconds in parts:
                yield name, "operator", start, stretch * seconds
                start += stretch * seconds
    end = stretch * played.makespan
    for name in _AROUND:
        if e.time.terms[name]:
            yield f"{name}: {TERMS[name]}", name, end, e.time.terms[name]
        end += e.time.terms[name]


def _together(layers: Iterable[Slices]) -> Slices:
    """Seconds of each operator over all layers."""
    found: dict[str, float] = {}
    for name, seconds in itertools.chain.from_iterable(layers):
        found[name] = found.get(name, 0.0) + seconds
    return list(found.items())


_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward of inputs", Kind.W: "backward of weights"}


def _inside(stage: Sequence[_Layer], kind: Kind) -> Iterator[tuple[str, Slices]]:
    """The layers of one action in the order in which they run, with their operators."""
    for layer in stage if kind is Kind.F else reversed(stage):
        parts = layer.forward if kind is Kind.F else layer.backward
        if kind in (Kind.I, Kind.W):
            halves = {n: parts[n] / 2 for n in _WEIGHTS if n in parts}
            parts = halves if kind is Kind.W else {**parts, **halves}
        yield layer.name, [(name, seconds) for name, seconds in parts.items() if seconds]


def _messages(played: Simulation, stretch: float, same: int) -> Iterator[dict[str, Any]]:
    """Arrows between the first ranks of the stages."""
    for number, t in enumerate(played.transfers):
        arrow = {"cat": "message", "name": str(t.action), "id": number, "tid": 0}
        yield {**arrow, "ph": "s", "pid": t.source * same, "ts": round(1e6 * stretch * t.departure, 3)}
        yield {**arrow, "ph": "f", "bp": "e", "pid": t.target * same, "ts": round(1e6 * stretch * t.arrival, 3)}
