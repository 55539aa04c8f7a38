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

from titan_train.data.loader.data_loader import DataLoader
from titan_train.data.loader.iterated import IteratedBatches, Loader
from titan_train.data.loader.source import TaskBatch
from titan_train.exchange import gather_values
from titan_train.observe.records import ValidationRecord
from titan_train.observe.run_info import record_early_stop, stopped_early
from titan_train.optim import Scheduler
from titan_train.optim.average import has_ema, update_ema
from titan_train.optim.spikes import Spikes
from titan_train.parallel.layout.batch import BatchPlan
from titan_train.run_folder import record_return
from titan_train.task import TaskInputs
from titan_train.train.best import BestValidation
from titan_train.train.checkpoints import Checkpoints
from titan_train.train.observer import ObservedRun, Observer, Phase, StepInfo, StepResult, is_due
from titan_train.train.process import SaveRequests
from titan_train.train.step import OptimizerStep
from titan_train.train.step_random import StepRandom

_MOST_REWINDS = 3


class TrainingLoop(ObservedRun):
    """The algorithm, over parts that `titan_train.train.trainer.Trainer` builds."""

    losses: list[float]
    """Loss of every step this trainer has made."""
    scheduler: Scheduler
    batch_plan: BatchPlan
    observers: Sequence[Observer]
    _inputs: TaskInputs
    _loader: Loader
    _batches: Iterator[TaskBatch] | None = None
    _sequences = 0
    _spikes: Spikes
    _random: StepRandom
    _optimizer_step: OptimizerStep
    _checkpoints: Checkpoints
    _best: BestValidation
    _requests: SaveRequests
    _saved_at: float
    _casts: contextlib.ExitStack
    """Has entered `OptimizerStep.frozen_weights` while `fit` runs."""

    def _measure_held_out(self) -> tuple[ValidationRecord, str | None]:
        """The loss on held-out data, and what the model writes, if the task lets it."""
        raise NotImplementedError

    def fit(self, until: int | None = None) -> None:
        """Train up to step ``until`` (default: ``train.steps``), saving, validating and logging as configured.

        Returns early, after saving, when a rank is asked to stop (SIGTERM), or `validation.patience` has run out.

        Raises:
            RuntimeError: ``train.nonfinite_limit`` steps in a row were not finite.
        """
        config, total = self.config, self.config.train.steps
        last = total if until is None else min(until, total)
        if self._best.exhausted and self.step < total:
            if stopped_early(self.run_dir, config.validation.patience) != self.step:
                self._stop_early()  # lost before this was on record, or patience was lowered
            return
        if self.step >= last:
            return
        self._saved_at = time.monotonic()
        with contextlib.ExitStack() as around:
            around.enter_context(self._requests.installed())
            for observer in self.observers:
                around.enter_context(observer.running())
            self._casts = around.enter_context(contextlib.ExitStack())
            self._casts.enter_context(self._optimizer_step.frozen_weights)
            while self.step < last:
                result = self._train_step()
                if result.spike and self._spikes.exhausted and self._leave_spike():
                    continue
                stop, save_asked, save_due = result.requests
                if self._inputs.validation is not None and is_due(self.step, config.validation.every, total):
                    save_due |= self._validate() and config.checkpoint.keep_best
                save_due |= self.step == total or is_due(self.step, config.checkpoint.every, total)
                if stop or save_asked or save_due or self._best.exhausted:
                    self.save()
                if self._best.exhausted and self.step < total:
                    self._stop_early()
                    break
                if stop:
                    self.event("stopped", reason="SIGTERM")
                    self.message(f"asked to stop: saved step {self.step}; run the same command to continue")
                    break

    @property
    def finished(self) -> bool:
        """Whether all steps are made, or the run has stopped early."""
        return self.step >= self.config.train.steps or self._best.exhausted

    def save(self) -> None:
        """Save a checkpoint of the current step. Collective: every rank calls it."""
        started = time.monotonic()
        with self.phase("checkpoint", self.step):
            self._checkpoints.save(self.step, self._best.loss_at(self.step))
        self._saved_at = time.monotonic()
        for observer in self.observers:
            observer.on_checkpoint(self.step, self._saved_at - started)

    def _train_step(self) -> StepResult:
        number = self.step + 1
        for observer in self.observers:
            observer.on_step_start(number)
        started = time.perf_counter()
        with self.phase("data", number):
            self._batches = self._batches or iter(self._loader)
            sequences = self._loader.global_batch
            batches = list(itertools.islice(self._batches, self._loader.microbatches_per_step))
        lacking = self._loader.lacking(batches) if isinstance(self._loader, IteratedBatches) else 0
        data_wait_s = time.perf_counter() - started
        for observer in self.observers:
            observer.on_batch(number, batches)

        self._random(number)
        learning_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        layer_norms = is_due(number, self.config.metrics.split_every, self.config.train.steps)
        requests = (self._requests.stop, self._requests.take_save(), self._minutes_due())
        if sequences != self._sequences:
            self.model.set_batch(sequences)
            self._sequences = sequences
        mtp_weight = self.config.mtp.weight_at(number, self.config.train.steps)
        result = self._optimizer_step(
            batches, requests, layer_norms=layer_norms, mtp_weight=mtp_weight, tokens_lacking=lacking
        )
        self.scheduler.step()
        if number in self.config.optimizer.frozen_steps.values():
            self._spikes.forget(norms=True)  # norms are of what is trained: more from the next step on
        self.step = number
        self.losses.append(result.loss)
        if self.config.average.ema_decay:
            due = number % self.config.average.ema_every == 0
            if due or not has_ema(self.optimizer):
                update_ema(self.optimizer, self.config.average.ema_decay, due=due)
        if len(self.losses) == 1:  # from this process's first step on, the optimizer has all its state
            self._checkpoints.prepare()

        info = StepInfo(
            step=number,
            result=result,
            learning_rates=learning_rates,
            sequences=sequences,
            samples_consumed=batches[-1].samples_consumed,
            data_wait_s=data_wait_s,
            started=started,
        )
        for observer in self.observers:
            observer.on_step(info)
        return result

    def _validate(self) -> bool:
        """Validate; whether the loss is the lowest so far."""
        averaged = self.config.evaluated_weights != "none"
        with self.phase("validation", self.step), self._weights_written() if averaged else contextlib.nullcontext():
            record, sample = self._measure_held_out()
        for observer in self.observers:
            observer.on_validation(record, sample)
        return self._best.take(record)

    def _stop_early(self) -> None:
        best, patience = self._best, self.config.validation.patience
        self.event("early_stopped", best_step=best.step, best_loss=best.loss)
        self.message(
            f"stopped early: {patience} validations without a loss below {best.loss:.4f}, that of step {best.step}"
        )
        if self.rank == 0:
            record_early_stop(self.run_dir, self.step, patience)

    def _leave_spike(self) -> bool:
        """After many spikes in a row: back to an older checkpoint and on with the data after them, or with them as usual.

        Returns:
            Whether the run went back.

        Raises:
            RuntimeError: It went back several times and never came past the first spike.
        """
        here, before = self.step, self.step - self._spikes.lasting
        found, lacks = None, ""
        if self.config.spikes.rewind:
            with self.phase("checkpoint", here), self._weights_written():
                older = self._checkpoints.newest_until(before - self.config.spikes.rewind)
                lacks = "" if older is None else self._data_lacks(older)
                if older is not None and not lacks:
                    found = self._checkpoints.rewind(older)
        self._spikes.forget(norms=found is None)
        if found is None:
            self.message(
                f"step {here}: gradients stay far larger than before step {before}; they count as usual from here on"
                + (f". The run does not go back, since it would pass over data that it needs: {lacks}" if lacks else "")
            )
            self.event("spikes_accepted", since=before)
            return False
        if self._spikes.went_back(here) > _MOST_REWINDS:
            raise RuntimeError(
                f"gradients were far larger than usual again after going back {_MOST_REWINDS} times, each time with other data: "
                f"the data of one place is not the reason. Lower optimizer.lr, or raise spikes.sigma above "
                f"{self.config.spikes.sigma}; the newest checkpoint is that of step {found}."
            )
        self.step = found
        self.save()  # what a restart continues from: these weights, with the data after the spikes
        with self.phase("checkpoint", found):
            self._checkpoints.checkpointer.wait()  # until then, a restart needs the record of the steps that are dropped here
            for observer in self.observers:
                observer.on_rewind(found)
            if self.rank == 0 and (changed := record_return(self.run_dir, found)):
                self.event("settings_changed", changed=changed)
            if self.mesh is not None:
                gather_values(None)  # who has less to close waits here, as long as for a save
        self.event("rewound", spikes_from=before + 1, spikes_to=here)
        self.message(
            f"gradients of steps {before + 1} to {here} were far too large: back to step {found}, on with later data"
        )
        return True

    def _data_lacks(self, step: int) -> str:
        """Why the data does not last for the steps after ``step``, from where it was read to; empty if it does."""
        left = max(0, self.config.train.steps - step)
        try:
            if isinstance(self._loader, DataLoader):
                needed = self.batch_plan.ramp.consumed_after(left, self._loader.samples_consumed)
                self._inputs.train.check_samples(needed)
            else:
                self._loader.check_steps(left)
        except ValueError as err:
            return str(err)
        return ""

    def _minutes_due(self) -> bool:
        """Whether a save by the clock is due; rank 0's clock decides for all."""
        minutes = self.config.checkpoint.every_minutes
        return bool(minutes) and self.rank == 0 and time.monotonic() - self._saved_at >= 60 * minutes

    @contextlib.contextmanager
    def _weights_written(self) -> Generator[None]:
        """A block that writes frozen weights too: their float8 casts are made again after it. Collective."""
        self._casts.close()
        yield  # no finally: entering is collective, and a rank that fails would wait for the others
        self._casts.enter_context(self._optimizer_step.frozen_weights)

    @contextlib.contextmanager
    def phase(self, name: Phase, step: int) -> Generator[None]:
        """A block that all observers take for `Observer.phase`."""
        with contextlib.ExitStack() as around:
            for observer in self.observers:
                around.enter_context(observer.phase(name, step))
            yield
