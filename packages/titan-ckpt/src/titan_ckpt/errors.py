"""The errors of this package, and how damage is reported."""

import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message says which, why, and what to do."""


class NoSuchStepError(ValueError):
    """There is no step of this number: it was never committed, or it was deleted since."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place of a step."""

    file: str
    """The file, relative to the step's folder."""
    what: str
    """What is wrong."""
    tensors: tuple[str, ...] = ()
    """Tensors with bytes in the damaged block. Empty for headers and JSON files."""
    block: int | None = None
    """Number of the 4 MiB block, from 0. None if the whole file is damaged."""
    offset: int | None = None
    """First byte of the block in the file."""

    def __str__(self) -> str:
        place = "" if self.block is None else f" block {self.block} (from byte {self.offset})"
        names = ", ".join(self.tensors[:4]) + (f" and {len(self.tensors) - 4} more" if len(self.tensors) > 4 else "")
        return f"{self.file}{place}: {self.what}" + (f"; tensors {names}" if names else "")


class DamageError(CheckpointError):
    """A step is damaged. No rank loaded anything from it, unless a compressed frame was crafted to match its digest."""

    def __init__(self, step: str, damages: Sequence[Damage], seen_by: Sequence[int] = ()) -> None:
        self.step = step
        """The step's folder."""
        self.damages = tuple(damages)
        """Every damaged place that a rank found, once each."""
        self.seen_by = tuple(seen_by)
        """The ranks that found damage. Empty in a single process and outside of collective calls."""
        listed = "\n  ".join(str(damage) for damage in self.damages[:20])
        more = f"\n  and {len(self.damages) - 20} more" if len(self.damages) > 20 else ""
        ranks = ", ".join(map(str, self.seen_by))
        seen = f" (seen by rank{'s' if len(self.seen_by) > 1 else ''} {ranks})" if ranks else ""
        super().__init__(f"{step} is damaged{seen}, nothing was loaded from it:\n  {listed}{more}")


class NoIntactStepError(DamageError):
    """Every step is damaged. No rank loaded anything from any of them."""

    def __init__(self, root: object, steps: Sequence[DamageError]) -> None:
        oldest = steps[-1]
        super().__init__(oldest.step, oldest.damages, oldest.seen_by)
        self.steps = tuple(steps)
        """The damage of each step, newest first."""
        lines = [
            f"{step.step}: {step.damages[0] if step.damages else 'unknown'}"
            + (f"; and {len(step.damages) - 1} more places" if len(step.damages) > 1 else "")
            for step in steps
        ]
        listed = "\n  ".join(lines[:10]) + (f"\n  and {len(lines) - 10} more" if len(lines) > 10 else "")
        self.args = (f"no checkpoint below {root} is intact, and nothing was loaded:\n  {listed}",)


@contextlib.contextmanager
def malformed_is_damage(folder: object, name: str) -> Generator[None]:
    """Turn the errors of malformed contents (missing keys, wrong types) into a `DamageError` of file ``name``.

    A restore can then take an older step.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as err:
        reason = str(err) if type(err) is ValueError else f"{type(err).__name__}: {err}"
        raise DamageError(str(folder), [Damage(name, f"has unexpected contents: {reason}")]) from err


def write_failure(err: OSError, path: object, rank: int) -> CheckpointError:
    """The error for an `OSError` of a rank that writes."""
    return CheckpointError(
        f"rank {rank} cannot write below {path}: {err.strerror or err} (errno {err.errno}). Earlier steps are intact."
    )
