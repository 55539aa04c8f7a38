"""Fill tensors of any layout from a step of any other layout.

Each box of a target is filled from the stored boxes that overlap it. Each overlap is one strided copy out of the mapped
file. There are two passes: all ranks check every block that is read, and only if none is damaged, the targets are
written. So a damaged step changes neither model nor optimizer.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from titan_ckpt.errors import Damage, DamageError
from titan_ckpt.format.boxes import Box, intersect
from titan_ckpt.format.index import StoredChunk, StoredTensor
from titan_ckpt.format.names import BLOCK_BYTES, ITEM_BYTES
from titan_ckpt.load.reader import StepReader
from titan_ckpt.state.dtypes import DTYPES
from titan_ckpt.state.sharding import LocalShard, local_part
from titan_ckpt.steps.claim import boot_id
from titan_ckpt.storage.paths import StorePath

Block = tuple[int, int]
"""A file's number in the index, and the block's number in the file."""


def assign_blocks(mine: Iterable[Block], reads: list[bytes], rank: int) -> set[Block]:
    """Which of the blocks that ``rank`` reads (``mine``) it must check: on each machine, one reader checks a block.

    ``reads`` is the result of `encode_reads` on each rank, in rank order.
    """
    replies = [json.loads(reply) for reply in reads]
    readers: dict[Block, list[int]] = {block: [] for block in mine}
    for mate, reply in enumerate(replies):
        for block in _expand(reply["runs"]) if reply["memory"] == replies[rank]["memory"] else ():
            if block in readers:
                readers[block].append(mate)
    # By the block's number: neighboring blocks of a file go to different ranks.
    return {block for block, those in readers.items() if those[(block[0] + block[1]) % len(those)] == rank}


def encode_reads(blocks: Iterable[Block], path: StorePath, rank: int) -> bytes:
    """What a rank sends to the others: the blocks that it reads, and an id of the memory that it maps them from.

    The id is equal on two ranks if they map the same pages: same machine, file system and folder. Ranks that read from a
    store have different ids.
    """
    memory: list[str | int | None] = [rank]
    if isinstance(path, Path):
        found = path.stat()
        memory = [boot_id(), found.st_dev, found.st_ino]
    return json.dumps({"memory": memory, "runs": block_runs(blocks)}).encode()


def block_runs(blocks: Iterable[Block]) -> list[list[int]]:
    """Runs of neighboring blocks, as ``[file, first, last]``, in order."""
    runs: list[list[int]] = []
    for file, block in sorted(blocks):
        if runs and runs[-1][0] == file and runs[-1][2] == block - 1:
            runs[-1][2] = block
        else:
            runs.append([file, block, block])
    return runs


def _expand(runs: Iterable[list[int]]) -> Iterator[Block]:
    return ((file, block) for file, first, last in runs for block in range(first, last + 1))


# Compressed rows are decompressed about this many bytes at a time.
_UNPACKED_BYTES = 32 << 20

Verify = Literal["touched", "all", "none"]
"""Check the blocks that are read, every block of the step, or only sizes, manifest and index."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The overlap of a stored box and a target's box."""

    into: Tensor
    """View of the target."""
    stored: StoredTensor
    chunk: StoredChunk
    box: Box
    """The overlap, in the whole tensor's coordinates."""


def plan_copies(
    stored: StoredTensor, target: Tensor, path: str, *, cast: bool, shard: LocalShard | None = None
) -> list[Copy]:
    """The copies that fill this rank's part of ``target``.

    Raises:
        ValueError: If shapes differ, dtypes differ without ``cast``, or the step does not hold every element.
    """
    part = local_part(target, path, shard)
    if part.shape != stored.shape:
        raise ValueError(
            f"{path} has shape {list(part.shape)}, but {list(stored.shape)} was saved. Build the same model."
        )
    if DTYPES[stored.dtype] != target.dtype and not cast:
        raise ValueError(
            f"{path} is {target.dtype}, but {DTYPES[stored.dtype]} was saved: a resume would not be exact. Build it "
            "in that dtype, or pass strict=False to convert."
        )
    copies: list[Copy] = []
    for i, (wanted, _) in enumerate(part.boxes):
        found = box_copies(stored, wanted, part.view(i))
        covered = sum(math.prod(copy.box[1]) for copy in found)
        if covered != wanted.numel:
            raise ValueError(f"{path}: the step holds {covered} of the {wanted.numel} elements this rank needs.")
        copies += found
    return copies


def box_copies(stored: StoredTensor, box: Box, into: Tensor) -> list[Copy]:
    """The copies that fill ``into`` with a box of a stored tensor. Both have the same shape."""
    found = [(chunk, intersect(box, chunk.box)) for chunk in stored.overlapping(box)]
    return [Copy(narrow(into, box[0], common), stored, chunk, common) for chunk, common in found if common]


def touched_blocks(reader: StepReader, copies: Mapping[str, list[Copy]]) -> set[Block]:
    """The blocks that the copies read."""
    return {
        (file, block)
        for file, begin, end in _file_runs(reader, copies)
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))
    }


def check_blocks(reader: StepReader, blocks: Iterable[Block]) -> list[Damage]:
    """Check blocks in file order. Blocks that were checked before are skipped."""
    ranges = [(file, first * BLOCK_BYTES, (last + 1) * BLOCK_BYTES) for file, first, last in block_runs(blocks)]
    reader.fetch_many(ranges)
    return [damage for file, begin, end in ranges for damage in reader.check(file, begin, end)]


def check_copies(reader: StepReader, copies: Mapping[str, list[Copy]]) -> list[Damage]:
    """Check the blocks that the copies read."""
    return check_blocks(reader, touched_blocks(reader, copies))


@torch.no_grad()
def run_copies(reader: StepReader, copies: Mapping[str, list[Copy]]) -> None:
    """Fill the targets."""
    reader.fetch_many(_file_runs(reader, copies))
    for listed in copies.values():
        for copy in listed:
            for into, values in _values(reader, copy):
                into.copy_(values)


def read_tensor(reader: StepReader, section: str, key: str) -> Tensor:
    """Read and check a whole tensor, on the CPU.

    Raises:
        ValueError: If the step has no such tensor.
        DamageError: If it is damaged.
    """
    stored = reader.index.find(section, key)
    if stored is None:
        raise ValueError(f"{reader.path} has no {section} tensor {key!r}.")
    tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    copies = {key: plan_copies(stored, tensor, key, cast=False)}
    damages = check_copies(reader, copies)
    if damages:
        raise DamageError(str(reader.path), damages)
    run_copies(reader, copies)
    return tensor


def narrow(view: Tensor, origin: tuple[int, ...], box: Box) -> Tensor:
    """The part of ``view`` that is ``box``, if ``view`` starts at ``origin``. Both refer to the whole tensor."""
    for dim, (at, begin, size) in enumerate(zip(origin, box[0], box[1], strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, begin - at, size)
    return view


def _values(reader: StepReader, copy: Copy) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a copy: the target, and the values as a view of the file or of decompressed rows."""
    chunk, dtype = copy.chunk, DTYPES[copy.stored.dtype]
    if chunk.frames is None:
        begin, end = reader.span(copy.stored, chunk)
        raw = torch.frombuffer(reader.bytes_of(chunk.file), dtype=torch.uint8, count=end - begin, offset=begin)
        if raw.data_ptr() % ITEM_BYTES[copy.stored.dtype]:
            raw = raw.clone()  # a file of another writer may not be aligned
        yield copy.into, narrow(raw.view(dtype).view(chunk.sizes), chunk.offsets, copy.box)
        return
    row_bytes = math.prod(chunk.sizes[1:]) * ITEM_BYTES[copy.stored.dtype]
    (first, *inner_offsets), (count, *inner_sizes) = copy.box
    step = max(_UNPACKED_BYTES // row_bytes, 1)
    for at in range(first, first + count, step):
        n = min(step, first + count - at)
        begin = (at - chunk.offsets[0]) * row_bytes
        data = reader.data(copy.stored, chunk, begin, begin + n * row_bytes)
        rows = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(n, *chunk.sizes[1:])
        box = (at, *inner_offsets), (n, *inner_sizes)
        yield copy.into.narrow(0, at - first, n), narrow(rows, (at, *chunk.offsets[1:]), box)


def _file_runs(reader: StepReader, copies: Mapping[str, list[Copy]]) -> Iterator[tuple[int, int, int]]:
    """File and byte range of everything that copies read; gaps shorter than a block are included."""
    for listed in copies.values():
        for copy in listed:
            for begin, end in _data_runs(copy):
                yield copy.chunk.file, *reader.stored_range(copy.stored, copy.chunk, begin, end)


def _data_runs(copy: Copy) -> Iterator[tuple[int, int]]:
    """The byte ranges of the chunk's uncompressed data that a copy reads."""
    item = ITEM_BYTES[copy.stored.dtype]
    sizes = copy.chunk.sizes
    if not sizes:
        yield 0, item
        return
    strides = [math.prod(sizes[d + 1 :]) * item for d in range(len(sizes))]
    low = [b - o for b, o in zip(copy.box[0], copy.chunk.offsets, strict=True)]
    last = [at + n - 1 for at, n in zip(low, copy.box[1], strict=True)]
    inner_begin = sum(at * stride for at, stride in zip(low[1:], strides[1:], strict=True))
    inner_end = sum(at * stride for at, stride in zip(last[1:], strides[1:], strict=True)) + item
    if strides[0] < BLOCK_BYTES:
        yield low[0] * strides[0] + inner_begin, last[0] * strides[0] + inner_end
        return
    for index in range(low[0], last[0] + 1):
        yield index * strides[0] + inner_begin, index * strides[0] + inner_end
