"""Folders of safetensors files written by anyone: what is where in them, checked, as views."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_ckpt._format import ITEM_BYTES, SECTIONS, decode_header
from titan_ckpt._index import FileRecord, Index, StoredChunk, StoredTensor, pack_tensor
from titan_ckpt._read import FolderReader
from titan_ckpt._views import ScaledView, StoredView, View

HF_INDEX_NAME = "model.safetensors.index.json"

_SCALE_SUFFIX = "_scale_inv"
_DEFAULT_SCALE_BLOCK = (128, 128)


class SafetensorsReader(FolderReader):
    """A folder of safetensors files.

    Args:
        folder: Holds one file, or several; with an index, the files it names must be there.

    Raises:
        ValueError: If a file is missing, not safetensors, or cut short.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        records: list[FileRecord] = []
        tensors: dict[str, StoredTensor] = {}
        for number, name in enumerate(_files(folder)):
            path = folder / name
            size = path.stat().st_size
            with path.open("rb") as opened:
                length = opened.read(8)
                head = length + opened.read(min(int.from_bytes(length, "little"), size))
            start, header = decode_header(head, size, str(path))
            records.append(FileRecord(name, size, (), start))
            for key, value in header.items():
                if key != "__metadata__":
                    tensors[key] = _stored(number, key, value, path)
        super().__init__(folder, Index(tuple(records), {section: {} for section in SECTIONS} | {"model": tensors}, {}))

    def views(self) -> dict[str, View]:
        """Every tensor by name; a float8 matrix with block scales as the product, without the scales."""
        stored: dict[str, View] = {key: StoredView(self, t) for key, t in self.index.tensors["model"].items()}
        block = _scale_block(self._folder)
        views: dict[str, View] = {}
        for key, view in stored.items():
            scales = stored.get(key + _SCALE_SUFFIX)
            if key.endswith(_SCALE_SUFFIX) and key.removesuffix(_SCALE_SUFFIX) in stored:
                continue
            views[key] = view if scales is None else _scaled(key, view, scales, block)
        return views


def _stored(file: int, key: str, value: Mapping[str, Any], path: Path) -> StoredTensor:
    if value["dtype"] not in ITEM_BYTES:
        raise ValueError(f"{path}: tensor {key!r} has dtype {value['dtype']}, which this version cannot read.")
    shape = tuple(value["shape"])
    return pack_tensor(value["dtype"], shape, [StoredChunk(file, value["data_offsets"][0], (0,) * len(shape), shape)])


def _scaled(key: str, view: View, scales: View, block: tuple[int, int]) -> View:
    want = tuple(-(-n // size) for n, size in zip(view.shape, block, strict=False))
    if len(view.shape) != 2 or scales.shape != want:
        raise ValueError(
            f"{key!r} of shape {list(view.shape)} has scales of shape {list(scales.shape)}; blocks of {list(block)} "
            f"need {list(want)}. Say the block's size in config.json: quantization_config.weight_block_size."
        )
    return ScaledView(view, scales, block)


def _scale_block(folder: Path) -> tuple[int, int]:
    config = folder / "config.json"
    if not config.exists():
        return _DEFAULT_SCALE_BLOCK
    told: dict[str, Any] = json.loads(config.read_bytes())
    rows, columns = (told.get("quantization_config") or {}).get("weight_block_size") or _DEFAULT_SCALE_BLOCK
    return rows, columns


def _files(folder: Path) -> list[str]:
    index = folder / HF_INDEX_NAME
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        files = sorted(set(weight_map.values()))
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in files if not (folder / name).is_file() or "/" in name]
    if missing or not files:
        raise ValueError(f"{folder} lacks {missing or 'any safetensors file'}. Fetch the whole checkpoint.")
    return files
