"""Two ways to keep a running mean, and one to keep a weight, in less than four bytes, with the same bits under every layout.

"bf16" rounds up or down at random, with the chances that keep the expected value: rounding to nearest would leave a mean as it is
whose change is below half a unit in the last place, 1/512 of it. The random bits of an element are a function of the parameter's
name, the step and the element's place in the whole parameter, and of no generator, so that a rank that holds a piece of it
rounds as one process does.

"int8" is that of arXiv:2110.02861: 256 values between -1 and 1 (or 0 and 1), dense near zero, times the largest magnitude of a
block. Blocks are stretches of rows of the whole parameter. Their length is the largest power of two up to 128 of which a row has
a multiple of 16: so FSDP, which cuts between rows, never cuts one, and tensor parallelism over 2, 4 or 8 ranks does not either.
Parameters with shorter rows, and vectors, keep float32 means; they are few. Cost of the magnitudes: 4 / length bytes an element.
"""

import functools
import zlib
from collections.abc import Sequence

import torch
from titan_ckpt.state.sharding import Chunk
from torch import Tensor

_LONGEST, _SHORTEST, _BLOCKS_A_ROW = 128, 8, 16


def block_length(shape: Sequence[int]) -> int:
    """Elements of a block of a parameter of this whole shape; 0 where the means stay float32."""
    if len(shape) < 2:
        return 0
    length = _LONGEST
    while length >= _SHORTEST:
        if shape[-1] % (_BLOCKS_A_ROW * length) == 0:
            return length
        length //= 2
    return 0


def check_columns(name: str, row: int, start: int, length: int, block: int) -> None:
    """Refuse a cut between columns that goes through a block.

    Args:
        name: Of the parameter.
        row: Elements of a whole row.
        start: The first that one rank holds.
        length: How many it holds.
        block: `block_length` of the whole parameter.

    Raises:
        ValueError: It does.
    """
    if start % block or length % block or length < 2 * block:
        raise ValueError(
            f"optimizer.states='int8': {name} with rows of {row} elements is cut into columns {start} to {start + length}, and "
            f"its means are kept in blocks of {block}. Use a parallel.tp that divides 8, or states='bf16'."
        )


def encode(values: Tensor, codes: Tensor, magnitudes: Tensor, *, signed: bool) -> None:
    """Write float32 values as 8-bit codes.

    Args:
        values: ``[..., n]``.
        codes: The same shape, uint8: changed in place.
        magnitudes: ``[..., n / block]`` float32: changed in place.
        signed: The codes' values are from -1 to 1, else from 0 to 1; then a positive value never becomes 0, which could make a
            step of any length.
    """
    blocks = values.unflatten(-1, (magnitudes.shape[-1], -1))
    largest = blocks.abs().amax(-1)
    magnitudes.copy_(largest)
    scaled = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    _, borders = _table(signed, values.device)
    found = torch.bucketize(scaled, borders, out_int32=True)
    if not signed:
        found.clamp_(min=(blocks > 0).int())
    codes.unflatten(-1, (magnitudes.shape[-1], -1)).copy_(found)


def decode(codes: Tensor, magnitudes: Tensor, *, signed: bool) -> Tensor:
    """The float32 values of `encode`."""
    table, _ = _table(signed, codes.device)
    blocks = table[codes.int()].unflatten(-1, (magnitudes.shape[-1], -1))
    return (blocks * magnitudes.unsqueeze(-1)).flatten(-2)


@functools.cache
def _table(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values in order, and the borders between them.

    Decades from 1e-6 to 1, each with twice the values of the one below, evenly spaced in it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        middles = ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    return ordered.float().to(device), ((ordered[:-1] + ordered[1:]) / 2).float().to(device)


def random_bits(name: str, step: int, box: Chunk, shape: Sequence[int], device: torch.device) -> Tensor:
    """32 random bits for each element of a box of a parameter.

    Args:
        name: Of the parameter, the same on every rank.
        step: How many updates it has had.
        box: Where the elements are in the whole parameter.
        shape: Of the whole parameter.
        device: Where they are made.

    Returns:
        int32, of the box's sizes.
    """
    index = torch.zeros((), dtype=torch.int32, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(box.offsets[dim], box.offsets[dim] + box.sizes[dim], device=device) * stride
        along = _mixed((along >> 32).int()) ^ along.int() if stride * shape[dim] > 1 << 32 else along.int()
        index = index + along.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= shape[dim]
    key = zlib.crc32(f"{name}:{step}".encode())
    return _mixed(_mixed(index * _signed(0x9E3779B1) + _signed(key)) + _signed(key * 0x85EBCA77))


def stochastic_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 to bfloat16, up with the chance of the part that is cut off.

    Args:
        values: Any shape; what is not finite stays so.
        bits: int32 of that shape; the lower 16 count, and are random.
    """
    raw = values.view(torch.int32)
    moved = torch.where(values.isfinite(), raw + (bits & 0xFFFF), raw) & ~0xFFFF
    return moved.view(torch.float32).bfloat16()


def _mixed(x: Tensor) -> Tensor:
    """MurmurHash3's finalizer: every bit of the result depends on every bit of an int32."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * _signed(0x85EBCA6B)
    x = x ^ (x >> 13 & 0x7FFFF)
    x = x * _signed(0xC2B2AE35)
    return x ^ (x >> 16 & 0xFFFF)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
