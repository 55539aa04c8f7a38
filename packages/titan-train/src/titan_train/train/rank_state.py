"""What a rank saves beside tensors of the model: where it is in the data, and what compressed gradients have not sent yet."""

import logging
from collections.abc import Sequence
from typing import Any

import titan_fsdp as fsdp
from torch import nn

from titan_train.data import DataLoader

log = logging.getLogger(__name__)

_COMPRESSION = "compression"


class RankState:
    """The loader's few integers, the same on every rank, so that any number of ranks can continue from them.

    With them, under ``parallel.compress="powersgd"``, each rank's own errors: they continue on the same layout only.
    """

    def __init__(self, loader: DataLoader, allow_change: bool, parts: Sequence[nn.Module]) -> None:
        """Of this rank's loader and model; ``allow_change``: other data may follow."""
        self._loader = loader
        self._allow_change = allow_change
        self._hooks = [hook for part in parts if (hook := fsdp.gradient_compression(part)) is not None]

    def state_dict(self) -> dict[str, Any]:
        """Plain data, and the tensors of compression."""
        state: dict[str, Any] = dict(self._loader.state_dict())
        if self._hooks:
            state[_COMPRESSION] = [hook.state_dict() for hook in self._hooks]
        return state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue on as many ranks."""
        position = {key: value for key, value in state.items() if key != _COMPRESSION}
        self._loader.load_state_dict(position, allow_data_change=self._allow_change)
        saved: list[dict[str, Any]] = state.get(_COMPRESSION, [])
        try:
            if len(saved) != len(self._hooks) and saved:
                raise ValueError("the saved layout compressed gradients of other parts of the model")
            for hook, value in zip(self._hooks, saved, strict=bool(saved)):
                hook.load_state_dict(value)
        except ValueError as err:
            for hook in self._hooks:
                hook.forget()
            _say_dropped(str(err))

    def reshard(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue on another number of ranks, from the states of all that saved."""
        first = dict(states[0])
        if first.pop(_COMPRESSION, None):
            _say_dropped("the checkpoint was saved by another number of ranks")
        self.load_state_dict(first)


def _say_dropped(why: str) -> None:
    log.warning(
        "the gradients' errors that parallel.compress='powersgd' had not sent yet are left out, and error feedback starts again: "
        "%s. Resume on the layout of the checkpoint to continue with them.",
        why,
    )
