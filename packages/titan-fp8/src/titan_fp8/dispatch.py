"""Which implementation of each op runs, decided in this one place.

Every op has a plain-torch reference, which runs anywhere, and faster implementations that need a device or a package.
An op's ``backend`` argument is ``"auto"`` (the first of its candidates that works here) or a candidate's name. Nothing
is imported until an op that could use it is called; `backends` says, for each op, what would run and why not the others.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from titan_fp8.first_call import COMPARED, compared_at_first


@dataclass(frozen=True, slots=True)
class Candidate:
    """One implementation of an op."""

    name: str
    """``cuda``, ``triton``, ``cublaslt``, ``bf16`` or ``reference``."""
    target: str
    """``module:function``, imported when it is first chosen."""


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What runs for one op on one device."""

    op: str
    """The op's name; a product's carries its scalings, ``scaled_mm[block1x128·block128]``."""
    chosen: str
    """The candidate that ``backend="auto"`` runs."""
    skipped: dict[str, str]
    """The candidates passed over on the way, and why."""


_TRITON = "titan_fp8.kernels.triton"
_REFERENCE = "titan_fp8.reference"

_TRITON_OPS = {
    "tensor": "amax cast_tensor cast_tensor_dual cast_row_dual",
    "row": "cast_row",
    "block": "cast_block cast_block_dual",
    "weights": "cast_weight_block cast_weight_rows cast_weights_block",
    "transpose": "transpose_codes",
    "mx": "cast_mx cast_mx_dual",
    "grouped_cast": "cast_grouped",
    "grouped_mm": "grouped_scaled_mm grouped_scaled_mm_wgrad",
    "elementwise": "rmsnorm swiglu swiglu_backward",
    "fused": "rmsnorm_cast_block rmsnorm_backward swiglu_cast_block swiglu_backward_cast_block",
    "layer_norm": "layernorm_cast_block gelu_cast_block",
}
"""Module to its ops."""

# In order of preference. Every list ends with the reference, which always works.
_CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    op: (Candidate("triton", f"{_TRITON}.{module}:{op}"), Candidate("reference", f"{_REFERENCE}:{op}"))
    for module, ops in _TRITON_OPS.items()
    for op in ops.split()
}
_CANDIDATES["cast_block_dual"] = (
    # half of the Triton kernel's instructions
    Candidate("cuda", "titan_fp8.kernels.cuda.launch:cast_block_dual"),
    *_CANDIDATES["cast_block_dual"],
)
_CANDIDATES["scaled_mm"] = (
    Candidate("cublaslt", "titan_fp8.kernels.products:scaled_mm_cublaslt"),
    Candidate("bf16", "titan_fp8.kernels.products:scaled_mm_bf16"),
    Candidate("reference", f"{_REFERENCE}:scaled_mm"),
)

# The pairs of scalings that products are asked for: forward and input gradient, then weight gradient.
_CASES = {
    "scaled_mm": ("tensor·tensor", "row·row", "block1x128·block128", "block1x128·block1x128", "mx32·mx32"),
    "cast_grouped": ("tensor", "row", "block1x128", "mx32"),
    "grouped_scaled_mm": ("tensor·tensor", "row·row", "block1x128·block128", "mx32·mx32"),
    "grouped_scaled_mm_wgrad": ("block1x128", "mx32"),
}


@functools.cache
def implementation(op: str, device: torch.device, backend: str = "auto", case: str = "") -> Callable[..., Any]:
    """The function that runs ``op`` on ``device``.

    Args:
        op: An op's name without its namespace.
        device: Where the operands are.
        backend: ``"auto"`` or a candidate's name.
        case: What the choice may depend on besides: scaling names, joined by ``·``.

    Raises:
        ValueError: If there is no such candidate, or it does not work on this device.
    """
    if backend == "auto":
        chosen = _first_working(op, device, case)
        function = _load(op, chosen, device)
        if op in COMPARED and _CANDIDATES[op][chosen].name == "triton":
            return compared_at_first(op, function, _load(op, len(_CANDIDATES[op]) - 1, device))
        return function
    names = [candidate.name for candidate in _CANDIDATES[op]]
    if backend not in names:
        raise ValueError(
            f"backend={backend!r} does not implement {op}. Its backends are: {', '.join(['auto', *names])}."
        )
    index = names.index(backend)
    problem = _problem(_CANDIDATES[op][index], device, case)
    if problem:
        raise ValueError(f"{op} with backend={backend!r} on {device}: {problem}. Use backend='auto'.")
    return _load(op, index, device)


def backends(device: torch.device | str | None = None) -> list[BackendReport]:
    """What ``backend="auto"`` runs for every op, and why not the candidates before it.

    Args:
        device: Device to report on; by default the current CUDA device, or the CPU where there is none.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    reports: list[BackendReport] = []
    for op, candidates in _CANDIDATES.items():
        for case in _CASES.get(op, ("",)):
            chosen = _first_working(op, device, case)
            skipped = {passed.name: _problem(passed, device, case) or "" for passed in candidates[:chosen]}
            reports.append(BackendReport(f"{op}[{case}]" if case else op, candidates[chosen].name, skipped))
    return reports


def _first_working(op: str, device: torch.device, case: str, start: int = 0) -> int:
    for index in range(start, len(_CANDIDATES[op])):
        if _problem(_CANDIDATES[op][index], device, case) is None:
            return index
    raise AssertionError(f"{op} has no reference")


def _load(op: str, index: int, device: torch.device) -> Callable[..., Any]:
    """A candidate's function. Where the CUDA kernel returns None for operands it cannot take, the next candidate runs."""
    candidate = _CANDIDATES[op][index]
    module, name = candidate.target.split(":")
    function = getattr(importlib.import_module(module), name)
    if candidate.name != "cuda":
        return function
    below = _load(op, _first_working(op, device, "", index + 1), device)

    def first_or_below(*operands: Any) -> Any:
        results = function(*operands)
        return below(*operands) if results is None else results

    return first_or_below


@functools.cache
def _problem(candidate: Candidate, device: torch.device, case: str) -> str | None:
    """Why this candidate cannot run, or None."""
    if candidate.name == "reference":
        return None
    if device.type != "cuda":
        return f"needs a CUDA device, the tensors are on {device.type}"
    if torch.version.hip is not None and candidate.name != "bf16":
        return "is for NVIDIA GPUs, and this torch is built for AMD's"
    capability = torch.cuda.get_device_capability(device)
    if candidate.name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if capability < (8, 9):
            return f"needs float8 conversions (compute capability 8.9), the device has {_dotted(capability)}"
        if candidate.target.startswith(f"{_TRITON}.grouped_mm") and "mx32" in case:
            return "has no 1x32 scales; products of MX operands are emulated"
        return None
    if candidate.name == "cuda":
        return _cuda_problem(capability)
    if candidate.name == "cublaslt":
        return _cublaslt_problem(capability, case)
    return None


def _cuda_problem(capability: tuple[int, int]) -> str | None:
    if capability < (9, 0):
        return f"needs compute capability 9.0, the device has {_dotted(capability)}"
    try:
        from titan_fp8.kernels.cuda.launch import build_problem
    except ImportError as err:
        return f"cuda-bindings cannot be imported ({err})"
    return build_problem("sm_{}{}a".format(*capability))


def _cublaslt_problem(capability: tuple[int, int], case: str) -> str | None:
    if capability < (8, 9):
        return f"float8 products need compute capability 8.9, the device has {_dotted(capability)}"
    if case in ("block1x128·block128", "block1x128·block1x128"):
        version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        if capability[0] != 9:
            return f"1x128 and 128x128 scales exist on Hopper (9.0) only, the device has {_dotted(capability)}"
        if version < (12, 9):
            return f"1x128 and 128x128 scales need CUDA 12.9, torch was built with {torch.version.cuda}"
        return None
    if case == "mx32·mx32" and capability[0] != 10:
        return f"MX scales exist on Blackwell (10.x) only, the device has {_dotted(capability)}"
    if case not in ("tensor·tensor", "row·row", "mx32·mx32"):
        return f"has no recipe for {case}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
