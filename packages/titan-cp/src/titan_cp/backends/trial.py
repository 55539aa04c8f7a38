"""Whether a faster kernel computes what plain torch does: tried at its first call, then taken or left.

Problem: kernels of other packages, and private operators of torch, are fast where they are right. On some devices, versions
and widths they raise, and on some they are silently wrong, most often in one gradient.

Idea: a *case* is everything that may decide which code a kernel runs: operation, device, dtypes, channels, whether rows are
packed. The first call of a case runs the reference and each candidate on small random tensors of that case, forward and
backward. The first candidate whose results are all within the rounding of the dtype is taken, for the life of the process;
where none is, the reference runs. A candidate that was tried and is not equal is said once, as a warning.

Every rank draws the same tensors, so ranks with the same device and versions choose alike, without a word between them.

Cost: a few small forwards and backwards for each case, and one wait of the host. They run in a thread of their own, in which
no hook or mode of the caller (activation checkpointing, counters, autocast) sees them.

Limits: an error that needs long rows or special values is not found; a kernel that destroys the CUDA context takes the process
with it. Nothing can be tried where nothing is computed or everything is recorded (fake tensors, ``torch.compile``, a
CUDA graph, inside backward): the reference runs there, or what the caller names, unless the case was tried before.
"""

import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

Case = tuple[object, ...]
"""The operation first, then what else may decide which code a kernel runs."""

ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3 * 2.0**-7, torch.float16: 3 * 2.0**-10}
"""Largest difference relative to the largest value: some roundings of a result and of sums over channels."""

_REFUSED = "not used"

_LONG_S = 10.0
"""Seconds of a trial after which the log says what is waited for."""


@dataclass(frozen=True)
class TrialKernel:
    """A candidate for an operation."""

    name: str
    run: Any
    """What the caller of `choose_kernel` gets, and hands to its own trial."""
    problem: str | None = None
    """Why it cannot run in this case, found out without running it."""


@dataclass(frozen=True)
class KernelChoice:
    """What runs in a case, and why the others do not."""

    case: Case
    used: TrialKernel
    reasons: Mapping[str, str]
    """By candidate: that it is used, why it cannot run, or by how much it differs."""

    @property
    def refused(self) -> bool:
        """Whether a candidate was tried and is not equal."""
        return any(reason.startswith(_REFUSED) for reason in self.reasons.values())

    def __str__(self) -> str:
        others = "; ".join(f"{name} {reason}" for name, reason in self.reasons.items() if name != self.used.name)
        return f"{', '.join(str(part) for part in self.case)}: {self.used.name}" + (f" ({others})" if others else "")


_CHOICES: dict[Case, KernelChoice] = {}


def choose_kernel(
    case: Case,
    kernels: Callable[[], Sequence[TrialKernel]],
    reference: TrialKernel,
    trial: Callable[[Any], Mapping[str, Tensor]],
    *,
    like: Tensor,
    dtype: torch.dtype,
    untried: TrialKernel | None = None,
) -> TrialKernel:
    """The kernel of a case: the first that equals the reference, tried at the first call.

    Args:
        case: What the choice is for.
        kernels: Gives the candidates, the preferred first; called until the case has its kernel.
        reference: Plain torch, which runs where no candidate does.
        trial: From a kernel's ``run`` to results and gradients by name, on small tensors of the case. Draws with a generator
            of its own.
        like: An operand of the call at hand, which says whether anything can be tried now.
        dtype: Whose rounding is allowed: the narrowest that takes part.
        untried: What runs where nothing can be tried; None for the reference.
    """
    found = _CHOICES.get(case)
    if found is not None:
        return found.used
    if not _can_try(like):
        return reference if untried is None else untried
    listed = kernels()
    if all(kernel.problem is not None for kernel in listed):
        reasons = {kernel.name: f"passed over: {kernel.problem}" for kernel in listed}
        found = KernelChoice(case, reference, {**reasons, reference.name: "used"})
    else:
        with ThreadPoolExecutor(1) as pool:  # see the module: no mode of this thread applies there
            found = pool.submit(_try_all, case, listed, reference, trial, like.device, ROUNDING[dtype]).result()
    _CHOICES[case] = found
    _logger.debug("%s", found)
    return found.used


def kernel_choices() -> list[KernelChoice]:
    """Every choice that was made in this process, in order."""
    return list(_CHOICES.values())


def choice_of(case: Case) -> KernelChoice | None:
    """The choice of a case, if it was made."""
    return _CHOICES.get(case)


def forget_choices() -> None:
    """Let every case be tried again, for tests."""
    _CHOICES.clear()


def _can_try(like: Tensor) -> bool:
    if torch.compiler.is_compiling() or type(like) not in (Tensor, torch.nn.Parameter) or like.is_meta:
        return False
    if torch._C._current_graph_task_id() != -1:  # its threads wait for this one
        return False
    return not (like.is_cuda and torch.cuda.is_current_stream_capturing())


def _try_all(
    case: Case,
    kernels: Sequence[TrialKernel],
    reference: TrialKernel,
    trial: Callable[[Any], Mapping[str, Tensor]],
    device: torch.device,
    limit: float,
) -> KernelChoice:
    reasons: dict[str, str] = {}
    used: TrialKernel | None = None
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext(), torch.enable_grad():
        expected = trial(reference.run)
        for kernel in kernels:
            if kernel.problem is not None:
                reasons[kernel.name] = f"passed over: {kernel.problem}"
                continue
            if used is not None:
                reasons[kernel.name] = "not tried"
                continue
            with _said_if_long(case, kernel.name):
                wrong = _difference(kernel, trial, expected, limit)
            if wrong is None:
                used, reasons[kernel.name] = kernel, "used"
            else:
                reasons[kernel.name] = wrong
                _logger.warning("%s: %s %s", ", ".join(str(part) for part in case), kernel.name, wrong)
    if used is None:
        used, reasons[reference.name] = reference, "used"
    return KernelChoice(case, used, reasons)


@contextmanager
def _said_if_long(case: Case, name: str) -> Generator[None]:
    """Say what the process waits for: other packages compile and tune for minutes, once on a machine."""
    what = ", ".join(str(part) for part in case)
    words = f"{what}: still trying {name}, which compiles and tunes itself at its first call here"
    timer = threading.Timer(_LONG_S, _logger.warning, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _difference(
    kernel: TrialKernel, trial: Callable[[Any], Mapping[str, Tensor]], expected: Mapping[str, Tensor], limit: float
) -> str | None:
    """What is wrong with a kernel, or None."""
    try:
        found = trial(kernel.run)
        apart = {name: _apart(found[name], want) for name, want in expected.items()}
    except Exception as err:  # another package's code: whatever it raises, the reference can go on
        return f"{_REFUSED}: its first call raised {type(err).__name__}: {_first_line(err)}"
    worst = max(apart, key=lambda name: apart[name] if apart[name] == apart[name] else float("inf"))
    if apart[worst] <= limit:
        return None
    return f"{_REFUSED}: {worst} differs from torch's by {apart[worst]:.1e} of its largest value (limit {limit:.1e})"


def _first_line(err: Exception) -> str:
    return next(iter(str(err).strip().splitlines()), "")[:200]


def _apart(found: Tensor, want: Tensor) -> float:
    if found.shape != want.shape:
        raise ValueError(f"a result has shape {tuple(found.shape)}, not {tuple(want.shape)}")
    largest = want.double().abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((found.double() - want.double()).abs().max() / largest)
