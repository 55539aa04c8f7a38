"""The loop: batches in, optimizer steps, what is logged, validated and saved along the way.

State between steps is a handful of objects: model, optimizer, scheduler and the data position (a few integers). All of it
is in every checkpoint, and random numbers are drawn from the number of the step, so that ten steps, a stop, and ten more
give bitwise the losses of twenty.
"""

import contextlib
import datetime
import gc
import itertools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from titan_ckpt import Checkpointer, LocalShard, NoIntactStepError, TrainState
from titan_mesh import Mesh, build

from titan_train.config import Config
from titan_train.data import BatchSource, DataLoader
from titan_train.host_memory import keep_freed_memory
from titan_train.models import accepted_inputs, build_model, named_parameters
from titan_train.observe import (
    StepRecord,
    Throughput,
    Tracker,
    TrainProgress,
    ValidationRecord,
    add_run_info,
    build_trackers,
    device_peak_flops,
    memory_in_use,
    peak_memory_gib,
)
from titan_train.observe.timing import Cause, StepSplit, split_line
from titan_train.optim import build_optimizer, build_scheduler, check_restored
from titan_train.parallel.apply import build_parallel_model, describe_layout, describe_options
from titan_train.parallel.layout.degrees import explain_mode
from titan_train.parallel.layout.run import RunPlan, plan_run
from titan_train.parallel.tied import tied_to_first
from titan_train.run_folder import commit, keep_model, run_folder, sync_run_folder, with_kept_model
from titan_train.task import Task, TaskBatch, TaskInputs, load_task
from titan_train.train.inspect_step import recorded_activations
from titan_train.train.measure import PipelineTimes, StepMeasure
from titan_train.train.monitor import StepMonitor
from titan_train.train.process import CollectedTogether, device_name, device_of, set_seeds
from titan_train.train.profile import StepProfile
from titan_train.train.published_tokenizer import check_tokenizer
from titan_train.train.rank_state import RankState
from titan_train.train.reduce_scope import ReduceScope
from titan_train.train.signals import SaveRequests
from titan_train.train.step import OptimizerStep, StepResult, Stopwatch
from titan_train.train.step_random import StepRandom, place_of_rank
from titan_train.train.validate import validation_loss
from titan_train.train.warm_start import load_init
from titan_train.train.whole_model import sample

log = logging.getLogger(__name__)


class Trainer:
    """One training run on this rank.

    Works without a process group (one process) and inside one (every rank makes a `Trainer` with the same
    configuration).
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path | None = None,
        monitor: StepMonitor | None = None,
        *,
        task: Task | None = None,
    ) -> None:
        """Build everything and resume from the run's last valid checkpoint, if it has one.

        In one process that no launcher started, the tokenizer and the token shards are prepared first if they are
        missing; several ranks need `titan_train.inputs.prepare_inputs` to have run.

        Args:
            config: The run's configuration.
            run_dir: The run's folder; the default is ``run.dir/run.name``.
            monitor: Receives every step, save and validation; None for a run without a launcher.
            task: What the model is trained on; None takes the configuration's.

        Raises:
            ValueError: The configuration does not fit the ranks, or the checkpoint was made with other data.
        """
        self._unattended = monitor is None  # no launcher has prepared the inputs
        self._monitor = monitor or StepMonitor()
        self.run_dir = Path(run_dir) if run_dir is not None else run_folder(config)
        self._as_given = config
        self.config = config = with_kept_model(config, self.run_dir)
        self.task = task or load_task(config)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = device_of(config)
        if self.device.type == "cpu":
            keep_freed_memory()
        plan = plan_run(config, world_size, device=self.device.type)
        layout, mode = plan.layout, plan.mode
        self.batch_plan = plan.batch
        set_seeds(config.run.seed, config.run.deterministic)

        # what an error ends in a run of one rank; where there are more, another may be waiting in a collective of it
        self._if_alone = contextlib.ExitStack()
        self.mesh: Mesh | None = None
        if dist.is_initialized() or mode != "none":  # alone, `build` makes a group of one and ends it on close
            patience = datetime.timedelta(seconds=config.launch.timeout_s)  # a rank may read torch from a cold disk
            self.mesh = build(layout, device_type=self.device.type, timeout=patience, agree_within=patience)
            if world_size == 1:
                self._if_alone.callback(self.mesh.close, barrier=False)
        self._closed = False
        try:
            self._build(config, plan, world_size)
        except BaseException:
            self._if_alone.close()
            raise

    def _build(self, config: Config, plan: RunPlan, world_size: int) -> None:
        """Everything that needs the mesh."""
        layout, mode, schedule = plan.layout, plan.mode, plan.schedule
        self._scope = ReduceScope.of(self.mesh, sequence_parallel=config.parallel.sequence_parallel)
        if self._unattended and world_size == 1:
            self.task.prepare(config)
        self._inputs: TaskInputs = self.task.open(config)
        self.model = build_parallel_model(
            config,
            layout=layout,
            mode=mode,
            mesh=self.mesh,
            schedule=schedule,
            vocab_size=self._inputs.vocab_size,
            device=self.device,
            task=self.task,
        )
        self.optimizer = build_optimizer(self.model.parts, config.optimizer, names=self.model.names)
        self.scheduler = build_scheduler(self.optimizer, config.schedule, total_steps=config.train.steps)
        self._loader = self._make_loader(self._inputs.train)
        self._inputs.train.check_samples(config.train.steps * config.train.global_batch)
        self._batches: Iterator[TaskBatch] | None = None
        self._measure = StepMeasure(
            self.mesh,
            self.device,
            every=config.metrics.split_every,
            last=config.train.steps,
            parts=self.model.parts,
            traced=config.profile.range is not None,
        )
        self._profile: StepProfile | None = None
        if config.profile.range is not None:
            self._profile = StepProfile(*config.profile.range, self.run_dir, self._measure, self.device)
        self._monitor.measured(self._measure.meter)
        if self.model.pipeline is not None:
            self.model.pipeline.measure(self._measure.timer, self._measure.meter)
        self._pipeline_times = PipelineTimes(self.model.pipeline, self.mesh, self.run_dir, self.device)
        self._optimizer_step = OptimizerStep(
            self.model,
            self.optimizer,
            max_grad_norm=config.train.max_grad_norm,
            accumulate=config.parallel.accumulate,
            scope=self._scope,
            device=self.device,
            timer=self._measure.timer,
            rerun_above=config.train.rerun_above,
            cudagraphs=config.compile.cudagraphs,
        )
        place = place_of_rank(self.mesh, sequence_parallel=config.parallel.sequence_parallel)
        self._random = StepRandom(config.run.seed, self.device, place)
        self._checkpointer = Checkpointer(
            self.run_dir / "checkpoints",
            keep_last=config.checkpoint.keep_last or None,
            keep_every=config.checkpoint.keep_every or None,
            async_=config.checkpoint.async_save,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None,
        )
        if world_size == 1:
            self._if_alone.callback(self._checkpointer.close)
        self.step = self._restore()
        if dist.is_initialized():
            dist.barrier()  # the attempt takes effect only once every rank has restored
        self.losses: list[float] = []
        """Loss of every step this trainer has made."""

        self._trackers: list[Tracker] = []
        self._progress: TrainProgress | None = None
        self._requests = SaveRequests()
        self._nonfinite_in_a_row = 0
        self._split: dict[str, float] = {}  # waits for the next step that is logged
        if self.rank == 0:
            self._pipeline_times.drop_outdated(schedule, self.step)
            self._open_run_folder(describe_layout(layout, self.model, schedule))
            self._message(explain_mode(config.parallel, layout, mode, dtype=config.train.dtype))
            for line in describe_options(config, self.model):
                self._message(line)
        self._throughput = Throughput(
            flops_per_token=self.model.flops_per_token,
            peak_flops=device_peak_flops(device_name(self.device), config.train.dtype),
            world_size=world_size,
        )
        if config.train.gc_every:
            gc.collect()  # what building left behind; from here on `fit` decides when

    def fit(self, until: int | None = None) -> None:
        """Train up to step ``until`` (default: ``train.steps``), saving, validating and logging as configured.

        Returns early, after saving, when a rank is asked to stop (SIGTERM).

        Raises:
            RuntimeError: ``train.nonfinite_limit`` steps in a row were not finite.
        """
        steps = self.config.train.steps
        last = steps if until is None else min(until, steps)
        if self.step >= last:
            return
        if self._batches is None:
            self._batches = iter(self._loader)
        saved_time = time.monotonic()
        timer = self._measure.timer
        with (
            self._requests.installed(),
            CollectedTogether(self.config.train.gc_every) as collect,
            self._measure.running(),
            self._optimizer_step.frozen_weights,
        ):
            while self.step < last:
                result = self._train_one_step(save_due=self._minutes_due(saved_time))
                stop, save_asked, save_due = result.requests
                every = self.config.validation.every
                if every and (self.step % every == 0 or self.step == steps):
                    with self._monitor.phase("validate", self.step), timer.phase("validation"):
                        self._validate()
                every = self.config.checkpoint.every
                if stop or save_asked or save_due or self.step == steps or (every and self.step % every == 0):
                    self.save()
                    saved_time = time.monotonic()
                collect(self.step)
                if stop:
                    self._event("stopped", reason="SIGTERM")
                    self._message(f"asked to stop: saved step {self.step}; run the same command to continue")
                    break

    def save(self) -> None:
        """Save a checkpoint of the current step. Collective: every rank calls it."""
        started = time.monotonic()
        with self._monitor.phase("save", self.step), self._measure.timer.phase("checkpoint"):
            if self.rank == 0:
                sync_run_folder(self.run_dir)
            self._checkpointer.save(self.step, self._state())
        self._event("checkpoint_saved", seconds=round(time.monotonic() - started, 3))

    def close(self) -> None:
        """Finish background work, close files, leave the process groups. Collective; safe to call twice.

        After an error on this rank, call `abandon` instead: peers that failed elsewhere would not come.
        """
        if self._closed:
            return
        self._checkpointer.close()
        self.abandon()
        if self.mesh is not None:
            self.mesh.close()

    def abandon(self) -> None:
        """Close what is this rank's alone, without waiting for any other."""
        self._closed = True
        self._loader.close()
        self._inputs.train.close()
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []
        self._if_alone.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _train_one_step(self, *, save_due: bool) -> StepResult:
        assert self._batches is not None
        if self._profile is not None:
            self._profile.before_step(self.step + 1)
        started = time.perf_counter()
        with Stopwatch() as waiting, self._measure.timer.phase("data"):
            self._monitor.before_data(self.step + 1)
            microbatches = list(itertools.islice(self._batches, self.batch_plan.accumulation))
            microbatches = self._monitor.data_loaded(self.step + 1, microbatches)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self._monitor.before_step(self.step + 1, self.model.parts)
        self._random(self.step + 1)
        self._optimizer_step.wants_layer_norms = self._measure.due(self.step + 1)
        self._pipeline_times.before_step(
            self._measure.due(self.step + 1) and bool(self.losses)
        )  # the first may compile
        every = self.config.metrics.activations_every
        inspected = bool(every) and self.rank == 0 and (self.step + 1) % every == 0
        with recorded_activations(self.model.parts) if inspected else contextlib.nullcontext({}) as activations:
            result = self._optimizer_step(microbatches, (self._requests.stop, self._requests.take_save(), save_due))
        learning_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.scheduler.step()
        self.step += 1
        fused = self.model.fused
        if fused is not None and not self.losses:  # this process's first step compiled
            self._event("async_tp_compiled", gathers=fused.gathers, scatters=fused.scatters, not_fused=fused.left)
        self._monitor.step_made(self.step)
        self.losses.append(result.loss)
        if len(self.losses) == 1:  # from this process's first step on, the optimizer has all its state
            self._checkpointer.prepare(self._state())
        self._guard_nonfinite(result)
        self._measure.timer.step_made()
        if self._profile is not None and (trace := self._profile.step_made(self.step)) is not None:
            self._event("profile_written", file=str(trace.relative_to(self.run_dir)))
        if activations:
            self._event("activations", **activations)
        if self._optimizer_step.layer_norms:
            self._event("groups", learning_rates=learning_rates, gradient_norms=self._optimizer_step.layer_norms)
        self._pipeline_times.step_made(self.step)
        measured = self._measure.step_made(self.step)
        if measured is not None:
            self._note_split(*measured)
        self._record(result, microbatches, learning_rate, time.perf_counter() - started, waiting.elapsed_s)
        return result

    def _guard_nonfinite(self, result: StepResult) -> None:
        if result.rerun is not None:
            self._event("rerun", **result.rerun.fields())
            self._message(result.rerun.text)
        if not result.skipped:
            self._nonfinite_in_a_row = 0
            return
        self._nonfinite_in_a_row += 1
        self._event("nonfinite", loss=result.loss, grad_norm=result.grad_norm)
        limit = self.config.train.nonfinite_limit
        if self._nonfinite_in_a_row >= limit:
            raise RuntimeError(
                f"loss or gradient was not finite for {limit} steps in a row (step {self.step}: loss {result.loss}, gradient "
                f"norm {result.grad_norm}); all of them were skipped, so the weights are unchanged. Lower optimizer.lr, lengthen "
                "schedule.warmup_steps, or look at the data of these steps."
            )

    def _record(
        self, result: StepResult, microbatches: list[TaskBatch], learning_rate: float, step_s: float, wait_s: float
    ) -> None:
        tokens = self.batch_plan.global_batch * self.config.model.seq_len
        self._throughput.update(tokens, step_s)
        if self.rank != 0:
            return
        record = StepRecord(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=learning_rate,
            tokens=tokens,
            samples_consumed=microbatches[-1].samples_consumed,
            peak_mem_gib=peak_memory_gib(self.device),
            data_wait_s=wait_s,
            step_time_s=step_s,
            skipped=result.skipped,
            routing=result.routing,
            split=self._split,
            memory=memory_in_use(self.device) if self._split else {},
            **self._throughput.rates(),
        )
        if self.step % self.config.metrics.log_every == 0 or self.step == self.config.train.steps:
            for tracker in self._trackers:
                tracker.log_step(record)
            self._split = {}
        if self._progress is not None:
            self._progress.update(record)

    def _note_split(self, split: StepSplit, causes: list[Cause]) -> None:
        self._split = split.seconds()
        self._event("step_split", **split.fields())
        if self._progress is not None:
            self._progress.line(split_line(split))
        for cause in causes:
            self._event("straggler", **cause.fields())
            self._message(cause.text)

    def _validate(self) -> None:
        if self._inputs.validation is None:
            return
        with self._make_loader(self._inputs.validation, steps=self.config.validation.steps) as loader:
            found = validation_loss(
                self.model,
                loader,
                accumulation=self.batch_plan.accumulation,
                scope=self._scope,
                device=self.device,
                text_bytes=self._inputs.text_bytes,
            )
        record = ValidationRecord(
            step=self.step,
            loss=found.loss,
            bits_per_byte=found.bits_per_byte,
            tokens=found.counted,
            parts=found.parts,
        )
        sampled = sample(self._inputs, self.model, self.mesh, self.config.parallel, self.run_dir, self.step)
        for tracker in self._trackers:
            tracker.log_validation(record)
        if self._progress is not None:
            self._progress.validation(record)
            if sampled:
                self._progress.sample(self.step, sampled)

    def _make_loader(self, dataset: BatchSource, *, steps: int | None = None) -> DataLoader:
        return DataLoader(
            dataset,
            global_batch=self.batch_plan.global_batch,
            dp_rank=self.mesh.rank_in("dp") if self.mesh else 0,
            dp_size=self.batch_plan.dp_size,
            microbatch=self.batch_plan.microbatch,
            prefetch=self.config.data.prefetch,
            device=self.device,
            steps=steps,
        )

    def _state(self) -> TrainState:
        tied = tied_to_first(self.model.names)
        return TrainState(
            model=self.model.parts,
            shards={tied.get(name, name): shard for name, shard in self._shards().items()},
            tied=tied,
            optim=self.optimizer,
            own_settings=True,
            sched=self.scheduler,
            data=RankState(self._loader, self.config.checkpoint.allow_data_change, self.model.parts),
            rng=False,  # each step is seeded
        )

    def _shards(self) -> dict[str, LocalShard]:
        """Where parameters that tensor or expert parallelism cut lie in the whole ones; tied ones once."""
        here = {name for part in self.model.parts for name, _ in named_parameters(part)}
        cuts = ((name, cut) for name, cut in self.model.cuts.items() if name in here and cut.pieces > 1)
        return {name: LocalShard(cut.global_shape, cut.offset) for name, cut in cuts}

    def _restore(self) -> int:
        """The step resumed from, 0 for none: the newest that is intact on every rank."""
        found = self._checkpointer.latest()
        if found is not None and self.config.checkpoint.resume == "never":
            raise ValueError(
                f"checkpoint.resume='never', but {self.run_dir} holds a checkpoint of step {found}. "
                "Choose another run.name, or set checkpoint.resume to 'auto'."
            )
        try:
            step = self._checkpointer.restore(self._state(), fallback=True)
        except NoIntactStepError as err:  # on every rank
            raise ValueError(
                f"{err}\nThe same command cannot continue. Bring one of these folders back from a copy, or choose another "
                "run.name to begin again. `titan-ckpt verify` on the folder lists every damaged place."
            ) from None
        if step:
            check_restored(self.optimizer, self.config.optimizer.name)
        if step == 0 and self.config.model.init:
            tokenizer = getattr(self._inputs, "tokenizer", None)
            if tokenizer is not None:
                check_tokenizer(self.config, tokenizer)
            whole = build_model(self.config.model, vocab_size=self._inputs.vocab_size, device="meta")
            load_init(
                self.config.model.init, self.model.parts, whole=whole, config=self.config.model, shards=self._shards()
            )
        return step

    def _minutes_due(self, since: float) -> bool:
        """Whether a save by the clock is due; rank 0's clock decides for all."""
        minutes = self.config.checkpoint.every_minutes
        return bool(minutes) and self.rank == 0 and time.monotonic() - since >= 60 * minutes

    def _open_run_folder(self, layout_text: str) -> None:
        commit(self.run_dir, self._as_given)
        keep_model(self.config, self.run_dir)
        self._inputs.keep(self.run_dir)
        (self.run_dir / "layout.txt").write_text(layout_text + "\n", encoding="utf-8")
        self._trackers = build_trackers(self.config.metrics, self.run_dir, resume_step=self.step)
        self._progress = TrainProgress(self.config.metrics, total_steps=self.config.train.steps, first_step=self.step)
        add_run_info(self.run_dir, parameters=self.model.num_parameters, device=device_name(self.device))
        masked = self.config.data.document_mask and "cu_seqlens" in self.task.keywords
        if masked and "cu_seqlens" not in accepted_inputs(self.model.parts[0]):
            log.warning(
                "data.document_mask is on, but the model's forward takes no cu_seqlens: tokens attend across documents. "
                "Accept cu_seqlens, or set data.document_mask=false."
            )
        for step, damage in self._checkpointer.passed_over:
            self._event("checkpoint_passed_over", passed_step=step, reason=str(damage))
        reason = self.task.why_no_samples(self.config, self.model.parts[0])
        if reason is not None and self._inputs.validation is not None:
            self._message(
                f"validations write no samples: {reason}. `titan-train generate` takes a checkpoint of the run."
            )
        if self.step:
            self._event("checkpoint_restored")
            self._message(f"resumed from step {self.step}")

    def _event(self, kind: str, **fields: object) -> None:
        for tracker in self._trackers:
            tracker.log_event(kind, step=self.step, **fields)

    def _message(self, text: str) -> None:
        log.info(text)
        if self._progress is not None:
            self._progress.message(text)
