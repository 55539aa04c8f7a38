"""Microbatches for flow matching, made of any set of latents and text features."""

import hashlib
import json
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titan_train.config.diffusion import DiffusionConfig
from titan_train.data.loader.source import BatchSource, TensorBatch
from titan_train.data.order.permutation import permute
from titan_train.models.flux.rope import grid_positions, time_features
from titan_train.tasks.diffusion.flow import FloatArray, draw_noise, draw_time, drops, shift_of

VALIDATION_TIMES = tuple((i + 0.5) / 8 for i in range(8))
"""Fixed times of validation, sample by sample."""


class Features(NamedTuple):
    """One image and its text."""

    latent: FloatArray
    """Packed latents ``[I, C]``."""
    text: FloatArray
    """``[T, text_dim]``."""
    pooled: FloatArray
    """``[pooled_dim]``."""


class FeatureSet(Protocol):
    """Images and texts by number."""

    fingerprint: str
    """Hash of the content."""
    empty: Features
    """The features of an empty text; its ``latent`` is not used."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def read(self, item: int, *, seed: int, sample: int) -> Features:
        """One item; what is drawn of it (an autoencoder's sample) depends on ``seed`` and the global ``sample`` alone."""
        ...


class FlowTarget(NamedTuple):
    """What the loss compares velocities with."""

    velocity: Tensor
    """``[B, I, C]``."""
    time: Tensor
    """``[B]`` float32: validation reports the loss by time."""


class FlowBatches(BatchSource):
    """Samples for flow matching: an item in the order of its epoch, its time, its noise, its dropped texts."""

    def __init__(
        self,
        items: FeatureSet,
        config: DiffusionConfig,
        *,
        seed: int,
        part: Literal["train", "validation"],
        guided: bool,
    ) -> None:
        """Read ``items`` in a random order.

        Args:
            items: The images and texts.
            config: How times are drawn and texts dropped.
            seed: Of the order and of all draws.
            part: Validation takes items in order, at fixed times, and drops no text.
            guided: The model takes a guidance scale.
        """
        self.seed = seed
        self.seq_len = config.text_tokens + config.grid**2
        self.items = items
        self._config = config
        self._training = part == "train"
        self._guided = guided
        self._mu = shift_of(config.grid**2) if config.shift else 0.0
        self._positions = grid_positions(config.text_tokens, config.grid, config.grid)[None]

    @property
    def fingerprint(self) -> str:
        """Hash of the items and of the settings that change samples."""
        config = self._config
        content = [
            self.items.fingerprint, self._training, config.grid, config.text_tokens, config.times, config.logit_mean,
            config.logit_std, config.shift, config.text_dropout, config.guidance,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def time_of(self, sample: int) -> float:
        if not self._training:
            return VALIDATION_TIMES[sample % len(VALIDATION_TIMES)]
        config = self._config
        return draw_time(
            self.seed, sample, times=config.times, mean=config.logit_mean, std=config.logit_std, mu=self._mu
        )

    def item_of(self, sample: int) -> int:
        epoch, place = divmod(sample, len(self.items))
        if not self._training:
            return place
        return int(permute(np.array([place], dtype=np.int64), len(self.items), self.seed, "diffusion", epoch)[0])

    def features_of(self, sample: int) -> Features:
        """Image and text of a sample, with what it drops replaced by the empty text."""
        found = self.items.read(self.item_of(sample), seed=self.seed, sample=sample)
        if self._training:
            share, empty = self._config.text_dropout, self.items.empty
            text = empty.text if drops(self.seed, sample, "drop_text", share) else found.text
            pooled = empty.pooled if drops(self.seed, sample, "drop_pooled", share) else found.pooled
            found = Features(found.latent, text, pooled)
        return found

    def build_batch(self, samples: npt.NDArray[np.int64], *, ignore_index: int, samples_consumed: int) -> TensorBatch:
        """Noisy latents ``[B, I, C]``, what the model is conditioned on, and their velocity as target."""
        numbers = [int(sample) for sample in samples]
        features = [self.features_of(sample) for sample in numbers]
        latent = np.stack([f.latent for f in features])
        noise = np.stack([draw_noise(self.seed, sample, latent.shape[1:]) for sample in numbers])
        times = np.array([self.time_of(sample) for sample in numbers], dtype=np.float32)
        place = times[:, None, None]
        keywords = {
            "positions": self._positions,
            "pooled": torch.from_numpy(np.stack([f.pooled for f in features])),
            "time": time_features(torch.from_numpy(times)),
        }
        if self._guided:
            keywords["guidance"] = time_features(torch.full((len(numbers),), self._config.guidance))
        return TensorBatch(
            inputs=(
                torch.from_numpy((1.0 - place) * latent + place * noise),
                torch.from_numpy(np.stack([f.text for f in features])),
            ),
            keywords=keywords,
            target=FlowTarget(torch.from_numpy(noise - latent), torch.from_numpy(times)),
            samples_consumed=samples_consumed,
        )
