"""A run's checkpoints: what is in them, when one is refused, and what continues on another number of ranks."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import titan_fsdp as fsdp
from titan_ckpt import Checkpointer, LocalShard, NoIntactStepError, TrainState
from titan_ckpt.load.reader import StepReader
from torch import nn

from titan_train.config.published import RUN
from titan_train.data.loader.iterated import IteratedBatches, Loader
from titan_train.exchange import gather_values
from titan_train.models import build_model, named_parameters
from titan_train.optim import Scheduler, check_restored
from titan_train.optim.average import averages_in_place, forget_ema, mean_over_checkpoints, older_steps, weights_kept
from titan_train.optim.build import check_saved_weights
from titan_train.optim.spikes import Spikes
from titan_train.parallel.model import ParallelModel
from titan_train.parallel.tied import tied_to_first
from titan_train.run_folder import (
    BEST,
    checkpoint_folders,
    find_start,
    set_best_aside,
    staged_folder,
    staged_rewind,
    sync_run_folder,
)
from titan_train.run_folder.contents import best_metric, best_saved
from titan_train.task import TaskInputs
from titan_train.train.best import BestValidation
from titan_train.train.observer import ObservedRun

log = logging.getLogger(__name__)

_CONFIGURED = "lr", "weight_decay", "frozen"
"""The configuration's settings in the groups of a program's own optimizer, which may keep running values in the others."""
_COMPRESSION, _SPIKES, _REWINDS, _BEST = "compression", "gradient_norms", "rewinds", "best_validation"
_SPIKES_OF = "gradient_norms_of"


class Checkpoints:
    """Saves and restores what a run on this rank consists of."""

    parent: tuple[str, int] | None = None
    """The run, and the step of it, that this attempt branches from."""

    def __init__(
        self,
        run: ObservedRun,
        scheduler: Scheduler,
        loader: Loader,
        inputs: TaskInputs,
        spikes: Spikes,
        best: BestValidation,
        *,
        own_optimizer: bool = False,
    ) -> None:
        """Nothing is read yet; ``own_optimizer``: not built by ``optimizer.name``."""
        config = run.config
        self._own_optimizer = own_optimizer
        self._run, self._scheduler, self._inputs = run, scheduler, inputs
        self._best = best
        self._rank_state = RankState(
            loader,
            config.checkpoint.allow_data_change,
            run.model.parts,
            spikes,
            best,
            lr=config.optimizer.lr,
            norms_of=(config.model.seq_len, _digest(run.model.trained, dict(config.optimizer.frozen_steps))),
        )
        saved = checkpoint_folders(run.run_dir) if run.rank == 0 and config.validation.every else {}
        self._best_metric = best_metric(saved, best.measured)  # of rank 0, which saves it and deletes by it
        keep_last = config.checkpoint.keep_last or None  # 0 keeps all; another rule would delete what it does not name
        self.checkpointer = Checkpointer(
            run.run_dir / "checkpoints",
            keep_last=keep_last,
            keep_every=(config.checkpoint.keep_every or None) if keep_last else None,
            keep_best=self._best_metric if config.checkpoint.keep_best and keep_last else None,
            async_=config.checkpoint.async_save,
            ranks_per_node=_ranks_per_node(),
            inherited_wait_s=0.8 * config.launch.timeout_s,  # the other ranks wait in a collective meanwhile
        )

    def restore(self) -> int:
        """The step resumed from: that of `stage_rewind`, or the newest that is intact on every rank.

        Where the run has none, that of ``checkpoint.start_from``; 0 without: then the weights of ``model.init``, if any.

        Raises:
            ValueError: None is intact, or it is of another optimizer.
        """
        asked = staged_rewind(staged_folder(self._run.run_dir))
        try:
            with self._dtypes_by_name(self.checkpointer, asked):
                step = self.checkpointer.restore(self._state(), asked or "latest", fallback=asked is None)
            if step and self._run.config.checkpoint.keep_best:
                self._correct_best(step)
            if not step and self._run.config.checkpoint.start_from:
                step = self._branch(self._run.config.checkpoint.start_from)
        except NoIntactStepError as err:  # on every rank
            raise ValueError(
                f"{err}\nThe same command cannot continue. Bring one of these folders back from a copy, or choose another "
                "run.name to begin again. `titan-ckpt verify` on the folder lists every damaged place."
            ) from None
        if step and not self._own_optimizer:
            check_restored(self._run.optimizer, self._run.config.optimizer.name)
        self._drop_average()
        if not step and self._run.config.model.init:
            self._load_init()
        return step

    def _branch(self, start: str) -> int:
        """Take the whole state of another run's step."""
        from titan_train.train.warm_start import check_saved_settings

        folder, step = find_start(start, "checkpoint.start_from")
        model = self._run.config.model
        whole = build_model(model, vocab_size=self._inputs.vocab_size, device="meta")
        check_saved_settings(f"checkpoint.start_from={start!r}", folder, whole, model, None)
        checkpoints = Checkpointer(folder / "checkpoints", ranks_per_node=_ranks_per_node())
        with checkpoints as theirs, self._dtypes_by_name(theirs, step):
            theirs.restore(self._state(), step)
        self._best.forget()  # their best checkpoint is not in this run's folder
        self._rank_state.forget_rewinds()
        self.parent = (str(folder), step)
        return step

    def prepare(self) -> None:
        """Reserve what saving needs, once the optimizer has all its state."""
        self.checkpointer.prepare(self._state())

    def save(self, step: int, validation_loss: float | None = None) -> None:
        """Save; collective. ``validation_loss`` is that of this very step, if it was validated."""
        if self._run.rank == 0:
            sync_run_folder(self._run.run_dir)
        metrics = {} if validation_loss is None else dict.fromkeys((BEST, self._best_metric), validation_loss)
        self.checkpointer.save(step, self._state(), metrics=metrics)

    def newest_until(self, step: int) -> int | None:
        """The step of the newest checkpoint that is not after ``step``; None if there is none. Collective."""
        return next(iter(older_steps(self._saved(), step + 1, 2)), None)

    def rewind(self, step: int) -> int:
        """Restore all but the data's position from the checkpoint of ``step``, or the newest intact one before it. Collective.

        Returns:
            Its step.
        """
        found = self.checkpointer.restore(dataclasses.replace(self._state(), data=None), step, fallback=True)
        self._drop_average()
        if self._run.config.checkpoint.keep_best:
            self._set_best_aside(found)
        else:  # validations of the steps that are left do not count
            best = self._best
            best.go_back(found, (best.loss, best.step) if 0 < best.step <= found else None)
        return found

    def _set_best_aside(self, step: int) -> None:
        """The best checkpoint is one of the steps up to ``step`` again: the numbers of later ones come again. Collective."""
        moved, best = set_best_aside(self._run.run_dir, step, self._best_metric) if self._run.rank == 0 else ({}, None)
        for number, folder in moved.items():
            self._run.message(f"step {number}, the best so far, comes again: its checkpoint was moved to {folder}")
        self._best.go_back(step, gather_values(best)[0] if self._run.mesh is not None else best)

    def _correct_best(self, step: int) -> None:
        """After a restore: if the best checkpoint so far is gone, the best is that of those up to ``step``. Collective."""
        found: tuple[bool, tuple[float, int] | None] = False, None
        if self._run.rank == 0:
            saved = checkpoint_folders(self._run.run_dir)
            order = list(saved)  # what was saved after this step is no part of how the run came here
            until = {number: saved[number] for number in order[: order.index(step) + 1] if number <= step}
            found = self._best.step in until, best_saved(until, self._best_metric)
        kept, best = gather_values(found)[0] if self._run.mesh is not None else found
        if self._best.step and not kept:
            self._best.go_back(step, best)

    def _drop_average(self) -> None:
        """Drop a restored moving average, if the run keeps none any more. An optimizer of the user's own may mean another."""
        if not (self._own_optimizer or self._run.config.average.ema_decay):
            forget_ema(self._run.optimizer)

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """A block in which the weights are `Config.evaluated_weights`. Collective where it reads checkpoints."""
        config, parts = self._run.config, self._run.model.parts
        if config.evaluated_weights in ("ema", "schedule_free"):
            with averages_in_place(parts, self._run.optimizer):
                yield
        elif config.evaluated_weights == "checkpoints":
            steps = older_steps(self._saved(), self._run.step, config.average.checkpoints)
            whole = self._state()
            state = TrainState(model=parts, shards=whole.shards, tied=whole.tied, rng=False)
            with weights_kept(parts):
                mean_over_checkpoints(self.checkpointer, state, steps)
                yield
        else:
            yield

    def _saved(self) -> list[int]:
        """The steps of all valid checkpoints in the order of their commits, as the first rank sees them. Collective."""
        self.checkpointer.wait()
        steps = self.checkpointer.steps() if self._run.rank == 0 else []
        return gather_values(steps)[0] if self._run.mesh is not None else steps

    @contextlib.contextmanager
    def _dtypes_by_name(self, checkpointer: Checkpointer, step: int | None) -> Generator[None]:
        """Name the setting where a step, None for the newest, is refused because weights were saved in another format."""
        try:
            yield
        except ValueError:
            if (step := checkpointer.latest() if step is None else step) is not None:
                for part in self._run.model.parts:
                    check_saved_weights(StepReader(checkpointer.path(step)), part, f"the checkpoint of step {step}")
            raise

    def _load_init(self) -> None:
        from titan_train.train.published_tokenizer import check_tokenizer
        from titan_train.train.warm_start import check_run_init, load_init

        config, tokenizer = self._run.config.model, getattr(self._inputs, "tokenizer", None)
        if tokenizer is not None:
            check_tokenizer(self._run.config, tokenizer)
        whole = build_model(config, vocab_size=self._inputs.vocab_size, device="meta")
        if config.init.startswith(RUN):
            folder, step = check_run_init(config.init, whole, config)
            weights = TrainState(
                model=self._run.model.parts,
                shards=self._shards(),
                tied=tied_to_first(self._run.model.names),
                rng=False,
            )
            with Checkpointer(folder / "checkpoints", ranks_per_node=_ranks_per_node()) as theirs:
                theirs.restore(weights, step, cast=True)
            return
        load_init(config.init, self._run.model.parts, whole=whole, config=config, shards=_local_shards(self._run.model))

    def _state(self) -> TrainState:
        return TrainState(
            model=self._run.model.parts,
            shards=self._shards(),
            tied=tied_to_first(self._run.model.names),
            optim=self._run.optimizer,
            own_settings=_CONFIGURED if self._own_optimizer else True,
            sched=self._scheduler,
            data=self._rank_state,
            dp=self._rank_state.place,
            rng=False,  # each step is seeded
        )

    def _shards(self) -> dict[str, LocalShard]:
        """`_local_shards`, by the first names of tied weights."""
        tied = tied_to_first(self._run.model.names)
        return {tied.get(name, name): shard for name, shard in _local_shards(self._run.model).items()}


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _ranks_per_node() -> int | None:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None


def _local_shards(model: ParallelModel) -> Mapping[str, LocalShard]:
    """Where parameters that tensor or expert parallelism cut lie in the whole ones; tied ones once."""
    here = {name for part in model.parts for name, _ in named_parameters(part)}
    cuts = ((name, cut) for name, cut in model.cuts.items() if name in here and cut.pieces > 1)
    return {name: LocalShard(cut.global_shape, cut.offset) for name, cut in cuts}


class RankState:
    """What a rank saves besides the model's tensors.

    The loader's few integers and the best validation are the same on every rank, so that any number of ranks can continue. Under
    ``parallel.compress="powersgd"`` each rank also saves its own errors, which continue on the same layout only. An iterable's
    own state is that of a data-parallel rank.
    """

    def __init__(
        self,
        loader: Loader,
        allow_change: bool,
        parts: Sequence[nn.Module],
        spikes: Spikes,
        best: BestValidation,
        *,
        lr: float = 0.0,
        norms_of: Sequence[Any] = (),
    ) -> None:
        """``norms_of``: what gradients' norms are of, besides the sequences of a step; plain values."""
        self._norms_of = norms_of
        self._loader, self._spikes, self._best, self._lr = loader, spikes, best, lr
        self._allow_change = allow_change
        self._hooks = [hook for part in parts if (hook := fsdp.gradient_compression(part)) is not None]

    @property
    def place(self) -> tuple[int, int] | None:
        """As `TrainState.dp`: by which rank's state to continue, where that is not the rank of the same number."""
        return self._loader.place if isinstance(self._loader, IteratedBatches) and not self._hooks else None

    def state_dict(self) -> dict[str, Any]:
        """Plain data, and the tensors of compression."""
        state: dict[str, Any] = dict(self._loader.state_dict())
        if norms := self._spikes.state_dict():
            state[_SPIKES], state[_SPIKES_OF] = norms, self._measured()
        if self._spikes.rewinds:
            state[_REWINDS] = [self._spikes.rewinds, self._spikes.worst, self._lr, self._spikes.sigma]
        if self._best.step:
            state[_BEST] = self._best.state_dict()
        if self._hooks:
            state[_COMPRESSION] = [hook.state_dict() for hook in self._hooks]
        return state

    def _measured(self) -> list[Any]:
        """What the norms are of, where the data stands: others say nothing about what is usual."""
        return [self._loader.global_batch, *self._norms_of]

    def forget_rewinds(self) -> None:
        """Count afresh how often the run goes back."""
        self._spikes.rewinds = self._spikes.worst = 0

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue on as many ranks."""
        own = _COMPRESSION, _SPIKES, _SPIKES_OF, _REWINDS, _BEST
        position = {key: value for key, value in state.items() if key not in own}
        rewinds, worst, *settings = state.get(_REWINDS, (0, 0))
        if settings == [self._lr, self._spikes.sigma]:  # with others it is another try
            self._spikes.rewinds, self._spikes.worst = rewinds, worst
        self._loader.load_state_dict(position, allow_data_change=self._allow_change)
        usual = state.get(_SPIKES_OF) in (None, self._measured())  # None: an older version's
        if not usual and self._spikes.sigma:
            log.warning("the last gradients' norms are of other parameters or another batch: spikes.window begins anew")
        self._spikes.load_state_dict(state.get(_SPIKES, {}) if usual else {})
        if _BEST in state:
            self._best.load_state_dict(state[_BEST])
        saved: list[dict[str, Any]] = state.get(_COMPRESSION, [])
        try:
            if len(saved) != len(self._hooks) and saved:
                raise ValueError("the saved layout compressed gradients of other parts of the model")
            for hook, value in zip(self._hooks, saved, strict=bool(saved)):
                hook.load_state_dict(value)
        except ValueError as err:
            for hook in self._hooks:
                hook.forget()
            _warn_dropped(str(err))

    def reshard(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue on another number of ranks, from the states of all that saved."""
        first = dict(states[0])
        if first.pop(_COMPRESSION, None):
            _warn_dropped("the checkpoint was saved by another number of ranks")
        self.load_state_dict(first)


def _warn_dropped(why: str) -> None:
    log.warning(
        "the gradients' errors that parallel.compress='powersgd' had not sent yet are left out, and error feedback starts again: "
        "%s. Resume on the layout of the checkpoint to continue with them.",
        why,
    )
