"""A run on this rank: everything is built here, in order, and `titan_train.train.loop` trains with it."""

import contextlib
import datetime
import gc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist
from titan_mesh import Mesh, build

from titan_train.config import Config
from titan_train.config.ramp import BatchRamp
from titan_train.data import DataLoader
from titan_train.data.loader.iterated import Loader
from titan_train.exchange import gather_values
from titan_train.inputs import GivenInputs, check_same_inputs
from titan_train.models import build_model
from titan_train.observe import ValidationRecord, add_run_info
from titan_train.optim import build_optimizer, build_scheduler
from titan_train.optim.matrices import MatrixKind, matrix_kinds
from titan_train.optim.spikes import Spikes
from titan_train.parallel.apply import build_parallel_model
from titan_train.parallel.describe import describe_layout, describe_options
from titan_train.parallel.layout.degrees import explain_mode
from titan_train.parallel.layout.run import RunPlan, plan_run
from titan_train.parallel.qk_clip import QKClip, layer_of
from titan_train.run_folder import (
    check_unused,
    discard,
    in_folder,
    keep_model,
    lease_of_program,
    run_folder,
    take_effect,
    with_kept_model,
)
from titan_train.task import Task, TaskInputs, load_task
from titan_train.train.best import BestValidation, check_measured, measurement
from titan_train.train.checkpoints import Checkpoints
from titan_train.train.given import Batches, Loss, MakeOptimizer, build_loader, make_optimizer, with_loss
from titan_train.train.loop import TrainingLoop
from titan_train.train.measure import StepMeasure, drop_outdated
from titan_train.train.observer import Observer
from titan_train.train.observers import build_observers
from titan_train.train.process import (
    SaveRequests,
    check_same_versions,
    device_name,
    resolve_same_starts,
    set_up_process,
)
from titan_train.train.reduce_scope import ReduceScope
from titan_train.train.run_log import RunLog, describe_task
from titan_train.train.step import OptimizerStep
from titan_train.train.step_random import StepRandom, place_of_rank
from titan_train.train.validate import validation_loss
from titan_train.train.whole_model import sample
from titan_train.trust import remember_named_code


class Trainer(TrainingLoop):
    """One training run on this rank.

    Works without a process group (one process) and inside one (every rank makes a `Trainer` with the same
    configuration).
    """

    def __init__(
        self,
        config: Config,
        run_dir: str | Path | None = None,
        monitor: Observer | None = None,
        *,
        task: Task | None = None,
        data: Batches | None = None,
        validation_data: Batches | None = None,
        loss: Loss | None = None,
        optimizer: MakeOptimizer | None = None,
        callbacks: Sequence[Observer] = (),
    ) -> None:
        """Build everything and resume from the run's last valid checkpoint, if it has one.

        In one process that no launcher started, the tokenizer and the token shards are prepared first if they are
        missing; several ranks need `titan_train.inputs.prepare_inputs` to have run, for the same ``run_dir``.

        Args:
            config: The run's configuration.
            run_dir: The run's folder; the default is ``run.dir/run.name``.
            monitor: What a launcher watches the run with; None for a run without a launcher.
            task: What the model is trained on; None takes the configuration's.
            data: What is trained on, in place of ``data.sources``: a `BatchSource`, or this rank's microbatches in order, as
                `titan_train.data.IteratedBatches` describes them.
            validation_data: What is validated on, if ``data`` is given: the same kinds; it must iterate anew each time.
            loss: In place of the task's: from the model's output and the batch's target (of text: logits ``[B, S, V]`` and next
                tokens ``[B, S]``, -100 where none is learned) to the sum over labels. Not under tensor parallelism.
            optimizer: In place of ``optimizer.name``: from parameter groups, with ``lr`` and ``weight_decay``, to an optimizer.
                The schedule scales the ``lr`` that its groups have.
            callbacks: Observers of your own, called after the run's; on every rank the same.

        Raises:
            ValueError: The configuration does not fit the ranks, the checkpoint was made with other data, or another run writes
                to the folder.
        """
        self.run_dir = Path(run_dir) if run_dir is not None else run_folder(config)
        if monitor is None:  # a launcher's command has looked, and its restarts resume
            check_unused(config, self.run_dir)
            config = in_folder(config, self.run_dir)
        self._as_given = resolve_same_starts(config, self.run_dir)
        self.config = config = with_kept_model(self._as_given, self.run_dir)
        self.task = task or load_task(config)
        if validation_data is not None and data is None:
            raise ValueError(
                "validation_data was given without data: the configuration's sources have their own. Give both."
            )
        self._data, self._validation_data, self._make_optimizer = data, validation_data, optimizer
        if loss is not None:
            config, self.task = with_loss(config, self.task, loss)
            self.config = config
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.device = set_up_process(config)
        plan = plan_run(config, world_size, device=self.device.type)
        self.batch_plan = plan.batch

        # closed without any other rank; no group of several, where another may be waiting in a collective
        self._local = contextlib.ExitStack()
        self.mesh: Mesh | None = None
        if dist.is_initialized() or plan.mode != "none":  # alone, `build` makes a group of one and ends it on close
            patience = datetime.timedelta(seconds=config.launch.timeout_s)  # a rank may read torch from a cold disk
            self.mesh = build(plan.layout, device_type=self.device.type, timeout=patience, agree_within=patience)
            if world_size == 1:
                self._local.callback(self.mesh.close, barrier=False)
        self._closed = False
        try:
            if monitor is None:
                self._take_folder(world_size)
            if data is None and monitor is None and world_size == 1:  # no launcher has prepared the inputs
                self.task.prepare(config)
            self._build(config, plan, world_size)
            self.log = RunLog(config, self._measure, own_optimizer=optimizer is not None)
            self.observers = build_observers(self, monitor, self._measure, self.log, callbacks)
            self._start(plan)
        except BaseException:
            self._local.close()
            raise

    def _build(self, config: Config, plan: RunPlan, world_size: int) -> None:
        """What trains: data, model, optimizer and step, and the state that they resume from."""
        if world_size > 1:
            check_same_versions()
        self._scope = ReduceScope.of(
            self.mesh, sequence_parallel=config.parallel.sequence_parallel, shared_over=config.context.axis
        )
        if self._data is None:
            self._inputs: TaskInputs = self.task.open(in_folder(config, self.run_dir))
            if world_size > 1:
                check_same_inputs(self._inputs)
        else:
            self._inputs = GivenInputs(config, self.task, self._data, self._validation_data)
        self.model = build_parallel_model(
            config,
            layout=plan.layout,
            mode=plan.mode,
            mesh=self.mesh,
            schedule=plan.schedule,
            vocab_size=self._inputs.vocab_size,
            device=self.device,
            task=self.task,
        )
        make = self._make_optimizer and partial(make_optimizer, self._make_optimizer)
        holders = None
        if self.mesh is not None and config.optimizer.name == "muon":
            holders = self.mesh.group("tokens" if plan.mode == "ddp" else "matrices")
        self.optimizer = build_optimizer(
            self.model.parts,
            config.optimizer,
            names=self.model.names,
            make=make,
            cuts=self.model.cuts,
            kinds=self._whole_kinds(),
            group=holders,
            device=self.device,
        )
        self.scheduler = build_scheduler(self.optimizer, config.schedule, total_steps=config.train.steps)
        self._loader = self._make_loader(self._inputs.train, plan.batch.ramp)
        if self._validation_data is not None and config.validation.every:
            # what it refuses, it refuses now and not after hours
            self._make_loader(self._validation_data, steps=config.validation.steps).close()
        check_measured(config, held_out=self._inputs.validation is not None, given=self._data is not None)
        measured = measurement(config, self._inputs.validation, plan.batch.global_batch)
        self._best = BestValidation(config.validation.patience, measured)
        self._measure = StepMeasure(config, self.mesh, self.device, self.model.parts)
        self.timer = self._measure.timer
        if self.model.pipeline is not None:
            self.model.pipeline.measure(self.timer, self._measure.meter)
        self._spikes = Spikes(config.spikes)
        self._optimizer_step = OptimizerStep(
            self.model,
            self.optimizer,
            max_grad_norm=config.train.max_grad_norm,
            accumulate=config.parallel.accumulate,
            scope=self._scope,
            device=self.device,
            timer=self.timer,
            qk_clip=self._make_qk_clip(world_size),
            spikes=self._spikes if config.spikes.sigma else None,
            rerun_above=config.train.rerun_above,
            cudagraphs=config.compile.cudagraphs,
        )
        place = place_of_rank(self.mesh, sequence_parallel=config.parallel.sequence_parallel)
        self._random = StepRandom(config.run.seed, self.device, place)
        self._checkpoints = Checkpoints(
            self,
            self.scheduler,
            self._loader,
            self._inputs,
            self._spikes,
            self._best,
            own_optimizer=self._make_optimizer is not None,
        )
        if world_size == 1:
            self._local.callback(self._checkpoints.checkpointer.close)
        self.step = self._checkpoints.restore()
        if lacks := self._data_lacks(self.step):
            raise ValueError(lacks)
        self._requests = SaveRequests()
        self.losses = []

    def _take_folder(self, world_size: int) -> None:
        """Make sure that no other run writes to the folder, as a command does for its own. Collective."""
        refusal = ""
        if self.rank == 0:
            try:
                lease = lease_of_program(self.run_dir)
            except (OSError, ValueError) as err:
                refusal = str(err)
            else:
                if lease is not None:  # else it is a torchrun worker's, or an earlier trainer's of this process
                    self._local.callback(lease.release)
                    discard(self.run_dir)  # of a command that was killed
        if world_size > 1:
            refusal = gather_values(refusal)[0]
        if refusal:
            raise ValueError(refusal)

    def _start(self, plan: RunPlan) -> None:
        """Let the attempt take effect, once every rank has restored, and begin to record it."""
        if dist.is_initialized():
            dist.barrier()
        if self.rank == 0:
            self._open_run_folder(plan)
        for observer in self.observers:
            observer.on_start(self)
        if self.config.train.gc_every:
            gc.collect()  # what building left behind; from here on `CollectGarbage` decides when

    def _open_run_folder(self, plan: RunPlan) -> None:
        config = self.config
        drop_outdated(self.run_dir, plan.schedule, self.step)
        changed = take_effect(self.run_dir, self._as_given, self.step, parent=self._checkpoints.parent)
        keep_model(config, self.run_dir)
        remember_named_code(self.run_dir, config.model.name)
        self._inputs.keep(self.run_dir)
        layout_text = describe_layout(plan.layout, self.model, plan.schedule)
        (self.run_dir / "layout.txt").write_text(layout_text + "\n", encoding="utf-8")
        self.log.open(self.run_dir, self.step)
        add_run_info(self.run_dir, parameters=self.model.report.num_parameters, device=device_name(self.device))
        for step, damage in self._checkpoints.checkpointer.passed_over:
            self.event("checkpoint_passed_over", passed_step=step, reason=str(damage))
        if self.step:
            self.event("checkpoint_restored")
            parent = self._checkpoints.parent
            self.message(f"resumed from step {self.step}" if parent is None else "branched from {}@{}".format(*parent))
        if changed:
            self.event("settings_changed", changed=changed)
        self.message(explain_mode(config.parallel, plan.layout, plan.mode, dtype=config.train.dtype))
        samples = self._inputs.validation is not None
        for level, line in describe_task(config, self.task, self.model.parts[0], samples=samples):
            self.log.message(line, level=level)
        for line in describe_options(config, self.model):
            self.message(line)

    def _whole_kinds(self) -> dict[str, MatrixKind] | None:
        """What Muon makes of the whole model's parameters, if a stage may know one name of several; None otherwise."""
        tied = any(len(every) > 1 for every in self.model.names.values())
        if self.model.pipeline is None or self.config.optimizer.name != "muon" or not tied:
            return None
        return matrix_kinds(build_model(self.config.model, vocab_size=self._inputs.vocab_size), {})

    def _make_qk_clip(self, world_size: int) -> QKClip | None:
        threshold, mesh = self.config.qk_clip.threshold, self.mesh
        if not threshold:
            return None
        numbers = [number for name in self.model.names if (number := layer_of(name, 0)) is not None]
        return QKClip(
            self.model.parts,
            threshold,
            num_layers=max(numbers) + 1 + self.model.mtp_depth,
            device=self.device,
            tokens=mesh.group("loss") if mesh is not None and mesh.size("loss") > 1 else None,
            context=mesh.group(self.config.context.axis) if mesh is not None and self.config.parallel.cp > 1 else None,
            every_rank=world_size > 1,
        )

    def _make_loader(self, batches: Batches, ramp: BatchRamp | None = None, *, steps: int | None = None) -> Loader:
        return build_loader(
            batches, ramp, config=self.config, plan=self.batch_plan, mesh=self.mesh, device=self.device,
            vocab_size=self._inputs.vocab_size, steps=steps,
        )  # fmt: skip

    def _measure_held_out(self) -> tuple[ValidationRecord, str | None]:
        assert self._inputs.validation is not None
        with (
            self._checkpoints.averaged(),
            self._make_loader(self._inputs.validation, steps=self.config.validation.steps) as loader,
        ):
            record = validation_loss(
                self.model,
                loader,
                step=self.step,
                accumulation=self.batch_plan.accumulation,
                scope=self._scope,
                device=self.device,
                text_bytes=self._inputs.text_bytes,
            )
            text = sample(self._inputs, self.model, self.mesh, self.config.parallel, self.run_dir, self.step)
        return record, text

    def event(self, kind: str, **fields: object) -> None:
        """Record that something happened at this step; ``fields`` are JSON values. Rank 0 writes."""
        self.log.event(kind, self.step, **fields)

    def message(self, text: str) -> None:
        """Log a line, and show it above the progress bar."""
        self.log.message(text)

    def close(self) -> None:
        """Finish background work, close files, leave the process groups. Collective; safe to call twice.

        After an error on this rank, call `abandon` instead: peers that failed elsewhere would not come.
        """
        if self._closed:
            return
        with self.phase("checkpoint", self.step):  # a save in the background may take longer than any step
            self._checkpoints.checkpointer.close()
        self.abandon()
        if self.mesh is not None:
            self.mesh.close()

    def abandon(self) -> None:
        """Close what is this rank's alone, without waiting for any other."""
        if not self._closed:
            self._closed = True
            self._loader.close()
            if isinstance(self._loader, DataLoader):
                self._inputs.train.close()
            for observer in self.observers:
                observer.on_end()
            self._local.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
