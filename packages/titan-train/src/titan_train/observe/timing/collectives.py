"""What each collective costs a rank, by mesh axis.

Problem: FSDP, tensor, context and pipeline parallelism start their collectives in torch and in five packages, and none of
them knows what a mesh axis is called.

Idea: all of it goes through the methods of `ProcessGroup` and through ``Work.wait``. While a run trains, these are
replaced by versions that read a clock before and after. The group says which axis it is; a name that several groups share
(``fsdp`` over dp_shard and cp) is an axis of its own.

On a GPU these calls only queue work: there events on the streams take the place of the clock (see `device`). NCCL collects the
messages of a ``batch_isend_irecv`` and queues them at its end, as one operation.

Cost: about two microseconds per call.

Limits: collectives inside compiled code, and the backward of expert parallelism's exchange, start in C++: they count as
compute. Waiting for a pipeline's neighbour counts on ``pp``, whether the message or the neighbour's work takes the time;
`StepTimer.transfer` times the arrival of its messages, which between machines are read by threads.
"""

import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from titan_mesh import Layout

from titan_train.observe.timing.clock import StepTimer

# torch 2.11 and 2.15 name some of them differently; those that are missing are skipped
_METHODS = {
    "allreduce": "all-reduce",
    "allreduce_coalesced": "all-reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "allgather_coalesced": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
}
_EXCHANGE = "exchange"
"""Messages that are queued as one operation."""
_OUTPUT_FIRST = ("all-gather", "reduce-scatter", "all-to-all")

Label = Callable[[str], AbstractContextManager[object]]


class CollectiveMeter:
    """Counts the collectives of this rank into a `StepTimer`."""

    def __init__(self, timer: StepTimer, layout: Layout | None, rank: int) -> None:
        """Prepare; nothing is replaced before `installed`.

        Args:
            timer: Where the time goes.
            layout: Which ranks are on an axis; None for a run of one rank.
            rank: This rank in the world.
        """
        self.timer = timer
        self.label: Label | None = None
        """Puts a name on each call in a trace, such as ``tp all-gather``; None without a profiler."""
        self._named = (
            () if layout is None else tuple((name, frozenset(layout.group_of(rank, name))) for name in axes_of(layout))
        )
        self._axes: dict[str, tuple[str, int]] = {}
        self._issued: weakref.WeakKeyDictionary[Any, tuple[int, str, Any, float, bool]] = weakref.WeakKeyDictionary()
        """Collectives on a device: window, axis, event before it, bytes, whether its duration says something of the link."""
        self._collecting: dict[Any, float] = {}
        """Groups that collect what is called, to queue it at once on a device, and the bytes that it sends."""
        self._works: weakref.WeakKeyDictionary[Any, tuple[str, float, float, float, bool]] = weakref.WeakKeyDictionary()

    @contextmanager
    def installed(self) -> Generator[None]:
        """Count inside the block."""
        # from the classes' own tables: an attribute of the class would come without what makes it a method
        saved: list[tuple[type, str, Any]] = []
        counted: dict[str, Callable[..., Any]] = {
            **{name: partial(self._counted, operation=operation) for name, operation in _METHODS.items()},
            "_start_coalescing": self._collected,
            "_end_coalescing": self._queued_at_once,
        }
        for name, replace in counted.items():
            if name in vars(dist.ProcessGroup):
                saved.append((dist.ProcessGroup, name, vars(dist.ProcessGroup)[name]))
                setattr(dist.ProcessGroup, name, replace(getattr(dist.ProcessGroup, name)))
        saved.append((dist.Work, "wait", vars(dist.Work)["wait"]))
        dist.Work.wait = self._waited(dist.Work.wait)
        timer = self.timer
        device = timer.device
        try:
            with device.watching(torch.cuda.Stream, lambda: timer.top, timer.counts_here) if device else nullcontext():
                yield
        finally:
            for owner, name, original in saved:
                setattr(owner, name, original)

    def axis_of(self, group: dist.ProcessGroup) -> tuple[str, int]:
        """The name of a group's axis and how many ranks it has; ``world`` if no axis holds its ranks."""
        found = self._axes.get(group.group_name)
        if found is None:
            ranks = frozenset(dist.get_process_group_ranks(group))
            around = sorted((a for a in self._named if ranks <= a[1]), key=lambda axis: len(axis[1]))
            found = self._axes[group.group_name] = (around[0][0] if around else "world", len(ranks))
        return found

    def _counted(self, original: Callable[..., Any], operation: str) -> Callable[..., Any]:
        timer = self.timer

        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if not timer.counts_here():
                return original(group, *args, **kwargs)
            axis, size = self.axis_of(group)
            moved = _moved_bytes(operation, args, size)
            sent = 0.0 if operation == "recv" else moved
            if group in self._collecting:
                self._collecting[group] += sent
                return original(group, *args, **kwargs)
            if timer.device is not None:
                return self._queued(lambda: original(group, *args, **kwargs), operation, axis, sent)
            began = time.perf_counter()
            timer.delay(axis)
            with nullcontext() if self.label is None else self.label(f"{axis} {operation}"):
                work = original(group, *args, **kwargs)
            ended = time.perf_counter()
            totals = timer.waited(axis, ended - began)
            totals.calls += 1
            totals.sent_bytes += sent
            # a message to one rank is buffered: how long sending takes says nothing of the link
            if work is None:
                totals.add_call(ended - began, moved)
            else:
                self._works[work] = (axis, began, ended, moved, operation != "send")
            return work

        return call

    def _collected(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timer = self.timer

        def call(group: dist.ProcessGroup, *args: Any) -> Any:
            if timer.device is not None and timer.counts_here():
                self._collecting[group] = 0.0
            return original(group, *args)

        return call

    def _queued_at_once(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: dist.ProcessGroup, *args: Any) -> Any:
            sent = self._collecting.pop(group, None)
            if sent is None:
                return original(group, *args)
            return self._queued(lambda: original(group, *args), _EXCHANGE, self.axis_of(group)[0], sent)

        return call

    def _waited(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timer = self.timer

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            if timer.device is not None:
                return self._awaited(lambda: original(work, *args, **kwargs), work)
            known = self._works.pop(work, None)
            if known is None:
                return original(work, *args, **kwargs)
            axis, began, issued, moved, timed = known
            if not timer.counts_here():
                return original(work, *args, **kwargs)
            asked = time.perf_counter()
            finished = work.is_completed()
            with nullcontext() if self.label is None else self.label(f"{axis} wait"):
                result = original(work, *args, **kwargs)
            ended = time.perf_counter()
            totals = timer.waited(axis, ended - asked)
            totals.hidden_s += asked - issued
            if timed and not finished:
                totals.add_call(ended - began, moved)
            return result

        return wait

    def _queued(self, call: Callable[[], Any], operation: str, axis: str, sent: float) -> Any:
        """Issue a collective on a device."""
        timer, device = self.timer, self.timer.device
        assert device is not None
        timer.delay(axis)
        sampled = device.sampling()
        began = device.mark(f"axis:{axis}") if sampled else None
        with nullcontext() if self.label is None else self.label(f"{axis} {operation}"):
            work = call()
        if sampled:
            ended = device.mark(timer.top)
            device.called(axis, sent)
            if work is None:
                device.span(axis, began, None, ended, sent, timed=operation != "send")
            elif (operation, axis) != (_EXCHANGE, "pp"):  # how long a pipeline waits, `StepTimer.waiting` counts
                self._issued[work] = (device.windows, axis, began, sent, operation != "send")
        return work

    def _awaited(self, wait: Callable[[], Any], work: dist.Work) -> Any:
        """Have the current stream wait for a collective on a device."""
        timer, device = self.timer, self.timer.device
        assert device is not None
        issued = self._issued.pop(work, None)
        if issued is None or not timer.counts_here() or not device.sampling():
            return wait()
        window, axis, began, sent, timed = issued
        if window != device.windows:
            return wait()
        asked = device.mark(f"axis:{axis}")
        with nullcontext() if self.label is None else self.label(f"{axis} wait"):
            result = wait()
        device.span(axis, began, asked, device.mark(timer.top), sent, timed=timed)
        return result


def axes_of(layout: Layout) -> list[str]:
    """The names under which a layout's communication is counted: axes of more than one rank first, then their flattens."""
    names = sorted((n for n in layout.names if layout.size(n) > 1), key=lambda n: n not in layout.spec.axes)
    first: dict[object, str] = {}  # of names with the same groups, the first
    for name in names:
        first.setdefault(tuple(map(tuple, layout.groups(name))), name)
    return list(first.values())


def _moved_bytes(operation: str, args: Sequence[Any], size: int) -> float:
    """What a rank sends in a call, by the usual algorithm, or receives in a ``recv``."""
    if operation == "barrier" or not args:
        return 0.0
    given = _bytes(args[1] if operation in _OUTPUT_FIRST and len(args) > 1 else args[0])
    if operation == "all-reduce":
        return 2 * given * (size - 1) / size
    if operation == "all-gather":
        return given * (size - 1)
    if operation in ("reduce-scatter", "all-to-all"):
        return given * (size - 1) / size
    return given


def _bytes(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0.0  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
