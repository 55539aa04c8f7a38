"""Context parallelism of two streams: each rank holds a part of the text and a part of the image.

Its joint sequence is its text followed by its image. Attention is not causal and each token carries its own place, so it does
not matter in which order the keys of other ranks arrive: the whole sequence is a permutation of the plain one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import titan_cp
import torch
import torch.distributed as dist
from titan_mesh import Mesh
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.data.loader.source import TensorBatch
from titan_train.models.flux.blocks import FullAttention
from titan_train.tasks.diffusion.batches import FlowTarget

_METHODS = ("allgather", "ulysses")


class JointAttention(nn.Module):
    """Replaces `FullAttention`: attention over the tokens of all ranks of the group."""

    def __init__(self, plan: titan_cp.AttentionPlan, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._attention = titan_cp.CPAttention(plan, dim_order="bthd", group=group)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, plan: Any = None) -> Tensor:
        return self._attention(q.contiguous(), k.contiguous(), v.contiguous())


@dataclass(frozen=True, slots=True)
class JointContext:
    """See `titan_train.task.ContextCut`."""

    plan: titan_cp.AttentionPlan
    group: dist.ProcessGroup
    text_tokens: int
    size: int
    rank: int

    def apply(self, model: nn.Module) -> None:
        for name in [name for name, module in model.named_modules() if isinstance(module, FullAttention)]:
            model.set_submodule(name, JointAttention(self.plan, self.group))

    def cut(self, batch: TensorBatch) -> TensorBatch:
        """The rank's text, image, places and velocities; what is known of a whole sample stays whole."""
        inputs, keywords = self.cut_inputs(batch.inputs, batch.keywords)
        return TensorBatch(
            inputs=inputs,
            keywords=keywords,
            target=FlowTarget(self._part(batch.target.velocity), batch.target.time),
            samples_consumed=batch.samples_consumed,
        )

    def cut_inputs(
        self, inputs: Sequence[Tensor], keywords: Mapping[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """As `cut`, of a batch without a target."""
        places = keywords["positions"]
        joined = (places[:, : self.text_tokens], places[:, self.text_tokens :])
        here = torch.cat([self._part(part) for part in joined], dim=1)
        return tuple(self._part(x) for x in inputs), {**keywords, "positions": here}

    def join(self, output: Tensor) -> Tensor:
        """The velocity of the whole image, from each rank's part ``[B, I / cp, C]``."""
        parts = [torch.empty_like(output) for _ in range(self.size)]
        dist.all_gather(parts, output.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)

    def _part(self, x: Tensor) -> Tensor:
        return x.chunk(self.size, dim=1)[self.rank].contiguous()


def check_cut(config: Config) -> None:
    """Refuse what cannot be cut: both streams must divide, and only methods without an order of tokens apply.

    Raises:
        ValueError: Names the length or the method.
    """
    cp, diffusion = config.parallel.cp, config.diffusion
    for name, tokens in (("text_tokens", diffusion.text_tokens), ("grid * grid", diffusion.grid**2)):
        if tokens % cp:
            near = max(1, round(tokens / cp)) * cp
            raise ValueError(
                f"parallel.cp={cp} does not divide diffusion.{name}={tokens}: ranks would hold different numbers of tokens. The "
                f"nearest number that it divides is {near}."
            )
    if config.context.method not in ("auto", *_METHODS):
        raise ValueError(
            f"context.method={config.context.method!r}: attention of this model is not causal, so there is no work to balance "
            f"over a ring. Use {' or '.join(map(repr, _METHODS))}."
        )


def plan_joint(config: Config, num_heads: int, head_dim: int, rank: int, dtype: torch.dtype) -> titan_cp.AttentionPlan:
    """titan-cp's plan of the joint sequence. Needs no ranks.

    Raises:
        ValueError: Heads do not divide among the ranks.
    """
    check_cut(config)
    heads = max(1, num_heads // config.parallel.tp)
    method = config.context.method
    if method == "auto":
        method = "ulysses" if heads % config.parallel.cp == 0 else "allgather"
    return titan_cp.plan(
        config.model.seq_len,
        size=config.parallel.cp,
        rank=rank,
        num_heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        method=method,
        layout="contiguous",
        causal=False,
    )


def joint_context(config: Config, mesh: Mesh, model: nn.Module, dtype: torch.dtype) -> JointContext:
    """Context parallelism for a run.

    Raises:
        ValueError: As `plan_joint`.
    """
    inner = next(module for module in model.modules() if isinstance(module, FullAttention))
    size, rank = mesh.size("cp"), mesh.rank_in("cp")
    plan = plan_joint(config, inner.num_heads, inner.head_dim, rank, dtype)
    return JointContext(plan, mesh.group("cp"), config.diffusion.text_tokens, size, rank)
