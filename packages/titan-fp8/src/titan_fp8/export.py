"""Write a model as a Hugging Face float8 checkpoint: 128x128 blocks, as DeepSeek-V3 is published and servers load.

Each float8 layer's weight becomes two tensors, ``<name>`` (float8 e4m3 codes, ``[N, K]``) and ``<name>_scale_inv``
(float32, ``[ceil(N / 128), ceil(K / 128)]``; a value is its code times its block's scale), everything else stays as it
is, and ``config.json`` gets a ``quantization_config``. The codes are those the blockwise recipe trains with.

Where transformers dequantizes, it takes a matrix's block to be its size over the number of its scales, which is 128 only where
a side is at most 128 or a multiple of it; other matrices stay as they are, and so do those that servers join with one of them.
Readers take every linear, and every module of experts, for float8 that the ``quantization_config`` does not except, so it
excepts all others.

One tensor at a time is gathered, cast and written; the sizes are known before, so the files' headers come first.
"""

import ctypes
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_fp8 import ops
from titan_fp8.convert.patterns import clean_fqn
from titan_fp8.layers.linear import Float8Linear, plain_weight
from titan_fp8.weights.sharded import is_dtensor

# https://github.com/huggingface/safetensors#format
_SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
"""What an export writes."""
_ANY_WEIGHTS = ("*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
"""What loaders look for."""
_WRITTEN_BY = {"written_by": "titan_fp8"}
"""In the metadata of files of weights and of their index: a later export may replace them."""

_BLOCK = 128
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
_EXPERTS = re.compile(r"(?:.*\.)?experts(?=\.)")
"""The module of all experts, as readers know it, at the beginning of a tensor's name."""


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class _Source(NamedTuple):
    """A tensor of the model, and what is written for it: itself, or codes and scales."""

    tensor: Tensor
    entries: tuple[_Entry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)


@torch.no_grad()
def export_hf_fp8(
    model: nn.Module,
    folder: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    rename: Callable[[str], str] = str,
    max_file_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write a model's weights in float8, for inference.

    Where parameters are sharded (DTensor) all ranks call this; rank 0 writes.

    Args:
        model: Its `Float8Linear` layers are written in float8, with any recipe, where each side is at most 128 or a multiple
            of it (transformers may misplace other blocks); those in a module of experts, and those that servers join, all
            together or not at all; all else as it is.
        folder: Made if it is missing. Files appear under their names only when complete; then those of an earlier export
            under other names are removed. A ``config.json`` is replaced.
        config: The rest of ``config.json``.
        rename: From this model's names to the published architecture's.
        max_file_bytes: Start another file beyond this size.

    Returns:
        The files that make up the checkpoint, on every rank.

    Raises:
        ValueError: If two tensors get one name, the model has no such layer, a tensor has a dtype that safetensors
            lacks, or the folder holds weights without the mark of an export. Nothing is written then.
    """
    sources, skipped = _plan(model, rename)
    files = _split(sources, max_file_bytes)
    folder = Path(folder)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    earlier = _found(folder, _WEIGHTS) if writes else []
    _refuse_others(folder, _found(folder, _ANY_WEIGHTS) if writes else [], sources)
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / _file_name(i, len(files)) for i in range(len(files))]
    for path, group in zip(paths, files, strict=True):
        _write_file(path, group, writes)
    if len(files) > 1:
        index = {
            e.name: p.name for p, group in zip(paths, files, strict=True) for source in group for e in source.entries
        }
        total = sum(source.num_bytes for source in sources)
        paths.append(folder / "model.safetensors.index.json")
        if writes:
            _write_json(paths[-1], {"metadata": {**_WRITTEN_BY, "total_size": total}, "weight_map": index})
    paths.append(folder / "config.json")
    if writes:
        quantization = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": skipped,
        }
        _write_json(paths[-1], {**(config or {}), "quantization_config": quantization})
        for old in earlier:  # in another number of files: loaders would read them before the new ones, or with them
            if old not in paths:
                old.unlink()
    return paths


def _found(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _refuse_others(folder: Path, found: list[Path], sources: list[_Source]) -> None:
    """Raise, on every rank that takes part in the gathers, if rank 0 found files of weights that no export wrote."""
    others = torch.tensor(sum(not _is_export(path) for path in found))
    for mesh in dict.fromkeys(source.tensor.device_mesh for source in sources if is_dtensor(source.tensor)):
        others = others.to(mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(others, op=dist.ReduceOp.MAX, group=group)
    if count := int(others):
        raise ValueError(
            f"{folder} holds {count} files ({', '.join(_ANY_WEIGHTS)}) without the mark of export_hf_fp8, such as a model's "
            "original weights, and an export would replace them, or their config.json. Give another folder, or move those "
            "files out of this one."
        )


def _is_export(path: Path) -> bool:
    """Whether an export wrote a file of weights or their index: the mark is among its first bytes."""
    try:
        with path.open("rb") as file:
            return json.dumps(_WRITTEN_BY).strip("{}").encode() in file.read(128)
    except OSError:  # a link to nowhere, or a folder
        return False


def _plan(model: nn.Module, rename: Callable[[str], str]) -> tuple[list[_Source], list[str]]:
    """What to write, in the state dict's order, and the modules that stay in high precision."""
    tensors: dict[str, Tensor] = {}
    fqns: dict[str, str] = {}
    for raw_name, value in model.state_dict().items():
        fqn = clean_fqn(raw_name)
        name = rename(fqn)
        if name in fqns:
            raise ValueError(f"{fqn} and {fqns[name]} are both renamed to {name!r}; make rename one-to-one.")
        fqns[name], tensors[name] = fqn, plain_weight(value)
    matrices = {n: [*tensor.shape] for n, tensor in tensors.items() if tensor.dim() > 1}
    float8, experts = _float8_names(matrices.keys() & map(rename, _weights_of(model, Float8Linear)), matrices)
    sources: list[_Source] = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name in float8:
            entries = (
                _Entry(name, torch.float8_e4m3fn, shape),
                _Entry(f"{name}_scale_inv", torch.float32, (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))),
            )
        elif tensor.dtype in _SAFETENSORS_DTYPES:
            entries = (_Entry(name, tensor.dtype, shape),)
        else:
            raise ValueError(
                f"{fqns[name]} is {tensor.dtype}, which safetensors cannot hold; convert it to another dtype."
            )
        sources.append(_Source(tensor, entries))
    linears = [rename(fqn) for fqn in _weights_of(model, nn.Linear)]
    return sources, [*(n.removesuffix(".weight") for n in linears if n not in float8), *experts]


def _float8_names(wanted: set[str], matrices: Mapping[str, Sequence[int]]) -> tuple[set[str], list[str]]:
    """Which of the ``wanted`` weights of float8 layers are written in float8, and the modules of experts that are not.

    Raises:
        ValueError: There are none.
    """
    if not wanted:
        raise ValueError(
            "the model has no float8 layer, so nothing would be written in float8; call convert_to_float8 first."
        )
    float8 = {name for name in wanted if all(size <= _BLOCK or size % _BLOCK == 0 for size in matrices[name])}
    apart = matrices.keys() - float8
    float8 = {name for name in float8 if apart.isdisjoint(_joined(name))}
    found = (_EXPERTS.match(name) for name in matrices if name not in float8)
    experts = [*dict.fromkeys(match[0] for match in found if match is not None)]
    float8 = {name for name in float8 if (match := _EXPERTS.match(name)) is None or match[0] not in experts}
    if not float8:
        name = min(wanted)
        raise ValueError(
            f"none of the {len(wanted)} float8 layers can be written: {name} has shape {matrices[name]}, and each side must be "
            f"at most {_BLOCK} or a multiple of it, as readers place scales. Pad the model's sizes, or save it in bfloat16."
        )
    return float8, experts


def _joined(name: str) -> list[str]:
    """The weights that vLLM and SGLang join with this one into a matrix, which is float8 as a whole or not at all."""
    owner, _, leaf = name.removesuffix(".weight").rpartition(".")
    return [f"{owner}.{other}.weight" for group in _JOINED if leaf in group for other in group if other != leaf]


def _weights_of(model: nn.Module, kind: type[nn.Linear]) -> list[str]:
    """Names of the weights of all layers of a kind."""
    named = model.named_modules(remove_duplicate=False)  # as the state dict has them
    return [f"{clean_fqn(name)}.weight".lstrip(".") for name, module in named if isinstance(module, kind)]


def _split(sources: list[_Source], max_file_bytes: int) -> list[list[_Source]]:
    files: list[list[_Source]] = [[]]
    size = 0
    for source in sources:
        if files[-1] and size + source.num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(source)
        size += source.num_bytes
    return files


def _write_file(path: Path, sources: list[_Source], writes: bool) -> None:
    if not writes:
        for source in sources:
            _whole(source.tensor)  # its part in the gather
        return
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **_WRITTEN_BY}}
    offset = 0
    for entry in (entry for source in sources for entry in source.entries):
        header[entry.name] = {
            "dtype": _SAFETENSORS_DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for source in sources:
            for tensor in _tensors(source):
                _write_tensor(file, tensor)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _tensors(source: _Source) -> tuple[Tensor, ...]:
    whole = _whole(source.tensor)
    if len(source.entries) == 1:
        return (whole,)
    (rows, columns), (row_blocks, column_blocks) = (entry.shape for entry in source.entries)
    codes, scale, _, _ = ops.cast_weight_block(whole)
    return codes[:rows, :columns], scale[:row_blocks, :column_blocks]


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered where it is sharded: on the device that communicates, also where shards are offloaded to the host."""
    if not is_dtensor(tensor):
        return tensor
    shards: Any = tensor
    kind = shards.device_mesh.device_type
    return (shards if shards.device.type == kind else shards.to(kind)).full_tensor()


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    data = tensor.detach().cpu().contiguous()
    num_bytes = data.numel() * data.element_size()
    if num_bytes:  # through ctypes: torch's own way to bytes needs numpy, which torch does not require
        file.write(memoryview((ctypes.c_ubyte * num_bytes).from_address(data.data_ptr())))


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
