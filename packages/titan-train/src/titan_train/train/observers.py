"""The list of all observers of a run; the small ones are here too."""

import contextlib
import gc
from collections.abc import Callable, Generator, Sequence
from typing import Any

import titan_fp8
from torch import Tensor, nn

from titan_train.parallel.stages import layers_of
from titan_train.train.measure import PipelineTimes, StepMeasure
from titan_train.train.observer import ObservedRun, Observer, StepInfo
from titan_train.train.run_log import RunLog


def build_observers(
    run: ObservedRun, monitor: Observer | None, measure: StepMeasure, log: RunLog, callbacks: Sequence[Observer]
) -> list[Observer]:
    """Everything that watches a run, in the order in which it is called: ``log`` records what those before it found."""
    config = run.config
    observers: list[Observer] = [measure]
    if monitor is not None:
        observers.append(monitor)
    observers.append(NonFiniteLimit(config.train.nonfinite_limit))
    if config.profile.range is not None:
        from titan_train.train.profile import StepProfile

        observers.append(StepProfile(*config.profile.range, measure))
    if config.metrics.activations_every and run.rank == 0:
        observers.append(Activations(config.metrics.activations_every))
    if run.model.pipeline is not None:
        observers.append(PipelineTimes(run.model.pipeline.executor))
    observers += [log, *callbacks]
    if config.train.gc_every:
        observers.append(CollectGarbage(config.train.gc_every))
    return observers


class NonFiniteLimit(Observer):
    """Reports steps that were left out, and ends the run after too many in a row that are not finite."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._in_a_row = 0

    def on_step(self, info: StepInfo) -> None:
        result = info.result
        if result.rerun is not None:
            self.run.event("rerun", **result.rerun.fields())
            self.run.message(result.rerun.text)
        if result.spike:
            self.run.event("spike", loss=result.loss, grad_norm=result.grad_norm)
        if not result.skipped or result.spike:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        fault = result.rerun if result.rerun is not None and result.rerun.skips else None
        if fault is None:  # else the event `rerun` says why
            self.run.event("nonfinite", loss=result.loss, grad_norm=result.grad_norm)
        if self._in_a_row < self._limit:
            return
        if fault is not None:
            raise RuntimeError(
                f"{self._limit} steps in a row were skipped, so the weights are unchanged. The last, step {info.step}: "
                f"{fault.text}. Run it without that rank's machine."
            )
        raise RuntimeError(
            f"loss or gradient was not finite for {self._limit} steps in a row (step {info.step}: loss {result.loss}, "
            f"gradient norm {result.grad_norm}); all of them were skipped, so the weights are unchanged. Lower "
            "optimizer.lr, lengthen schedule.warmup_steps, or look at the data of these steps."
        )


class CollectGarbage(Observer):
    """Collects garbage on every rank at the same step: a rank that pauses alone makes all others wait."""

    def __init__(self, every: int) -> None:
        self._every = every

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def on_step(self, info: StepInfo) -> None:
        if info.step % self._every == 0:
            gc.collect(1)


class Activations(Observer):
    """Records what a step's activations are like: by block their size, by float8 layer what the cast loses.

    On rank 0, every so many steps, because each figure waits for the device. The event ``activations`` has ``blocks``, the
    root mean square and the largest magnitude of each block's output, by the block's number; with float8 layers also
    ``float8``, by layer and by tensor (input, weight, grad) the largest magnitude and the share of values that underflow.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._hooks = contextlib.ExitStack()
        self._blocks: dict[str, dict[str, float]] = {}
        self._casts: list[Any] = []

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        with self._hooks:
            yield

    def on_batch(self, step: int, batches: list[Any]) -> None:
        if step % self._every:
            return
        self._blocks = {}
        self._casts = [self._hooks.enter_context(titan_fp8.record_stats(part)) for part in self.run.model.parts]
        for part in self.run.model.parts:
            for name, block in _blocks_of(part):
                self._hooks.callback(block.register_forward_hook(self._recorder(name)).remove)

    def on_step(self, info: StepInfo) -> None:
        if info.step % self._every:
            return
        self._hooks.close()
        float8 = {
            name: {tensor: [stats.amax, stats.underflow] for tensor, stats in tensors.items()}
            for cast in self._casts
            for name, tensors in cast.items()
        }
        found = {"blocks": self._blocks} | ({"float8": float8} if float8 else {})
        self.run.event("activations", **found)

    def _recorder(self, name: str) -> Callable[..., None]:
        def record(_module: nn.Module, _args: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) and output else output  # pyright: ignore[reportUnknownVariableType]
            if isinstance(first, Tensor) and first.is_floating_point():
                values = first.detach().float()
                self._blocks[name] = {"rms": float(values.square().mean().sqrt()), "amax": float(values.abs().max())}

        return record


def _blocks_of(part: nn.Module) -> list[tuple[str, nn.Module]]:
    names = {id(module): name for name, module in part.named_modules()}
    try:
        return [(names[id(block)], block) for block in dict.fromkeys(layers_of(part))]
    except AttributeError:  # a model that does not name its blocks
        return list(part.named_children())
