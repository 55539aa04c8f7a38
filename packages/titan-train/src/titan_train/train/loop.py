"""The loop: batches in, optimizer steps, now and then a validation and a checkpoint.

State between steps is a handful of objects: model, optimizer, scheduler and the data position (a few integers). All of it
is in every checkpoint, and random numbers are drawn from the number of the step, so that ten steps, a stop, and ten more
give bitwise the losses of twenty.

What watches the run is not part of the algorithm: it is called at the points of `titan_train.train.observer.Observer`.
"""

import contextlib
import itertools
import time
from collections.abc import Generator, Iterator, Sequence

from titan_train.data import DataLoader
from titan_train.data.loader.source import TaskBatch
from titan_train.observe.records import ValidationRecord
from titan_train.optim import Scheduler
from titan_train.parallel.layout.batch import BatchPlan
from titan_train.task import TaskInputs
from titan_train.train.checkpoints import Checkpoints
from titan_train.train.observer import ObservedRun, Observer, Phase, StepInfo, StepResult, is_due
from titan_train.train.process import SaveRequests
from titan_train.train.step import OptimizerStep
from titan_train.train.step_random import StepRandom


class TrainingLoop(ObservedRun):
    """The algorithm, over parts that `titan_train.train.trainer.Trainer` builds."""

    losses: list[float]
    """Loss of every step this trainer has made."""
    scheduler: Scheduler
    batch_plan: BatchPlan
    observers: Sequence[Observer]
    _inputs: TaskInputs
    _loader: DataLoader
    _batches: Iterator[TaskBatch] | None = None
    _random: StepRandom
    _optimizer_step: OptimizerStep
    _checkpoints: Checkpoints
    _requests: SaveRequests
    _saved_at: float

    def _measure_held_out(self) -> tuple[ValidationRecord, str | None]:
        """The loss on held-out data, and what the model writes, if the task lets it."""
        raise NotImplementedError

    def fit(self, until: int | None = None) -> None:
        """Train up to step ``until`` (default: ``train.steps``), saving, validating and logging as configured.

        Returns early, after saving, when a rank is asked to stop (SIGTERM).

        Raises:
            RuntimeError: ``train.nonfinite_limit`` steps in a row were not finite.
        """
        config, total = self.config, self.config.train.steps
        last = total if until is None else min(until, total)
        if self.step >= last:
            return
        self._saved_at = time.monotonic()
        with contextlib.ExitStack() as around:
            around.enter_context(self._requests.installed())
            for observer in self.observers:
                around.enter_context(observer.running())
            around.enter_context(self._optimizer_step.frozen_weights)
            while self.step < last:
                stop, save_asked, save_due = self._train_step().requests
                if self._inputs.validation is not None and is_due(self.step, config.validation.every, total):
                    self._validate()
                save_due |= self.step == total or is_due(self.step, config.checkpoint.every, total)
                if stop or save_asked or save_due:
                    self.save()
                if stop:
                    self.event("stopped", reason="SIGTERM")
                    self.message(f"asked to stop: saved step {self.step}; run the same command to continue")
                    break

    def save(self) -> None:
        """Save a checkpoint of the current step. Collective: every rank calls it."""
        started = time.monotonic()
        with self._phase("checkpoint", self.step):
            self._checkpoints.save(self.step)
        self._saved_at = time.monotonic()
        for observer in self.observers:
            observer.on_checkpoint(self.step, self._saved_at - started)

    def _train_step(self) -> StepResult:
        number = self.step + 1
        for observer in self.observers:
            observer.on_step_start(number)
        started = time.perf_counter()
        with self._phase("data", number):
            self._batches = self._batches or iter(self._loader)
            batches = list(itertools.islice(self._batches, self.batch_plan.accumulation))
        data_wait_s = time.perf_counter() - started
        for observer in self.observers:
            observer.on_batch(number, batches)

        self._random(number)
        learning_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        layer_norms = is_due(number, self.config.metrics.split_every, self.config.train.steps)
        requests = (self._requests.stop, self._requests.take_save(), self._minutes_due())
        result = self._optimizer_step(batches, requests, layer_norms=layer_norms)
        self.scheduler.step()
        self.step = number
        self.losses.append(result.loss)
        if len(self.losses) == 1:  # from this process's first step on, the optimizer has all its state
            self._checkpoints.prepare()

        info = StepInfo(
            step=number,
            result=result,
            learning_rates=learning_rates,
            samples_consumed=batches[-1].samples_consumed,
            data_wait_s=data_wait_s,
            started=started,
        )
        for observer in self.observers:
            observer.on_step(info)
        return result

    def _validate(self) -> None:
        with self._phase("validation", self.step):
            record, sample = self._measure_held_out()
        for observer in self.observers:
            observer.on_validation(record, sample)

    def _minutes_due(self) -> bool:
        """Whether a save by the clock is due; rank 0's clock decides for all."""
        minutes = self.config.checkpoint.every_minutes
        return bool(minutes) and self.rank == 0 and time.monotonic() - self._saved_at >= 60 * minutes

    @contextlib.contextmanager
    def _phase(self, name: Phase, step: int) -> Generator[None]:
        with contextlib.ExitStack() as around:
            for observer in self.observers:
                around.enter_context(observer.phase(name, step))
            yield
