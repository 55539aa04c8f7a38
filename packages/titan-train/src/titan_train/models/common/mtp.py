"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): the model also learns to predict tokens further ahead.

Next-token loss teaches nothing about what comes after the next token. So D small modules follow the model, one after the other.
Module k takes what the module before it knew of token i (the first: the model's own last hidden states, after its norm) and the
embedding of token i + k, and predicts token i + k + 1:

    h_k = norm(block(W [norm(emb(t_{i+k})); norm(h_{k-1})]))        logits_k = head(h_k)

Embedding and head are the model's own. A module's loss counts labels of its own document alone (of the row, where positions do
not tell documents apart), and is divided by the labels of the next-token loss, as in the paper:

    loss = next-token loss + weight / D * sum over k of the loss of module k

What is reported as the loss is the next-token loss: the modules' losses are added to the gradient, and recorded beside it. They
run in training only; generation may draft tokens with them.

The order (embedding, hidden states), and hidden states behind the norm, are those of published weights and of the libraries that
serve them. Cost: a block, a product of 2 d x d and a pass through the head for each module.

Shapes: B batch, S sequence, d width, D modules.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.models.common.attention import row_positions
from titan_train.models.common.loss import IGNORE_INDEX, count_valid

AHEAD = ("ahead_tokens", "ahead_labels")
"""What a model with such modules is given by name in training, from `look_ahead`."""


class MTPModule(nn.Module):
    """One module: what it predicts lies one token further ahead than what its input predicted."""

    def __init__(self, dim: int, norm: Callable[[], nn.Module], block: nn.Module) -> None:
        """Put a module together around a decoder layer, called by `through_block`, and norms of the model's kind."""
        super().__init__()
        self.embedding_norm = norm()
        self.hidden_norm = norm()
        self.proj = nn.Linear(2 * dim, dim, bias=False)
        self.block = block
        self.norm = norm()

    def forward(self, hidden: Tensor, embedded: Tensor, context: Any) -> Tensor:
        """Hidden states and embeddings one token further on, ``[B, S, d]`` each, to hidden states for the head."""
        both = torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), dim=-1)
        return self.norm(self.through_block(self.proj(both), context))

    def through_block(self, x: Tensor, context: Any) -> Tensor:
        """``[B, S, d]`` to ``[B, S, d]``."""
        return self.block(x, context)


class MTPModules(nn.ModuleDict):
    """The modules of a model by number, with the weight of their losses and what a step finds of them."""

    # not buffers: DistributedDataParallel would overwrite every rank's sums with those of rank 0
    _weight: Tensor | None = None
    _sums: Tensor | None = None

    def __init__(self, modules: Sequence[MTPModule]) -> None:
        """Keep the modules in order; until `begin`, their losses have no weight."""
        super().__init__({str(k): module for k, module in enumerate(modules)})

    def begin(self, weight: float, device: torch.device) -> Tensor:
        """Before a step: the weight of the losses' mean, and nothing counted.

        Returns:
            Where the step adds up each module's loss and labels, ``[D, 2]``; a recorded step finds the same tensors.
        """
        if self._weight is None or self._sums is None:
            self._weight, self._sums = torch.zeros((), device=device), torch.zeros(len(self), 2, device=device)
        self._weight.fill_(weight)
        return self._sums.zero_()

    def loss(
        self,
        hidden: Tensor,
        tokens: Tensor,
        labels: Tensor,
        context: Any,
        embeddings: nn.Module,
        head: nn.Module,
    ) -> Tensor:
        """What to add to the sum of the next-token loss: zero, with the gradient of the modules' losses.

        Args:
            hidden: ``[B, S, d]``, behind the model's last norm.
            tokens: ``[B, S, D]`` int64, from `look_ahead`.
            labels: ``[B, S, D]`` int64, likewise.
            context: Of the batch, as the modules' blocks take it.
            embeddings: The model's.
            head: From hidden states and labels to the sum of the cross-entropy.
        """
        losses: list[Tensor] = []
        for k, module in enumerate(self.values()):
            hidden = module(hidden, embeddings(tokens[..., k]), context)
            losses.append(head(hidden, labels[..., k]))
            if self._sums is not None:
                self._sums[k] += torch.stack([losses[k].detach().float(), count_valid(labels[..., k]).float()])
        total = torch.stack(losses).sum() * (0.0 if self._weight is None else self._weight / len(self))
        return total - total.detach()


def mtp_of(model: nn.Module) -> MTPModules | None:
    """The modules of a model or of its last pipeline stage, inside any wrappers; None where there are none."""
    return next((module for module in model.modules() if isinstance(module, MTPModules)), None)


def look_ahead(tokens: Tensor, labels: Tensor, positions: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """What the modules are given beside hidden states, and what they are to predict, of whole rows.

    Args:
        tokens: ``[B, S]`` int64.
        labels: ``[B, S]`` int64: the next token, `IGNORE_INDEX` where it is not learned.
        positions: ``[B or 1, S]`` int64, from 0 in each document.
        depth: D.

    Returns:
        Tokens ``[B, S, D]``: those 1 to D further on; 0 behind the end of the row. Labels ``[B, S, D]``: those of these tokens,
        `IGNORE_INDEX` where they belong to another document.
    """
    rows, length = tokens.shape
    ahead = tokens.new_zeros(rows, length, depth)
    learned = torch.full_like(ahead, IGNORE_INDEX)
    for k in range(1, min(depth, length - 1) + 1):
        here, there = slice(0, length - k), slice(k, length)
        ahead[:, here, k - 1] = tokens[:, there]
        same = positions[:, there] == positions[:, here] + k
        learned[:, here, k - 1] = labels[:, there].where(same, learned.new_tensor(IGNORE_INDEX))
    return ahead, learned


@dataclass(frozen=True, slots=True)
class AheadBatch:
    """A batch of text with the tokens ahead; the fields are those of `titan_train.TaskBatch`."""

    inputs: tuple[Tensor, ...]
    keywords: Mapping[str, Any]
    target: Tensor
    samples_consumed: int = 0


def with_ahead(batch: Any, depth: int) -> AheadBatch:
    """A batch of text, whose model is given whole rows, with the tokens ahead."""
    (tokens,) = batch.inputs
    positions = batch.keywords.get("positions")
    if positions is None:
        positions = row_positions(tokens.shape[1], batch.keywords.get("cu_seqlens"), tokens.device)
    ahead = dict(zip(AHEAD, look_ahead(tokens, batch.target, positions, depth), strict=True))
    return AheadBatch(batch.inputs, {**batch.keywords, **ahead}, batch.target, batch.samples_consumed)
