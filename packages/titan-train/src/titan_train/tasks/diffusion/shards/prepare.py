"""Encode images and captions once into shards, so that training reads latents and text features.

The folder ends with ``train-00000.*``, ``validation-00000.*``, ..., ``empty.safetensors`` and ``prepared.json``, which says what
they were made of. Images are encoded in blocks of ``diffusion.shard_samples``; ``prepared.json`` is replaced after each block. A
killed preparation continues with the next block and ends with the same bytes. Values are stored in float16.

An image is held out by a hash of its caption (``data.validation_fraction``): equal captions never land on both sides.
"""

import hashlib
import json
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter, ValidationError

from titan_train.config import Config
from titan_train.data.progress import PrepareProgress, ProgressCallback
from titan_train.data.sources.held_out import is_held_out
from titan_train.files import write_atomic
from titan_train.tasks.diffusion.flow import FloatArray
from titan_train.tasks.diffusion.shards.encoders import Encoders, check_encoders, encoders_stamp
from titan_train.tasks.diffusion.shards.features import EMPTY_NAME, SampleSizes
from titan_train.tasks.diffusion.shards.images import Captioned, TooSmallError, decode_image, list_images, read_images
from titan_train.tasks.diffusion.shards.write import Encoded, write_folder_shard, write_tar_shard, write_tensors

PREPARED_NAME = "prepared.json"
"""Says what the shards of a folder were made of, and how far that is."""
_QUARANTINE_NAME = "quarantine.jsonl"
_ENCODED_AT_ONCE = 8
_logger = logging.getLogger(__name__)


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


_ADAPTER = TypeAdapter(Prepared)


def prepare_shards(config: Config, sizes: SampleSizes, progress: ProgressCallback | None = None) -> Prepared | None:
    """Encode what ``diffusion.images`` names, unless that was done before.

    Args:
        config: The run's configuration.
        sizes: What the model asks of a sample.
        progress: Told how far it is.

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
    key = _key(config, sizes, files, encoders)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_process(folder):
        state = _state(folder, key)
        if state.complete:
            return None
        _Preparation(config, sizes, folder, files, state, progress).run(encoders)
    return state


def check_complete(folder: Path) -> None:
    """Refuse shards whose preparation has not ended.

    Raises:
        ValueError: It has not.
    """
    state = _read_state(folder)
    if state is not None and not state.complete:
        raise ValueError(
            f"{folder} was not prepared to its end: {state.read} images are done. Run `titan-train prepare` with the same "
            "diffusion.images and diffusion.encoders; it continues there."
        )


class _Preparation:
    """One folder on its way."""

    def __init__(
        self,
        config: Config,
        sizes: SampleSizes,
        folder: Path,
        files: Sequence[Path],
        state: Prepared,
        progress: ProgressCallback | None,
    ) -> None:
        self._config, self._sizes, self._folder, self._files = config, sizes, folder, files
        self._state, self._progress = state, progress
        self._done_files = 0
        self._left_out: list[str] = []
        """Lines of the quarantine file, written with their block."""
        self._started = time.monotonic()

    def run(self, folder: Path) -> None:
        config = self._config
        cpu = config.launch.device == "cpu" or not torch.cuda.is_available()
        encoders = Encoders(folder, text_tokens=self._sizes.text_tokens, device="cpu" if cpu else "cuda")
        side = 2 * self._sizes.grid * encoders.factor
        self._write_empty(encoders)
        images = islice(self._images(), self._state.read, None)
        while True:
            before = self._state.read
            block = list(self._block(images, side))
            if self._state.read == before:
                break
            self._write(block, encoders)
            self._check_share()
            self._save()
        self._check_share()
        if not self._state.samples["train"]:
            raise ValueError(
                f"diffusion.images={config.diffusion.images!r} gave no image to train on: {self._state.small} are smaller than "
                f"{side} pixels, {self._state.bad} cannot be used, {self._state.samples['validation']} are held out."
            )
        self._state.complete = True
        self._save()

    def _images(self) -> Iterator[Captioned]:
        for number, path in enumerate(self._files):
            self._done_files = number
            yield from read_images(path)
        self._done_files = len(self._files)

    def _block(self, images: Iterator[Captioned], side: int) -> Iterator[tuple[str, FloatArray]]:
        """The next captions and pixels; a block ends after so many images that were read, good or not."""
        for found in islice(images, self._config.diffusion.shard_samples):
            self._state.read += 1
            try:
                if found.problem:
                    raise ValueError(found.problem)
                yield found.caption, decode_image(found.content, side)
            except TooSmallError:
                self._state.small += 1
            except ValueError as err:
                self._leave_out(found.place, str(err))

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
                path = self._folder / f"{name}{'.tar' if tar else '.safetensors'}"
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
        path = self._folder / EMPTY_NAME
        write_tensors(path, {"text": _stored("text", text[0].numpy()), "pooled": _stored("pooled", pooled[0].numpy())})

    def _leave_out(self, place: str, reason: str) -> None:
        data = self._config.data
        if data.on_error == "raise":
            raise ValueError(f'{place}: {reason}. Repair or remove it, or set data.on_error to "skip" or "quarantine".')
        self._state.bad += 1
        _logger.warning("left out: %s: %s", place, reason)
        if data.on_error == "quarantine":
            self._left_out.append(json.dumps({"image": place, "reason": reason}) + "\n")

    def _check_share(self) -> None:
        data, state = self._config.data, self._state
        most = data.max_bad or state.read
        if state.bad > min(most, data.max_bad_fraction * state.read):
            raise ValueError(
                f"diffusion.images={self._config.diffusion.images!r}: {state.bad} of {state.read} images cannot be used, more "
                f"than data.max_bad_fraction={data.max_bad_fraction} or data.max_bad={data.max_bad} allows. Repair them, or "
                "raise the limit."
            )

    def _save(self) -> None:
        if self._left_out:
            with (self._folder / _QUARANTINE_NAME).open("a", encoding="utf-8") as file:
                file.writelines(self._left_out)
            self._left_out = []
        write_atomic(self._folder / PREPARED_NAME, json.dumps(asdict(self._state), indent=1) + "\n", sync=True)
        if self._progress is not None:
            sizes = [path.stat().st_size for path in self._files]
            tokens = sum(self._state.samples.values()) * (self._sizes.grid**2 + self._sizes.text_tokens)
            self._progress(
                PrepareProgress(
                    stage="encode images",
                    files_done=self._done_files,
                    files_total=len(sizes),
                    bytes_done=sum(sizes[: self._done_files]),
                    bytes_total=sum(sizes),
                    tokens=tokens,
                    elapsed_s=time.monotonic() - self._started,
                    finished=self._state.complete,
                )
            )


def _stored(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    found = values.astype(np.float16)
    if not np.isfinite(found).all():
        raise ValueError(
            f"the encoders gave {name} with values that float16 does not hold (at most {np.abs(values).max():g}). These weights "
            "are damaged, or not those of a FLUX pipeline."
        )
    return found


def _key(config: Config, sizes: SampleSizes, files: Sequence[Path], encoders: Path) -> str:
    diffusion, data = config.diffusion, config.data
    content: dict[str, Any] = {
        "format": 1,
        "sizes": asdict(sizes),
        "files": [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        "encoders": encoders_stamp(encoders),
        "options": [diffusion.shard_format, diffusion.shard_samples, data.validation_fraction, data.on_error],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _state(folder: Path, key: str) -> Prepared:
    """How far the folder is; refuses one that holds other shards."""
    found = _read_state(folder)
    if found is not None and found.key == key:
        return found
    if found is not None or any(folder.glob("*.safetensors")) or any(folder.glob("*.tar")):
        raise ValueError(
            f"diffusion.path={str(folder)!r} holds shards that were made of other images, encoders or settings. Name a new "
            "folder; or leave diffusion.images empty to train on what is there."
        )
    return Prepared(key=key)


def _read_state(folder: Path) -> Prepared | None:
    path = folder / PREPARED_NAME
    if not path.is_file():
        return None
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except ValidationError as err:
        raise ValueError(f"{path} is damaged. Remove the folder and prepare it again.") from err


@contextmanager
def _only_process(folder: Path) -> Generator[None]:
    import fcntl  # not on Windows

    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
