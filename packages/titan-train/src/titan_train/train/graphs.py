"""Forward and backward of a step as one CUDA graph: the host launches it once instead of each kernel.

Problem: a GPU that is faster than Python waits for the host between kernels. A graph is recorded once and replayed: the
same kernels on the same addresses. So everything that changes between steps must be copied to where the recording read it.

    first step of a shape   batches, denominator -> static buffers; warm up on a side stream; capture; then as below
    every step              copy in, replay, hand the recorded gradients to the parameters, return the recorded loss

All micro-batches of a step are one graph. The first one's backward writes the gradients and the others add to them, as in
eager mode, so that the loss and the gradients have the same bits. Clipping, the optimizer, validation and checkpoints stay
outside: they change weights in place, where the graph reads them.

Warm-up and capture leave nothing behind: the random state and the buffers of the model are put back. The generator of the
device is registered with the graph by torch, so that each replay draws new numbers.

Cost: the memory of one step's activations stays reserved, once: all graphs share one pool, because no two of them run at the
same time and nothing of one is read after another. Each shape of a step's batches has a graph. Packed documents differ in the
number of their boundaries alone; those of all micro-batches are padded to one length, which only grows, in powers of two. So a
run has one graph at a time, and captures again a few times in all.

Limits: one rank, no offload and no recomputation (`titan_train.parallel.compiled.check_cudagraphs`). The model's
Python runs at capture only: hooks see nothing of later steps.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from titan_train.data.loader.source import TaskBatch
from titan_train.train.step_random import RandomState

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 3
"""Runs before capture: lazy initialisation and the autotuning of libraries must not be recorded (CUDA best practice)."""
MOST_SHAPES = 16
"""Graphs that are kept; steps of further shapes run in eager mode."""

Capture = Callable[[Callable[[], None], torch.device, Any], Callable[[], None]]
"""Records what a function does and returns what does it again on the same tensors. The function is run as often as needed.
The third argument is the memory pool that all graphs share, from `torch.cuda.graph_pool_handle`."""


def capture_cuda_graph(run: Callable[[], None], device: torch.device, pool: Any) -> Callable[[], None]:
    """Warm ``run`` up on a side stream, then record it as a CUDA graph in ``pool``."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # of this thread alone: the thread that loads data copies to the device meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        run()
    return graph.replay


@dataclass(frozen=True, slots=True)
class _StaticBatch:
    """A microbatch whose tensors stay where they are."""

    inputs: tuple[Tensor, ...]
    keywords: dict[str, Any]
    target: Any
    samples_consumed: int = 0


@dataclass(slots=True)
class _Recorded:
    tensors: list[Tensor]
    """The batches' tensors, in the order of `_leaves`."""
    denominator: Tensor
    replay: Callable[[], None]
    loss: Tensor
    gradients: list[tuple[nn.Parameter, Tensor]]


class StepGraphs:
    """Runs forwards and backwards of steps by graphs; called like the function that it records."""

    def __init__(
        self,
        run: Callable[[Sequence[TaskBatch], Tensor], Tensor],
        parts: Sequence[nn.Module],
        device: torch.device,
        *,
        forget: Callable[[], None],
        capture: Capture = capture_cuda_graph,
    ) -> None:
        """Nothing is recorded yet.

        Args:
            run: From a step's batches and the denominator (a scalar on the device) to the loss, a scalar on the device. It
                adds gradients to the parameters and must not wait for the device.
            parts: The model.
            device: Where everything is.
            forget: Drops every gradient.
            capture: Records; another one stands in for the graph in tests.

        Raises:
            ValueError: The device has no CUDA graphs.
        """
        if capture is capture_cuda_graph and device.type != "cuda":
            raise ValueError(
                f"compile.cudagraphs=true, and this run is on {device.type}: only CUDA devices have graphs. Set "
                "compile.cudagraphs=false."
            )
        self._run, self._parts, self._device = run, parts, device
        self._forget, self._capture = forget, capture
        self._pool = _new_pool(device)
        self._recorded: dict[Any, _Recorded] = {}
        self._boundaries = 0
        """Columns that the document boundaries of every micro-batch are padded to."""
        self._warned = False

    def __call__(self, batches: Sequence[TaskBatch], denominator: Tensor) -> Tensor:
        """Loss of a step; the gradients are the parameters'. Both are overwritten by the next call.

        Args:
            batches: This rank's micro-batches.
            denominator: A scalar on the device.

        Raises:
            ValueError: A batch holds what is neither a tensor nor a plain value.
            RuntimeError: The step cannot be captured.
        """
        batches = self._alike(batches)
        leaves, structure = _leaves(batches)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (structure, *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves))
        found = self._recorded.get(key)
        if found is None:
            if len(self._recorded) >= MOST_SHAPES:
                self._warn_eager()
                return self._run(batches, denominator)
            found = self._recorded[key] = self._record(leaves, structure, denominator)
        for static, given in zip([*found.tensors, found.denominator], [*tensors, denominator], strict=True):
            static.copy_(given, non_blocking=True)
        found.replay()
        for parameter, gradient in found.gradients:
            parameter.grad = gradient
        return found.loss

    def _record(self, leaves: Sequence[Any], structure: Any, denominator: Tensor) -> _Recorded:
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        batches = [_StaticBatch(*one) for one in pytree.tree_unflatten(static, structure)]
        number = denominator.clone()
        loss: list[Tensor] = []

        def run() -> None:
            self._forget()
            loss[:] = [self._run(batches, number)]

        random, buffers = RandomState(self._device), [b for part in self._parts for b in part.buffers()]
        before = [buffer.clone() for buffer in buffers]
        try:
            replay = self._capture(run, self._device, self._pool)
        except RuntimeError as err:
            raise RuntimeError(
                f"compile.cudagraphs=true, and the step could not be captured as a graph: {err}. Forward or backward waits for "
                "the device, or its shapes depend on values. Set compile.cudagraphs=false."
            ) from err
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        random.restore()
        every = (parameter for part in self._parts for parameter in part.parameters())
        gradients = [(p, p.grad) for p in every if p.grad is not None]
        return _Recorded([x for x in static if isinstance(x, Tensor)], number, replay, loss[0].detach(), gradients)

    def _alike(self, batches: Sequence[TaskBatch]) -> Sequence[TaskBatch]:
        """The micro-batches with as many document boundaries as the most that were seen; a repeated one ends no document."""
        widths = [0 if (found := _boundaries(batch)) is None else found.shape[1] for batch in batches]
        if max(widths) > self._boundaries:
            self._boundaries = max(widths)
            self._recorded.clear()  # no step is as narrow again
            # cuBLAS keeps a workspace in the old pool, and torch 2.11 captures into no pool whose graphs are gone
            self._pool = _new_pool(self._device)
        if all(width == self._boundaries for width in widths):
            return batches
        return [_widened(batch, self._boundaries) for batch in batches]

    def _warn_eager(self) -> None:
        if not self._warned:
            logger.warning(
                "compile.cudagraphs=true, and batches have more than %d shapes: steps of further shapes run in eager mode. Give "
                "every batch the same shape.",
                MOST_SHAPES,
            )
        self._warned = True


def _new_pool(device: torch.device) -> Any:
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _boundaries(batch: TaskBatch) -> Tensor | None:
    """The boundaries of its packed documents, ``[B, D + 1]``; None if it has none."""
    return cast("Tensor | None", batch.keywords.get("cu_seqlens"))


def _widened(batch: TaskBatch, columns: int) -> TaskBatch:
    found = _boundaries(batch)
    if found is None:
        return batch
    padding = found[:, -1:].expand(-1, columns - found.shape[1])
    keywords = {**batch.keywords, "cu_seqlens": torch.cat((found, padding), dim=1)}
    return _StaticBatch(batch.inputs, keywords, batch.target)


def _leaves(batches: Sequence[TaskBatch]) -> tuple[list[Any], Any]:
    """Tensors and plain values of all batches, and how they belong together."""
    trees = [(batch.inputs, dict(batch.keywords), batch.target) for batch in batches]
    leaves, structure = pytree.tree_flatten(trees)
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, (Tensor, int, float, str)):
            raise ValueError(
                f"compile.cudagraphs=true, and a batch holds a {type(leaf).__name__}: its tensors cannot be found. Use tensors, "
                "lists, tuples and dicts of them, or set compile.cudagraphs=false."
            )
    return leaves, structure
