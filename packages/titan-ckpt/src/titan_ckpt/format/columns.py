"""Columns of integers: the places of thousands of boxes, without an object per box.

In memory and on disk a column is one integer (all entries are equal), a list (few entries), or a `PackedColumn`. That
stores the difference of each entry from the one before, in the narrowest integer type that holds all of them. In an
evenly sharded tensor nearly all differences are equal and compress to almost nothing.
"""

import itertools
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PACKED_FROM = 64
"""Columns of more entries than this are packed."""

_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


class PackedColumn:
    """A long column, stored as differences.

    Args:
        width: Bytes per difference: 1, 2, 4 or 8.
        data: The differences, little-endian. The first is the first entry.
    """

    __slots__ = ("_array", "data", "width")

    def __init__(self, width: int, data: bytes) -> None:
        self.width, self.data = width, data
        self._array: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, numbers: Any) -> "PackedColumn":
        """Pack a list or an int64 array."""
        import numpy as np

        values = np.asarray(numbers, dtype="<i8")
        steps = np.diff(values, prepend=np.zeros(1, "<i8"))
        low, high = int(steps.min(initial=0)), int(steps.max(initial=0))
        width = next(n for n in _CODES if -(1 << 8 * n - 1) <= low and high < 1 << 8 * n - 1)
        column = cls(width, steps.astype(f"<i{width}").tobytes())
        column._array = values
        return column

    def __len__(self) -> int:
        return len(self.data) // self.width

    @property
    def array(self) -> "NDArray[np.int64]":
        """The entries."""
        if self._array is None:
            import numpy as np

            self._array = np.cumsum(np.frombuffer(self.data, f"<i{self.width}"), dtype=np.int64)
        return self._array

    def numbers(self) -> list[int]:
        """The entries, without numpy."""
        steps = array(_CODES[self.width], self.data)
        if sys.byteorder == "big":
            steps.byteswap()
        return list(itertools.accumulate(steps))


Column = int | list[int] | PackedColumn
"""One entry per box."""


def pack_column(numbers: Any) -> Column:
    """The shortest column that holds a list or an int64 array."""
    if not len(numbers):
        return []
    first = int(numbers[0])
    if isinstance(numbers, list):
        same = numbers.count(first) == len(numbers)
    else:
        same = bool((numbers == first).all())
    if same:
        return first
    return PackedColumn.of(numbers) if len(numbers) > PACKED_FROM else [int(number) for number in numbers]


def column_numbers(column: Column, count: int) -> list[int]:
    """All entries of a column."""
    if isinstance(column, int):
        return [column] * count
    return column.numbers() if isinstance(column, PackedColumn) else column


def column_array(column: Column) -> "int | NDArray[np.int64]":
    """A column for numpy: one number, or an array."""
    if isinstance(column, list):
        import numpy as np

        return np.array(column, dtype=np.int64)
    return column if isinstance(column, int) else column.array


class ColumnTable:
    """The packed columns of many tensors; equal columns are stored once."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, bytes], int] = {}
        self._known: dict[int, int] = {}
        self._columns: list[PackedColumn] = []

    def refer(self, columns: dict[str, Any]) -> dict[str, Any]:
        """A tensor's columns, with ``#<place in the table>`` in place of each packed column."""
        return _mapped(columns, self._refer)

    def sizes(self) -> list[tuple[int, int]]:
        """Width in bytes and number of entries, per column."""
        return [(column.width, len(column)) for column in self._columns]

    def data(self) -> bytes:
        """All columns, one after the other."""
        return b"".join(column.data for column in self._columns)

    def _refer(self, column: Any) -> Any:
        if not isinstance(column, PackedColumn):
            return column
        if id(column) not in self._known:
            place = self._places.setdefault((column.width, column.data), len(self._columns))
            if place == len(self._columns):
                self._columns.append(column)
            self._known[id(column)] = place
        return f"#{self._known[id(column)]}"


def resolver(sizes: Sequence[Sequence[int]], data: bytes) -> Any:
    """A function that undoes `ColumnTable.refer`.

    Raises:
        ValueError: If ``sizes`` and ``data`` do not match. The function itself may also raise `LookupError` or `TypeError`.
    """
    table: list[PackedColumn] = []
    at = 0
    for width, count in sizes:
        if width not in _CODES or type(count) is not int or count < 0:
            raise ValueError(f"a column cannot have {count!r} entries of {width!r} bytes.")
        table.append(PackedColumn(width, data[at : at + width * count]))
        at += width * count
    if at != len(data):
        raise ValueError(f"its columns need {at} bytes, but it has {len(data)}.")

    def resolve(column: Any) -> Any:
        if not isinstance(column, str):
            return column
        if not column.startswith("#") or not column[1:].isdecimal():
            raise ValueError(f"{column[:40]!r} is not a column.")
        return table[int(column[1:])]

    return lambda columns: _mapped(columns, resolve)


def _mapped(columns: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Change every column of a tensor; ``offsets`` and ``sizes`` hold one per dimension."""
    return {
        name: [change(c) for c in column] if name in ("offsets", "sizes") else change(column)
        for name, column in columns.items()
    }
