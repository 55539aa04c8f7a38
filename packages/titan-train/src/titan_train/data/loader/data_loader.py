"""Microbatches of one data-parallel rank, made ahead by a thread; the position is one integer.

At a step that begins after ``c`` consumed samples, rank d of D takes the global samples
``[c + d G / D, c + (d + 1) G / D)`` and cuts them into microbatches in order. Joined over ranks, a step is the samples
``c .. c + G`` for every D. G may rise with c (`titan_train.config.ramp`). The state is what the trainer has consumed, never what
the thread has made.

Ranks of one model replica (tensor, context and pipeline parallel) build the same loader with the same ``dp_rank`` and
read the same samples; nothing is broadcast.
"""

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from titan_train.config.ramp import BatchRamp
from titan_train.data.loader.source import BatchSource, HostMicrobatch
from titan_train.data.loader.transfer import HostToDevice

if TYPE_CHECKING:
    import torch

# How often a waiting thread checks whether to stop: bounds the time `close` takes.
_POLL_S = 0.05
_STATE_VERSION = 1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which samples the rank takes, as numbers only: the producer thread must not keep the loader alive."""

    ramp: BatchRamp
    dp_rank: int
    dp_size: int
    microbatch: int
    ignore_index: int

    def per_step(self, samples: int) -> int:
        return self.ramp.at(samples) // (self.dp_size * self.microbatch)

    def build(self, dataset: BatchSource, samples: int, number: int) -> HostMicrobatch:
        """Microbatch ``number`` of the step that begins after ``samples`` samples."""
        batch = self.ramp.at(samples)
        dataset.require(samples + batch)
        first = samples + self.dp_rank * (batch // self.dp_size) + number * self.microbatch
        done = samples + batch if number + 1 == self.per_step(samples) else samples
        return dataset.build_batch(
            np.arange(first, first + self.microbatch, dtype=np.int64),
            ignore_index=self.ignore_index,
            samples_consumed=done,
        )


class DataLoader:
    """Iterate over microbatches without end (or for ``steps`` steps).

    Args:
        dataset: Where samples come from.
        global_batch: Samples of one optimizer step over all ranks, or how they rise.
        dp_rank: This rank among the data-parallel ranks.
        dp_size: Number of data-parallel ranks.
        microbatch: Samples of one forward and backward.
        prefetch: Microbatches to make ahead; 0 makes each when asked, without a thread.
        device: Where batches are put; on CUDA through pinned memory, on a stream of its own.
        ignore_index: Label the loss leaves out.
        steps: Stop after this many optimizer steps; None never stops. `reset` starts again.

    Raises:
        ValueError: If the numbers do not fit each other, naming the nearest that do.
    """

    def __init__(
        self,
        dataset: BatchSource,
        *,
        global_batch: int | BatchRamp,
        dp_rank: int = 0,
        dp_size: int = 1,
        microbatch: int = 1,
        prefetch: int = 3,
        device: "str | torch.device" = "cpu",
        ignore_index: int = -100,
        steps: int | None = None,
    ) -> None:
        ramp = BatchRamp((global_batch,)) if isinstance(global_batch, int) else global_batch
        for size in ramp.sizes:
            _check_sizes(size, dp_rank, dp_size, microbatch)
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch} is below 0. The nearest valid value is 0: no thread.")
        self.dataset = dataset
        self._plan = _Plan(ramp, dp_rank, dp_size, microbatch, ignore_index)
        self._prefetch = prefetch
        self._steps = steps
        self._made = 0  # steps taken whole in this pass
        self._samples = 0  # samples of completed steps
        self._number = 0  # microbatches taken of the step in progress
        self._transfer = HostToDevice(device, slots=prefetch + 2)
        self._producer: _Producer | None = None

    @property
    def global_batch(self) -> int:
        """Samples of the optimizer step in progress, or of the next one."""
        return self._plan.ramp.at(self._samples)

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches that this rank takes in that step."""
        return self._plan.per_step(self._samples)

    @property
    def samples_consumed(self) -> int:
        """Global samples of the steps that were taken whole."""
        return self._samples

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._steps is not None and self._made >= self._steps:
            self.close()
            raise StopIteration
        if self._prefetch == 0:
            batch = self._transfer.send(self._plan.build(self.dataset, self._samples, self._number))
        else:
            if self._producer is None:
                self._producer = _Producer(
                    self.dataset, self._plan, self._samples, self._number, self._prefetch, self._transfer.send
                )
                weakref.finalize(self, self._producer.stop.set)
            batch = self._producer.take()
        self._transfer.receive(batch)
        self._number += 1
        if self._number == self.microbatches_per_step:
            self._number, self._samples, self._made = 0, self._samples + self.global_batch, self._made + 1
        return batch.batch

    def state_dict(self) -> dict[str, Any]:
        """Position after the last whole step: the same on every rank, valid for any number of ranks."""
        return {
            "version": _STATE_VERSION,
            "samples": self._samples,
            **_identity(self.dataset),
        } | ({"streams": streams} if (streams := self.dataset.stream_states(self._samples)) else {})

    def load_state_dict(self, state: Mapping[str, Any], allow_data_change: bool = False) -> None:
        """Continue after the samples that ``state`` counts; the number of ranks and the batch size may differ.

        Args:
            state: What `state_dict` returned.
            allow_data_change: Continue although seed, seq_len, tokenizer or data differ. The count of samples is kept,
                so what was seen before may come again.

        Raises:
            ValueError: If the state is of other data, naming the field and both values.
        """
        if ITERATED in state:
            state = _as_numbered(state, self.state_dict(), allow_data_change=allow_data_change)
        samples = _check_state(state, self.state_dict(), allow_data_change=allow_data_change)
        self.close()  # its thread reads the streams
        streams: dict[str, Any] = state.get("streams") or {}
        try:
            self.dataset.load_stream_states(streams)
        except ValueError:
            if not allow_data_change:
                raise
            self._load_unchanged_streams(streams)
        self._go_to(samples)

    def _load_unchanged_streams(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            try:
                self.dataset.load_stream_states({name: state})
            except ValueError as err:
                _logger.warning(
                    "%s Allowed: the run goes on, and reads this stream from its first file up to its place.", err
                )

    def reset(self) -> None:
        """Start again at sample 0, as a validation pass does."""
        self._go_to(0)

    def close(self) -> None:
        """Stop the thread (within a second) and drop what it made; iterating starts it again where it was."""
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _go_to(self, samples: int) -> None:
        self.close()
        self._samples, self._number, self._made = samples, 0, 0


class _Producer:
    """A thread that makes microbatches in order, at most ``ahead`` before they are taken."""

    def __init__(
        self,
        dataset: BatchSource,
        plan: _Plan,
        samples: int,
        number: int,
        ahead: int,
        send: Callable[[HostMicrobatch], Any],
    ) -> None:
        self.stop = threading.Event()
        self._made: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self._thread = threading.Thread(
            target=_produce,
            args=(dataset, plan, samples, number, send, self._made, self.stop),
            name="titan-data-prefetch",
            daemon=True,
        )
        self._thread.start()

    def take(self) -> Any:
        """The next microbatch; an error in the thread is raised here, again at every later call."""
        while True:
            try:
                made = self._made.get(timeout=1.0)
                break
            except queue.Empty as err:
                if not self._thread.is_alive() and self._made.empty():
                    raise RuntimeError("the data loader was closed while a batch was awaited.") from err
        if isinstance(made, BaseException):
            self._made.put(made)
            raise made
        return made

    def close(self) -> None:
        self.stop.set()
        self._thread.join(timeout=1.0)


def _produce(
    dataset: BatchSource,
    plan: _Plan,
    samples: int,
    number: int,
    send: Callable[[HostMicrobatch], Any],
    made: "queue.Queue[Any]",
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        item: Any
        try:
            item = send(plan.build(dataset, samples, number))
        except BaseException as error:  # the consumer raises it, of whatever kind
            item = error
        while not stop.is_set():
            try:
                made.put(item, timeout=_POLL_S)
                break
            except queue.Full:
                continue
        if isinstance(item, BaseException):
            return
        number += 1
        if number == plan.per_step(samples):
            number, samples = 0, samples + plan.ramp.at(samples)


def _check_sizes(global_batch: int, dp_rank: int, dp_size: int, microbatch: int) -> None:
    for name, value in (("global_batch", global_batch), ("dp_size", dp_size), ("microbatch", microbatch)):
        if value < 1:
            raise ValueError(f"{name}={value} is below 1. The nearest valid value is 1.")
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank={dp_rank} is not one of the {dp_size} data-parallel ranks, 0 to {dp_size - 1}.")
    unit = dp_size * microbatch
    if global_batch % unit:
        below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
        near = f"{below} or {above}" if below else f"{above}"
        share = global_batch // dp_size
        fits = [size for size in range(1, share + 1) if global_batch % (dp_size * size) == 0]
        other = f", or microbatch={min(fits, key=lambda size: abs(size - microbatch))}" if fits else ""
        raise ValueError(
            f"global_batch={global_batch} is not a multiple of dp_size={dp_size} x microbatch={microbatch} = {unit}: "
            f"ranks would take unequal shares. Use global_batch={near}{other}."
        )


ITERATED = "iterated_samples"
"""The count of samples in the state of `titan_train.data.IteratedBatches`."""


def _as_numbered(saved: Mapping[str, Any], current: Mapping[str, Any], *, allow_data_change: bool) -> Mapping[str, Any]:
    """The state of batches that a program gave in order, as one of numbered samples.

    Raises:
        ValueError: That change is not allowed.
    """
    change = (
        f"the run had read {saved[ITERATED]} samples of an iterable when it was saved, and its samples are numbered now"
    )
    if not allow_data_change:
        raise ValueError(
            f"{change}: others would come. Pass the data that the run began with, or allow it, to go on behind as many samples: "
            "checkpoint.allow_data_change=true (allow_data_change=True of a data loader)."
        )
    _logger.warning("%s; continuing after as many samples as asked", change)
    return {**current, "samples": saved[ITERATED], "streams": {}}


_COMPARED = {
    "seed": "run.seed, which draws the order of samples",
    "seq_len": "the length of a sample",
    "tokenizer": "the tokenizer (its fingerprint)",
    "fingerprint": "the data: its tokens, the sources' names and weights, or the document options",
}


def check_position(saved: Mapping[str, Any], dataset: BatchSource) -> None:
    """Refuse a saved position of other data than ``dataset``, as `DataLoader.load_state_dict` does.

    Raises:
        ValueError: A field differs, naming it and both values; or the position is not one of a data loader.
    """
    current = {"version": _STATE_VERSION, "samples": 0, **_identity(dataset)}
    if ITERATED in saved:
        saved = _as_numbered(saved, current, allow_data_change=False)
    _check_state(saved, current, allow_data_change=False)


def _identity(dataset: BatchSource) -> dict[str, Any]:
    """What must be the same where a position is continued."""
    return {name: getattr(dataset, name) for name in _COMPARED}


def _check_state(saved: Mapping[str, Any], current: Mapping[str, Any], *, allow_data_change: bool) -> int:
    """Samples to continue after.

    Args:
        saved: A loader's state.
        current: The state of the loader that is to continue.
        allow_data_change: Log differences instead of raising.

    Raises:
        ValueError: If a field is missing or differs, naming it and both values.
    """
    if missing := sorted(set(current) - set(saved) - {"streams"}):
        raise ValueError(
            f"the saved data state has no {missing[0]!r} (it has {sorted(saved)}): it was not written by a data loader."
        )
    if saved["version"] != _STATE_VERSION:
        raise ValueError(
            f"the saved data state has version {saved['version']}, but this release reads version {_STATE_VERSION}. "
            "Resume with the release that wrote it."
        )
    samples = saved["samples"]
    if not isinstance(samples, int) or samples < 0:
        raise ValueError(f"the saved data state has samples={samples!r}, which is not a count of samples.")
    for field, meaning in _COMPARED.items():
        if saved[field] == current[field]:
            continue
        change = f"{field} was {saved[field]!r} when the state was saved and is {current[field]!r} now: {meaning}"
        if not allow_data_change:
            raise ValueError(
                f"{change}. Samples would repeat or be left out. Restore the setting, or allow it: "
                "checkpoint.allow_data_change=true (allow_data_change=True of a data loader)."
            )
        _logger.warning("%s; continuing after %d samples as asked", change, samples)
    return samples
