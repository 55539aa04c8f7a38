"""What each kernel costs on this machine, forward and backward, and whether it computes the same.

Every kernel that can run is first compared with the plain form; one that is further from it than half precision explains
is reported and never chosen. Then they take turns, and the fastest round of each counts.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_train.kernels.registry import OPERATIONS, Kernel, kernels_of

_TOKENS = {"cpu": 512, "cuda": 8192}
_ROUNDS = 7
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 3 * 2.0**-7}
"""Largest difference relative to the largest value: some roundings of a result, and of sums over channels."""


def measure_kernels(device: str) -> dict[str, Any]:
    """For each operation: microseconds of each kernel, and the name of the fastest that is right."""
    place = torch.device(device)
    table: dict[str, Any] = {}
    for operation in OPERATIONS:
        inputs = example_inputs(operation, place)
        runnable = [kernel for kernel in kernels_of(operation) if kernel.problem(place) is None]
        expected = run_both_ways(runnable[0].load(), inputs)
        right = [kernel for kernel in runnable if agrees(run_both_ways(kernel.load(), inputs), expected)]
        micros = {kernel.name: float("inf") for kernel in right}
        for _ in range(_ROUNDS):
            for kernel in right:
                micros[kernel.name] = min(micros[kernel.name], _micros(kernel, inputs, place))
        fastest = min(micros, key=micros.__getitem__)
        table[operation] = {"chosen": fastest, "microseconds": micros}
        wrong = sorted({kernel.name for kernel in runnable} - micros.keys())
        if wrong:
            table[operation]["differ"] = wrong
    return table


def example_inputs(operation: str, device: torch.device, tokens: int = 0) -> tuple[Any, ...]:
    """Operands of an operation at the width of a model of a few billion parameters; ``tokens`` 0 is by device."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    count = tokens or _TOKENS[device.type]
    width = 4096 if device.type == "cuda" else 512

    def normal(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=like)

    if operation == "rms_norm":
        return normal(1, count, width).requires_grad_(), normal(width).requires_grad_(), 1e-5
    if operation == "swiglu":
        return tuple(normal(1, count, 2 * width).requires_grad_() for _ in range(2))
    if operation == "rope":
        angles = normal(1, count, 1, 32, like=torch.float32)
        heads = (width // 64, width // 256)
        return *(normal(1, count, n, 64).requires_grad_() for n in heads), angles.cos(), angles.sin()
    labels = torch.randint(0, 2 * width, (1, count), generator=generator, device=device)
    labels[0, ::8] = -100
    return normal(1, count, 2 * width).requires_grad_(), labels


def run_both_ways(function: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Tensor]:
    """Results, and gradients of everything that takes one; the operands are copies."""
    own = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in inputs
    ]  # fmt: skip
    found = function(*own)
    results = list(found) if isinstance(found, tuple) else [found]
    generator = torch.Generator(results[0].device).manual_seed(1)
    gradients = [
        torch.randn(r.shape, generator=generator, device=r.device, dtype=torch.float32).to(r.dtype)
        if r.ndim else torch.ones_like(r)
        for r in results
    ]  # fmt: skip
    wanted = [x for x in own if isinstance(x, Tensor) and x.requires_grad]
    kept = [r.detach().clone() for r in results]
    return [*kept, *torch.autograd.grad(results, wanted, gradients)]


def agrees(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether every result and gradient is as near as rounding explains."""
    for ours, theirs in zip(found, expected, strict=True):
        limit = _ALLOWED[theirs.dtype] * float(theirs.double().abs().max())
        if ours.dtype != theirs.dtype or not float((ours.double() - theirs.double()).abs().max()) <= limit:
            return False
    return True


def _micros(kernel: Kernel, inputs: tuple[Any, ...], device: torch.device) -> float:
    function = kernel.load()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run_both_ways(function, inputs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return round((time.perf_counter() - began) * 1e6, 1)
