"""Schedule families by name, and how to add one.

A family is a function ``(num_ranks, num_microbatches[, num_chunks]) -> Schedule`` and what it accepts. `register_family`
adds one; so does an entry point of the group ``titan_pipeline.families`` that names a module which calls it. The
command line and the solver then know it.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.schedule import Schedule

ENTRY_POINTS = "titan_pipeline.families"


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """What a family accepts."""

    make: Callable[..., Schedule]
    """Called with ranks and microbatches; then chunks if ``chunks`` leaves a choice, then costs and memory limit if
    ``takes_costs``."""
    chunks: tuple[int, int | None]
    """Fewest and most stages per rank; None for no upper end."""
    splits_backward: bool
    """Whether backwards run in two halves, I and W."""
    summary: str
    """One line for help texts."""
    takes_costs: bool = False
    """Whether the order depends on costs and a memory limit."""


FAMILIES: dict[str, ScheduleFamily] = {}
"""The families registered so far, by name. `find_family` also loads those of installed packages."""

_loaded: list[str] = []
_logger = logging.getLogger("titan_pipeline")


def register_family(
    name: str,
    make: Callable[..., Schedule],
    *,
    chunks: tuple[int, int | None] = (1, 1),
    splits_backward: bool = False,
    summary: str = "",
    takes_costs: bool = False,
) -> None:
    """Make a family available by name to `build_schedule`, `solve` and the command line.

    Args:
        name: Not in use yet.
        make: Returns the schedule for ``(num_ranks, num_microbatches)``. It raises ValueError for numbers it cannot
            serve, and says which it can.
        chunks: Fewest and most stages per rank, None for no most. Where they differ, ``make`` also gets ``num_chunks``.
        splits_backward: Whether backwards run in two halves, I and W.
        summary: One line for help texts.
        takes_costs: ``make`` also gets ``costs`` and ``mem_limit``, both of which may be None.

    Raises:
        ValueError: The name is taken, or ``chunks`` is not a range.
    """
    if name in FAMILIES:
        raise ValueError(f"a schedule family {name!r} is registered already. Choose another name.")
    low, high = chunks
    if low < 1 or (high is not None and high < low):
        raise ValueError(f"chunks={chunks}: give the fewest and the most stages per rank, at least 1.")
    FAMILIES[name] = ScheduleFamily(make, chunks, splits_backward, summary, takes_costs)


def find_family(name: str) -> ScheduleFamily | None:
    """The family of that name, if any; families of installed packages are loaded when a name is not known."""
    if name not in FAMILIES:
        load_installed_families()
    return FAMILIES.get(name)


def load_installed_families() -> None:
    """Import the modules that installed packages name in the entry-point group ``titan_pipeline.families``.

    One that cannot be imported is passed over with a warning: a broken package must not stop what does not use it.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.value not in _loaded:
            _loaded.append(entry.value)
            try:
                entry.load()
            except Exception as err:
                _logger.warning(
                    "schedules of %s (entry point %s) could not be loaded: %s", entry.value, entry.name, err
                )


def build_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    num_chunks: int | None = None,
    costs: Costs | None = None,
    mem_limit: float | Sequence[float] | None = None,
) -> Schedule:
    """Make a schedule by family name.

    Args:
        name: Name of a registered family; `FAMILIES` holds them.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches per step.
        num_chunks: Stages per rank. By default the fewest of the family, but 2 for those that take any number.
        costs: For families that take them (``zb_auto``).
        mem_limit: For families that take costs (``zb_auto``).

    Raises:
        ValueError: For an unknown name, or numbers the family cannot serve; the message says which can.
    """
    family = find_family(name)
    if family is None:
        raise ValueError(f"schedule {name!r} is unknown. Use one of {', '.join(FAMILIES)}.")
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(f"num_ranks={num_ranks}, num_microbatches={num_microbatches}: both must be at least 1.")
    low, high = family.chunks
    if num_chunks is None:
        num_chunks = low if high is not None else 2
    if num_chunks < low or (high is not None and num_chunks > high):
        wanted = f"exactly {low}" if low == high else f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(
            f"num_chunks={num_chunks}: {name} has {wanted} stage(s) per rank. Use that, or interleaved_1f1b, "
            "looped_bfs or interleaved_zb, which take any number."
        )
    chosen = () if low == high else (num_chunks,)
    if family.takes_costs:
        return family.make(num_ranks, num_microbatches, *chosen, costs, mem_limit)
    if costs is not None or mem_limit is not None:
        adapting = ", ".join(n for n, f in FAMILIES.items() if f.takes_costs)
        raise ValueError(
            f"{name} has a fixed order; only {adapting} takes costs and mem_limit. Use solve() to search for both."
        )
    return family.make(num_ranks, num_microbatches, *chosen)
