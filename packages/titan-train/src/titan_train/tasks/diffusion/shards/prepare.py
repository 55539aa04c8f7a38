"""Encode images and captions once into shards, so that training reads latents and text features.

The folder is a `PreparedFolder`: ``train-00000.*``, ``validation-00000.*``, ..., ``empty.safetensors`` and ``prepared.json``,
which says what they were made of. Images are encoded in blocks of ``diffusion.shard_samples``; ``prepared.json`` is replaced
after each block. A killed preparation continues with the next block and ends with the same bytes. Values are float16.

An image is held out by a hash of its caption (``data.validation_fraction``): equal captions never land on both sides.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from titan_train.config import Config
from titan_train.data.prepared import PreparedFolder, content_key
from titan_train.data.progress import ProgressCallback, ProgressReporter
from titan_train.data.sources.document import is_held_out
from titan_train.data.sources.malformed import BadDocument
from titan_train.tasks.diffusion.flow import FloatArray
from titan_train.tasks.diffusion.shards.encoders import Encoders, check_encoders, encoders_stamp
from titan_train.tasks.diffusion.shards.features import EMPTY_NAME, SampleSizes
from titan_train.tasks.diffusion.shards.images import Captioned, TooSmallError, decode_image, list_images, read_images
from titan_train.tasks.diffusion.shards.shard import Encoded, write_folder_shard, write_tar_shard, write_tensors
from titan_train.tasks.image_files import BrokenImage

_ENCODED_AT_ONCE = 8


@dataclass(kw_only=True)
class Prepared:
    """The content of ``prepared.json``."""

    key: str
    """Hash of everything that decides the shards."""
    complete: bool = False
    read: int = 0
    """Images of all files that were read."""
    blocks: int = 0
    samples: dict[str, int] = field(default_factory=lambda: {"train": 0, "validation": 0})
    small: int = 0
    """Images left out because they are smaller than the model's."""
    bad: int = 0
    """Images left out because they cannot be used."""
    quarantine_bytes: int | None = None
    """Bytes of the quarantine file; None in folders of the first release."""


def prepare_shards(config: Config, sizes: SampleSizes, progress: ProgressCallback | None = None) -> Prepared | None:
    """Encode what ``diffusion.images`` names, unless that was done before.

    Args:
        config: The run's configuration.
        sizes: What the model asks of a sample.
        progress: Called with the progress.

    Returns:
        What was prepared; None if everything was there.

    Raises:
        ValueError: Images, encoders and model do not fit together, too many images are malformed, or the folder holds other
            shards.
    """
    diffusion = config.diffusion
    folder, encoders = Path(diffusion.path).expanduser(), Path(diffusion.encoders).expanduser()
    files = list_images(diffusion.images)
    check_encoders(encoders)
    prepared = _folder(folder)
    with prepared.one_process():
        state = _state(prepared, shards_key(config, sizes, files, encoders))
        if state.complete:
            return None
        _Preparation(config, sizes, prepared, files, state, progress).run(encoders)
    gc.collect()  # a launcher lives as long as the run, on a GPU of its ranks
    torch.cuda.empty_cache()
    return state


def is_prepared(folder: Path) -> bool:
    """Whether the shards of a folder were made here."""
    return _folder(folder).state_path.is_file()


def encoding_device(config: Config) -> torch.device:
    """Where encoders compute: on a rank's own GPU, on the first one where no rank has begun."""
    if config.launch.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def check_complete(folder: Path) -> None:
    """Refuse shards whose preparation has not ended.

    Raises:
        ValueError: It has not.
    """
    state = _folder(folder).read()
    if state is not None and not state.complete:
        raise ValueError(
            f"{folder} was not prepared to its end: {state.read} images are done. Run `titan-train data prepare` with the same "
            "diffusion.images and diffusion.encoders; it continues there."
        )


def shards_key(config: Config, sizes: SampleSizes, files: Sequence[Path], encoders: Path) -> str:
    """Hash of everything that decides the shards."""
    diffusion, data = config.diffusion, config.data
    content: dict[str, Any] = {
        "format": 1,
        "sizes": asdict(sizes),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "encoders": encoders_stamp(encoders),
        "options": [diffusion.shard_format, diffusion.shard_samples, data.validation_fraction, data.on_error],
    }
    return content_key(content)


class _Preparation:
    def __init__(
        self,
        config: Config,
        sizes: SampleSizes,
        folder: PreparedFolder[Prepared],
        files: Sequence[Path],
        state: Prepared,
        progress: ProgressCallback | None,
    ) -> None:
        self._config, self._sizes, self._folder, self._files, self._state = config, sizes, folder, files, state
        self._done_files = 0
        self._report = ProgressReporter("encode images", [path.stat().st_size for path in files], progress)
        self._bad = folder.bad_documents("diffusion.images", config.data)
        bad = {"bad_image": state.bad} if state.bad else {}
        kept = self._bad.quarantine_size() if state.quarantine_bytes is None else state.quarantine_bytes
        self._bad.resume(state.read, bad, kept)

    def run(self, folder: Path) -> None:
        config = self._config
        encoders = Encoders(folder, text_tokens=self._sizes.text_tokens, device=encoding_device(config))
        side = 2 * self._sizes.grid * encoders.factor
        self._save()  # from here on the folder is this preparation's, though its first block may fail
        self._write_empty(encoders)
        images = islice(self._images(), self._state.read, None)
        while True:
            block = list(self._decoded(islice(images, config.diffusion.shard_samples), side))
            if self._bad.seen == self._state.read:
                break
            self._write(block, encoders)
            self._bad.check_share()
            self._save()
        if not self._state.samples["train"]:
            raise ValueError(
                f"diffusion.images={config.diffusion.images!r} gave no image to train on: {self._state.small} are smaller than "
                f"{side} pixels, {self._bad.counts.total()} cannot be used, {self._state.samples['validation']} are held out."
            )
        self._state.complete = True
        self._save()

    def _images(self) -> Iterator[Captioned | BadDocument]:
        for number, path in enumerate(self._files):
            self._done_files = number
            yield from read_images(path)
        self._done_files = len(self._files)

    def _decoded(self, items: Iterator[Captioned | BadDocument], side: int) -> Iterator[tuple[str, FloatArray]]:
        """The captions and pixels of the images that can be used."""
        for item in items:
            if isinstance(item, BadDocument):
                self._bad.add(item)
                continue
            try:
                pixels = decode_image(item.content, side, item.name)
            except BrokenImage as err:
                self._bad.add(item.bad(str(err)))
                continue
            except TooSmallError:
                self._state.small += 1
            else:
                yield item.caption, pixels
            self._bad.add_good()

    def _write(self, block: Sequence[tuple[str, FloatArray]], encoders: Encoders) -> None:
        """Encode a block and write its shard of each part."""
        encoded: list[tuple[str, Encoded]] = []
        for start in range(0, len(block), _ENCODED_AT_ONCE):
            captions, pixels = zip(*block[start : start + _ENCODED_AT_ONCE], strict=True)
            encoded += self._encoded(captions, np.stack(pixels), encoders)
        fraction = self._config.data.validation_fraction
        tar = self._config.diffusion.shard_format == "webdataset"
        for part, held_out in (("train", False), ("validation", True)):
            taken = [(text, sample) for text, sample in encoded if is_held_out(text.encode(), fraction) is held_out]
            if taken:
                texts, samples = zip(*taken, strict=True)
                name = f"{part}-{self._state.blocks:05}"
                path = self._folder.path / f"{name}{'.tar' if tar else '.safetensors'}"
                (write_tar_shard if tar else write_folder_shard)(path, samples, texts)
                self._state.samples[part] += len(taken)
        self._state.blocks += 1

    def _encoded(
        self, captions: Sequence[str], pixels: npt.NDArray[np.float32], encoders: Encoders
    ) -> Iterator[tuple[str, Encoded]]:
        text, pooled = encoders.encode_texts(captions)
        mean, logvar = encoders.encode_images(torch.from_numpy(pixels))
        arrays = {"latent": mean, "logvar": logvar, "text": text, "pooled": pooled}
        self._check({name: tuple(array.shape[1:]) for name, array in arrays.items()})
        for row, caption in enumerate(captions):
            yield caption, {name: _stored(name, array[row].numpy()) for name, array in arrays.items()}

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        wanted = self._sizes.shapes()
        wrong = [
            f"{name} {list(shape)} instead of {list(wanted[name])}"
            for name, shape in shapes.items()
            if shape != wanted[name]
        ]
        if wrong:
            raise ValueError(
                f"diffusion.encoders={self._config.diffusion.encoders!r} gives {'; '.join(wrong)} for each image. Set "
                "model.args.in_channels (4 x the latent's channels), text_dim and pooled_dim to what the encoders give."
            )

    def _write_empty(self, encoders: Encoders) -> None:
        text, pooled = encoders.encode_texts([""])
        shapes = self._sizes.shapes()
        self._check({"text": tuple(text.shape[1:]), "pooled": tuple(pooled.shape[1:])} | {"latent": shapes["latent"]})
        path = self._folder.path / EMPTY_NAME
        write_tensors(path, {"text": _stored("text", text[0].numpy()), "pooled": _stored("pooled", pooled[0].numpy())})

    def _save(self) -> None:
        self._state.read, self._state.bad = self._bad.seen, self._bad.counts.total()
        self._state.quarantine_bytes = self._bad.quarantine_size()
        self._folder.write(self._state)
        tokens = sum(self._state.samples.values()) * (self._sizes.grid**2 + self._sizes.text_tokens)
        self._report(self._done_files, tokens=tokens, finished=self._state.complete)


def _stored(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    found = values.astype(np.float16)
    if not np.isfinite(found).all():
        raise ValueError(
            f"the encoders gave {name} with values that float16 does not hold (at most {np.abs(values).max():g}). These weights "
            "are damaged, or not those of a FLUX pipeline."
        )
    return found


def _folder(path: Path) -> PreparedFolder[Prepared]:
    return PreparedFolder(path, "prepared.json", Prepared)


def _state(folder: PreparedFolder[Prepared], key: str) -> Prepared:
    """The state of the folder; refuses one that holds other shards."""
    found = folder.read()
    if found is not None and not found.read:  # its first block was not finished: nothing of it is kept
        for path in (*folder.path.glob("train-00000.*"), *folder.path.glob("validation-00000.*")):
            path.unlink()
        return Prepared(key=key, quarantine_bytes=0)
    if found is not None and found.key == key:
        return found
    if found is not None or any(folder.path.glob("*.safetensors")) or any(folder.path.glob("*.tar")):
        raise ValueError(
            f"diffusion.path={str(folder.path)!r} holds shards that were made of other images, encoders or settings. Name a new "
            "folder; or leave diffusion.images empty to train on what is there."
        )
    return Prepared(key=key)
