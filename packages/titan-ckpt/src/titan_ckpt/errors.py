"""The errors of this package, and the report of a damaged place."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message says which, why, and what to do."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One place of a step that is not what was written."""

    file: str
    """File, relative to the step's folder."""
    what: str
    """What is wrong, in words."""
    tensors: tuple[str, ...] = ()
    """Tensors with bytes in the damaged block; empty for headers and JSON files."""
    block: int | None = None
    """Number of the 4 MiB block, counted from 0; None where the whole file is at fault."""
    offset: int | None = None
    """Byte of the file at which the block starts."""

    def __str__(self) -> str:
        place = "" if self.block is None else f" block {self.block} (from byte {self.offset})"
        names = ", ".join(self.tensors[:4]) + (f" and {len(self.tensors) - 4} more" if len(self.tensors) > 4 else "")
        return f"{self.file}{place}: {self.what}" + (f"; tensors {names}" if names else "")


class DamageError(CheckpointError):
    """A step is damaged; nothing was loaded from it, by any rank."""

    def __init__(self, step: str, damages: Sequence[Damage], seen_by: Sequence[int] = ()) -> None:
        self.step = step
        """The step's folder."""
        self.damages = tuple(damages)
        """What every rank found, each place once."""
        self.seen_by = tuple(seen_by)
        """The ranks that found something; empty outside of collective calls and in a single process."""
        listed = "\n  ".join(str(damage) for damage in self.damages[:20])
        more = f"\n  and {len(self.damages) - 20} more" if len(self.damages) > 20 else ""
        ranks = ", ".join(map(str, self.seen_by))
        seen = f" (seen by rank{'s' if len(self.seen_by) > 1 else ''} {ranks})" if ranks else ""
        super().__init__(f"{step} is damaged{seen}, nothing was loaded from it:\n  {listed}{more}")


@contextlib.contextmanager
def malformed_is_damage(folder: object, name: str) -> Generator[None]:
    """Turn what malformed contents raise (missing keys, values of the wrong type) into damage.

    So a restore can take an older step.

    Args:
        folder: The step's folder.
        name: The file in it that is being read.

    Raises:
        DamageError: In place of what the block raises on malformed contents.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as err:
        reason = str(err) if type(err) is ValueError else f"{type(err).__name__}: {err}"
        raise DamageError(str(folder), [Damage(name, f"does not hold what it should: {reason}")]) from err


def write_failure(err: OSError, path: object, rank: int) -> CheckpointError:
    """An operating system's error, with the rank and what it means."""
    return CheckpointError(
        f"rank {rank} cannot write below {path}: {err.strerror or err} (errno {err.errno}). Earlier steps are intact."
    )
