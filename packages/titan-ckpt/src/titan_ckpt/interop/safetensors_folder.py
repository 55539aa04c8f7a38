"""Folders of safetensors files of any writer, as views."""

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_ckpt.format.boxes import Box
from titan_ckpt.format.names import ITEM_BYTES, parse_object
from titan_ckpt.interop.views import MX_GROUP, HalfBytesView, Mxfp4View, RefusedView, ScaledView, View
from titan_ckpt.storage.files import links_out

HF_INDEX_NAME = "model.safetensors.index.json"
DIFFUSERS_STEM = "diffusion_pytorch_model"
"""How diffusers names the files of a model."""
_INDEX_NAMES = (HF_INDEX_NAME, f"{DIFFUSERS_STEM}.safetensors.index.json")

_DEFAULT_SCALE_BLOCK = (128, 128)

# The scales of NAME.weight: weight_scale_inv is DeepSeek-V3's name, weight_scale compressed-tensors', scale DeepSeek-V4's.
_SCALE_SUFFIXES = ("_scale_inv", "_scale")
_MX_BLOCKS, _MX_SCALES = "_blocks", "_scales"
_SCALE = ".scale"
_QUANTIZED = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8")
_SCALE_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E8M0")

# Scales of activations and of the key-value cache. They do not scale weights.
_OTHER_SCALES = ("input_", "output_", "act_", "activation_", "q_", "k_", "v_", "kv_")


class SafetensorsReader:
    """A folder of safetensors files.

    With an index (``model.safetensors.index.json``, or that of diffusers), each tensor is read from the file that the index
    names. Without one, all files are read. ``consolidated*`` files beside ``model*`` files are skipped: they are a copy with
    other names; and so are variants such as ``diffusion_pytorch_model.fp16.safetensors`` beside diffusers' plain file.

    Args:
        folder: The folder.

    Raises:
        ValueError: If a file is missing, not safetensors or truncated, a tensor is not in the file that the index names,
            or two files have the same tensor.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored: dict[str, View] = {}
        weight_map = _weight_map(folder)
        places: dict[str, str] = {}
        for name in _files(folder, weight_map):
            opened = _opened(folder / name)
            for key in opened.keys():  # noqa: SIM118
                if weight_map.get(key, name) != name:
                    continue
                if key in places:
                    raise ValueError(
                        f"{folder}: {key!r} is in {places[key]!r} and in {name!r}, and no index says which one counts. "
                        f"Move the stale file away, or name the file of each tensor in {HF_INDEX_NAME}."
                    )
                places[key] = name
                part = opened.get_slice(key)
                dtype, shape = part.get_dtype(), part.get_shape()
                if dtype in ITEM_BYTES:
                    self._stored[key] = _ForeignView(dtype, shape, part)
                else:
                    reason = f"{folder / name}: tensor {key!r} has dtype {dtype}, which this version cannot read."
                    self._stored[key] = RefusedView(dtype, shape, reason)
        for key, name in weight_map.items():
            if key not in places:
                raise ValueError(
                    f"{folder}: {HF_INDEX_NAME} says that {key!r} is in {name!r}, but that file does not contain it. Fetch "
                    "the index and the files again, from the same place."
                )

    def views(self, kept: Callable[[str], bool] = lambda name: False) -> dict[str, View]:
        """Every tensor by name. Float8 and int8 weights are multiplied with their scales, which are not listed; so are experts
        in MXFP4, of which ``NAME_blocks`` and ``NAME_scales`` are one tensor ``NAME``.

        Scales may be per tensor, per row or per block; int8 matrices with an exponent (``F8_E8M0``) for every 16 bytes of a row
        hold two 4-bit values in each byte. A weight with other scales, or a tensor of an unknown dtype, is a
        `RefusedView`. Scales of activations and of the key-value cache are not listed where ``config.json`` announces a
        quantization.

        Args:
            kept: Whether to list a scale as a tensor: the model may have scales itself.
        """
        stored = self._stored
        scales_of = {
            key: name
            for key, view in stored.items()
            if view.dtype in _QUANTIZED
            for name in reversed(_scale_names(key))
            if name in stored and not kept(name)
        }
        packed = {
            key.removesuffix(_MX_BLOCKS)
            for key, view in stored.items()
            if key.endswith(_MX_BLOCKS) and view.dtype == "U8" and not kept(key)
        }
        used = {*scales_of.values(), *(name + suffix for name in packed for suffix in (_MX_BLOCKS, _MX_SCALES))}
        strays = _stray_scales(stored, kept)
        quantization = _quantization(self._folder)
        if quantization:
            used |= {key for key in stored if _of_activations(key) and not kept(key)}
        block = _scale_block(self._folder, quantization)
        views = {name: _mxfp4(name, stored[name + _MX_BLOCKS], stored.get(name + _MX_SCALES)) for name in packed}
        for key, view in stored.items():
            if key in used:
                continue
            stray = strays.get(key.rpartition(".")[0]) if view.dtype.startswith("F8") else None
            if key in scales_of:
                views[key] = _scaled(key, view, scales_of[key], stored, block)
            elif stray not in (None, key):
                views[key] = _refused(key, view, f"{stray!r} beside it is not a scale that this version supports")
            else:
                views[key] = view
        return views


class _ForeignView(View):
    """A tensor in a file without digests, as the safetensors library maps it."""

    def __init__(self, dtype: str, shape: Sequence[int], part: Any) -> None:
        super().__init__(dtype, shape)
        self._part = part

    def fill(self, box: Box, into: Tensor) -> None:
        into.copy_(self._part[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))])


def _opened(path: Path) -> Any:
    """A safetensors file. The library refuses one that is truncated, or whose tensors overlap or leave holes."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as err:
        raise ValueError(
            f"{path} is not a safetensors file that the safetensors library reads: {err}. It is damaged or was not written "
            "whole. Fetch it again."
        ) from err


def _scale_names(key: str) -> tuple[str, ...]:
    """What the scales of a weight may be called, the likeliest first."""
    beside = (key.removesuffix(".weight") + _SCALE,) if key.endswith(".weight") else ()
    return (*(key + suffix for suffix in _SCALE_SUFFIXES), *beside)


def _scaled(key: str, view: View, name: str, stored: Mapping[str, View], block: tuple[int, int]) -> View:
    scales = stored[name]
    halves = _is_half_bytes(view, scales)
    known = (1, MX_GROUP) if halves else _known_block(view.shape, scales.shape, block)
    if f"{key}_zero_point" in stored:
        return _refused(key, view, f"{key + '_zero_point'!r} beside it says that it is not symmetric")
    if scales.dtype not in _SCALE_DTYPES:
        return _refused(key, view, f"its scales {name!r} are of dtype {scales.dtype}, not floating-point")
    if known is None:
        want = [-(-n // size) for n, size in zip(view.shape, block, strict=False)]
        reason = (
            f"its scales {name!r} of shape {list(scales.shape)} fit neither one scale per tensor nor one per row, and blocks of "
            f"{list(block)} need {want}: say the block's size in config.json, quantization_config.weight_block_size"
        )
        return _refused(key, view, reason)
    return ScaledView(HalfBytesView(view) if halves else view, scales, known)


def _is_half_bytes(view: View, scales: View) -> bool:
    """Whether a matrix is of 4-bit values, with a power of two for every 32 of a row (DeepSeek-V4's experts)."""
    if view.dtype != "I8" or len(view.shape) != 2 or scales.dtype != "F8_E8M0":
        return False
    return scales.shape == (view.shape[0], -(-2 * view.shape[1] // MX_GROUP))


def _mxfp4(name: str, blocks: View, scales: View | None) -> View:
    """Experts of two tensors."""
    shape = blocks.shape
    if scales is None:
        return _refused(name + _MX_BLOCKS, blocks, f"there is no {name + _MX_SCALES!r}")
    if len(shape) != 4 or shape[3] != 16 or scales.shape != shape[:3] or scales.dtype != "U8":
        found = f"{name + _MX_SCALES!r} of shape {list(scales.shape)} is {scales.dtype}"
        return _refused(name + _MX_BLOCKS, blocks, f"{found}: MXFP4 has blocks [E, R, G, 16] and U8 scales [E, R, G]")
    return Mxfp4View(blocks, scales)


def _refused(key: str, view: View, why: str) -> View:
    reason = (
        f"{key!r} of shape {list(view.shape)} is {view.dtype}, which needs its scales, but {why}. Or convert the folder "
        "to bfloat16 with the tool that wrote it."
    )
    return RefusedView(view.dtype, view.shape, reason)


def _known_block(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...] | None:
    """The block of a tensor that one scale is for; None if it is unknown."""
    if prod(scales) == 1 and len(scales) <= len(shape):
        return tuple(max(size, 1) for size in shape)
    if len(shape) != 2:
        return None
    if scales in ((shape[0],), (shape[0], 1)):
        return 1, max(shape[1], 1)
    return block if scales == (-(-shape[0] // block[0]), -(-shape[1] // block[1])) else None


def _stray_scales(stored: Mapping[str, View], kept: Callable[[str], bool]) -> dict[str, str]:
    """Module to its tensor that looks like the scale of a weight, but is not named after one."""
    strays: dict[str, str] = {}
    for name in stored:
        module, _, last = name.rpartition(".")
        named_after = any(name.endswith(suffix) and name.removesuffix(suffix) in stored for suffix in _SCALE_SUFFIXES)
        named_after |= name.endswith(_SCALE) and f"{module}.weight" in stored
        if "scale" in last and not named_after and not _of_activations(name) and not kept(name):
            strays[module] = name
    return strays


def _of_activations(name: str) -> bool:
    """Whether a tensor scales activations or the key-value cache, by its name."""
    last = name.rpartition(".")[2]
    return "scale" in last and last.startswith(_OTHER_SCALES)


def _quantization(folder: Path) -> Mapping[str, Any]:
    """``quantization_config`` of the folder's ``config.json``; empty if there is none."""
    config = folder / "config.json"
    found = parse_object(config.read_bytes(), str(config)).get("quantization_config") if config.exists() else None
    return found if isinstance(found, dict) else {}


def _scale_block(folder: Path, quantization: Mapping[str, Any]) -> tuple[int, int]:
    size = quantization.get("weight_block_size")
    if not size:
        return _DEFAULT_SCALE_BLOCK
    if not isinstance(size, list) or [type(n) for n in size] != [int, int] or min(size) < 1:
        file = folder / "config.json"
        raise ValueError(f"{file}: weight_block_size={size!r} is not [rows, columns]. Give two integers from 1.")
    return size[0], size[1]


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor to file, by the index; empty without an index."""
    index = next((folder / name for name in _INDEX_NAMES if (folder / name).exists()), None)
    if index is None:
        return {}
    try:
        value: Any = json.loads(index.read_bytes())
        return {str(key): str(name) for key, name in value["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ValueError(f"{index} is not an index with a weight_map ({type(err).__name__}). Fetch it again.") from err


def _files(folder: Path, weight_map: Mapping[str, str]) -> list[str]:
    files = sorted(set(weight_map.values()) or {path.name for path in folder.glob("*.safetensors")})
    if not weight_map and any(name.startswith("model") for name in files):
        files = [name for name in files if not name.startswith("consolidated")]
    if not weight_map and f"{DIFFUSERS_STEM}.safetensors" in files:
        files = [name for name in files if name == f"{DIFFUSERS_STEM}.safetensors" or DIFFUSERS_STEM not in name]
    missing = [name for name in files if not (folder / name).is_file() or "/" in name]
    if missing or not files:
        raise ValueError(f"{folder} is missing {missing or 'all safetensors files'}. Fetch the whole checkpoint.")
    _refuse_links_out(folder, files)
    return files


def _refuse_links_out(folder: Path, files: list[str]) -> None:
    """Refuse files that are links out of the folder. In a cache of the Hugging Face hub, links to its blobs are allowed."""
    parent = folder.absolute().parent
    for name, found in links_out(folder, files, [str(parent.parent / "blobs")] if parent.name == "snapshots" else []):
        raise ValueError(
            f"{folder / name} is a link to {found}, out of the folder. Copy the file it links to, if you trust it."
        )
