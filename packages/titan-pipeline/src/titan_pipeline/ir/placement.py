"""Which rank holds which stage.

A placement is a tuple: entry ``s`` is the rank of stage ``s``. The model runs through stages 0, 1, 2, … in order; a
rank that holds several stages holds several *chunks* of the model. Two shapes cover the published schedules:

- loop: ``0 1 2 3 0 1 2 3``: every hop goes to the next rank, and the last rank's hop wraps to the first.
- v: ``0 1 2 3 3 2 1 0``: the second half walks back, so rank 0 holds the first and the last stage, and the turn
  needs no communication. More chunks continue the zigzag (0..p-1, p-1..0, 0..p-1, …).
"""

from collections.abc import Sequence

Placement = tuple[int, ...]


def loop_placement(num_ranks: int, num_chunks: int = 1) -> Placement:
    """Stage ``s`` on rank ``s % num_ranks``."""
    _check(num_ranks, num_chunks)
    return tuple(s % num_ranks for s in range(num_ranks * num_chunks))


def v_placement(num_ranks: int, num_chunks: int = 2) -> Placement:
    """Stages walk up the ranks, then down, then up again; two chunks make the V of zero-bubble schedules."""
    _check(num_ranks, num_chunks)
    up = tuple(range(num_ranks))
    return tuple(r for c in range(num_chunks) for r in (up if c % 2 == 0 else up[::-1]))


def placement_from(spec: str | Sequence[int], num_ranks: int, num_chunks: int) -> Placement:
    """A placement from ``"loop"``, ``"v"`` or an explicit rank per stage.

    Raises:
        ValueError: If the name is neither, or an explicit placement leaves a rank without a stage.
    """
    if isinstance(spec, str):
        if spec == "loop":
            return loop_placement(num_ranks, num_chunks)
        if spec == "v":
            return v_placement(num_ranks, num_chunks)
        raise ValueError(f"placement={spec!r} is unknown. Use 'loop', 'v', or a list with the rank of each stage.")
    placement = tuple(int(r) for r in spec)
    check_placement(placement)
    if max(placement) + 1 != num_ranks:
        raise ValueError(f"placement={placement} uses {max(placement) + 1} ranks, not num_ranks={num_ranks}.")
    return placement


def check_placement(placement: Placement) -> None:
    """Raise unless ranks 0..p-1 all hold at least one stage."""
    if not placement:
        raise ValueError("placement=() names no stage. Give the rank of each stage, e.g. (0, 1, 2, 3).")
    missing = sorted(set(range(max(placement) + 1)) - set(placement))
    if missing or min(placement) < 0:
        raise ValueError(
            f"placement={placement} leaves ranks {missing} without a stage, or names a negative rank. "
            "Number the ranks 0..p-1 and give each at least one stage."
        )


def _check(num_ranks: int, num_chunks: int) -> None:
    if num_ranks < 1 or num_chunks < 1:
        raise ValueError(f"num_ranks={num_ranks}, num_chunks={num_chunks}: both must be at least 1.")
