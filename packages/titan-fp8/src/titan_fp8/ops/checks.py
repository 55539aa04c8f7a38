"""What the ops refuse, before any kernel or fake runs: torch's CPU path accepts much that CUDA rejects."""

import torch
from torch import Tensor

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALINGS = ("tensor", "row", "block1x128", "block128", "mx32")
GROUPED_SCALINGS = ("tensor", "row", "block1x128", "mx32")
PAIRS = ("tensor·tensor", "row·row", "block1x128·block128", "block1x128·block1x128", "mx32·mx32")
ALIGNMENT = {"tensor": 16, "row": 16, "block1x128": 128, "block128": 128, "mx32": 128}


def check_input(x: Tensor, name: str, dims: tuple[int, ...] = (2,)) -> None:
    """A matrix in a dtype that can be cast."""
    if x.dim() not in dims:
        expected = " or ".join(str(dim) for dim in dims)
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected {expected} dimensions. "
            "Flatten leading dimensions first: x.reshape(-1, x.shape[-1])."
        )
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"{name} is {x.dtype}, which has no float8 cast. Use bfloat16, float16 or float32.")


def check_float8(dtype: torch.dtype) -> None:
    """One of the two formats the tensor cores multiply."""
    if dtype not in FLOAT8:
        raise ValueError(
            f"dtype={dtype} is not a float8 training format. Use torch.float8_e4m3fn or torch.float8_e5m2."
        )


def check_cast(x: Tensor, dtype: torch.dtype) -> None:
    """A cast of one matrix."""
    check_input(x, "x")
    check_float8(dtype)


def check_weights(weights: list[Tensor], dtype: torch.dtype) -> None:
    """Casts of weights in one launch."""
    check_float8(dtype)
    if not weights:
        raise ValueError("weights is empty: there is nothing to cast, and no device to cast on.")
    for index, w in enumerate(weights):
        check_input(w, f"weights[{index}]", dims=(2, 3))
        if w.device != weights[0].device:
            raise ValueError(
                f"weights[{index}] is on {w.device} and weights[0] on {weights[0].device}: one launch casts "
                "weights of one device. Group them by device."
            )


def check_weight(w: Tensor, dtype: torch.dtype) -> None:
    """The cast of one weight."""
    check_weights([w], dtype)


def check_codes(codes: Tensor, multiple: int) -> None:
    """Codes to transpose."""
    if codes.dtype != torch.uint8 or codes.dim() != 2 or multiple < 1:
        raise ValueError(
            f"transpose_codes got {codes.dtype} {tuple(codes.shape)} and multiple={multiple}: it takes float8 codes as bytes, "
            "[N, K], and a positive multiple. Pass codes.view(torch.uint8)."
        )


def check_grouped_cast(x: Tensor, offs: Tensor, dtype: torch.dtype, scaling: str) -> None:
    """The cast of tokens sorted by expert."""
    check_input(x, "x")
    check_offsets(offs)
    check_float8(dtype)
    if scaling not in GROUPED_SCALINGS:
        raise ValueError(f"scaling={scaling!r} is unknown. Use one of {', '.join(GROUPED_SCALINGS)}.")


def check_layer_norm(x: Tensor, gain: Tensor, shift: Tensor, dtype: torch.dtype) -> None:
    """LayerNorm with the cast that follows."""
    check_cast(x, dtype)
    check_same_shape(gain, shift, ("gain", "shift"))
    if gain.ndim != 2 or gain.shape[1] != x.shape[1] or not gain.shape[0] or x.shape[0] % gain.shape[0]:
        raise ValueError(
            f"gain has shape {tuple(gain.shape)}, and x {tuple(x.shape)}: it must be [G, {x.shape[1]}] with G rows that divide "
            f"the {x.shape[0]} rows of x."
        )


def check_same_shape(first: Tensor, second: Tensor, names: tuple[str, str]) -> None:
    """Two operands of an elementwise operation."""
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(
            f"{names[0]} is {first.dtype} {tuple(first.shape)} and {names[1]} is {second.dtype} {tuple(second.shape)}: "
            "they are multiplied element by element. Give both one shape and dtype."
        )


def check_vector(vector: Tensor, size: int, name: str) -> None:
    """A vector of one value per column or row."""
    if vector.shape != (size,):
        raise ValueError(f"{name} has shape {tuple(vector.shape)}, expected ({size},).")


def check_offsets(offs: Tensor) -> None:
    """Group ends, on the device."""
    if offs.dim() != 1 or offs.dtype != torch.int32 or offs.shape[0] == 0:
        raise ValueError(
            f"offs is {offs.dtype} {tuple(offs.shape)}, expected int32 [num_groups], the end of each group: "
            "for example counts.cumsum(0, dtype=torch.int32)."
        )


def check_operand(q: Tensor, scale: Tensor, scaling: str, name: str, batched: bool = False) -> None:
    """Float8 data with scales of the shape that ``scaling`` implies, contraction innermost and aligned."""
    if scaling not in SCALINGS:
        raise ValueError(f"scaling_{name}={scaling!r} is unknown. Use one of {', '.join(SCALINGS)}.")
    if q.dtype not in FLOAT8 or q.dim() != 2 + batched:
        raise ValueError(f"{name} is {q.dtype} {tuple(q.shape)}, expected float8 with {2 + batched} dimensions.")
    if not q.is_contiguous():
        raise ValueError(
            f"{name} has strides {q.stride()}: float8 tensor cores read the contracted dimension contiguously. "
            "Pass the transposed output of a dual cast, not a transposed view."
        )
    multiple = ALIGNMENT[scaling]
    if q.shape[-1] % multiple:
        raise ValueError(
            f"{name} has shape {tuple(q.shape)}: with {scaling!r} scales the contracted size must be a multiple of "
            f"{multiple}. The casts pad to it; keep their padding."
        )
    expected = scale_shape(q, scaling)
    if tuple(scale.shape) not in expected:
        raise ValueError(
            f"scale_{name} has shape {tuple(scale.shape)}, but {name} {tuple(q.shape)} with {scaling!r} scales needs "
            f"{expected[0]}. Pass the scale that the same cast returned."
        )
    wanted = torch.float8_e8m0fnu if scaling == "mx32" else torch.float32
    if scale.dtype != wanted:
        raise ValueError(f"scale_{name} is {scale.dtype}, but {scaling!r} scales are {wanted}.")
    if scaling == "block1x128" and scale.shape[-1] > 1 and scale.shape[-2] > 1 and scale.stride(-2) != 1:
        raise ValueError(
            f"scale_{name} has strides {scale.stride()}: 1x128 scales are stored column by column, strides "
            f"(1, {q.shape[-2]}). Pass the scale that the same cast returned."
        )


def scale_shape(q: Tensor, scaling: str) -> list[tuple[int, ...]]:
    """The scale shapes that fit ``q``."""
    *batch, rows, columns = q.shape
    if scaling == "tensor":
        return [(), tuple(batch)]
    if scaling == "row":
        return [(*batch, rows, 1)]
    if scaling == "block1x128":
        return [(*batch, rows, columns // 128)]
    if scaling == "block128":
        return [(*batch, -(-rows // 128), -(-columns // 512) * 4)]
    return [(*batch, rows, columns // 32)]


def check_product(a: Tensor, b: Tensor, scaling_a: str, scaling_b: str, out_dtype: torch.dtype) -> None:
    """What cuBLASLt can multiply."""
    pair = f"{scaling_a}·{scaling_b}"
    if pair not in PAIRS:
        raise ValueError(f"scaled_mm cannot multiply {pair} operands. It takes {', '.join(PAIRS)}.")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"a{tuple(a.shape)} and b{tuple(b.shape)} differ in their last dimension, the one that is contracted: "
            "scaled_mm computes a · bᵀ."
        )
    if a.dtype == b.dtype == torch.float8_e5m2:
        raise ValueError("a and b are both float8_e5m2, which the tensor cores' library lacks. Cast one to e4m3.")
    if b.shape[-2] % 16:
        raise ValueError(
            f"b has shape {tuple(b.shape)}: its rows become the output's columns, which must be a multiple of 16. "
            "The casts pad to it; keep their padding and cut the output."
        )
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype={out_dtype} is not supported. Use bfloat16, float16 or float32.")
