"""Call any model on a batch, handing it only what its forward accepts; and what it drops by chance in training."""

import inspect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

from titan_fsdp import unwrap
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage] # the base of all of torch's

_OPTIONAL = ("positions", "cu_seqlens", "attention_plan")


class TokenBatch(Protocol):
    """What a model is called on; `titan_train.data.Batch` is one. It may also have an ``attention_plan``."""

    @property
    def tokens(self) -> Tensor:
        """``[B, S]`` int64."""
        ...

    @property
    def positions(self) -> Tensor | None:
        """Position of each token in its document, ``[B, S]`` int64."""
        ...

    @property
    def cu_seqlens(self) -> Tensor | None:
        """Cumulative document lengths, ``[B, N + 1]`` int32, padded by repeating S."""
        ...


def call_model(model: nn.Module, batch: TokenBatch, *, labels: Tensor | None = None) -> Tensor:
    """Logits of a batch, from a shipped model or a user's own.

    Positions and document boundaries are passed if the batch has them and the model's ``forward`` accepts them; a
    forward that takes only tokens attends across packed documents.

    Args:
        model: The model, with any wrappers around it (DDP, FSDP2, torch.compile, activation checkpointing).
        batch: The tokens, and where documents lie.
        labels: Passed to the ``forward`` of a model whose head computes the loss.

    Returns:
        ``[B, S, V]``; with labels, what the model returns for them.
    """
    accepted = accepted_inputs(model)
    passed = {name: value for name in accepted if (value := getattr(batch, name, None)) is not None}
    if labels is not None:
        passed["labels"] = labels
    return model(batch.tokens, **passed)


def accepted_inputs(model: nn.Module, names: Sequence[str] = _OPTIONAL) -> frozenset[str]:
    """Which of ``names`` the model's ``forward`` takes; costs some 20 microseconds."""
    parameters = inspect.signature(unwrap(model).forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return frozenset(names)
    return frozenset(name for name in names if name in parameters)


def active_dropout(parts: Iterable[nn.Module]) -> dict[str, int]:
    """Rates of dropout above 0, and how many modules have each, such as ``{"attn_dropout=0.1": 12}``.

    Counts torch's dropout layers, and numbers between 0 and 1 with "drop" in their name that a module keeps for
    ``F.dropout`` or its attention, as the models of transformers do.
    """
    found: Counter[str] = Counter()
    for part in parts:
        for name, module in part.named_modules():
            if isinstance(module, _DropoutNd):
                if module.p > 0:
                    found[f"{name.rpartition('.')[2]}={module.p:g}"] += 1
                continue
            rates = ((key, value) for key, value in vars(module).items() if isinstance(value, float) and 0 < value <= 1)
            found.update(f"{key}={value:g}" for key, value in rates if "drop" in key.lower())
    return dict(found)
