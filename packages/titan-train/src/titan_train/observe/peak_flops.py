"""What a device can reach at most: the denominator of MFU.

A wrong denominator gives a wrong MFU that looks right (an H100 PCIe is a quarter slower than an SXM; a MIG slice
carries its parent's name). So a name must match a whole pattern of the table, and everything else has no peak: the
run then shows no MFU.

Figures are dense (no 2:4 sparsity), TFLOP/s, from the makers' data sheets and architecture white papers, with float32
accumulation where the maker separates it (GeForce cards halve their rate with it). Where a data sheet prints only
"with sparsity", half of that is taken. A power cap or a shared chassis lowers what can be reached, not the peak.
"""

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
"""Arithmetic of the matrix products. ``fp32`` is true float32, torch's default; ``tf32`` when it is allowed."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Peak TFLOP/s of a device by dtype; None where the hardware has no such units or no figure was found."""

    names: str  # regular expression for the whole name, as torch.cuda.get_device_name gives it, without the maker
    source: str
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    tf32: float | None = None
    fp32: float | None = None


_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet; Hopper white paper v1.04"
_AMPERE = "NVIDIA A100 Tensor Core GPU data sheet"
_GA102 = "NVIDIA Ampere GA102 white paper v2.1"
_ADA = "NVIDIA Ada GPU architecture white paper v2.1"

_PARTS = (
    # NVIDIA Blackwell
    _Part("B200", "NVIDIA DGX B200 / HGX data sheet, per GPU", bf16=2250, fp16=2250, fp8=4500, tf32=1100, fp32=75),
    _Part("B300 SXM6 AC", "NVIDIA HGX B300 data sheet, per GPU", bf16=2250, fp16=2250, fp8=4500, tf32=1125, fp32=75),
    _Part("GB200", "NVIDIA GB200 NVL72 data sheet, per GPU", bf16=2500, fp16=2500, fp8=5000, tf32=1250, fp32=80),
    _Part(
        "GeForce RTX 5090", "NVIDIA RTX Blackwell white paper", bf16=209.5, fp16=209.5, fp8=419, tf32=104.8, fp32=104.8
    ),
    # NVIDIA Hopper
    _Part("H100 80GB HBM3|H100 SXM5.*|H800", _HOPPER, bf16=989.4, fp16=989.4, fp8=1978.9, tf32=494.7, fp32=66.9),
    _Part("H100 PCIe", _HOPPER, bf16=756, fp16=756, fp8=1513, tf32=378, fp32=51.2),
    _Part("H100 NVL", _HOPPER, bf16=835, fp16=835, fp8=1671, tf32=418, fp32=60),
    _Part("H200", "NVIDIA H200 data sheet", bf16=989.4, fp16=989.4, fp8=1978.9, tf32=494.7, fp32=66.9),
    _Part("H200 NVL", "NVIDIA H200 data sheet", bf16=836, fp16=836, fp8=1671, tf32=418, fp32=60),
    _Part("GH200 (480GB|144G HBM3e|120GB)", "NVIDIA GH200 data sheet", bf16=990, fp16=990, fp8=1979, tf32=494, fp32=67),
    _Part("H20", "NVIDIA H20 product brief", bf16=148, fp16=148, fp8=296, tf32=74, fp32=44),
    # NVIDIA Ada
    _Part("L40S", "NVIDIA L40S data sheet", bf16=362.05, fp16=362.05, fp8=733, tf32=183, fp32=91.6),
    _Part("L40", "NVIDIA L40 data sheet", bf16=181.05, fp16=181.05, fp8=362, tf32=90.5, fp32=90.5),
    _Part("L4", "NVIDIA L4 data sheet", bf16=121, fp16=121, fp8=242.5, tf32=60, fp32=30.3),
    _Part("RTX 6000 Ada Generation", _ADA, bf16=364.2, fp16=364.2, fp8=728.5, tf32=182.1, fp32=91.1),
    _Part("GeForce RTX 4090", _ADA, bf16=165.2, fp16=165.2, fp8=330.3, tf32=82.6, fp32=82.6),
    # NVIDIA Ampere
    _Part(
        "A100-SXM4-[48]0GB|A100-PCIE-40GB|A100 80GB PCIe|A800-SXM4-80GB",
        _AMPERE,
        bf16=312,
        fp16=312,
        tf32=156,
        fp32=19.5,
    ),
    _Part("A40", "NVIDIA A40 data sheet", bf16=149.7, fp16=149.7, tf32=74.8, fp32=37.4),
    _Part("A30", "NVIDIA A30 data sheet", bf16=165, fp16=165, tf32=82, fp32=10.3),
    _Part("A10", "NVIDIA A10 data sheet", bf16=125, fp16=125, tf32=62.5, fp32=31.2),
    _Part("RTX A6000", _GA102, bf16=154.8, fp16=154.8, tf32=77.4, fp32=38.7),
    _Part("GeForce RTX 3090", _GA102, bf16=71, fp16=71, tf32=35.6, fp32=35.6),
    # NVIDIA Volta and Turing: no bf16 units
    _Part("V100-SXM2-(16|32)GB", "NVIDIA V100 data sheet", fp16=125, fp32=15.7),
    _Part("T4", "NVIDIA T4 data sheet", fp16=65, fp32=8.1),
    # AMD CDNA 3 and 4
    _Part(
        "Instinct MI300X",
        "AMD Instinct MI300X data sheet",
        bf16=1307.4,
        fp16=1307.4,
        fp8=2614.9,
        tf32=653.7,
        fp32=163.4,
    ),
    _Part(
        "Instinct MI325X",
        "AMD Instinct MI325X data sheet",
        bf16=1307.4,
        fp16=1307.4,
        fp8=2614.9,
        tf32=653.7,
        fp32=163.4,
    ),
    _Part("Instinct MI355X", "AMD Instinct MI355X data sheet", bf16=2516.6, fp16=2516.6, fp8=5033.2, fp32=157.3),
)
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
    if bare == name:  # every maker's driver puts its name first; a bare name is somebody's short-hand
        return None
    for part in _PARTS:
        if re.fullmatch(part.names, bare):
            tflops = cast("float | None", getattr(part, dtype))
            return None if tflops is None else tflops * 1e12
    return None
