"""A Hugging Face folder's own module in the account: what its blocks keep is counted on fake tensors.

A block of transformers takes norms and rotary positions apart, and where its attention is not fused it keeps the scores:
several times what our block of the same widths does. It is counted eagerly, for one sequence, as tensor parallelism cuts it. Of
a compiled run, what torch's partitioner leaves of the two most frequent sorts of block on one rank is counted once for each
recomputation, and all blocks under all degrees are given the same share of their eager count: tracing each would take longer.
"""

import json
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

from titan_train.config import Config, load_config
from titan_train.models.build import build_model
from titan_train.models.hf.folder import DROPOUTS, PREFIX, read_published
from titan_train.models.shape import ModelShape
from titan_train.parallel.layout.run import plan_run
from titan_train.parallel.structure import blocks_of
from titan_train.planner.memory.ranks import RankProgram
from titan_train.planner.memory.rehearsed import pretended_groups
from titan_train.planner.setup import Setup
from titan_train.planner.shapes import shape_of_config

_LINEAR = 1024
"""Tokens that are counted where what is kept grows with them."""


class FolderBlocks:
    """Counts what the blocks of a folder's module keep; each recomputation, length and degree of tensor parallelism once, and
    each recomputation once more as it is compiled.
    """

    def __init__(self, name: str, args: dict[str, Any]) -> None:
        """Nothing is built before it is asked for.

        Args:
            name: ``hf:DIR``.
            args: ``model.args``, the changes of its configuration.
        """
        published = read_published(name, key="MODEL")
        # what dropout leaves is not in the account, and a family with a plan is refused with it when it is built to run
        self._name, self._args = name, {**{field: 0.0 for field in DROPOUTS if published.get(field)}, **args}
        self._found: dict[tuple[Any, ...], float] = {}

    def __call__(self, setup: Setup) -> float:
        """Bytes that one block keeps of one microbatch on one rank; the mean of all blocks."""
        kept = self._kept(setup.recompute, setup)
        if setup.recompute == "full" and setup.recompute_share < 1:
            kept = setup.recompute_share * kept + (1 - setup.recompute_share) * self._kept("none", setup)
        return kept

    def _kept(self, recompute: str, setup: Setup) -> float:
        tokens = setup.seq_len // setup.cp
        most = _LINEAR if self._is_linear else setup.seq_len
        counted = min(tokens, most)
        kept = self._each(recompute, counted, setup.tp)
        # "full" leaves a block's input, however it is computed again
        if setup.stack == "compile" and recompute != "full":
            kept *= self._compiled_share(recompute, min(setup.seq_len, most))
        return kept * tokens / counted * setup.microbatch

    def _each(self, recompute: str, tokens: int, tp: int) -> float:
        """Bytes of one sequence, the mean of all blocks."""
        key = recompute, tokens, tp
        if key not in self._found:
            try:
                found = float(self._of_blocks(*key))
            except ValueError:  # so many ranks cannot share its heads: a search may ask all the same
                found = self._of_blocks(recompute, tokens, 1) / tp
            self._found[key] = found / len(blocks_of(self._model))
        return self._found[key]

    def _compiled_share(self, recompute: str, tokens: int) -> float:
        """What compiled blocks keep of what eager ones do."""
        key = recompute, tokens
        if key not in self._found:
            compiled, eager = (self._of_blocks(*key, 1, compiled, most=True) for compiled in (True, False))
            self._found[key] = compiled / eager
        return self._found[key]

    @property
    def fused_attention(self) -> bool:
        """Whether attention keeps its scores on the chip."""
        return getattr(self._model.config, "_attn_implementation", "sdpa") != "eager"

    @cached_property
    def _is_linear(self) -> bool:
        """Whether each token keeps as much, however many there are: not with scores, nor with keys that are chosen."""
        if not self.fused_attention:
            return False
        half, whole = (self._each("none", tokens, 1) for tokens in (_LINEAR // 2, _LINEAR))
        return whole < 2.02 * half

    @cached_property
    def _model(self) -> Any:
        return build_model(self._config("none", 64).model, vocab_size=None)

    def _config(self, recompute: str, seq_len: int, tp: int = 1, compiled: bool = False) -> Config:
        given = {
            "model.name": self._name, "model.seq_len": seq_len, "train.global_batch": 1, "train.microbatch": 1,
            "train.dtype": "bf16", "activations.checkpoint": recompute, "parallel.mode": "fsdp", "parallel.tp": tp,
            "launch.nproc": tp, "launch.device": "cpu", "compile.enabled": str(compiled).lower(),
        }  # fmt: skip
        config = load_config("debug", [word for key, value in given.items() for word in (f"--{key}", str(value))])
        return replace(config, model=replace(config.model, args=self._args))

    def _of_blocks(self, recompute: str, seq_len: int, tp: int, compiled: bool = False, *, most: bool = False) -> int:
        config = self._config(recompute, seq_len, tp, compiled)
        plan = plan_run(config, tp)
        with pretended_groups(tp) as (group,):
            rank = RankProgram(config, plan.layout, plan.mode, plan.batch, self._model, group, None, closed_form=False)
            return rank.of_blocks(most=most)


def of_folder(shape: ModelShape, name: str, args: dict[str, Any]) -> ModelShape:
    """The shape with the memory, and the attention, of its folder's own module. What was counted of a folder is kept."""
    found = _counts(name, json.dumps(args, sort_keys=True))
    fused = found.fused_attention
    blocks = tuple(
        replace(block, attention=block.attention and replace(block.attention, fused=fused)) for block in shape.blocks
    )
    return replace(shape, blocks=blocks, kept=found)


def shape_of_folder(config: Config) -> ModelShape | None:
    """The shape of a configuration's folder, for `titan_train.planner.memory.ranks`: with the memory of its own module where
    blocks are computed again. None of another model, or of one whose ``config.json`` does not tell it.
    """
    name, args = config.model.name, config.model.args
    if not name.startswith(PREFIX):
        return None
    try:
        shape = shape_of_config(config)
    except ValueError:
        return None
    return shape if config.activations.checkpoint == "none" else of_folder(shape, name, args)


@cache
def _counts(name: str, args: str) -> FolderBlocks:
    return FolderBlocks(name, json.loads(args))
