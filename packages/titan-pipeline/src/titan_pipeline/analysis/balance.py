"""Cut a list of layers into stages of balanced cost."""

from collections.abc import Sequence
from itertools import pairwise


def balanced_cut(costs: Sequence[float], num_stages: int) -> list[range]:
    """The cut into consecutive, non-empty stages whose largest stage is as small as possible.

    Exact, by dynamic programming over cut positions: ``O(layers^2 x stages)``.

    Args:
        costs: Cost of each layer: time, FLOPs, parameters, or 1 for each.
        num_stages: How many stages to make.

    Returns:
        The layers of each stage, in order.

    Raises:
        ValueError: If there are fewer layers than stages, or a cost is negative.

    Example::

        >>> balanced_cut([4, 1, 1, 1, 1], 2)
        [range(0, 1), range(1, 5)]
    """
    n = len(costs)
    if num_stages < 1 or n < num_stages:
        raise ValueError(f"{n} layers cannot fill num_stages={num_stages}: use 1 to {n} stages, or split layers finer.")
    if any(c < 0 for c in costs):
        raise ValueError("layer costs must not be negative.")
    total = [0.0]
    for c in costs:
        total.append(total[-1] + c)
    # best[i]: smallest possible largest stage of the first i layers in k stages
    best = [total[i] if i else float("inf") for i in range(n + 1)]
    choices: list[list[int]] = []
    for k in range(2, num_stages + 1):
        following = [float("inf")] * (n + 1)
        choice = [0] * (n + 1)
        for i in range(k, n + 1):
            for j in range(k - 1, i):
                largest = max(best[j], total[i] - total[j])
                if largest < following[i]:
                    following[i], choice[i] = largest, j
        best = following
        choices.append(choice)
    ends = [n]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    bounds = [0, *reversed(ends)]
    return [range(a, b) for a, b in pairwise(bounds)]
