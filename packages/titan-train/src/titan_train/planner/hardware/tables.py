"""Measured seconds by shape: products, attention, casts and collectives of one device and its ranks, from a hardware file.

`titan-train plan calibrate --device` writes them. Between the points of a table a value is multilinear in the logarithms of
shape and seconds, which is exact for powers of the sizes. Outside a table the cost model's roofline answers; `OperatorTables`
counts who did, so that an estimate can say so.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTable:
    """Seconds on a grid of sizes."""

    axes: tuple[tuple[float, ...], ...]
    """Sizes along each axis, ascending."""
    seconds: tuple[float, ...]
    """One for each point, the last axis fastest."""

    def at(self, *sizes: float) -> float | None:
        """Seconds for these sizes; None outside the grid."""
        corners = [(1.0, 0)]
        for axis, size in zip(self.axes, sizes, strict=True):
            if not axis[0] <= size <= axis[-1]:
                return None
            high = bisect.bisect_left(axis, size)
            steps = [(1.0, high)]
            if axis[high] != size:
                share = math.log(size / axis[high - 1]) / math.log(axis[high] / axis[high - 1])
                steps = [(1 - share, high - 1), (share, high)]
            corners = [(w * part, place * len(axis) + step) for w, place in corners for part, step in steps]
        return math.exp(sum(weight * math.log(self.seconds[place]) for weight, place in corners))


@dataclass(frozen=True, slots=True, eq=False)
class OperatorTables:
    """All tables of a machine, by kind and name: ``product.bf16`` by rows, inner and columns."""

    tables: Mapping[str, OperatorTable]
    ranks: int
    """Ranks of the measured collectives."""
    answered: Counter[tuple[str, bool]] = field(default_factory=Counter[tuple[str, bool]])
    """By kind: how often a table had the answer, and how often it had none."""

    def find(self, name: str, *sizes: float) -> float | None:
        """Measured seconds; None where no table covers these sizes."""
        table = self.tables.get(name)
        found = table.at(*sizes) if table is not None else None
        self.answered[name.partition(".")[0], found is not None] += 1
        return found

    def describe(self) -> str:
        """Which of the terms that were asked for since `answered` was cleared came from a table."""
        counts = {kind: (self.answered[kind, True], self.answered[kind, False]) for kind, _ in sorted(self.answered)}
        parts = [
            f"{kind}s "
            + ("measured" if not missed else "by the roofline" if not hit else f"{hit} of {hit + missed} measured")
            for kind, (hit, missed) in counts.items()
        ]
        return ", ".join(parts)


def read_tables(given: Mapping[str, Any], name: str) -> OperatorTables | None:
    """The tables of a hardware file; None where it has none.

    Args:
        given: The file's ``tables``: ``ranks``, and by kind and name ``axes`` and ``seconds``.
        name: The file's, for errors.

    Raises:
        ValueError: A table is malformed.
    """
    if not given:
        return None
    tables: dict[str, OperatorTable] = {}
    for kind, group in given.items():
        if kind == "ranks":
            continue
        for which, content in group.items():
            try:
                axes = tuple(tuple(map(float, axis)) for axis in content["axes"])
                seconds = tuple(map(float, content["seconds"]))
            except (KeyError, TypeError, ValueError) as err:
                raise ValueError(
                    f"hardware file {name!r}: tables.{kind}.{which} needs axes and seconds ({err})."
                ) from err
            grows = all(axis and axis[0] > 0 and all(a < b for a, b in itertools.pairwise(axis)) for axis in axes)
            if not axes or not grows or len(seconds) != math.prod(map(len, axes)) or not min(seconds) > 0:
                raise ValueError(
                    f"hardware file {name!r}: tables.{kind}.{which} needs ascending positive sizes on each axis and "
                    f"{math.prod(map(len, axes))} positive seconds; it has {len(seconds)}. Measure it again with titan-train "
                    "plan calibrate --device."
                )
            tables[f"{kind}.{which}"] = OperatorTable(axes, seconds)
    return OperatorTables(tables, int(cast(int, given.get("ranks", 1))))
