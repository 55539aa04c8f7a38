"""Where a run's images and texts come from: the source that ``diffusion.source`` names, and the captions that it samples."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from titan_train.config import Config
from titan_train.data import cache_folder, show_progress
from titan_train.models.flux.args import FluxArgs
from titan_train.tasks.diffusion.batches import Features, FeatureSet
from titan_train.tasks.diffusion.flow import FloatArray
from titan_train.tasks.diffusion.shapes import CHANNELS, ShapeFeatures, caption_text, score, to_image
from titan_train.tasks.diffusion.shards.encoders import Encoders, check_encoders
from titan_train.tasks.diffusion.shards.features import SampleSizes, ShardFeatures, list_shards, unpack
from titan_train.tasks.diffusion.shards.prepare import check_complete, is_prepared, prepare_shards

if TYPE_CHECKING:
    from titan_train.config.diffusion import DiffusionConfig


class Gallery(Protocol):
    """The captions that a run samples."""

    empty: Features
    """The features of an empty text."""
    zoom: int
    """Each pixel of an image is shown as a square of so many."""

    def texts(self, count: int) -> list[Features]:
        """The features of the first ``count`` captions; their latents are not used."""
        ...

    def images(self, latents: npt.NDArray[np.float32], device: torch.device) -> list[FloatArray]:
        """Images ``[side, side, 3]`` of about -1 to 1 from packed latents ``[count, I, C]``, computed on ``device``."""
        ...

    def describe(self, images: Sequence[FloatArray]) -> dict[str, Any]:
        """What is written beside the images of the first captions, as JSON."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """The data of a run."""

    train: FeatureSet
    validation: FeatureSet | None
    gallery: Gallery


def check_source(config: Config, args: FluxArgs) -> None:
    """Refuse a source that cannot feed this model, before any data is there.

    Raises:
        ValueError: Names the settings.
    """
    diffusion = config.diffusion
    if diffusion.source == "shapes" and args.in_channels != CHANNELS:
        raise ValueError(
            f"diffusion.source='shapes' makes tokens of {CHANNELS} values, but the model takes {args.in_channels}. Set "
            f"model.args.in_channels={CHANNELS}; or name shards of your images, diffusion.source='shards'."
        )
    if diffusion.source == "shards":
        if args.in_channels % 4:
            raise ValueError(
                f"model.args.in_channels={args.in_channels} is not a multiple of 4: a token is 2 x 2 places of a latent. Use "
                f"{max(1, round(args.in_channels / 4)) * 4}."
            )
        _check_scaled_once(diffusion)
        if diffusion.sample_images and not diffusion.encoders:
            raise ValueError(
                f"diffusion.sample_images={diffusion.sample_images} needs diffusion.encoders: the folder whose vae decodes "
                "latents to images. Name it, or set sample_images=0."
            )
        if diffusion.encoders:
            check_encoders(Path(diffusion.encoders).expanduser(), text=bool(diffusion.images))


def prepare_source(config: Config, args: FluxArgs, *, quiet: bool) -> None:
    """Make what `open_source` opens.

    Raises:
        ValueError: Images cannot be encoded, or shards cannot be used; the message names them.
    """
    check_source(config, args)
    if config.diffusion.source != "shards":
        return
    if config.diffusion.images:
        with nullcontext() if quiet else show_progress() as progress:
            made = prepare_shards(config, _sizes(config.diffusion, args), progress)
        if made is not None and not quiet:
            print(
                f"prepared {config.diffusion.path}: {made.samples['train']} images to train on, {made.samples['validation']} "
                f"held out; {made.small} were too small, {made.bad} cannot be used"
            )
    open_source(config, args)  # refuses what is damaged, and indexes tar files, before ranks start


def open_source(config: Config, args: FluxArgs) -> Source:
    """Open the data of a run.

    Raises:
        ValueError: It does not fit the model, or a shard is damaged.
    """
    check_source(config, args)
    diffusion = config.diffusion
    if diffusion.source == "shapes":
        shapes = ShapeFeatures(
            grid=diffusion.grid, text_tokens=diffusion.text_tokens, text_dim=args.text_dim, pooled_dim=args.pooled_dim
        )
        return Source(shapes, shapes, ShapeGallery(shapes))
    folder = Path(diffusion.path).expanduser()
    check_complete(folder)

    def part(name: str) -> ShardFeatures:
        return ShardFeatures(
            folder,
            name,
            _sizes(diffusion, args),
            cache_dir=cache_folder(config.data),
            scale=diffusion.latent_scale,
            shift=diffusion.latent_shift,
        )

    train = part("train")
    validation = part("validation") if list_shards(folder, "validation") else None
    return Source(train, validation, ShardGallery(validation or train, diffusion))


class ShapeGallery:
    """Captions spread over all colours, shapes and places."""

    zoom = 4

    def __init__(self, items: ShapeFeatures) -> None:
        self._items = items
        self.empty = items.empty

    def texts(self, count: int) -> list[Features]:
        return [Features(self.empty.latent, *self._items.text_of(item)) for item in self._numbers(count)]

    def images(self, latents: npt.NDArray[np.float32], device: torch.device) -> list[FloatArray]:
        return [to_image(tokens) for tokens in latents]

    def describe(self, images: Sequence[FloatArray]) -> dict[str, Any]:
        items = self._numbers(len(images))
        right = sum(score(item, image) for item, image in zip(items, images, strict=True))
        return {"right": right, "images": len(images), "captions": [caption_text(item) for item in items]}

    def _numbers(self, count: int) -> list[int]:
        # 63 and 200 have no common divisor: no caption comes twice
        return [63 * number % len(self._items) for number in range(count)]


class ShardGallery:
    """The first captions of the held-out shards, else of those to train on; the autoencoder makes images."""

    zoom = 1

    def __init__(self, items: ShardFeatures, config: "DiffusionConfig") -> None:
        self._items, self._config = items, config
        self.empty = items.empty

    def texts(self, count: int) -> list[Features]:
        return [self._items.read(item, seed=0, sample=item) for item in self._numbers(count)]

    def images(self, latents: npt.NDArray[np.float32], device: torch.device) -> list[FloatArray]:
        decoder = self._decoder
        try:
            decoder.move_decoder(device)
            return decode_latents(decoder, self._config, latents)
        except torch.OutOfMemoryError:  # the model in training leaves too little
            decoder.move_decoder("cpu")
            return decode_latents(decoder, self._config, latents)
        finally:
            decoder.move_decoder("cpu")

    def describe(self, images: Sequence[FloatArray]) -> dict[str, Any]:
        return {"images": len(images), "captions": self._items.captions(self._numbers(len(images)))}

    def _numbers(self, count: int) -> list[int]:
        return [number % len(self._items) for number in range(count)]

    @cached_property
    def _decoder(self) -> Encoders:
        config = self._config
        return Encoders(Path(config.encoders).expanduser(), text_tokens=config.text_tokens, text=False)


def decode_latents(encoders: Encoders, config: "DiffusionConfig", latents: npt.NDArray[np.float32]) -> list[FloatArray]:
    """Images ``[side, side, 3]`` of about -1 to 1 from packed latents ``[count, I, C]`` as a model is trained on them."""
    # what `titan-train data prepare` wrote is scaled already; other latents are scaled when they are read
    own = config.latent_scale == 1.0 and config.latent_shift == 0.0
    found: list[FloatArray] = []
    for tokens in latents:
        latent = unpack(tokens, config.grid)
        if not own:
            latent = encoders.scale * (latent / config.latent_scale + config.latent_shift - encoders.shift)
        pixels = encoders.decode(torch.from_numpy(latent.astype(np.float32))[None])[0]
        found.append(pixels.permute(1, 2, 0).cpu().numpy())
    return found


def _check_scaled_once(diffusion: "DiffusionConfig") -> None:
    own = diffusion.latent_scale == 1.0 and diffusion.latent_shift == 0.0
    if not own and (diffusion.images or is_prepared(Path(diffusion.path).expanduser())):
        raise ValueError(
            f"diffusion.latent_scale={diffusion.latent_scale} and latent_shift={diffusion.latent_shift}: `titan-train data "
            f"prepare` has scaled the latents of diffusion.path={diffusion.path!r} already; they would be scaled twice. Remove "
            "both settings."
        )


def _sizes(diffusion: "DiffusionConfig", args: FluxArgs) -> SampleSizes:
    return SampleSizes(
        grid=diffusion.grid,
        channels=args.in_channels,
        text_tokens=diffusion.text_tokens,
        text_dim=args.text_dim,
        pooled_dim=args.pooled_dim,
    )
