"""What watches a run. An `Observer` is called where something happens; it may communicate, and changes no number.

`Trainer` builds all of them in one list: what measures, profiles, records, collects garbage, and what the launcher and the
caller (``Trainer(config, callbacks=[...])``) bring. Each method is called on every rank at the same point, in the order of
the list, so that one that communicates meets its peers. An exception ends the run.
"""

import contextlib
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from titan_mesh import Mesh

    from titan_train.config import Config
    from titan_train.observe.records import ValidationRecord
    from titan_train.observe.timing import StepTimer
    from titan_train.parallel.model import ParallelModel
    from titan_train.train.rerun import RerunVerdict

Phase = Literal["data", "validation", "checkpoint"]
"""What the loop does besides optimizer steps."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    loss: float
    """The mean loss; of text, cross-entropy in nats over all valid labels."""
    grad_norm: float
    """2-norm of the whole gradient before clipping."""
    num_labels: int
    """What the loss was divided by, over all ranks: labels, or elements."""
    skipped: bool
    """Nothing was updated: loss or gradient was not finite, or far larger than usual (`spike`)."""
    requests: tuple[bool, ...]
    """For each request passed in, whether any rank made it."""
    routing: dict[str, float]
    """How evenly the mixtures of experts were used, from `routing_statistics`; empty for a dense model."""
    rerun: "RerunVerdict | None" = None
    """What executing a suspect step again showed; None if it was not."""
    layer_norms: dict[str, float] = field(default_factory=dict[str, float])
    """Norm of the gradient before clipping, by layer; empty unless asked for."""
    attention_logits: dict[str, float] = field(default_factory=dict[str, float])
    """The largest attention logit of the step by layer; empty unless ``qk_clip.threshold`` is set."""
    spike: bool = False
    """The step was left out for its gradient norm, which ``spikes.sigma`` does not allow."""
    mtp_losses: tuple[float, ...] = ()
    """Mean loss of each module that predicts a token further ahead, over the labels that it has."""
    tokens_lacking: int = 0
    """What the step's rows are short of ``model.seq_len``, over all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """One optimizer step that was made. All but the times is the same on every rank."""

    step: int
    """Optimizer steps made, this one included; the first is 1."""
    result: StepResult
    """Loss, gradient norm, and whether the update was skipped."""
    learning_rates: list[float]
    """What this step used, by parameter group."""
    sequences: int
    """Sequences of this step, over all ranks."""
    samples_consumed: int
    """Sequences consumed since the start of training, this step's included."""
    data_wait_s: float
    """Seconds that the step waited for its batch."""
    started: float
    """When it began, by `time.perf_counter`."""

    @property
    def seconds(self) -> float:
        """Since the step began; at the end of the list of observers, the whole step with all of them."""
        return time.perf_counter() - self.started


class ObservedRun(Protocol):
    """What an observer sees of the trainer."""

    config: "Config"
    run_dir: Path
    rank: int
    device: "torch.device"
    mesh: "Mesh | None"
    model: "ParallelModel"
    optimizer: "torch.optim.Optimizer"
    timer: "StepTimer"
    step: int
    """Optimizer steps made."""

    def event(self, kind: str, **fields: object) -> None:
        """Record that something happened at this step; ``fields`` are JSON values. Rank 0 writes."""
        ...

    def message(self, text: str) -> None:
        """Log a line, and show it above the progress bar."""
        ...

    def phase(self, name: Phase, step: int) -> AbstractContextManager[None]:
        """A block of work that may take longer than a step, such as writing files; all observers are told as of a phase."""
        ...


class Observer:
    """Watches a run. Every method but `on_start` does nothing by default."""

    run: ObservedRun
    """The trainer, from `on_start` on."""

    def on_start(self, run: ObservedRun) -> None:
        """The trainer is built, and restored if it resumes."""
        self.run = run

    def running(self) -> AbstractContextManager[object]:
        """A context around all steps of one `Trainer.fit`."""
        return contextlib.nullcontext()

    def phase(self, name: Phase, step: int) -> AbstractContextManager[object]:
        """A context around loading the batch of ``step``, or validating, saving, restoring or other writing after ``step``."""
        return contextlib.nullcontext()

    def on_step_start(self, step: int) -> None:
        """``step`` is next; its batch is not loaded yet."""

    def on_batch(self, step: int, batches: list[Any]) -> None:
        """The micro-batches of ``step`` are loaded, and no collective of the step is made yet."""

    def on_step(self, info: StepInfo) -> None:
        """All ranks have made a step."""

    def on_validation(self, record: "ValidationRecord", sample: str | None) -> None:
        """The model was validated; ``sample`` is what it wrote, if the task lets it."""

    def on_checkpoint(self, step: int, seconds: float) -> None:
        """A checkpoint of ``step`` was saved; the ranks waited ``seconds`` for it."""

    def on_rewind(self, step: int) -> None:
        """The run went back to the checkpoint of ``step``, which is restored."""

    def on_end(self) -> None:
        """The trainer is closed, also after an error. Other ranks may be gone: do not communicate."""


def is_due(step: int, every: int, last: int) -> bool:
    """Whether what is done every so many steps (0: never), and at the last one, is done at ``step``."""
    return bool(every) and (step % every == 0 or step == last)
