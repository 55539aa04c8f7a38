"""Torch dtypes and their safetensors names."""

import torch

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Safetensors dtype name to torch dtype."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, path: str) -> str:
    """The safetensors name of ``dtype``.

    Raises:
        TypeError: If safetensors has no such dtype (complex128, quantized ones).
    """
    if dtype not in _NAMES:
        raise TypeError(
            f"{path} has dtype {dtype}, which safetensors cannot hold. Convert it to one of {sorted(DTYPES)}."
        )
    return _NAMES[dtype]
