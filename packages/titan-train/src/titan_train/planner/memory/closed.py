"""What a shipped decoder holds by its arguments alone: no module is built, and torch is not imported.

`ranks` counts parameters and shards on the module, and takes from here what a micro-batch leaves for backward. Where nothing
wraps the model, on one rank, arguments decide everything: `whole_rank` fills the same account (`peak`) with the same numbers, and
a test holds the two equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from titan_train.config import ActivationsConfig, Config
from titan_train.models.shape import ModelShape
from titan_train.planner.memory.kept import block_bytes, tokens_of
from titan_train.planner.memory.peak import MemoryPeak, rank_peak
from titan_train.planner.memory.saved import stage_saved_bytes
from titan_train.planner.setup import Setup
from titan_train.planner.translate import setup_of_config

if TYPE_CHECKING:
    from titan_fsdp import Collectives


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """Bytes on one rank."""

    pipeline_rank: int
    """Its place in the pipeline; 0 without one."""
    num_parameters: int
    """Elements of the parameters it computes with, after tensor, expert and pipeline parallelism, before sharding."""
    activations: int
    """Saved for backward, of all micro-batches that are under way at the same time."""
    memory: MemoryPeak
    """Bytes by use; they add up to the peak of a step."""
    left_out: str = ""
    """What a rehearsal could not build of the program that will run."""
    wrapper: "Mapping[str | None, Collectives]" = field(default_factory=dict[str | None, Any])
    """Collectives of data parallelism in one step, by mesh as in `titan_fsdp.WrapPlan`."""

    @property
    def peak(self) -> int:
        """Most bytes at any time of a step."""
        return int(self.memory.allocated)


def whole_rank(config: Config, shape: ModelShape, *, rows: int) -> RankEstimate:
    """The one rank of a run without a wrapper, whose model is trained whole and in float32.

    Args:
        config: The run's configuration.
        shape: Its model, with the vocabulary that it will have.
        rows: Sequences of a micro-batch.
    """
    setup = setup_of_config(config, 1)
    activations = closed_form(config, shape, setup, range(shape.num_layers), rows=rows)
    assert activations is not None
    count = shape.parameters()
    of_blocks, of_ends = config.state_bytes
    in_blocks = sum(shape.totals)
    counted = {
        "parameters": 4.0 * count,
        "gradients": 4.0 * count,
        "optimizer": of_blocks * in_blocks + of_ends * (count - in_blocks),
        "activations": float(activations),
        "gathered": 0.0,
    }
    return RankEstimate(0, count, activations, rank_peak(shape, setup, first=True, head=True, counted=counted))


def closed_form(config: Config, shape: ModelShape, setup: Setup, layers: Sequence[int], *, rows: int) -> int | None:
    """Bytes that some blocks of a shipped decoder leave for backward; None where only a run can tell.

    Args:
        config: The run's configuration.
        shape: The whole model.
        setup: The configuration in the planner's words.
        layers: Numbers of the blocks, which follow each other.
        rows: Sequences of a micro-batch.
    """
    again = recomputed_layers(config.activations, len(layers))
    selective = config.activations.checkpoint == "selective" and config.activations.matmul_every == 2
    if again is None and not selective:
        return None
    if not (again and all(again)) and any(block.only_counted for block in shape.blocks):
        return None
    setup = replace(setup, recompute="selective" if selective else "none", recompute_share=1.0)
    at = replace(tokens_of(setup), rows=rows, sequence_parallel=config.parallel.sequence_parallel)
    return stage_saved_bytes(
        shape,
        range(layers[0], layers[-1] + 1),
        again or [False] * len(layers),
        at,
        chunked_loss=config.train.fused_loss,
        block_bytes=lambda block: block_bytes(block, shape.dim, setup, at),
        shared_angles=not selective and not config.compile.enabled,
    )


def recomputed_layers(config: ActivationsConfig, count: int) -> list[bool] | None:
    """For each of ``count`` blocks, whether it is recomputed as a whole; None where parts of blocks are."""
    if config.checkpoint in ("none", "budget"):
        return [False] * count
    every = {"full": 1, "every": config.every}.get(config.checkpoint)
    return None if every is None else [layer % every == 0 for layer in range(count)]
