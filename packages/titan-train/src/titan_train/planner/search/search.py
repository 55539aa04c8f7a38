"""Estimate every legal setup and rank those that fit.

Choices that do not interact are settled one by one: the least recomputation that fits is the fastest (an eager dense model may
move its activations to the host instead, and smaller optimizer states are tried where they make room for less of it), the method
of context parallelism is the one with the cheapest block, async TP is on where there is tp. The rest is enumerated.

The order is by estimated tokens per second, less 2 % for each axis outside the range of measured rows (tp across domains,
pp > 8, cp > 8, under 4,096 tokens a microbatch, experts on torch's own stack, more than 512 devices). Setups within 2 % of the
best are a tie, and the simplest of a tie comes first: fewest axes, then small pp, cp, tp, ep.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from titan_train.models.shape import ModelShape
from titan_train.planner.calibrate.defaults import constants_for
from titan_train.planner.cost.constants import Constants
from titan_train.planner.cost.step import MicrobatchTime, context_of, microbatch_time, step_time
from titan_train.planner.estimate import StepEstimate
from titan_train.planner.memory.peak import MemoryPeak, memory_peak
from titan_train.planner.memory.states import state_bytes
from titan_train.planner.search.space import PlanRequest, base_setup, batches, copied, degrees
from titan_train.planner.setup import Precision, Setup

_TIE = 0.02
_HOST_BYTES = 128 * 2**30
"""Host memory that one device may use for parameters and optimizer state, or for activations."""
_RECOMPUTE = ("none", "selective", "full")
_RECOMPUTE_TORCH = (
    {"recompute": "none"},
    {"recompute": "full", "recompute_share": 1 / 4},  # each fourth block
    {"recompute": "selective"},  # keeps less than each second block would, and is as fast
    {"recompute": "full"},
)
_RECOMPUTE_TE = (
    {"recompute": "none"},
    {"recompute": "none", "recompute_modules": ("layernorm", "moe_act")},
    {"recompute": "none", "recompute_modules": ("layernorm", "moe_act", "mla_up_proj", "mlp")},
    {"recompute": "full", "recompute_modules": ()},
)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The outcome of a search."""

    request: PlanRequest
    best: list[StepEstimate]
    """Best first."""
    kinds: dict[str, list[StepEstimate]]
    """The best three without an axis, with experts over ranks or not, of each precision, and where small optimizer states make
    room for something, of each format; best first."""
    front: list[StepEstimate]
    """Setups that no other beats in both memory and speed, least memory first."""
    tie: int
    """How many of all setups lie within 2 % of the best."""
    examined: int
    """Setups whose memory was estimated."""
    fitting: int
    """Setups that fit and were timed."""
    closest: StepEstimate | None = field(default=None)
    """Where none fits: the setup that needs the least memory."""


class Searcher:
    """One search; keeps the costs of blocks that many setups share."""

    def __init__(self, request: PlanRequest, *, offload: float = 0.0) -> None:
        self.request = request
        self.offload = offload
        self.may_offload = request.stack == "eager" and not request.shape.moe  # a compiled block cannot be told to move
        self.times: dict[tuple[Any, ...], MicrobatchTime] = {}
        self.constants: dict[str, Constants] = {}
        self._tried: list[tuple[Setup, MemoryPeak]] = []

    def run(self, top: int = 10) -> Ranking:
        """Search."""
        request = self.request
        base = replace(base_setup(request), offload_optimizer=self.offload)
        found: list[StepEstimate] = []
        small: list[StepEstimate] = []
        examined, closest = 0, None
        for chosen in degrees(request):
            for batch in batches(request, chosen):
                setup = base.changed(async_tp=chosen["tp"] > 1 and request.task != "lora", **chosen, **batch)
                if copied(request.stack, setup.dp_replicate, setup.dp_shard * setup.cp):
                    if self.offload:  # moves shards
                        continue
                    setup = setup.changed(sharding="ddp")
                examined += 1
                states_by_use = state_bytes(request.shape, setup, first=not setup.head_on_first_rank)
                states = sum(states_by_use.values())
                if states > request.limit_bytes and (found or (closest and states >= closest.memory.allocated)):
                    small += self._with_small_states(setup, states_by_use, {})
                    continue
                fitted, peak = self._least_recompute(setup, states)
                tried: dict[Precision, list[tuple[Setup, MemoryPeak]]] = {setup.precision: self._tried}
                if self.may_offload and fitted.recompute != "none":
                    found += self._offloaded(setup)
                if peak.allocated > request.limit_bytes:
                    if closest is None or peak.allocated < closest.memory.allocated:
                        closest = self._estimate(fitted, peak)
                    small += self._with_small_states(setup, states_by_use, tried)
                    continue
                for precision in request.precisions:
                    precise, held = fitted, peak
                    if precision != fitted.precision:  # casts take the place of what bf16 keeps, or stand beside it
                        precise, held = self._least_recompute(at(setup, precision), states)
                        tried[precision] = self._tried
                    if held.allocated <= request.limit_bytes:
                        found.append(self._fastest(precise, held))
                small += self._with_small_states(setup, states_by_use, tried)
        ranked, tie = self._rank(distinct(found))
        kinds, others = kinds_of(ranked), self._rank(distinct(small))
        kinds |= {
            f"optimizer states in {s}": [e for e in others[0] if e.setup.states == s][:3] for s in request.states[1:]
        }
        if not found:
            found, (ranked, tie) = small, others
        return Ranking(
            request,
            ranked[:top],
            {name: best for name, best in kinds.items() if best},
            pareto(found),
            tie,
            examined,
            len(found),
            closest if not found else None,
        )

    def _least_recompute(self, setup: Setup, states: float) -> tuple[Setup, MemoryPeak]:
        options = _RECOMPUTE_TE if setup.te else _RECOMPUTE_TORCH
        shape, limit = self.request.shape, self.request.limit_bytes
        if states > limit:
            options = options[-1:]
        self._tried = []
        of_a_stage = shape.num_layers // (setup.pp * setup.stages_per_rank)
        for option in options:
            asked = setup.changed(**{"recompute_share": 1.0, **option})
            if asked.recompute_share * of_a_stage < 1:
                continue  # each stage begins to count anew
            setup = asked
            peak = memory_peak(shape, setup)
            self._tried.append((setup, peak))
            if peak.allocated <= limit:
                break
        return setup, peak  # type: ignore[possibly-undefined]

    def _with_small_states(
        self, setup: Setup, held: dict[str, float], tried: dict[Precision, list[tuple[Setup, MemoryPeak]]]
    ) -> Iterator[StepEstimate]:
        """The layout with small optimizer states, where they let it recompute less, or fit.

        Args:
            setup: The layout, in bf16.
            held: Its bytes throughout a step, by use, with the first format of states.
            tried: For each precision what was tried with the first format of states; its last did not need to recompute more.
                A precision is missing where another was too large already.
        """
        limit = self.request.limit_bytes
        whole = self.request.state_bytes[0]
        for states in self.request.states[1:] if not (self.offload or setup.te) else ():
            fewer: dict[str, Any] = {"states": states, "state_bytes": self.request.state_bytes_with(states)}
            each = fewer["state_bytes"][0]
            if each >= whole or (states == "int8" and 8 % setup.tp):
                continue
            for precision in self.request.precisions:
                if precision not in tried:
                    states_less = sum(held.values()) - held["optimizer"] * (1 - each / whole)
                    if states_less > limit:
                        break
                    fitted, peak = self._least_recompute(at(setup, precision).changed(**fewer), states_less)
                    if peak.allocated <= limit:
                        yield self._fastest(fitted, peak)
                    continue
                options = tried[precision]
                for option, peak in options[:-1] if options[-1][1].allocated <= limit else options:
                    saved = peak.parts.get("optimizer", 0.0) * (1 - each / whole)
                    if peak.allocated - saved > limit:
                        continue
                    parts = peak.parts | {"optimizer": peak.parts["optimizer"] - saved}
                    yield self._fastest(option.changed(**fewer), MemoryPeak(parts, peak.instant, peak.reserved - saved))
                    break

    def _offloaded(self, setup: Setup) -> Iterator[StepEstimate]:
        """The setup in each precision with its activations in host memory instead of computed again, where it fits."""
        for precision in self.request.precisions:
            kept = memory_peak(self.request.shape, at(setup, precision)).parts["activations"]
            moved = at(setup, precision).changed(offload_activations=1.0)
            peak = memory_peak(self.request.shape, moved)
            if kept <= _HOST_BYTES and peak.allocated <= self.request.limit_bytes:
                yield self._fastest(moved, peak)

    def _fastest(self, setup: Setup, peak: MemoryPeak) -> StepEstimate:
        """Settle what needs no memory, or little: the method of context parallelism, and resharding."""
        if setup.cp > 1:
            setup, peak = self._exchange(setup, peak)
        best = self._estimate(setup, peak)
        if setup.sharding == "fsdp" and setup.pp == 1 and setup.dp_shard * setup.cp > 1:
            kept = setup.changed(reshard=False)
            kept_peak = memory_peak(self.request.shape, kept)
            if kept_peak.allocated <= self.request.limit_bytes:
                other = self._estimate(kept, kept_peak)
                if other.time.total < 0.995 * best.time.total:
                    return other
        return best

    def _exchange(self, setup: Setup, peak: MemoryPeak) -> tuple[Setup, MemoryPeak]:
        """The method of context parallelism with the cheapest block, of those that fit; ``peak`` is that of ``setup``."""
        methods = [setup.changed(cp_method=method) for method in cp_methods(self.request.shape, setup)]
        for other in sorted(methods, key=lambda s: sum(self._microbatch(s).passes.values())):
            held = peak if other.cp_method == setup.cp_method else memory_peak(self.request.shape, other)
            if held.allocated <= self.request.limit_bytes:
                return other, held
        return setup, peak

    def _constants(self, setup: Setup) -> Constants:
        if setup.precision not in self.constants:
            self.constants[setup.precision] = self.request.constants or constants_for(
                self.request.machine, setup, routed=self.request.shape.moe
            )
        return self.constants[setup.precision]

    def _microbatch(self, s: Setup) -> MicrobatchTime:
        key = (
            s.tp, s.cp, s.ep, s.microbatch, s.recompute, s.recompute_share, s.recompute_modules, s.precision, s.cp_method,
        )  # fmt: skip
        if key not in self.times:
            context = context_of(self.request.shape, self.request.machine, self._constants(s), s)
            self.times[key] = microbatch_time(context, self.request.shape)
        return self.times[key]

    def _estimate(self, setup: Setup, peak: MemoryPeak) -> StepEstimate:
        shape, machine, constants = self.request.shape, self.request.machine, self._constants(setup)
        time = step_time(shape, machine, constants, setup, self._microbatch(setup))
        return StepEstimate(shape, machine, setup, constants, time, peak)

    def _rank(self, found: list[StepEstimate]) -> tuple[list[StepEstimate], int]:
        scored = sorted(((score(e), _simplicity(e.setup), e) for e in found), key=lambda x: (-x[0], x[1]))
        if not scored:
            return [], 0
        near = [x for x in scored if x[0] >= scored[0][0] * (1 - _TIE)]
        first = min(near, key=lambda x: (x[1], -x[0]))
        return [first[2], *(x[2] for x in scored if x is not first)], len(near)


def cp_methods(shape: ModelShape, setup: Setup) -> list[str]:
    """What the setup can exchange under context parallelism; an exchange of heads is the last."""
    heads = [b.attention for b in shape.blocks if b.attention is not None]
    # a ring balances the work of causal attention; without that the trainer gathers or exchanges
    methods = ["ring", "allgather"] if all(a.causal for a in heads) else ["allgather"]
    if all(a.heads // setup.tp % setup.cp == 0 and a.kv_heads // setup.tp % setup.cp == 0 for a in heads):
        methods.append("ulysses")
    return methods


def at(setup: Setup, precision: Precision) -> Setup:
    """The setup in ``precision``."""
    return setup if setup.precision == precision else setup.changed(precision=precision)


def kinds_of(ranked: list[StepEstimate]) -> dict[str, list[StepEstimate]]:
    """What each choice buys: the best three with it and without it, of what was searched."""
    chosen: dict[str, Callable[[Setup], bool]] = {
        "no pipeline": lambda s: s.pp == 1,
        "no tensor parallelism": lambda s: s.tp == 1,
        "no context parallelism": lambda s: s.cp == 1,
        "experts over ranks (ep)": lambda s: s.ep > 1,
        "experts on every rank": lambda s: s.ep == 1,
        "bf16": lambda s: not s.float8,
        "float8": lambda s: s.float8,
    }
    kinds = {name: [e for e in ranked if fits(e.setup)] for name, fits in chosen.items()}
    return {name: found[:3] for name, found in kinds.items() if 0 < len(found) < len(ranked)}


def distinct(found: list[StepEstimate]) -> list[StepEstimate]:
    """Of setups that the model cannot tell apart (longer slices against more sequences), the simplest."""
    kept: dict[tuple[Any, ...], StepEstimate] = {}
    for e in sorted(found, key=lambda e: _simplicity(e.setup)):
        s = e.setup
        kept.setdefault(
            (
                s.pp,
                s.tp,
                s.ep,
                s.precision,
                s.schedule,
                round(e.time.total, 4),
                s.recompute,
                s.recompute_share,
                s.states,
            ),
            e,
        )
    return list(kept.values())


def outside(e: StepEstimate) -> list[str]:
    """Axes on which a setup lies outside the range of measured rows."""
    s = e.setup
    checks = (
        (s.tp > e.machine.domain, "tp across domains"),
        (s.pp > 8, "pp > 8"),
        (s.cp > 8, "cp > 8"),
        (s.tokens < 4096, "under 4,096 tokens a microbatch"),
        (e.shape.moe and not s.te, "experts on torch's own stack"),
        (s.world_size > 512, "more than 512 devices"),
    )
    return [name for is_outside, name in checks if is_outside]


def score(e: StepEstimate) -> float:
    """Tokens per second, less 2 % for each axis outside the measured range."""
    return e.tokens_per_s * (1 - 0.02 * len(outside(e)))


def _simplicity(s: Setup) -> tuple[Any, ...]:
    axes = sum(degree > 1 for degree in s.degrees().values())
    return (
        axes, s.pp, s.cp, s.tp, s.ep, s.dp_replicate, s.stages_per_rank, _RECOMPUTE.index(s.recompute), s.microbatch,
        s.precision, not s.reshard,
    )  # fmt: skip


def pareto(found: list[StepEstimate]) -> list[StepEstimate]:
    """Setups that no other beats in both memory and speed, least memory first."""
    front: list[StepEstimate] = []
    for e in sorted(found, key=lambda e: (e.memory.allocated, -e.tokens_per_s)):
        if not front or e.tokens_per_s > front[-1].tokens_per_s:
            front.append(e)
    return front


def search(request: PlanRequest, top: int = 10) -> Ranking:
    """Search all setups of ``request``; where none fits, also those that keep parameters and optimizer on the host."""
    found = Searcher(request).run(top)
    if found.best or request.stack not in ("eager", "compile"):
        return found
    each = 2 * request.weight_bytes + max(request.state_bytes)
    if each * request.shape.parameters() / request.gpus > _HOST_BYTES:
        return found
    offloaded = Searcher(request, offload=1.0).run(top)
    return offloaded if offloaded.best else found
