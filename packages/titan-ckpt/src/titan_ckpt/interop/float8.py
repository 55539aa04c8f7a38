"""Store matrices as float8 with block scales, as DeepSeek-V3 (arXiv:2412.19437) is published.

Each block of 128 x 128 is divided by its scale and rounded to e4m3. The scale is the block's largest magnitude over 448,
the largest e4m3 value. The scales are a second, float32 matrix. `titan_ckpt.interop.views.ScaledView` reads such pairs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_ckpt.format.boxes import Box
from titan_ckpt.interop.views import View, read_box
from titan_ckpt.state.dtypes import DTYPES

BLOCK = 128
SUFFIX = "_scale_inv"
_LARGEST = 448.0  # of e4m3


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as float8.

    Args:
        matrix: ``[R, C]``, any float dtype.

    Returns:
        ``[R, C]`` e4m3, and its scales ``[ceil(R / 128), ceil(C / 128)]`` float32.
    """
    rows, columns = matrix.shape
    down, across = -(-rows // BLOCK), -(-columns // BLOCK)
    padded = torch.zeros(down * BLOCK, across * BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, BLOCK, across, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(amax > 0, amax / _LARGEST, torch.ones_like(amax))
    stored = (blocks / scales[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return stored.view_as(padded)[:rows, :columns].contiguous(), scales


def dequantize(stored: Tensor, scales: Tensor) -> Tensor:
    """Undo `quantize`, in float32."""
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return stored.float() * wide[: stored.shape[0], : stored.shape[1]]


def with_scales(views: Mapping[str, View], chosen: frozenset[str]) -> dict[str, View]:
    """The views, with the chosen ones as float8 and each one's scales after it.

    Raises:
        ValueError: If a chosen tensor is missing, or is not a floating-point matrix.
    """
    if unknown := sorted(chosen - views.keys()):
        raise ValueError(f"{unknown[:4]} are not exported, so they cannot be stored as float8. Leave them out.")
    found: dict[str, View] = {}
    for name, view in views.items():
        if name not in chosen:
            found[name] = view
            continue
        if len(view.shape) != 2 or not DTYPES[view.dtype].is_floating_point:
            raise ValueError(
                f"{name!r} of shape {list(view.shape)} and dtype {view.dtype} cannot be stored as float8: it is not a "
                "floating-point matrix. Choose fewer names."
            )
        found[name] = Float8View(view)
        found[name + SUFFIX] = Float8ScalesView(view)
    return found


class Float8View(View):
    """A matrix divided by the scales of its blocks, as e4m3."""

    def __init__(self, base: View) -> None:
        super().__init__("F8_E4M3", base.shape)
        self.base = base

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        return [(self.base, _whole_blocks(box, self.shape))]

    def fill(self, box: Box, into: Tensor) -> None:
        ((base, covering),) = self.needs(box)
        stored = quantize(read_box(base, covering).float())[0]
        for dim in range(2):
            stored = stored.narrow(dim, box[0][dim] - covering[0][dim], box[1][dim])
        into.copy_(stored)


class Float8ScalesView(View):
    """The scales of a `Float8View`."""

    def __init__(self, base: View) -> None:
        super().__init__("F32", [-(-size // BLOCK) for size in base.shape])
        self.base = base

    def needs(self, box: Box) -> list[tuple[View, Box]]:
        low = tuple(at * BLOCK for at in box[0])
        high = [min((at + n) * BLOCK, size) for at, n, size in zip(*box, self.base.shape, strict=True)]
        return [(self.base, (low, tuple(end - start for start, end in zip(low, high, strict=True))))]

    def fill(self, box: Box, into: Tensor) -> None:
        for row in range(box[1][0]):  # one row of blocks at a time
            line = ((box[0][0] + row, box[0][1]), (1, box[1][1]))
            into[row : row + 1].copy_(quantize(read_box(*self.needs(line)[0]).float())[1])


def _whole_blocks(box: Box, shape: tuple[int, ...]) -> Box:
    low = tuple(at // BLOCK * BLOCK for at in box[0])
    high = [min(-(-(at + n) // BLOCK) * BLOCK, size) for at, n, size in zip(*box, shape, strict=True)]
    return low, tuple(end - start for start, end in zip(low, high, strict=True))
