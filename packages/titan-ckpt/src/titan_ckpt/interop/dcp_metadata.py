"""Read the metadata of torch's distributed checkpoints (DCP) without running what a crafted file asks for.

DCP keeps its metadata as a pickle, and a pickle may name any function to call. Here only the classes that DCP itself
puts there can be named; everything else is an error before anything is called. Checked on files of torch 2.11 and 2.15;
names of older versions are accepted where they only moved.
"""

import collections
import pathlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import _get_layout  # type: ignore[attr-defined] # a table look-up that metadata names

METADATA_NAME = ".metadata"

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_METADATA_MODULE = "torch.distributed._shard.sharded_tensor.metadata"


def read_metadata(folder: Path) -> metadata.Metadata:
    """The metadata of a DCP checkpoint.

    Raises:
        ValueError: If there is none, or it names anything but DCP's own classes, or is not what DCP writes.
    """
    path = folder / METADATA_NAME
    if not path.is_file():
        raise ValueError(f"{folder} has no {METADATA_NAME}: it is not a DCP checkpoint, or its save did not finish.")
    with path.open("rb") as file:
        try:
            found: Any = _Unpickler(file).load()
        except ValueError:
            raise
        except Exception as err:  # a damaged pickle may raise anything; nothing but DCP's own classes was called
            raise ValueError(f"{path} is not what DCP writes: {type(err).__name__}: {err}") from err
    if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not DCP's metadata of files.")
    return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in _ALLOWED:
            raise ValueError(
                f"the metadata names {module}.{name}, which DCP does not put there: loading it as a pickle could run "
                "code. It was crafted or damaged, or written by an extension; do not load it with torch either."
            )
        return _ALLOWED[module, name]


def _enum_member(cls: Any, name: Any) -> Any:
    """What early Python 3.11 pickles an enumeration's member as, where that is all it is used for."""
    if cls is not metadata._MEM_FORMAT_ENCODING or name not in cls.__members__:
        raise ValueError(f"the metadata asks for attribute {name!r} of {cls!r}, which DCP does not do.")
    return cls.__members__[name]


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (_METADATA_MODULE, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (_OLD_METADATA_MODULE, "TensorProperties"): metadata.TensorProperties,
    (_OLD_METADATA_MODULE, "MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "getattr"): _enum_member,
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
