"""Kernels of flash-linear-attention for layers with a state, where they are installed and equal.

They take whole documents on one device: `titan_cp.local_linear_attention`, and `titan_cp.linear_attention` where the plan cuts
no document. Pieces of documents need the map of their state (`titan_cp.state.scan`), which these kernels do not return. A
call that continues a state, a short one and one in a compiled graph stay with plain torch.

Signatures are those of fla-core 0.6; what another version does is found out by the trial (`titan_cp.backends.trial`), which
takes minutes the first time, as fla tunes each kernel. With Triton 3.6 on an H200 the gated ones are known to be wrong and are
passed over; none has been measured.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_cp.backends.trial import TrialKernel, choose_kernel
from titan_cp.state.chunks import bounded_decay

SHORTEST = 64
"""Tokens of a row from which a kernel is tried: below, one chunk of plain products does it."""

StateRun = Callable[..., tuple[Tensor, Tensor]]
"""``run(q, k, v, decay, beta, bounds=, scale=)``: shapes of `local_linear_attention`; ``bounds`` are the ends of the documents of
all rows laid end to end, ``[N + 1]`` int64, increasing, or None. Returns the output and the state after each row's last token.
"""


class _Published(NamedTuple):
    """A function of fla."""

    module: str
    function: str
    shares_keys: bool
    """Takes fewer key heads than value heads."""
    gated_products: bool
    """Its backward runs fla's ``chunk_bwd_dqkwg`` with a gate."""


_FLA: Mapping[str, _Published] = {
    "gated_delta": _Published("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", True, True),
    "kda": _Published("fla.ops.kda", "chunk_kda", True, False),
    "mamba2": _Published("fla.ops.simple_gla", "chunk_simple_gla", False, True),
    "gated_linear": _Published("fla.ops.gla", "chunk_gla", False, False),
}
"""By kind of layer, as `titan_cp.state_costs` names them."""


def state_kind(decay: Tensor, beta: Tensor | None) -> str:
    """Which layer the arguments are those of."""
    if beta is None:
        return "mamba2" if decay.ndim == 3 else "gated_linear"
    return "gated_delta" if decay.ndim == 3 else "kda"


def choose_state_kernel(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], *, packed: bool, reference: StateRun
) -> StateRun | None:
    """What computes ``given`` (queries, keys, values, decay, beta) instead of ``reference``; None where nothing does."""
    q, _, v, decay, beta = given
    if torch.compiler.is_compiling() or v.shape[2] < SHORTEST:
        return None
    kind = state_kind(decay, beta)
    dtypes = [str(x.dtype).removeprefix("torch.") for x in given if x is not None]
    case = (
        kind, str(v.device), "/".join(dtypes if len(set(dtypes)) > 1 else dtypes[:1]), f"{q.shape[-1]} × {v.shape[-1]}",
        f"{v.shape[1] // q.shape[1]} heads per key", "packed" if packed else "whole rows",
    )  # fmt: skip
    torch_form = TrialKernel("torch", reference)
    trial = partial(_trial, given, packed)
    used = choose_kernel(case, partial(candidates, kind, v.device, v.dtype), torch_form, trial, like=v, dtype=v.dtype)
    return None if used.name == torch_form.name else used.run


def candidates(kind: str, device: torch.device, dtype: torch.dtype) -> list[TrialKernel]:
    """The kernels of a kind of layer, for values of a dtype on a device."""
    published = _FLA[kind]
    problem = _problem(device, dtype) or _known_fault(published, device)
    return [TrialKernel(f"fla's {published.function}", partial(_run_fla, published), problem)]


def _known_fault(published: _Published, device: torch.device) -> str | None:
    """Why a backward of fla's would be refused after minutes of tuning: it is wrong with some Triton on Hopper (fla #640).

    fla 0.6 refuses it itself, and takes another kernel where tilelang is installed; on an H200 that took 155 s to find out.
    """
    if not published.gated_products or _installed("tilelang") or not _installed("triton"):
        return None
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    version = tuple(map(int, re.findall(r"\d+", importlib.metadata.version("triton"))[:3]))
    if not (3, 4, 0) <= version < (3, 7, 1):
        return None
    found = ".".join(map(str, version))
    return f"its backward is wrong on Hopper with Triton 3.4.0 to 3.7.0 (fla #640), and {found} is installed; tilelang helps"


def _problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why fla's kernels cannot run, found out without importing them."""
    if device.type != "cuda":
        return f"needs CUDA tensors, got {device.type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"needs half precision or float32, got {str(dtype).removeprefix('torch.')}"
    if not _installed("fla"):
        return "fla-core is not installed"
    return None


@cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _run_fla(
    published: _Published,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    *,
    bounds: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Tokens before heads, one dtype for queries, keys and values, and packed rows as one: what fla takes."""
    function = getattr(importlib.import_module(published.module), published.function)
    rows, _, tokens, _ = v.shape
    groups = v.shape[1] // k.shape[1]
    if groups > 1 and not published.shares_keys:
        q, k = (x.repeat_interleave(groups, dim=1) for x in (q, k))
    operands = {"q": q.to(v.dtype), "k": k.to(v.dtype), "v": v, "g": bounded_decay(decay.float())}
    if beta is not None:
        operands["beta"] = beta
    operands = {name: x.transpose(1, 2) for name, x in operands.items()}
    if bounds is not None:
        operands = {name: x.flatten(0, 1).unsqueeze(0) for name, x in operands.items()}
    out, state = function(
        **{name: x.contiguous() for name, x in operands.items()},
        scale=scale,
        output_final_state=True,
        cu_seqlens=bounds,
    )
    if bounds is not None:
        out = out.squeeze(0).unflatten(0, (rows, tokens))
        ends = torch.arange(1, rows + 1, device=v.device) * tokens
        state = state[torch.searchsorted(bounds, ends) - 1]
    return out.to(v.dtype).transpose(1, 2), state


def _trial(
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], packed: bool, run: StateRun
) -> Mapping[str, Tensor]:
    """Results and gradients on two rows of 150 tokens, of the widths and dtypes of the call at hand."""
    tokens = 150
    made: list[Tensor | None] = []
    generator = torch.Generator(given[2].device).manual_seed(0)
    groups = given[2].shape[1] // given[0].shape[1]
    for name, x in zip(("q", "k", "v", "decay", "beta"), given, strict=True):
        if x is None:
            made.append(None)
            continue
        shape = (2, 2 if name in "qk" else 2 * groups, tokens, *x.shape[3:])
        drawn = torch.randn(shape, generator=generator, device=x.device)
        if name in "qk":
            drawn = torch.nn.functional.normalize(drawn, dim=-1)
        elif name != "v":
            drawn = -0.3 * drawn.abs() if name == "decay" else drawn.sigmoid()
        made.append(drawn.to(x.dtype).requires_grad_())
    bounds = None
    if packed:  # a document of one token, one that ends with a chunk, and rows that differ
        bounds = torch.tensor([0, 1, 65, 70, 150, 249, 300], device=given[2].device)
    out, state = run(*made, bounds=bounds, scale=given[0].shape[-1] ** -0.5)
    probe = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    wanted = {name: x for name, x in zip(("q", "k", "v", "decay", "beta"), made, strict=True) if x is not None}
    gradients = torch.autograd.grad(out, list(wanted.values()), probe)
    found: dict[str, Any] = {f"the gradient of {name}": x for name, x in zip(wanted, gradients, strict=True)}
    return {"the output": out.detach(), "the last state": state.detach(), **found}
