"""The backends in order of preference, and the one place that chooses among them."""

from dataclasses import dataclass

import torch

from titan_cp.backends.backend import Backend, Request
from titan_cp.backends.cpu_flash import CpuFlash
from titan_cp.backends.cuda_dense import CudaCudnn, CudaEfficient, CudaFlash
from titan_cp.backends.cuda_varlen import CudaVarlenFlash
from titan_cp.backends.naive import Naive

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (CudaVarlenFlash(), CudaFlash(), CudaCudnn(), CudaEfficient(), CpuFlash(), Naive())
}
"""Every backend by name, the preferred first. One more is a `Backend` passed as ``backend=``; nothing registers."""


@dataclass(frozen=True)
class Choice:
    """Which backend serves a request, and what each of the others lacks."""

    used: Backend
    reasons: dict[str, str]
    """By backend name: why it was passed over, or that it is used or would do."""

    def __str__(self) -> str:
        width = max(len(name) for name in self.reasons)
        return "\n".join(f"{name:<{width}}  {reason}" for name, reason in self.reasons.items())


def select(backend: str | Backend, request: Request) -> Backend:
    """The backend for a request.

    Args:
        backend: ``"auto"``, a name in `BACKENDS`, or a `Backend` of your own.
        request: What is asked of it.

    Raises:
        ValueError: If the named backend does not exist, or cannot serve the request; the message says why, and which
            one could.
    """
    if backend == "auto":
        return _choose(request).used
    if isinstance(backend, str):
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} does not exist. Use 'auto' or one of {list(BACKENDS)}.")
        backend = BACKENDS[backend]
    problem = backend.why_not(request)
    if problem is not None:
        raise ValueError(
            f"backend={backend.name!r} cannot run here: {problem}. Use backend='auto', which takes "
            f"{_choose(request).used.name!r}."
        )
    return backend


def explain(
    device: torch.device | str, dtype: torch.dtype, *, head_dim: int = 128, packed: bool = False, window: bool = False
) -> Choice:
    """Which backend ``"auto"`` uses, and why not the others; print it.

    Args:
        device: Where the tensors live.
        dtype: Their dtype.
        head_dim: Channels per head.
        packed: Whether there is more than one document.
        window: Whether there is a sliding window.
    """
    return _choose(Request(torch.device(device), dtype, head_dim, packed, window))


def _choose(request: Request) -> Choice:
    used: Backend | None = None
    reasons: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        problem = backend.why_not(request) or backend.why_not_first(request)
        if problem is None and used is None:
            used = backend
            reasons[name] = f"used: {backend.summary}"
        else:
            reasons[name] = f"passed over: {problem}" if problem else "would do"
    assert used is not None, "naive serves every request"
    return Choice(used, reasons)
