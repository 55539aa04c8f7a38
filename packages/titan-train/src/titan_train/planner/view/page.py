"""The page of a plan: sliders, and for each position of theirs what Python computed. The page itself computes nothing.

Saved, its sliders stop at a grid of setups around the plan, whose answers are in the page. Served (`titan-train plan --web`),
they take every value, and Python answers on loopback, to this machine only.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from titan_train.models.shape import ExpertsShape, ModelShape
from titan_train.planner.calibrate.defaults import constants_for
from titan_train.planner.cost.constants import Constants
from titan_train.planner.cost.schedules import SEARCHED, schedule_cost, stages_of
from titan_train.planner.estimate import StepEstimate, estimate
from titan_train.planner.hardware.machine import Machine
from titan_train.planner.search.search import cp_methods
from titan_train.planner.search.space import copied
from titan_train.planner.setup import Setup
from titan_train.planner.view.tables import count_text
from titan_train.trust.published import content_policy

_GIB = 2.0**30
_MOST_POINTS = 600
_EACH_FOURTH = "full, each fourth"
_LABELS = {
    "gpus": "Devices", "seq_len": "Sequence", "global_batch": "Global batch", "microbatch": "Microbatch", "tp": "tp", "cp": "cp",
    "pp": "pp", "ep": "ep", "dp_replicate": "Replicas", "schedule": "Schedule", "stages_per_rank": "Stages per rank",
    "recompute": "Recompute", "precision": "Precision",
}  # fmt: skip

Choices = Mapping[str, int | str]


@dataclass(frozen=True)
class Plan:
    """What the page shows at first, and what its sliders start from."""

    best: StepEstimate
    limit_bytes: float
    """Bytes that a setup may allocate."""
    constants: Constants | None = None
    """A set of one's own instead of the shipped ones."""
    uncut: tuple[str, ...] = ()
    """As in `titan_train.planner.search.space.PlanRequest`; they have no slider."""

    @property
    def shape(self) -> ModelShape:
        """The model's."""
        return self.best.shape

    @property
    def machine(self) -> Machine:
        """The kind of device."""
        return self.best.machine

    @property
    def choices(self) -> dict[str, int | str]:
        """Where the sliders stand at first."""
        s = self.best.setup
        found = {name: s.world_size if name == "gpus" else getattr(s, name) for name in _LABELS}
        return found | ({"recompute": _EACH_FOURTH} if s.recompute == "full" and s.recompute_share == 1 / 4 else {})

    def setup(self, choices: Choices) -> Setup:
        """The setup that the sliders mean; all else is as planned.

        Raises:
            ValueError: It cannot run; the message says why.
        """
        c: dict[str, Any] = self.choices | dict(choices)
        inner = c["tp"] * c["cp"] * c["pp"] * c["dp_replicate"]
        if c["gpus"] % inner:
            raise ValueError(
                f"tp x cp x pp x replicas = {inner} does not divide {c['gpus']} devices. Lower one of them."
            )
        if c["pp"] == 1:
            c |= {"schedule": "1f1b", "stages_per_rank": 1}
        elif c["schedule"] != "interleaved_1f1b" or c["stages_per_rank"] == 1:
            c["stages_per_rank"] = stages_of(c["schedule"], max(2, c["stages_per_rank"]))
        shard = c.pop("gpus") // inner
        alone = c["cp"] * shard == 1 or c["pp"] > 1  # nothing to gather again
        planned = self.best.setup
        if c["recompute"] == _EACH_FOURTH:
            c |= {"recompute": "full", "recompute_share": 1 / 4, "recompute_modules": ()}
        elif c["recompute"] != self.choices["recompute"]:
            c |= {"recompute_share": 1.0, "recompute_modules": ()}
        copies = copied(planned.stack, c["dp_replicate"], shard * c["cp"])
        sharding = "ddp" if copies else "fsdp" if planned.sharding == "ddp" else planned.sharding
        setup = replace(
            planned,
            **c,
            dp_shard=shard,
            async_tp=c["tp"] > 1,
            reshard=alone or planned.reshard,
            sharding=sharding,
        )
        _check(self.shape, self.machine, setup)
        methods: list[Any] = cp_methods(self.shape, setup)
        return setup if setup.cp == 1 or setup.cp_method in methods else replace(setup, cp_method=methods[-1])

    def answer(self, choices: Choices) -> dict[str, Any]:
        """What the page shows for some choices: texts, and the bars' parts in percent."""
        if self.choices | dict(choices) == self.choices:
            return _shown(self.best, self.limit_bytes)
        try:
            setup = self.setup(choices)
            constants = self.constants or constants_for(self.machine, setup, routed=self.shape.moe)
            return _shown(estimate(self.shape, self.machine, setup, constants), self.limit_bytes)
        except ValueError as err:
            return {"state": "invalid", "speed": "This cannot run", "verdict": str(err)}

    def values(self, *, live: bool) -> dict[str, list[int | str]]:
        """The positions of each slider: of a served page all, of a saved one those around the plan, one wider at a time."""
        best = self.choices
        routed = any(isinstance(b.ffn, ExpertsShape) for b in self.shape.blocks)
        shown = [name for name in _LABELS if name not in self.uncut and (name != "ep" or routed)]
        names: dict[str, list[int | str]] = {
            "recompute": ["none", _EACH_FOURTH, "selective", "full"],
            "precision": ["bf16", *(("tensorwise", "rowwise", "blockwise") if self.machine.fp8 else ())],
        }
        if live:
            names["schedule"] = [name for name in SEARCHED if name not in ("gpipe", "looped_bfs")]
            tops = {"gpus": 14, "seq_len": 20, "global_batch": 15, "microbatch": 5, "stages_per_rank": 3}
            return {
                name: _with(names[name], best[name])
                if name in names
                else _with([2**k for k in range(tops.get(name, 9))], best[name])
                for name in shown
            }
        found: dict[str, list[int | str]] = {name: [best[name]] for name in shown}
        for name in ("recompute", "tp", "microbatch", "pp", "precision", "dp_replicate", "cp", "ep"):
            if name not in found:
                continue
            at = best[name]
            wider = names.get(name) or [v for v in (int(at) // 2, int(at) * 2) if v]
            grown = found | {name: _with(["bf16", at] if name == "precision" else wider, at)}
            if len(list(_points(grown))) <= _MOST_POINTS:
                found = grown
        return found


def page(plan: Plan, *, live: bool = False) -> str:
    """The page's HTML; ``live`` asks the server that it comes from."""
    values = plan.values(live=live)
    grid = {} if live else {_key(choices): plan.answer(choices) for choices in _points(values)}
    title = f"{plan.shape.name}, {count_text(plan.shape.parameters())} parameters, on {plan.machine.title}"
    if not live:
        title += " x {gpus}, {global_batch} sequences of {seq_len:,} tokens a step".format(**plan.choices)
    data = {
        "title": title,
        "controls": [
            {"name": n, "label": _LABELS[n], "values": v, "first": plan.choices[n]} for n, v in values.items()
        ],
        "first": plan.answer(plan.choices),
        "grid": grid,
        "live": live,
        "note": "Python answers every position on this machine."
        if live
        else f"Sliders stop at the {len(grid)} setups that were computed around this plan; titan-train plan with --web "
        "answers all others.",
    }
    html = resources.files("titan_train.planner.view").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    before, tag, rest = html.partition("<script>")
    body, end, after = rest.partition("</script>")
    body = body.replace("/*DATA*/", f"const DATA = {text};")
    return before.replace("/*POLICY*/", content_policy(body, connect=live)) + tag + body + end + after


def build_plan_app(plan: Plan) -> Any:
    """The page on loopback: ``POST /answer`` takes the sliders' positions and returns what to show. It reads no file."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    from titan_train.serve.loopback import LocalOnly

    allowed = plan.values(live=True)

    async def show(_request: Request) -> Response:
        return HTMLResponse(page(plan, live=True), headers={"Cache-Control": "no-store"})

    async def answer(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > 4096:
                return JSONResponse({"error": "the choices are at most 4096 bytes."}, 413)
        asked: Any = None
        try:
            asked = json.loads(body)
            known = isinstance(asked, dict) and all(asked[name] in allowed[name] for name in asked)  # pyright: ignore[reportUnknownVariableType]
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            return JSONResponse({"error": "the choices must be positions of the page's sliders."}, 400)
        return JSONResponse(await run_in_threadpool(plan.answer, plan.choices | asked))

    routes = [Route("/", show), Route("/answer", answer, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(LocalOnly)])


def _points(values: Mapping[str, list[int | str]]) -> Iterator[dict[str, int | str]]:
    for point in itertools.product(*values.values()):
        yield dict(zip(values, point, strict=True))


def _key(choices: Choices) -> str:
    return "|".join(map(str, choices.values()))


def _with(values: list[Any], best: int | str) -> list[int | str]:
    """The values and the plan's own, numbers in order."""
    if best not in values:
        values = [*values, best]
    return sorted(set(values)) if isinstance(best, int) else list(dict.fromkeys(values))


def _check(shape: ModelShape, machine: Machine, s: Setup) -> None:
    """Refuse with a ValueError what no trainer could run."""
    reasons: list[str] = []
    if not all(block.splits(s.tp) for block in shape.blocks):
        reasons.append(f"tp={s.tp} does not divide the heads of each layer.")
    if s.tp > machine.domain:
        reasons.append(f"tp={s.tp} leaves the {machine.domain} devices of one domain.")
    if s.global_batch % (s.dp * s.microbatch):
        reasons.append(
            f"{s.global_batch} sequences cannot be cut over {s.dp} data-parallel ranks in microbatches of {s.microbatch}."
        )
    if s.cp * s.tp > 1 and s.seq_len % (2 * s.cp * s.tp):
        reasons.append(f"a sequence of {s.seq_len:,} does not divide over 2 x cp x tp = {2 * s.cp * s.tp}.")
    if s.pp * s.stages_per_rank > shape.num_layers:
        reasons.append(f"{s.pp * s.stages_per_rank} stages need as many layers; the model has {shape.num_layers}.")
    experts = [b.ffn.num_experts for b in shape.blocks if isinstance(b.ffn, ExpertsShape)]
    ranks = s.dp_shard * s.cp * s.tp
    if s.ep > 1 and s.sharding == "ddp":
        reasons.append(f"ep={s.ep} needs ranks that shard parameters, and {s.dp_replicate} replicas leave none.")
    if s.ep > 1 and (not experts or ranks % s.ep or any(number % s.ep for number in experts)):
        reasons.append(f"ep={s.ep} must divide the {ranks} ranks of one copy, and the experts.")
    if s.pp > 1 and s.microbatches < s.pp:
        reasons.append(f"{s.microbatches} microbatches are fewer than {s.pp} pipeline ranks.")
    if reasons:
        raise ValueError(" ".join(reasons))
    if s.pp > 1:
        schedule_cost(s.schedule, s.pp, s.stages_per_rank, s.microbatches)  # refuses what the family cannot serve


def _shown(e: StepEstimate, limit_bytes: float) -> dict[str, Any]:
    low, high = e.interval
    over = e.memory.allocated > limit_bytes
    limit = f"{limit_bytes / _GIB:.1f} GiB"
    largest = max(e.memory.parts, key=lambda name: e.memory.parts[name])
    whole = max(limit_bytes, e.memory.allocated)
    verdict = (
        f"Does not fit: {e.memory.allocated_gib:.1f} GiB of {limit}; {largest} takes "
        f"{e.memory.parts[largest] / _GIB:.1f} GiB."
        if over
        else f"Fits: {e.memory.allocated_gib:.1f} GiB of {limit}."
    )
    return {
        "state": "over" if over else "fits",
        "speed": f"{e.tokens_per_s:,.0f} tokens/s/device",
        "facts": [
            ["80 % interval", f"{low:,.0f} to {high:,.0f}"],
            ["step", f"{e.time.total:.3f} s"],
            ["MFU", f"{e.mfu(causal=True):.1%}"],
            ["1 B tokens", f"{1e9 / e.tokens_per_s / 3600:.0f} device-hours"],
        ],
        "verdict": verdict,
        "setup": e.setup.describe(),
        "time": _bar(e.time.terms, e.time.total, lambda seconds: f"{seconds:.3f} s"),
        "memory": _bar(e.memory.parts, whole, lambda size: f"{size / _GIB:.1f} GiB"),
        "limit": round(100 * limit_bytes / whole, 2),
    }


def _bar(parts: Mapping[str, float], whole: float, text: Callable[[float], str]) -> list[list[Any]]:
    """Name, percent and text of each part that can be seen, the largest first."""
    shown = sorted(((n, x) for n, x in parts.items() if x > 0.002 * whole), key=lambda part: -part[1])
    return [[name, round(100 * size / whole, 2), text(size)] for name, size in shown]
