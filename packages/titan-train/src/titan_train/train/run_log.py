"""What a run says: steps, validations and events to its trackers, the same and messages to the person who watches.

Rank 0 has the trackers and the display; the other ranks have Python's log only.
"""

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from titan_cp.backends import kernel_choices
from torch import nn

from titan_train.config import Config
from titan_train.models import accepted_inputs
from titan_train.observe import (
    JsonlTracker,
    StepRecord,
    Throughput,
    Tracker,
    TrainProgress,
    ValidationRecord,
    build_trackers,
    device_peak_flops,
    memory_in_use,
    peak_memory_gib,
)
from titan_train.observe.timing import Cause, StepSplit, split_line
from titan_train.optim.schedule import check_schedule, lr_factor
from titan_train.parallel.context import ContextParallelism
from titan_train.task import Task
from titan_train.train.measure import StepMeasure
from titan_train.train.observer import ObservedRun, Observer, StepInfo, is_due
from titan_train.train.process import device_name

log = logging.getLogger(__name__)


class RunLog(Observer):
    """Records a run; `open` comes before its first step."""

    def __init__(self, config: Config, measure: StepMeasure, *, own_optimizer: bool = False) -> None:
        """With an optimizer of the caller's own, the rate is that of its first group, as it set it."""
        self._config, self._measure, self._own_optimizer = config, measure, own_optimizer
        self._schedule = check_schedule(config.schedule, config.train.steps)
        self._trackers: list[Tracker] = []
        self._progress: TrainProgress | None = None
        self._before_s = 0.0  # of training in earlier processes
        self._seconds: dict[str, float] = {}  # by part of a step; waits for the next step that is logged
        self._context: dict[str, float] = {}  # of the next step, if it is logged
        self._compiled = False  # this process has made its first step, and said what it chose

    def open(self, run_dir: Path, step: int) -> None:
        """On rank 0: record in the run's folder from ``step`` on."""
        self._trackers = build_trackers(self._config.metrics, run_dir, resume_step=step)
        self._before_s = next((t.elapsed_s for t in self._trackers if isinstance(t, JsonlTracker)), 0.0)
        self._progress = TrainProgress(self._config.metrics, total_steps=self._config.train.steps, first_step=step)

    def event(self, kind: str, step: int, **fields: object) -> None:
        for tracker in self._trackers:
            tracker.log_event(kind, step=step, **fields)

    def message(self, text: str, *, level: int = logging.INFO) -> None:
        log.log(level, text)
        if self._progress is not None:
            self._progress.message(text)

    def on_start(self, run: ObservedRun) -> None:
        self.run = run
        self._throughput = Throughput(
            flops_per_token=run.model.report.flops_per_token,
            peak_flops=device_peak_flops(device_name(run.device), self._config.train.dtype),
            world_size=dist.get_world_size() if dist.is_initialized() else 1,
            elapsed_before_s=self._before_s,
        )
        self._since_logged = copy.copy(self._throughput)  # read only at steps that are logged

    def on_batch(self, step: int, batches: list[Any]) -> None:
        context = self.run.model.context
        if self._progress is not None and isinstance(context, ContextParallelism) and self._is_logged(step):
            self._context = context.dealt(batches)

    def on_step(self, info: StepInfo) -> None:
        result, step, fused = info.result, info.step, self.run.model.report.fused
        if fused is not None and not self._compiled:
            self.event("async_tp_compiled", step, gathers=fused.gathers, scatters=fused.scatters, not_fused=fused.left)
        if not self._compiled:
            self._note_kernels(step)
        self._compiled = True
        if result.layer_norms:
            self.event("groups", step, learning_rates=info.learning_rates, gradient_norms=result.layer_norms)
        if result.attention_logits:
            self.event("attention_logits", step, largest=result.attention_logits)
        if self._measure.found is not None:
            self._note_split(*self._measure.found)
        step_s, tokens = info.seconds, info.sequences * self._config.model.seq_len - result.tokens_lacking
        self._throughput.update(tokens, step_s)
        self._since_logged.update(tokens, step_s)
        if self._progress is None:
            return
        record = StepRecord(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=self._learning_rate(info),
            tokens=tokens,
            samples_consumed=info.samples_consumed,
            peak_mem_gib=peak_memory_gib(self.run.device),
            data_wait_s=info.data_wait_s,
            step_time_s=step_s,
            skipped=result.skipped,
            routing=result.routing,
            mtp_losses=list(result.mtp_losses),
            context=self._context,
            split=self._seconds,
            memory=memory_in_use(self.run.device) if self._seconds else {},
            **self._throughput.rates(),
        )
        if self._is_logged(step):
            logged = replace(record, **self._since_logged.rates())
            for tracker in self._trackers:
                tracker.log_step(logged)
            self._seconds = {}
        self._progress.update(record)

    def on_validation(self, record: ValidationRecord, sample: str | None) -> None:
        for tracker in self._trackers:
            tracker.log_validation(record)
        if self._progress is not None:
            self._progress.validation(record)
            if sample:
                self._progress.sample(record.step, sample)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self.event("checkpoint_saved", step, seconds=round(seconds, 3))

    def on_rewind(self, step: int) -> None:
        """Steps after ``step`` will be recorded again, with other data."""
        if self.run.rank == 0:
            self.on_end()
            self.open(self.run.run_dir, step)

    def on_end(self) -> None:
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []

    def _learning_rate(self, info: StepInfo) -> float:
        """``optimizer.lr`` as scheduled; a group may have a scaled one, or none while it is frozen."""
        if self._own_optimizer:
            return info.learning_rates[0]
        return self._config.optimizer.lr * lr_factor(info.step - 1, **self._schedule)

    def _is_logged(self, step: int) -> bool:
        return is_due(step, self._config.metrics.log_every, self._config.train.steps)

    def _note_kernels(self, step: int) -> None:
        """What the first step's calls chose among the kernels of attention and of layers with a state."""
        choices = kernel_choices()
        if choices:
            self.event("kernels", step, chosen=[str(choice) for choice in choices])
        for choice in choices:
            if self.run.device.type == "cuda" or choice.refused:
                self.message(f"kernel: {choice}")

    def _note_split(self, split: StepSplit, causes: list[Cause]) -> None:
        self._seconds = split.seconds()
        self.event("step_split", split.step, **split.fields())
        if self._progress is not None:
            self._progress.line(split_line(split))
        for cause in causes:
            self.event("straggler", split.step, **cause.fields())
            self.message(cause.text)


def describe_task(config: Config, task: Task, part: nn.Module, *, samples: bool) -> Iterator[tuple[int, str]]:
    """What the task cannot do with a model, each with its level; ``samples`` if validations would let it sample."""
    masked = config.data.document_mask and "cu_seqlens" in task.keywords
    if masked and "cu_seqlens" not in accepted_inputs(part):
        text = (
            "data.document_mask is on, but the model's forward takes no cu_seqlens: tokens attend across documents. Accept "
            "cu_seqlens, or set data.document_mask=false."
        )
        yield logging.WARNING, text
    reason = task.why_no_samples(config, part)
    if reason is not None and samples:
        text = f"validations write no samples: {reason}. `titan-train generate` takes a checkpoint of the run."
        yield logging.INFO, text
