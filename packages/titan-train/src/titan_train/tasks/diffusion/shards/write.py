"""Write shards of either form, each in one piece, and the features of the empty text."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titan_train.files import write_atomic

Encoded = Mapping[str, npt.NDArray[np.float16]]
"""Field to array: what is stored of a sample."""


def write_folder_shard(path: Path, samples: Sequence[Encoded], captions: Sequence[str]) -> None:
    """Write samples, which all have the same fields, as a safetensors file, in one piece."""
    from safetensors.numpy import save

    # safetensors writes an array's memory as it lies; an autoencoder's output may lie channels last
    stacked = {name: np.ascontiguousarray(np.stack([sample[name] for sample in samples])) for name in samples[0]}
    write_atomic(path, save(stacked, metadata={"captions": json.dumps(list(captions))}))


def write_tar_shard(path: Path, samples: Sequence[Encoded], captions: Sequence[str]) -> None:
    """Write the same as a tar file, in one piece; keys are the numbers of the samples in it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number, (sample, caption) in enumerate(zip(samples, captions, strict=True)):
            files: dict[str, bytes] = {"txt": caption.encode()}
            for name, values in sample.items():
                array = io.BytesIO()
                np.lib.format.write_array(array, np.ascontiguousarray(values), allow_pickle=False)
                files[f"{name}.npy"] = array.getvalue()
            for name, text in files.items():
                info = tarfile.TarInfo(f"{number:06}.{name}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
    write_atomic(path, content.getvalue())


def write_tensors(path: Path, values: Encoded) -> None:
    """Single arrays as a safetensors file."""
    from safetensors.numpy import save

    write_atomic(path, save({name: np.ascontiguousarray(array) for name, array in values.items()}))
