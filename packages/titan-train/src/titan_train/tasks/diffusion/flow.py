"""Flow matching: between an image x0 and noise e lies x_t = (1 - t) x0 + t e, whose velocity e - x0 the model predicts.

What is random about a sample is a function of (seed, sample number) and of nothing else. Every rank that needs a sample's
noise draws the same one; ranks that hold different samples draw different noise; and a resumed run draws what it would have
drawn. Each kind of draw has a stream of its own, so that changing one leaves the others as they were.

Papers: Lipman et al. (arXiv:2210.02747); Esser et al. (arXiv:2403.03206), section 3.1 for the logit-normal times, 5.3.2 for
the shift by resolution.
"""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
Draw = Literal["time", "noise", "drop_text", "drop_pooled", "latent", "order"]

_STREAMS: tuple[Draw, ...] = ("time", "noise", "drop_text", "drop_pooled", "latent", "order")


def generator(seed: int, sample: int, draw: Draw) -> np.random.Generator:
    """The stream of one kind of draw for one sample."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, _STREAMS.index(draw), sample])))


def draw_time(
    seed: int,
    sample: int,
    *,
    times: Literal["uniform", "logit_normal"],
    mean: float = 0.0,
    std: float = 1.0,
    mu: float = 0.0,
) -> float:
    """The time of a training sample, in (0, 1).

    Args:
        seed: Of the run.
        sample: Global number.
        times: The distribution.
        mean: Of the normal number behind "logit_normal".
        std: Its standard deviation.
        mu: Shift, see `shift_of`; 0 for none.
    """
    stream = generator(seed, sample, "time")
    # uniform on the middles of 2^53 cells: neither 0 nor 1, where the velocity says nothing about the image or the noise
    time = (int(stream.integers(2**53)) + 0.5) / 2**53
    if times == "logit_normal":
        time = 1.0 / (1.0 + math.exp(-(mean + std * stream.standard_normal())))
    return shifted(time, mu)


def draw_noise(seed: int, sample: int, shape: tuple[int, ...]) -> FloatArray:
    """Standard normal noise of one sample, float32."""
    return generator(seed, sample, "noise").standard_normal(shape, dtype=np.float32)


def drops(seed: int, sample: int, kind: Literal["drop_text", "drop_pooled"], share: float) -> bool:
    """Whether a sample is trained without these features."""
    return bool(generator(seed, sample, kind).random() < share)


def shift_of(image_tokens: int) -> float:
    """The shift for an image of so many **packed** tokens: 0.5 at 256, 1.15 at 4096, linear between and beyond.

    Packed tokens, not latent pixels: there are four times as many of those.
    """
    return 0.5 + (1.15 - 0.5) * (image_tokens - 256) / (4096 - 256)


def shifted(time: float, mu: float) -> float:
    """``e^mu / (e^mu + 1 / t - 1)``: the time moved towards noise; 0 and 1 stay."""
    if time <= 0.0:
        return 0.0
    return math.exp(mu) / (math.exp(mu) + 1.0 / time - 1.0)


def schedule(steps: int, mu: float) -> list[float]:
    """The times of ``steps`` Euler steps, from 1 to 0: ``steps + 1`` numbers."""
    return [shifted(1.0 - step / steps, mu) for step in range(steps + 1)]
