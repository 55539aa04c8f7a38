"""What float8 costs each layer, in numbers: largest value, underflow, saturation, and signal over quantisation noise."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from titan_fp8.convert.patterns import clean_fqn
from titan_fp8.layers.linear import Float8Linear, plain_weight
from titan_fp8.products import cast
from titan_fp8.recipe import Scaling
from titan_fp8.reference import FLOAT8_MAX, dequantize
from titan_fp8.weights.gathered import GatheredWeight
from titan_fp8.weights.sharded import is_dtensor


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor against its float8 cast."""

    amax: float
    """Largest finite magnitude."""
    underflow: float
    """Share of the non-zero values that became zero."""
    saturation: float
    """Share of the values at the format's largest code."""
    non_finite: float
    """Share of the values that were NaN or infinite (and are NaN in float8)."""
    sqnr_db: float
    """Signal over quantisation noise, decibels: about 31.5 for normal data in e4m3, 25.6 in e5m2. Infinite if exact."""


@torch.no_grad()
def tensor_stats(x: Tensor, scaling: Scaling) -> TensorStats:
    """Cast a matrix ``[M, K]`` and compare. Waits for the device."""
    rows, columns = x.shape
    q = cast(x, scaling, layouts="rows")
    assert q.data is not None
    assert q.scale is not None
    values = dequantize(q.data, q.scale, scaling.gran)[:rows, :columns].double()
    exact = x.double()
    finite = exact.isfinite()
    count = max(1, x.numel())
    exact = torch.where(finite, exact, 0.0)
    values = torch.where(finite, values, 0.0)
    non_zero = exact != 0
    top = q.data[:rows, :columns].float().abs() == FLOAT8_MAX[scaling.dtype]
    noise = (values - exact).square().sum().item()
    signal = exact.square().sum().item()
    return TensorStats(
        amax=exact.abs().max().item() if x.numel() else 0.0,
        underflow=((values == 0) & non_zero).sum().item() / max(1, int(non_zero.sum().item())),
        saturation=top.sum().item() / count,
        non_finite=(~finite).sum().item() / count if x.numel() else 0.0,
        sqnr_db=math.inf if noise == 0 else 10 * math.log10(signal / noise) if signal else -math.inf,
    )


def stats(model: nn.Module) -> dict[str, TensorStats]:
    """The weights of all float8 layers against their casts, by name. A sharded weight is judged by this rank's shard."""
    return {name: tensor_stats(_local(layer.weight), layer.recipe.w) for name, layer in _layers(model)}


@contextmanager
def record_stats(model: nn.Module) -> Generator[dict[str, dict[str, TensorStats]], None, None]:
    """Judge inputs, weights and output gradients of the forwards and backwards run inside; the last of each stays.

    Waits for the device at every layer: for diagnosis, not for training steps. Eager mode. A weight that FSDP2 gathers in float8
    is judged on entry, by this rank's shard: what is gathered are its codes.

    Yields:
        Name of layer → ``{"input": …, "weight": …, "grad": …}``, filled as layers run.
    """
    found: dict[str, dict[str, TensorStats]] = {}
    for name, layer in _layers(model):
        if plain_weight(layer.weight) is not layer.weight:
            found[name] = {"weight": tensor_stats(_local(layer.weight), layer.recipe.w)}
    handles = [
        layer.register_forward_hook(_recorder(found.setdefault(name, {})), with_kwargs=True)
        for name, layer in _layers(model)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _recorder(entry: dict[str, TensorStats]) -> Any:
    def record(layer: Float8Linear, args: tuple[Tensor, ...], named: dict[str, Tensor], out: Tensor) -> None:
        x = args[0] if args else named["input"]
        entry["input"] = tensor_stats(_rows(x.detach()), layer.recipe.x)
        if not isinstance(layer.weight, GatheredWeight):
            entry["weight"] = tensor_stats(_local(layer.weight), layer.recipe.w)

        def record_grad(grad: Tensor) -> None:
            entry["grad"] = tensor_stats(_rows(grad), layer.recipe.g)

        if out.requires_grad:
            out.register_hook(record_grad)

    return record


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _layers(model: nn.Module) -> list[tuple[str, Float8Linear]]:
    return [(clean_fqn(n), m) for n, m in model.named_modules() if isinstance(m, Float8Linear)]


def _local(weight: Tensor) -> Tensor:
    plain = plain_weight(weight).detach()
    return plain.to_local() if is_dtensor(plain) else plain
