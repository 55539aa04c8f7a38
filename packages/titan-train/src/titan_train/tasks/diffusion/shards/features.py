"""The samples of all shards of a folder, as the `FeatureSet` that training reads."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titan_train.tasks.diffusion.batches import Features
from titan_train.tasks.diffusion.flow import FloatArray, generator
from titan_train.tasks.diffusion.shards.shard import SafetensorsShard, ShardFile, TarShard, read_tensors, table_of

EMPTY_NAME = "empty.safetensors"
"""The features ``text`` and ``pooled`` of the empty text."""
_SUFFIXES = (".safetensors", ".tar")
_LOGVAR = (-30.0, 20.0)
"""Bounds of the log of a variance, as diffusers' autoencoder has them."""


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """What the model and the configuration ask of a sample."""

    grid: int
    """Packed tokens along one side; a latent has twice as many."""
    channels: int
    """Values of a packed token: four times those of a latent."""
    text_tokens: int
    text_dim: int
    pooled_dim: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each field of a sample."""
        latent = (self.channels // 4, 2 * self.grid, 2 * self.grid)
        return {
            "latent": latent,
            "logvar": latent,
            "text": (self.text_tokens, self.text_dim),
            "pooled": (self.pooled_dim,),
        }


class ShardFeatures:
    """Samples by number, over all shards of one part of a folder."""

    def __init__(
        self, folder: Path, part: str, sizes: SampleSizes, *, cache_dir: Path, scale: float, shift: float
    ) -> None:
        """Open the shards ``part-*``.

        Args:
            folder: Holds the shards, and ``empty.safetensors``.
            part: "train" or "validation".
            sizes: What each sample must have.
            cache_dir: Where tables of contents of tar files are kept.
            scale: A latent z is used as ``scale * (z - shift)``.
            shift: See there.

        Raises:
            ValueError: There is no shard, or one is damaged or of other sizes; the message names it.
        """
        paths = list_shards(folder, part)
        if not paths:
            raise ValueError(
                f"{folder} holds no shard {part}-*.safetensors or {part}-*.tar. Name the folder of the shards in diffusion.path, "
                "or make them with `titan-train data prepare` (diffusion.images, diffusion.encoders)."
            )
        self.shards: Sequence[ShardFile] = [
            TarShard(path, cache_dir) if path.suffix == ".tar" else SafetensorsShard(path) for path in paths
        ]
        for shard in self.shards:
            _check_sizes(shard, sizes)
        self._ends = list(accumulate(shard.count for shard in self.shards))
        self._scale, self._shift = scale, shift
        self.empty = _read_empty(folder, sizes)
        content = [[shard.path.name, shard.count, shard.content, _sampled(shard.path)] for shard in self.shards]
        empty = hashlib.sha256(self.empty.text.tobytes() + self.empty.pooled.tobytes()).hexdigest()
        self.fingerprint = hashlib.sha256(json.dumps(["shards 1", content, empty, scale, shift]).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, item: int, *, seed: int, sample: int) -> Features:
        """One item; where there is a variance, the latent is drawn by ``seed`` and ``sample``.

        Raises:
            ValueError: It is damaged: the message names it.
        """
        shard, number = self._place(item)
        found = shard.read(number)
        broken = [name for name, values in found.items() if not np.isfinite(values).all()]
        if broken:
            raise ValueError(
                f"{shard.name_of(number)}: {' and '.join(broken)} holds values that are not finite. Encode it again, or remove "
                "it."
            )
        latent = found["latent"]
        if "logvar" in found:
            spread = np.exp(0.5 * np.clip(found["logvar"], *_LOGVAR))
            latent = latent + spread * generator(seed, sample, "latent").standard_normal(latent.shape, dtype=np.float32)
        packed = pack(np.float32(self._scale) * (latent - np.float32(self._shift)))
        return Features(packed, found["text"], found["pooled"])

    def captions(self, items: Sequence[int]) -> list[str]:
        places = [self._place(item) for item in items]
        known: dict[tuple[Path, int], str] = {}
        for shard in {id(shard): shard for shard, _ in places}.values():
            numbers = [number for holder, number in places if holder is shard]
            known |= {(shard.path, number): text for number, text in zip(numbers, shard.captions(numbers), strict=True)}
        return [known[shard.path, number] for shard, number in places]

    def _place(self, item: int) -> tuple[ShardFile, int]:
        index = bisect_right(self._ends, item)
        return self.shards[index], item - (self._ends[index - 1] if index else 0)


def list_shards(folder: Path, part: str) -> list[Path]:
    """The shards ``part-*`` of a folder, in the order of their names."""
    return sorted(path for suffix in _SUFFIXES for path in folder.glob(f"{part}-*{suffix}"))


def are_indexed(folder: Path, cache_dir: Path) -> bool:
    """Whether every tar file of a folder has its table of contents."""
    paths = (*list_shards(folder, "train"), *list_shards(folder, "validation"))
    return all(table_of(path, cache_dir).is_file() for path in paths if path.suffix == ".tar")


def pack(latent: FloatArray) -> FloatArray:
    """A latent ``[C, H, W]`` as tokens of 2 x 2 places, row by row: ``[H / 2 * W / 2, 4 C]``, channel before place."""
    channels, height, width = latent.shape
    cut = latent.reshape(channels, height // 2, 2, width // 2, 2).transpose(1, 3, 0, 2, 4)
    return np.ascontiguousarray(cut.reshape(height // 2 * (width // 2), 4 * channels))


def unpack(tokens: npt.NDArray[np.float32], grid: int) -> FloatArray:
    """The inverse of `pack` for a square."""
    channels = tokens.shape[1] // 4
    cut = tokens.reshape(grid, grid, channels, 2, 2).transpose(2, 0, 3, 1, 4)
    return np.ascontiguousarray(cut.reshape(channels, 2 * grid, 2 * grid))


def _check_sizes(shard: ShardFile, sizes: SampleSizes) -> None:
    wanted = sizes.shapes()
    settings = {
        "latent": f"diffusion.grid={sizes.grid}, model.args.in_channels={sizes.channels}",
        "text": f"diffusion.text_tokens={sizes.text_tokens}, model.args.text_dim={sizes.text_dim}",
        "pooled": f"model.args.pooled_dim={sizes.pooled_dim}",
    }
    settings["logvar"] = settings["latent"]
    wrong = [
        f"{name} {list(shape)} instead of {list(wanted[name])} ({settings[name]})"
        for name, shape in shard.shapes.items()
        if shape != wanted[name]
    ]
    if wrong:
        raise ValueError(
            f"{shard.path}: a sample has {'; '.join(wrong)}. Set what these shards hold, or encode the images for this model."
        )


def _read_empty(folder: Path, sizes: SampleSizes) -> Features:
    path = folder / EMPTY_NAME
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: it holds text and pooled, the features of an empty caption, which stand for dropped texts "
            "and in guidance. `titan-train data prepare` writes it; or encode an empty caption and store it there."
        )
    found = read_tensors(path, ("text", "pooled"))
    wanted = sizes.shapes()
    for name, values in found.items():
        if values.shape != wanted[name] or not np.isfinite(values).all():
            raise ValueError(
                f"{path}: {name} is {list(values.shape)}, but {list(wanted[name])} of finite values is needed. Encode it as the "
                "shards were encoded."
            )
    return Features(np.zeros((0, sizes.channels), np.float32), found["text"], found["pooled"])


def _sampled(path: Path) -> str:
    """Hash of the size and of 16 places of a file: cheap, and other values show."""
    size, block = path.stat().st_size, 4096
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for part in range(16):
            file.seek(part * max(0, size - block) // 15)
            digest.update(file.read(block))
    return digest.hexdigest()
