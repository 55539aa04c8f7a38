"""The lowest validation loss of a run: the checkpoint that is kept for it, and when a run that no longer improves ends.

Bits per byte divide the same loss by a constant of the validation text, so they rank checkpoints alike.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from titan_train.config import Config
from titan_train.config.data import TEXT_KINDS
from titan_train.observe.records import ValidationRecord
from titan_train.task import task_name

log = logging.getLogger(__name__)

_TO_HOLD_OUT = {
    "vision": "Set vision.held_out",
    "diffusion": "Set data.validation_fraction where diffusion.images are prepared, or add shards validation-* to diffusion.path",
}


class BestValidation:
    """What `checkpoint.keep_best` saves after, and what `validation.patience` waits for. The same on every rank."""

    def __init__(self, patience: int, measured: Mapping[str, Any] | None = None) -> None:
        """No validation is made yet.

        Args:
            patience: Validations in a row that may pass without a new lowest loss; 0 is any number.
            measured: What losses are of, from `measurement`: others say nothing about these.
        """
        self._patience, self._measured = patience, dict(measured or {})
        self._newest: ValidationRecord | None = None
        self.forget()

    def forget(self) -> None:
        """Begin again: no validation is the best so far."""
        self.loss, self.step, self._waited = math.inf, 0, 0

    def go_back(self, step: int, best: tuple[float, int] | None) -> None:
        """The run went back to ``step``; ``best`` is the lowest loss until then whose checkpoint is kept, and its step."""
        self.forget()
        if best is not None:
            self.loss, self.step = best
        if self._newest is not None and self._newest.step > step:
            self._newest = None

    @property
    def measured(self) -> str:
        """What losses are of, as a short text."""
        return hashlib.sha256(json.dumps(self._measured, sort_keys=True).encode()).hexdigest()[:12]

    def take(self, record: ValidationRecord) -> bool:
        """Count a validation. Returns whether its loss is the lowest so far; NaN never is."""
        self._newest = record
        better = record.loss < self.loss
        if better:
            self.loss, self.step, self._waited = record.loss, record.step, 0
        else:
            self._waited += 1
        return better

    @property
    def exhausted(self) -> bool:
        """Whether patience has run out."""
        return 0 < self._patience <= self._waited

    def loss_at(self, step: int) -> float | None:
        """The validation loss of a step, if the newest validation was after it, or the best one."""
        if self._newest is not None and self._newest.step == step:
            return self._newest.loss
        return self.loss if 0 < self.step == step else None

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"loss": self.loss, "step": self.step, "waited": self._waited, "measured": self._measured}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, if the saved loss was measured as the next ones will be. An older version says nothing of that."""
        was = state.get("measured", self._measured)
        if changed := [name for name in self._measured if was.get(name) != self._measured[name]]:
            log.warning(
                "the lowest validation loss, %.4f of step %d, was measured otherwise (%s): no other is compared with it",
                state["loss"], state["step"], ", ".join(changed),
            )  # fmt: skip
            self.forget()
            return
        self.loss, self.step, self._waited = float(state["loss"]), int(state["step"]), int(state["waited"])


def measurement(config: Config, source: Any, sequences: int) -> dict[str, Any]:
    """What a validation loss is of: plain values by name.

    Args:
        config: The run's.
        source: What is validated on.
        sequences: Of a step, over all ranks.
    """
    return {
        "data": getattr(source, "fingerprint", ""),
        "sequences": config.validation.steps * sequences,
        "model.seq_len": config.model.seq_len,
        "averaged weights": config.evaluated_weights,
    }


def check_measured(config: Config, *, held_out: bool = True, given: bool = False) -> None:
    """Refuse to keep or wait for the best of validations that a run does not make.

    Args:
        config: The run's.
        held_out: Whether there is anything to validate on.
        given: Whether a program gives the data, in place of the configuration's.

    Raises:
        ValueError: Validation is off, or nothing is held out.
    """
    asked = ["checkpoint.keep_best=true"] if config.checkpoint.keep_best else []
    asked += [f"validation.patience={config.validation.patience}"] if config.validation.patience else []
    if not asked or (config.validation.every and held_out):
        return
    why = (
        f"nothing is held out to validate on. {'Give the Trainer validation_data' if given else _to_hold_out(config)}"
        if config.validation.every
        else "validation.every=0 makes no validation. Set validation.every"
    )
    raise ValueError(f"{asked[0]} goes by the validation loss, and {why}; or leave it out.")


def _to_hold_out(config: Config) -> str:
    """What a user does for something to validate on."""
    task = task_name(config)
    if task != "text":
        return _TO_HOLD_OUT.get(task, f"Let the task {task!r} open some")
    by_fraction = any(source.kind in TEXT_KINDS and not source.stream for source in config.data.sources)
    return ("Set data.validation_fraction or name" if by_fraction else "Name") + " data.validation_sources"
