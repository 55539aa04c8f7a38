"""A pipeline schedule as immutable data.

A schedule says, for each rank, which action runs when. An action is a kind, a stage and a microbatch:

====  =======================================================================
F     forward of the stage
B     whole backward: gradients of the stage's input and of its weights
I     backward, first half: gradient of the stage's input only
W     backward, second half: gradient of the weights; any time after its I
====  =======================================================================

and, once communication has been made explicit (see `titan_pipeline.lower`):

======  ====================================================================================
SEND_F  send the output of this stage to the rank of the next stage
RECV_F  receive the input of this stage from the rank of the previous stage
SEND_B  send the gradient of this stage's input to the rank of the previous stage
RECV_B  receive the gradient of this stage's output from the rank of the next stage
======  ====================================================================================

``2F0`` is the forward of stage 2 for microbatch 0; ``2SEND_F0`` sends its result. A schedule with no communication
actions is complete: who must send what to whom follows from the placement. One that holds them also fixes their
order, and is checked and run exactly as written.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, cast

from titan_pipeline.errors import ScheduleError
from titan_pipeline.ir.placement import Placement, check_placement

FORMAT = "titan-pipeline/schedule"
FORMAT_VERSION = 1


class Kind(StrEnum):
    """What an action does; the table is in `titan_pipeline.ir.schedule`."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the papers' letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    # Enum's own hash is a Python call; actions are dictionary keys by the hundred thousand.
    __hash__ = str.__hash__  # pyright: ignore[reportAssignmentType]


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})


class Action(NamedTuple):
    """One step of one rank."""

    kind: Kind
    """What is done: a forward, a backward or half of one, or a message."""
    stage: int
    """The stage it is done for, from 0."""
    microbatch: int
    """The microbatch, from 0."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read ``2F0``; the whole text must match.

        Raises:
            ScheduleError: Code ``format``.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ScheduleError(
                "format", f"{text!r} is not an action. Write stage, kind, microbatch: 2F0, 0I3, 1SEND_F2."
            )
        return cls(Kind(match[2]), int(match[1]), int(match[3]))


_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order in which every rank runs its actions. Construct with a family, a file, or by hand.

    Construction checks the shape only (types, placement, number of programs); `titan_pipeline.verify` proves that it
    runs.
    """

    name: str
    """Family or free text; not part of the identity."""
    num_microbatches: int
    """Microbatches per step, numbered from 0."""
    placement: Placement
    """Rank of each stage."""
    ranks: tuple[tuple[Action, ...], ...]
    """One program per rank."""
    overlaps: tuple[tuple[int, ...], ...] = field(default=())
    """Per rank, positions ``i`` such that actions ``i`` and ``i+1`` (an F and a backward of different microbatches)
    may run as one overlapped action; empty when the schedule has none."""

    def __post_init__(self) -> None:
        check_placement(self.placement)
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches={self.num_microbatches}: a step needs at least one.")
        if len(self.ranks) != self.num_ranks:
            raise ValueError(
                f"{len(self.ranks)} programs for a placement on {self.num_ranks} ranks. Give one program per rank."
            )
        if self.overlaps and len(self.overlaps) != self.num_ranks:
            raise ValueError(f"overlaps has {len(self.overlaps)} entries for {self.num_ranks} ranks.")

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.placement) + 1

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.placement)

    @property
    def num_chunks(self) -> int:
        """Largest number of stages on one rank."""
        return max(self.placement.count(r) for r in range(self.num_ranks))

    @property
    def communicates(self) -> bool:
        """Whether sends and receives are written out."""
        return any(a.kind not in COMPUTE for program in self.ranks for a in program)

    @property
    def splits_backward(self) -> bool:
        """Whether any backward runs as I and W."""
        return any(a.kind is Kind.I for program in self.ranks for a in program)

    @property
    def forward_only(self) -> bool:
        """Whether it holds no backward at all, as for evaluation."""
        backward = {Kind.B, Kind.I, Kind.W}
        return not any(a.kind in backward for program in self.ranks for a in program)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in model order."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def compute_only(self) -> "Schedule":
        """The same schedule without communication actions. Overlap marks are kept where the pair stays adjacent."""
        ranks: list[tuple[Action, ...]] = []
        overlaps: list[tuple[int, ...]] = []
        for r, program in enumerate(self.ranks):
            kept = [i for i, a in enumerate(program) if a.kind in COMPUTE]
            position = {old: new for new, old in enumerate(kept)}
            ranks.append(tuple(program[i] for i in kept))
            marks = self.overlaps[r] if self.overlaps else ()
            overlaps.append(tuple(position[i] for i in marks if i in position))  # `verify` refuses others
        return replace(self, ranks=tuple(ranks), overlaps=tuple(overlaps) if self.overlaps else ())

    def for_evaluation(self, num_microbatches: int | None = None) -> "Schedule":
        """Forward passes only, in an order that keeps one activation alive a chunk, for any number of microbatches.

        The training order is of no use here: with no backward, microbatch by microbatch is best. Rank ``r`` runs the
        actions of "wave" ``stage + microbatch`` in increasing order, later stages first, which is acyclic for any
        placement.

        Args:
            num_microbatches: Defaults to the schedule's own; evaluation may use another number.
        """
        m = self.num_microbatches if num_microbatches is None else num_microbatches
        ranks = tuple(
            tuple(
                Action(Kind.F, s, mb)
                for s, mb in sorted(
                    ((s, mb) for s in self.stages_of(r) for mb in range(m)), key=lambda a: (a[0] + a[1], -a[0])
                )
            )
            for r in range(self.num_ranks)
        )
        return Schedule(f"{self.name}-eval", m, self.placement, ranks)

    @property
    def digest(self) -> str:
        """SHA-256 of everything but the name: two schedules with one digest run the same."""
        body = {k: v for k, v in self._body().items() if k != "name"}
        return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "name": self.name,
            "num_microbatches": self.num_microbatches,
            "placement": list(self.placement),
            "ranks": [" ".join(map(str, program)) for program in self.ranks],
        }
        if any(self.overlaps):
            body["overlaps"] = [list(o) for o in self.overlaps]
        return body

    def to_json(self) -> str:
        """One JSON object: format, version, name, num_microbatches, placement, ranks, digest."""
        return json.dumps({**self._body(), "digest": self.digest}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Schedule":
        """Read what `to_json` wrote.

        Raises:
            ScheduleError: Code ``format``: not this format, a newer version, a missing or unknown key, or a digest that
                does not match the content.
        """
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as err:
            raise ScheduleError("format", f"not JSON: {err}. Write it with Schedule.to_json.") from err
        if not isinstance(raw, dict):
            raise ScheduleError("format", "a schedule file holds one JSON object.")
        body = cast(dict[str, Any], raw)
        if body.get("format") != FORMAT:
            raise ScheduleError("format", f"format={body.get('format')!r}, expected {FORMAT!r}.")
        if body.get("version") != FORMAT_VERSION:
            raise ScheduleError(
                "format",
                f"version={body.get('version')!r}; this release reads {FORMAT_VERSION}. Upgrade titan-pipeline.",
            )
        unknown = set(body) - {
            "format",
            "version",
            "name",
            "num_microbatches",
            "placement",
            "ranks",
            "overlaps",
            "digest",
        }
        if unknown:
            raise ScheduleError("format", f"unknown keys {sorted(unknown)}.")
        try:
            schedule = cls(
                name=str(body["name"]),
                num_microbatches=int(body["num_microbatches"]),
                placement=tuple(int(r) for r in body["placement"]),
                ranks=tuple(tuple(Action.parse(w) for w in str(line).split()) for line in body["ranks"]),
                overlaps=tuple(tuple(int(i) for i in o) for o in body.get("overlaps", ())),
            )
        except KeyError as err:
            raise ScheduleError("format", f"key {err} is missing.") from err
        except (TypeError, AttributeError) as err:
            raise ScheduleError("format", f"a value has the wrong type: {err}.") from err
        if body.get("digest", schedule.digest) != schedule.digest:
            raise ScheduleError(
                "format",
                "the digest does not match the content: the file was edited. Remove the digest to accept that.",
            )
        return schedule

    def to_text(self) -> str:
        """A short form for people, diffs and issue reports; `from_text` reads it back."""
        lines = [
            f"# {FORMAT} {FORMAT_VERSION}",
            f"name: {self.name}",
            f"microbatches: {self.num_microbatches}",
            "placement: " + " ".join(map(str, self.placement)),
        ]
        lines += [f"rank {r}: " + " ".join(map(str, program)) for r, program in enumerate(self.ranks)]
        if any(self.overlaps):
            lines += [f"overlap {r}: " + " ".join(map(str, o)) for r, o in enumerate(self.overlaps)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """Read what `to_text` wrote.

        Raises:
            ScheduleError: Code ``format``.
        """
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines or lines[0] != f"# {FORMAT} {FORMAT_VERSION}":
            raise ScheduleError("format", f"the first line must be '# {FORMAT} {FORMAT_VERSION}'.")
        fields: dict[str, str] = {}
        for line in lines[1:]:
            key, colon, value = line.partition(":")
            if not colon or key in fields:
                raise ScheduleError("format", f"line {line!r}: expected one 'key: value' a key.")
            fields[key] = value.strip()
        try:
            placement = tuple(int(r) for r in fields["placement"].split())
            num_ranks = max(placement) + 1
            programs = [fields[f"rank {r}"] for r in range(num_ranks)]
            marks = [fields.get(f"overlap {r}", "") for r in range(num_ranks)]
            overlaps = tuple(tuple(int(i) for i in o.split()) for o in marks)
            return cls(
                name=fields["name"],
                num_microbatches=int(fields["microbatches"]),
                placement=placement,
                ranks=tuple(tuple(Action.parse(w) for w in program.split()) for program in programs),
                overlaps=overlaps if any(overlaps) else (),
            )
        except KeyError as err:
            raise ScheduleError("format", f"line {err} is missing.") from err

    def save(self, path: str | Path) -> None:
        """Write JSON to ``path``."""
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Schedule":
        """Read JSON or the text form from ``path``, by content."""
        text = read_text(path)
        return cls.from_text(text) if text.lstrip().startswith("#") else cls.from_json(text)


def schedule_from_programs(
    name: str,
    num_microbatches: int,
    placement: Placement,
    programs: Iterable[Sequence[tuple[Kind, int, int]]],
) -> Schedule:
    """A schedule from plain tuples, as the family generators make them."""
    ranks = tuple(tuple(Action(*a) for a in program) for program in programs)
    return Schedule(name, num_microbatches, placement, ranks)


def producers(action: Action, num_stages: int) -> tuple[tuple[Action, ...], ...]:
    """The results ``action`` needs; each entry lists the alternatives that can provide it."""
    kind, s, mb = action
    if kind is Kind.F:
        return ((Action(Kind.F, s - 1, mb),),) if s > 0 else ()
    if kind is Kind.W:
        return ((Action(Kind.I, s, mb),),)
    needs: tuple[tuple[Action, ...], ...] = ((Action(Kind.F, s, mb),),)
    if s + 1 < num_stages:
        needs += ((Action(Kind.I, s + 1, mb), Action(Kind.B, s + 1, mb)),)
    return needs


def consumers(action: Action, num_stages: int) -> tuple[tuple[int, Kind, Kind], ...]:
    """Stages that wait for the result of ``action``, with the kinds of the send and of the receive between them."""
    kind, s, _ = action
    if kind is Kind.F and s + 1 < num_stages:
        return ((s + 1, Kind.SEND_F, Kind.RECV_F),)
    if kind in (Kind.I, Kind.B) and s > 0:
        return ((s - 1, Kind.SEND_B, Kind.RECV_B),)
    return ()


def transfer_of(action: Action) -> tuple[int, int, Kind]:
    """``(producer stage, consumer stage, F or B)`` of a communication action."""
    kind, s, _ = action
    if kind is Kind.SEND_F:
        return s, s + 1, Kind.F
    if kind is Kind.RECV_F:
        return s - 1, s, Kind.F
    if kind is Kind.SEND_B:
        return s, s - 1, Kind.B
    return s + 1, s, Kind.B


def read_text(path: str | Path) -> str:
    """The text of a file, in UTF-8.

    Raises:
        ValueError: It is a folder, a pipe or a device, which could be read without end; or it is not text.
        OSError: It cannot be read.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder, a pipe or a device. Give a file; write to one what a pipe would bring.")
    return path.read_text(encoding="utf-8")
