"""Read a committed step: map its files, check the blocks that are read, return bytes. No torch.

A file is mapped copy-on-write after its size was checked: a page past the end of a file is a bus error, not an exception.
A block is checked once. JSON files are read, not mapped. No file is opened before the index was checked
(`titan_ckpt.format.validate`) and no file is a link out of the step's folder.
"""

import base64
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from titan_ckpt.errors import Damage, DamageError, malformed_is_damage
from titan_ckpt.format import tagged_json
from titan_ckpt.format.codec import FRAME_BYTES, block_digests, unpack_frame
from titan_ckpt.format.index import FileRecord, StoredChunk, StoredTensor
from titan_ckpt.format.manifest import Manifest, check_size, read_file
from titan_ckpt.format.names import BLOCK_BYTES, INDEX_NAME, ITEM_BYTES, STATE_NAME, parse_object, rank_state_name
from titan_ckpt.format.validate import check_index, check_shared_state
from titan_ckpt.storage.files import MappedFile, fetch_all, links_out
from titan_ckpt.storage.paths import StorePath, as_path

HELD_BLOCKS = 8
"""Blocks of 4 MiB that `StepReader.release` leaves in memory."""


class StepReader:
    """Reads a committed step, with digests.

    Args:
        path: The step's folder.
        all_sizes: Check the size of every file now. False: only of files that are mapped, then. That is for the ranks of a
            restore of which another one checks all: a step has as many files as ranks saved it.

    Raises:
        DamageError: If the manifest or the index is damaged or malformed, or a file is missing, has another size, or is
            outside of the step's folder.
    """

    def __init__(self, path: StorePath | os.PathLike[str] | str, *, all_sizes: bool = True) -> None:
        self.manifest = Manifest.open(path) if all_sizes else Manifest.read(as_path(path))
        with malformed_is_damage(self.manifest.path, INDEX_NAME):
            index = self.manifest.read_index()
            check_index(index)
        _refuse_links_out(self.manifest.path, [record.name for record in index.files])
        self.path, self.index = self.manifest.path, index
        self._maps: dict[int, MappedFile] = {}
        self._checked: dict[int, set[int]] = {}
        self._owners: dict[int, list[tuple[int, int, str]]] | None = None

    def bytes_of(self, file: int) -> memoryview:
        """All bytes of a file, unchecked. Writes do not change the file. Remote bytes must be fetched first."""
        return self._mapped(file).view

    def fetch_many(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Fetch ranges (file, begin, end), several at a time."""
        fetch_all((self._mapped(file), begin, end) for file, begin, end in ranges)

    def release(self) -> None:
        """Give back the memory of what was fetched from a store, if it is more than a few blocks, which small tensors share.

        It is fetched and checked anew when it is needed.
        """
        if not isinstance(self.path, Path) and sum(len(mapped.fetched) for mapped in self._maps.values()) > HELD_BLOCKS:
            self._maps.clear()
            self._checked.clear()

    def _mapped(self, file: int) -> MappedFile:
        if file not in self._maps:
            record = self.index.files[file]
            if damage := check_size(self.path, record.name, record.size):
                raise DamageError(str(self.path), [damage])
            self._maps[file] = MappedFile(self.path / record.name, record.size)
        return self._maps[file]

    def span(self, tensor: StoredTensor, chunk: StoredChunk) -> tuple[int, int]:
        """Begin and end of a chunk in its file."""
        begin = self.index.files[chunk.file].data_start + chunk.start
        if chunk.frames is not None:
            return begin, begin + sum(chunk.frames)
        return begin, begin + math.prod(chunk.sizes) * ITEM_BYTES[tensor.dtype]

    def stored_range(self, tensor: StoredTensor, chunk: StoredChunk, begin: int, end: int) -> tuple[int, int]:
        """Begin and end, in the file, of what holds bytes ``begin`` to ``end`` of a chunk's data."""
        base, _ = self.span(tensor, chunk)
        if chunk.frames is None:
            return base + begin, base + end
        first, last = begin // FRAME_BYTES, -(-end // FRAME_BYTES)
        return base + sum(chunk.frames[:first]), base + sum(chunk.frames[:last])

    def data(self, tensor: StoredTensor, chunk: StoredChunk, begin: int, end: int) -> memoryview:
        """Bytes ``begin`` to ``end`` of a chunk's data, mapped or decompressed, unchecked. Writable.

        Raises:
            DamageError: If a frame cannot be decompressed.
        """
        file = self.bytes_of(chunk.file)
        at, stop = self.stored_range(tensor, chunk, begin, end)
        self.fetch_many([(chunk.file, at, stop)])
        if chunk.frames is None:
            return file[at:stop]
        item, total = ITEM_BYTES[tensor.dtype], math.prod(chunk.sizes) * ITEM_BYTES[tensor.dtype]
        first, raw = begin // FRAME_BYTES, bytearray()
        for number in range(first, -(-end // FRAME_BYTES)):
            frame_bytes = min(FRAME_BYTES, total - number * FRAME_BYTES)
            with malformed_is_damage(self.path, self.index.files[chunk.file].name):
                raw += unpack_frame(file[at : at + chunk.frames[number]], frame_bytes, item)
            at += chunk.frames[number]
        return memoryview(raw)[begin - first * FRAME_BYTES : end - first * FRAME_BYTES]

    def check(self, file: int, begin: int, end: int) -> list[Damage]:
        """Check the blocks of bytes ``begin`` to ``end`` of a file, each block once; return the damage."""
        damages: list[Damage] = []
        record = self.index.files[file]
        checked = self._checked.setdefault(file, set())
        self.fetch_many([(file, begin, end)])
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            if block in checked:
                continue
            at = block * BLOCK_BYTES
            if block_digests(self.bytes_of(file)[at : at + BLOCK_BYTES]) != [record.blocks[block]]:
                damages.append(self._damage(file, record, block))
            checked.add(block)
        return damages

    def check_all(self) -> Iterator[tuple[int, list[Damage]]]:
        """Check every block; after each, yield its size and damage."""
        for file, record in enumerate(self.index.files):
            for at in range(0, record.size, BLOCK_BYTES):
                end = min(at + BLOCK_BYTES, record.size)
                yield end - at, self.check(file, at, end)
                self.release()

    def check_values(self) -> None:
        """Read every state file and decompress every frame, of a step whose blocks are intact.

        Raises:
            DamageError: If a restore could not decode one. Arrays of numpy are not looked into.
        """
        for record in self.index.files:
            if record.name.endswith(".json"):
                with malformed_is_damage(self.path, record.name):
                    tagged_json.decode(self.read_state(record.name), self._check_leaf)
        for tensor in self.index.tensors.get("optim", {}).values():
            for chunk in tensor.chunks:
                size = math.prod(chunk.sizes) * ITEM_BYTES[tensor.dtype]
                for begin in range(0, size if chunk.frames is not None else 0, FRAME_BYTES):
                    self.data(tensor, chunk, begin, min(begin + FRAME_BYTES, size))
                self.release()

    def _check_leaf(self, tag: str, body: Any) -> None:
        """Raise for a value that `titan_ckpt.state.leaves.decode` refuses, as far as that shows without torch and numpy."""
        if tag == "$stored":
            if self.index.find("extra", body) is None:
                raise ValueError(f"the step has no extra tensor {body!r}.")
        elif tag == "$tensor":
            dtype, shape, text = body
            if min(shape, default=0) < 0 or len(base64.b64decode(text)) != math.prod(shape) * ITEM_BYTES[dtype]:
                raise ValueError(f"the bytes of a tensor are not {dtype} of shape {shape}.")
        elif tag not in ("$ndarray", "$numpy", "$dtype", "$device", "$size"):
            raise ValueError(f"unknown tag {tag!r} in a state file: it was written by a newer version.")

    def read_state(self, name: str) -> dict[str, Any]:
        """A JSON state file, checked and still encoded.

        Raises:
            DamageError: If it is damaged or malformed.
            ValueError: If the step has no such file.
        """
        data = self._read(name)
        with malformed_is_damage(self.path, name):
            state = parse_object(data, name)
            if name == STATE_NAME:
                check_shared_state(state)
            tagged_json.decode(state, lambda tag, body: None)  # raises for a malformed tag, and for too deep nesting
        return state

    def shared_state(self) -> dict[str, Any]:
        """The plain state of the run. Raises as `read_state`."""
        return self.read_state(STATE_NAME)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """The plain state of one rank; empty if it has none. Raises as `read_state`."""
        name = rank_state_name(rank)
        return {} if self.index.file_number(name) is None else self.read_state(name)

    def _read(self, name: str) -> bytes:
        """A small file's bytes. It is not mapped: a file that is cut short meanwhile is damage, not a bus error."""
        file = self.index.file_number(name)
        if file is None:
            raise ValueError(f"{self.path} has no {name}.")
        record, data = self.index.files[file], read_file(self.path, name)
        found = block_digests(data)
        damages = [
            self._damage(file, record, block)
            for block, digest in enumerate(record.blocks)
            if found[block : block + 1] != [digest]
        ]
        if len(data) != record.size:
            damages.append(Damage(name, f"has {len(data)} bytes, {record.size} were written"))
        if damages:
            raise DamageError(str(self.path), damages)
        return data

    def _damage(self, file: int, record: FileRecord, block: int) -> Damage:
        at = block * BLOCK_BYTES
        if self._owners is None:
            self._owners = {}
            for tensors in self.index.tensors.values():
                for key, tensor in tensors.items():
                    for chunk in tensor.chunks:
                        self._owners.setdefault(chunk.file, []).append((*self.span(tensor, chunk), key))
        names = [key for begin, end, key in self._owners.get(file, []) if begin < at + BLOCK_BYTES and end > at]
        what = "does not match its digest" + (" (file header)" if at < record.data_start and not names else "")
        return Damage(record.name, what, tuple(sorted(set(names))), block, at)


def _refuse_links_out(folder: StorePath, names: Iterable[str]) -> None:
    """Refuse files that are links out of the folder."""
    if not isinstance(folder, Path):
        return
    damages = [
        Damage(name, f"is a link to {found}, out of the step's folder. Copy the file it links to, if you trust it")
        for name, found in links_out(folder, [INDEX_NAME, *names])
    ]
    if damages:
        raise DamageError(str(folder), damages)
