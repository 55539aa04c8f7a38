"""The largest layout that fits the ranks that are left. Pure arithmetic.

Only data parallelism shrinks: tensor, context, pipeline and expert degrees cut the model, and dropping a rank would
leave part of the model unassigned. Copies go first (dp_replicate), then shards. The global batch does not change, so
each step trains on the same samples, divided differently; the checkpoint and the data position do not depend on the
number of ranks.
"""

import dataclasses
from collections.abc import Iterator

from titan_train.config import Config
from titan_train.parallel.layout.run import plan_run


def fit_layout(config: Config, available: int, *, full: int, unit: int = 1) -> tuple[Config, int]:
    """Choose how many of the available ranks to use, and the degrees for them.

    Args:
        config: The run's configuration, with the degrees for ``full`` ranks.
        available: Ranks that could run now.
        full: Ranks the configuration is meant for.
        unit: Ranks come and go in this number: those of a node.

    Returns:
        The configuration for the chosen number of ranks, and that number.

    Raises:
        ValueError: No number from ``available`` down to ``launch.min_ranks`` fits; the message says why for each.
    """
    if available >= full:
        return config, full
    least = config.launch.min_ranks
    refused: list[str] = []
    for size in range(available // unit * unit, least - 1, -unit):
        why = ""
        for candidate in _shrunk(config, size // unit if config.launch.nnodes > 1 else 1):
            try:
                plan_run(candidate, size)
            except ValueError as err:
                why = str(err)
                continue
            return candidate, size
        refused.append(f"{size}: {why}")
    reasons = "\n  ".join(refused) or f"fewer than launch.min_ranks={least}"
    raise ValueError(
        f"{available} of {full} ranks are left, and no smaller layout fits them:\n  {reasons}\n"
        "Choose a train.global_batch that is divisible by more rank counts, or lower launch.min_ranks."
    )


def _shrunk(config: Config, nodes: int) -> Iterator[Config]:
    """The configuration with fewer copies, then with as many shards as are left; the nearest to the original first."""
    parallel = config.parallel
    if parallel.dp_replicate == -1 or parallel.dp_shard == -1:
        yield config  # the degree that takes what is left shrinks by itself
    launch = dataclasses.replace(config.launch, nnodes=nodes, node_rank=0)
    shapes = [(-1, parallel.dp_shard)] if parallel.dp_shard > 0 else []
    shapes += [(copies, -1) for copies in range(max(1, parallel.dp_replicate), 0, -1)]
    for copies, shards in shapes:
        mode = "fsdp" if parallel.mode == "hsdp" and copies == 1 else parallel.mode
        yield dataclasses.replace(
            config,
            parallel=dataclasses.replace(parallel, dp_replicate=copies, dp_shard=shards, mode=mode),
            launch=launch,
        )
