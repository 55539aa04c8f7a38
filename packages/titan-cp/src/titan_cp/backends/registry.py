"""The backends in order of preference, and the one place that chooses among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from titan_cp.backends.backend import Backend, Grads, Request, Saved
from titan_cp.backends.cpu_flash import CpuFlash
from titan_cp.backends.cuda_dense import CudaCudnn, CudaEfficient, CudaFlash
from titan_cp.backends.cuda_varlen import CudaVarlenFlash
from titan_cp.backends.naive import Naive
from titan_cp.backends.trial import Case, TrialKernel, choice_of, choose_kernel
from titan_cp.planning.costs import accumulator_dtype
from titan_cp.planning.tiles import plan_tiles

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


def select(backend: str | Backend, request: Request, like: Tensor | None = None) -> Backend:
    """The backend for a request.

    Args:
        backend: ``"auto"``, a name in `BACKENDS`, or a `Backend` of your own.
        request: What is asked of it.
        like: Queries of the call at hand: with them ``"auto"`` compares a backend with `Naive` before its first use, and
            passes over one that is not equal (`titan_cp.backends.trial`). A backend that is named is used as it is.

    Raises:
        ValueError: If the named backend does not exist, or cannot serve the request; the message says why, and which
            one could.
    """
    if backend == "auto":
        return _choose(request).used if like is None else _tried(request, like)
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


def _tried(request: Request, like: Tensor) -> Backend:
    case = _case(request)
    if (found := choice_of(case)) is not None:  # every call after the first
        return found.used.run
    kernels = [
        TrialKernel(name, backend, backend.why_not(request) or backend.why_not_first(request))
        for name, backend in BACKENDS.items()
        if name != "naive"
    ]
    reference = TrialKernel("naive", BACKENDS["naive"])
    untried = next((kernel for kernel in kernels if kernel.problem is None), reference)
    trial = partial(_trial, request)
    return choose_kernel(case, lambda: kernels, reference, trial, like=like, dtype=request.dtype, untried=untried).run


def _case(request: Request) -> Case:
    mask = ", ".join(word for word, on in (("packed", request.packed), ("window", request.window)) if on)
    dtype = str(request.dtype).removeprefix("torch.")
    return "attention over tiles", str(request.device), dtype, f"{request.head_dim} channels", mask or "causal"


def _trial(request: Request, backend: Backend) -> Mapping[str, Tensor]:
    """Attention and gradients of 160 tokens by a backend, two heads for each key head."""
    generator = torch.Generator(request.device).manual_seed(0)
    tokens, wide = 160, accumulator_dtype(request.dtype)

    def draw(heads: int) -> Tensor:
        shape = (2, heads, tokens, request.head_dim)
        return torch.randn(shape, generator=generator, device=request.device).to(request.dtype)

    q, k, v, grad_out = draw(4), draw(2), draw(2), draw(4)
    scale = request.head_dim**-0.5
    bounds = [0, 1, 33, 80, tokens] if request.packed else [0, tokens]
    whole = ((0, tokens),)
    tiles = plan_tiles(whole, whole, bounds, causal=True, window=20 if request.window else None)
    out, lse = torch.zeros_like(q, dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
    backend.forward(q, k, v, tiles, scale, out, lse)
    grads = Grads(*(torch.zeros_like(x, dtype=wide) for x in (q, k, v)))
    backend.backward(Saved(grad_out, q, k, v, out.to(q.dtype), lse), tiles, scale, grads)
    return {
        "the output": out, "the log-sum-exp": lse, "the gradient of q": grads.q, "the gradient of k": grads.k,
        "the gradient of v": grads.v,
    }  # fmt: skip


def _choose(request: Request) -> Choice:
    found = choice_of(_case(request))
    if found is not None:
        return _as_tried(found.used.run, found.reasons)
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


def _as_tried(used: Backend, found: Mapping[str, str]) -> Choice:
    words = {"used": f"used: {used.summary}", "not tried": "would do"}
    reasons = {name: words.get(found.get(name, ""), found.get(name, "would do")) for name in BACKENDS}
    return Choice(used, reasons)
