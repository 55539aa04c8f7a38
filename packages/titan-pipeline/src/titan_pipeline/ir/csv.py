"""Read and write the CSV of torch.distributed.pipelining.

torch's file has one row a rank and nothing else: no version, placement or number of microbatches. Import therefore
needs the placement's shape, or reads it off the rows (stage on the rank whose row names it). Overlapped pairs are
written ``(0F1;7B0)OVERLAP_F_B``; FSDP's actions (UNSHARD, RESHARD, REDUCE_GRAD) mean nothing to a schedule and are
skipped.
"""

import csv
import io
import re

from titan_pipeline.errors import ScheduleError
from titan_pipeline.ir.placement import Placement
from titan_pipeline.ir.schedule import Action, Kind, Schedule

_PAIR = re.compile(r"\((\d+[FBI]\d+);(\d+[FBI]\d+)\)OVERLAP_F_B")
_FSDP = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)\d*")
_WAIT = re.compile(r"\d+WAIT_SEND_[FB]\d+")


def to_torch_csv(schedule: Schedule) -> str:
    """The compute actions as CSV text that torch's ``_PipelineScheduleRuntime._load_csv`` reads (compute_only)."""
    schedule = schedule.compute_only()
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank, program in enumerate(schedule.ranks):
        marks = set(schedule.overlaps[rank]) if schedule.overlaps else set[int]()
        row: list[str] = []
        skip = False
        for i, action in enumerate(program):
            if skip:
                skip = False
            elif i in marks:
                row.append(f"({action};{program[i + 1]})OVERLAP_F_B")
                skip = True
            else:
                row.append(str(action))
        writer.writerow(row)
    return out.getvalue()


def from_torch_csv(text: str, *, name: str = "torch", placement: Placement | None = None) -> Schedule:
    """A schedule from torch's CSV, with or without communication.

    Args:
        text: The file's content.
        name: Name of the result.
        placement: Rank of each stage; read off the rows if None.

    Raises:
        ScheduleError: Code ``format``: a cell that is not an action, or a stage that appears on two ranks.
    """
    ranks: list[tuple[Action, ...]] = []
    overlaps: list[tuple[int, ...]] = []
    for row in csv.reader(io.StringIO(text)):
        program: list[Action] = []
        marks: list[int] = []
        for raw in row:
            cell = raw.strip()
            pair = _PAIR.fullmatch(cell)
            if pair:
                marks.append(len(program))
                program += [Action.parse(pair[1]), Action.parse(pair[2])]
            elif cell and not _FSDP.fullmatch(cell) and not _WAIT.fullmatch(cell):
                program.append(Action.parse(cell))
        ranks.append(tuple(program))
        overlaps.append(tuple(marks))
    if placement is None:
        placement = _placement_of(ranks)
    microbatches = 1 + max((a.microbatch for program in ranks for a in program), default=0)
    return Schedule(name, microbatches, placement, tuple(ranks), tuple(overlaps) if any(overlaps) else ())


def _placement_of(ranks: list[tuple[Action, ...]]) -> Placement:
    place: dict[int, int] = {}
    for rank, program in enumerate(ranks):
        for index, action in enumerate(program):
            if action.kind is Kind.F and place.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    "format",
                    f"stage {action.stage} also runs on rank {place[action.stage]}. Pass the placement.",
                    rank=rank, index=index, action=action,
                )  # fmt: skip
    missing = sorted(set(range(max(place, default=0) + 1)) - set(place))
    if missing or not place:
        raise ScheduleError("format", f"stages {missing} never run forward: this is not a whole schedule.")
    return tuple(place[s] for s in range(len(place)))
