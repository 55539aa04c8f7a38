"""Where each group's tiles of 128 rows lie: a table on the device that grouped casts and products read.

Rows are sorted by group, and tiles are counted group by group, so that a tile holds rows of one group only. That is also the
padded order of a grouped cast, where every group starts at a multiple of 128 tokens. The rows of no group, those at or
beyond ``offs[-1]``, form one more group. The host never reads the offsets.
"""
# Triton kernels are not Python: their arguments and launches have no types.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8.kernels.triton.launch import launch
from titan_fp8.reference import padded_tokens


@triton.jit
def group_tiles_kernel(offs, tiles, offs_padded, M, E, GROUPS: tl.constexpr, PADDED: tl.constexpr):
    """One tile per program.

    Args:
        offs: Group ends ``[E]``.
        tiles: ``[T + 1, 4]`` int32: of each tile its group, its first row and the end of its group's rows, and in the last
            row the number of tiles that hold rows. Of the other tiles the group is E and the end 0.
        offs_padded: Ends of the groups in the padded order ``[E]``, written with ``PADDED``.
        M: Rows.
        E: Groups.
        GROUPS: A power of two above ``E``.
        PADDED: See ``offs_padded``.
    """
    tile = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    ends = tl.load(offs + groups, mask=groups < E, other=M)  # beyond E: the rows of no group
    starts = tl.load(offs + groups - 1, mask=(groups > 0) & (groups <= E), other=M)
    starts = tl.where(groups == 0, 0, starts)
    num_tiles = (ends - starts + 127) // 128
    last_tiles = tl.cumsum(num_tiles, axis=0)
    group = tl.sum((last_tiles <= tile).to(tl.int32), axis=0)
    here = groups == group
    in_group = tile - tl.sum(tl.where(here, last_tiles - num_tiles, 0), axis=0)
    own = tiles + tile * 4
    tl.store(own, tl.minimum(group, E))
    tl.store(own + 1, tl.sum(tl.where(here, starts, 0), axis=0) + in_group * 128)
    tl.store(own + 2, tl.sum(tl.where(here, ends, 0), axis=0))
    if tile == 0:
        tl.store(tiles + tl.num_programs(0) * 4, tl.max(last_tiles, axis=0))
        if PADDED:
            tl.store(offs_padded + groups, last_tiles * 128, mask=groups < E)


def group_tiles(offs: Tensor, num_rows: int, offs_padded: Tensor | None = None) -> Tensor:
    """The table ``[T + 1, 4]`` of `group_tiles_kernel`; ``T`` bounds the tiles of any offsets.

    Args:
        offs: End of each group, int32 ``[E]``.
        num_rows: M.
        offs_padded: Written with the ends in the padded order, if given.
    """
    num_groups = offs.shape[0]
    most = padded_tokens(num_rows, num_groups + 1) // 128
    tiles = offs.new_empty(most + 1, 4, dtype=torch.int32)
    launch(
        group_tiles_kernel, (most,), offs.contiguous(), tiles, tiles if offs_padded is None else offs_padded,
        num_rows, num_groups, GROUPS=triton.next_power_of_2(num_groups + 1), PADDED=offs_padded is not None, num_warps=1,
    )  # fmt: skip
    return tiles
