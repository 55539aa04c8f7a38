"""What a plan is checked against, and the words it is refused with. All before any collective, on every rank alike."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from titan_cp.planning.layouts import LAYOUTS, layout_multiple

METHODS = ("ring", "allgather", "ulysses", "usp")


def check_arguments(
    size: int,
    rank: int,
    num_heads: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    window: int | None,
    block_size: int,
    method: str,
    layout: str,
    ulysses_degree: int | None,
) -> None:
    """Everything but the lengths.

    Raises:
        ValueError: On the first argument that cannot work.
    """
    for name, value in (("size", size), ("num_heads", num_heads), ("num_kv_heads", num_kv_heads),
                        ("head_dim", head_dims[0]), ("value_dim", head_dims[1]), ("block_size", block_size)):  # fmt: skip
        if value < 1:
            raise ValueError(f"{name}={value} is not a positive number. Use 1 or more.")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is outside a group of size={size}. Use 0 to {size - 1}.")
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}: query heads could not share KV heads "
            f"equally. Use one of {divisors(num_heads)}."
        )
    if head_dims[1] > head_dims[0]:
        raise ValueError(
            f"value_dim={head_dims[1]} is wider than head_dim={head_dims[0]}. Values may be narrower than queries and keys, "
            "not wider."
        )
    if window is not None and window < 1:
        raise ValueError(
            f"window={window} leaves a token nothing to attend to. Use 1 (itself only) or more, or None for no window."
        )
    if method not in (*METHODS, "auto"):
        raise ValueError(f"method={method!r} does not exist. Use 'auto' or one of {list(METHODS)}.")
    if layout not in (*LAYOUTS, "auto"):
        raise ValueError(f"layout={layout!r} does not exist. Use 'auto' or one of {list(LAYOUTS)}.")
    if ulysses_degree is not None:
        if method != "usp":
            raise ValueError(
                f"ulysses_degree={ulysses_degree} was given with method={method!r}, which has no such degree. Use "
                "method='usp', or leave it out."
            )
        if ulysses_degree < 1 or size % ulysses_degree:
            raise ValueError(f"ulysses_degree={ulysses_degree} must divide size={size}. Use one of {divisors(size)}.")


def check_documents(seq_len: int | None, cu_seqlens: Sequence[int] | Tensor | None) -> tuple[int, ...]:
    """Document boundaries as a tuple of ints.

    Raises:
        ValueError: If neither argument is given, they disagree, or the boundaries do not increase from 0.
    """
    if cu_seqlens is None:
        if seq_len is None:
            raise ValueError("plan got neither seq_len nor cu_seqlens. Give the sequence's length in tokens, or both.")
        if seq_len < 1:
            raise ValueError(f"seq_len={seq_len} is not a positive number of tokens.")
        return (0, seq_len)
    bounds = tuple(int(c) for c in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens))
    if len(bounds) < 2 or bounds[0] != 0:
        raise ValueError(
            f"cu_seqlens={_shortened(bounds)} must start with 0 and end with the sequence's length, e.g. [0, 3, 8] for "
            "documents of 3 and 5 tokens."
        )
    for i, (before, after) in enumerate(pairwise(bounds)):
        if after <= before:
            raise ValueError(
                f"cu_seqlens has {before} then {after} at index {i}: document {i} would have {after - before} tokens. "
                "Boundaries must increase; drop empty documents."
            )
    if seq_len is not None and seq_len != bounds[-1]:
        raise ValueError(
            f"seq_len={seq_len} but cu_seqlens ends at {bounds[-1]}. They must agree; leave seq_len out, or add the "
            f"missing tokens as a document of their own."
        )
    return bounds


def legal_multiple(method: str, layout: str, size: int, ring_degree: int, block_size: int) -> int:
    """What the sequence length must be a multiple of."""
    # USP without a ring holds tokens as Ulysses does: cut over all ranks
    ranks = size if method == "ulysses" or ring_degree == 1 else ring_degree
    return math.lcm(layout_multiple(layout, ranks, block_size), size)


def reject_length(seq_len: int, multiple: int, layout: str, method: str, size: int) -> None:
    """Refuse a length that the layout cannot cut.

    Raises:
        ValueError: Always; it names the nearest legal lengths.
    """
    above = -(-seq_len // multiple) * multiple
    below = above - multiple
    nearest = f"{below} or {above}" if below else f"{above}"
    raise ValueError(
        f"a sequence of {seq_len} tokens cannot be cut for layout={layout!r}, method={method!r} on {size} ranks: the "
        f"length must be a multiple of {multiple}. Nearest: {nearest}. plan(..., pad=True) pads to {above} "
        "(plan.pad_to) with a document that no token attends to."
    )


def pad_documents(cu_seqlens: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    """Append the padding, as a document of its own."""
    return (*cu_seqlens, -(-cu_seqlens[-1] // multiple) * multiple)


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _shortened(values: tuple[int, ...]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, …]"
