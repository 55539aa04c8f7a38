"""What each action costs, in time and in memory.

All times share one unit (seconds when measured), all memory shares another (bytes when measured). Nothing here
assumes that stages are alike: the last stage carries the vocabulary, the first the embedding, and a schedule made for
averages loses up to 10 % on such a profile.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from titan_pipeline.ir.schedule import Action, Kind, read_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction of a connection between two ranks: a transfer takes ``latency + payload / bandwidth``."""

    latency: float = 0.0
    """Time from the end of the producer to the earliest arrival, per message."""
    bandwidth: float = float("inf")
    """Payload units per time unit. Transfers on one directed link queue for it; latency overlaps."""

    def __post_init__(self) -> None:
        if self.latency < 0 or not self.bandwidth > 0:
            raise ValueError(
                f"latency={self.latency}, bandwidth={self.bandwidth}: need latency >= 0 and bandwidth > 0."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Time and memory of every stage. Each tuple has one entry per stage.

    `uniform` makes one for equal stages; `Costs.load` reads a file.
    """

    forward: tuple[float, ...]
    """T_F: time of a forward."""
    input_grad: tuple[float, ...]
    """T_B of the zero-bubble papers: time of the input-gradient half of a backward."""
    weight_grad: tuple[float, ...]
    """T_W: time of the weight-gradient half."""
    activation: tuple[float, ...]
    """M_B: memory kept from the start of a forward to the end of its I or B."""
    weight_context: tuple[float, ...]
    """M_W: memory kept from the end of an I to the end of its W."""
    backward: tuple[float, ...] = ()
    """Time of an unsplit backward; empty means ``input_grad + weight_grad``."""
    payload: tuple[float, ...] = ()
    """Size of the message from stage ``s`` to ``s + 1`` (its gradient has the same size); empty means 0."""
    link: Link = field(default_factory=Link)
    """Every directed pair of ranks that ``links`` does not name."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict[tuple[int, int], Link])
    """``(from rank, to rank)`` → its own link."""

    def __post_init__(self) -> None:
        n = len(self.forward)
        if n == 0:
            raise ValueError("forward=(): give one cost a stage.")
        for name in ("forward", "input_grad", "weight_grad", "activation", "weight_context", "backward", "payload"):
            values = cast(tuple[float, ...], getattr(self, name))
            if name in ("backward", "payload") and not values:
                continue
            if len(values) != n:
                raise ValueError(f"{name} has {len(values)} entries but forward has {n}. Give one per stage.")
            if any(not (x >= 0) or x == float("inf") for x in values):
                raise ValueError(f"{name}={values}: costs are finite and not negative.")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        latency: float = 0.0,
        activation: float = 1.0,
        weight_context: float = 0.43,
        num_chunks: int = 1,
    ) -> "Costs":
        """Equal stages. Values are those of one *rank*; each of its ``num_chunks`` stages gets its share.

        Args:
            num_stages: Stages of the whole model (ranks x chunks).
            forward: T_F of a rank.
            input_grad: T_B of a rank.
            weight_grad: T_W of a rank.
            latency: Time of any hop between ranks (not divided by chunks).
            activation: M_B of a rank.
            weight_context: M_W of a rank; 0.43 M_B is a GPT block at sequence 1024 (zero-bubble paper, table 9 models).
            num_chunks: Stages a rank.
        """
        v = num_chunks

        def row(x: float) -> tuple[float, ...]:
            return (x / v,) * num_stages

        return cls(
            forward=row(forward),
            input_grad=row(input_grad),
            weight_grad=row(weight_grad),
            activation=row(activation),
            weight_context=row(weight_context),
            link=Link(latency=latency),
        )

    @property
    def num_stages(self) -> int:
        """Stages these costs describe."""
        return len(self.forward)

    def backward_of(self, stage: int) -> float:
        """Time of an unsplit backward of ``stage``."""
        return self.backward[stage] if self.backward else self.input_grad[stage] + self.weight_grad[stage]

    def payload_of(self, stage: int) -> float:
        """Size of the message between ``stage`` and ``stage + 1``."""
        return self.payload[stage] if self.payload else 0.0

    def link_of(self, source: int, target: int) -> Link:
        """The directed link between two ranks."""
        return self.links.get((source, target), self.link)

    def hop(self, stage: int, source: int, target: int) -> float:
        """Time of one uncontended transfer between ``stage`` and ``stage + 1``; 0 within a rank."""
        if source == target:
            return 0.0
        link = self.link_of(source, target)
        return link.latency + self.payload_of(stage) / link.bandwidth

    def time_of(self, action: Action) -> float:
        """Time of one compute action."""
        if action.kind is Kind.F:
            return self.forward[action.stage]
        if action.kind is Kind.I:
            return self.input_grad[action.stage]
        if action.kind is Kind.W:
            return self.weight_grad[action.stage]
        return self.backward_of(action.stage)

    def stage_total(self, stage: int) -> float:
        """F + I + W of one microbatch."""
        return self.forward[stage] + self.input_grad[stage] + self.weight_grad[stage]

    def without_communication(self) -> "Costs":
        """The same costs with instant links."""
        return replace(self, link=Link(), links={})

    def balanced(self) -> "Costs":
        """The same total work of each kind, spread evenly over the stages."""

        def mean(values: Sequence[float]) -> tuple[float, ...]:
            return (sum(values) / len(values),) * len(values) if values else ()

        return replace(
            self,
            forward=mean(self.forward),
            input_grad=mean(self.input_grad),
            weight_grad=mean(self.weight_grad),
            backward=mean(self.backward),
        )

    def check(self, num_stages: int) -> None:
        """Raise unless these costs describe ``num_stages`` stages."""
        if self.num_stages != num_stages:
            raise ValueError(
                f"the costs describe {self.num_stages} stages, the schedule has {num_stages}. "
                "Measure with the same split, or build them with Costs.uniform(num_stages)."
            )

    def to_json(self) -> str:
        """All fields as one JSON object."""
        body = asdict(self)
        body["link"] = _link_body(self.link)
        body["links"] = {f"{a}->{b}": _link_body(link) for (a, b), link in self.links.items()}
        return json.dumps(body, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Costs":
        """Read what `to_json` wrote.

        Raises:
            ValueError: On an unknown or missing key, or a value of another type.
        """
        body = cast(dict[str, Any], json.loads(text))
        known = {f.name for f in fields(cls)}
        try:
            unknown = sorted(set(body) - known)
            if unknown:
                raise ValueError(f"unknown keys {unknown} in costs; known: {sorted(known)}.")
            values: dict[str, Any] = {k: tuple(v) for k, v in body.items() if k not in ("link", "links")}
            if "link" in body:
                values["link"] = _link_from(body["link"])
            if "links" in body:
                values["links"] = {_pair(k): _link_from(v) for k, v in body["links"].items()}
            return cls(**values)
        except (TypeError, AttributeError) as err:
            raise ValueError(
                f"costs file: {err}. Give one object: a list with a number for each stage under each name, and an object with "
                "latency and bandwidth for each link."
            ) from err

    @classmethod
    def load(cls, path: str | Path) -> "Costs":
        """Read JSON from ``path``."""
        return cls.from_json(read_text(path))


def _link_body(link: Link) -> dict[str, float | None]:
    """JSON has no infinity; ``null`` bandwidth means unlimited."""
    return {"latency": link.latency, "bandwidth": None if link.bandwidth == float("inf") else link.bandwidth}


def _link_from(body: dict[str, Any]) -> Link:
    bandwidth = body.get("bandwidth")
    return Link(latency=body.get("latency", 0.0), bandwidth=float("inf") if bandwidth is None else bandwidth)


def _pair(key: str) -> tuple[int, int]:
    a, _, b = key.partition("->")
    return int(a), int(b)
