"""What a device can reach at most: the denominator of MFU, from the table ``peaks.toml``.

A wrong denominator gives a wrong MFU that looks right (an H100 PCIe is a quarter slower than an SXM; a MIG slice
carries its parent's name). So a name must match a whole pattern of the table, and everything else has no peak: the
run then shows no MFU.
"""

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
"""Arithmetic of the matrix products. ``fp32`` is true float32, torch's default; ``tf32`` when it is allowed."""

_MAKER = re.compile(r"^(NVIDIA|Tesla|AMD)\s+")


def device_peak_flops(device_name: str, dtype: Dtype) -> float | None:
    """Dense peak FLOP/s of one device, or None when it is not known for certain.

    Args:
        device_name: As ``torch.cuda.get_device_name()`` gives it, such as ``"NVIDIA H100 80GB HBM3"``.
        dtype: Arithmetic of the matrix products.

    Returns:
        FLOP/s; None for a device that is not in the table, a slice of one (MIG), a CPU, or a dtype it has no units for.

    Raises:
        ValueError: If ``dtype`` is not one of ``Dtype``.
    """
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r} has no peak; use one of {', '.join(get_args(Dtype))}.")
    name = device_name.strip()
    bare = _MAKER.sub("", name)
    if bare == name:  # every maker's driver puts its name first; a bare name is shorthand
        return None
    tflops = next((device.get(dtype) for device in _devices() if re.fullmatch(device["names"], bare)), None)
    return None if tflops is None else tflops * 1e12


@cache
def _devices() -> list[dict[str, Any]]:
    text = resources.files("titan_train.observe").joinpath("peaks.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["device"]
