"""From noise to images: Euler steps along the predicted velocity, with classifier-free guidance; and PNG files.

The two predictions of a step, with the caption and with the empty text, are one batch of twice the size; with a scale of 1 the
first is enough.
"""

import itertools
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from titan_train.files import write_atomic
from titan_train.models.flux.rope import grid_positions, time_features
from titan_train.tasks.diffusion.batches import Features
from titan_train.tasks.diffusion.flow import FloatArray, draw_noise, schedule


@torch.no_grad()
def sample_latents(
    model: nn.Module,
    texts: Sequence[Features],
    empty: Features,
    *,
    grid: int,
    channels: int,
    steps: int,
    scale: float,
    mu: float,
    seed: int,
    guidance: float | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Sample one image for each text.

    Args:
        model: Takes the arguments of `titan_train.models.flux.model.Flux`, with any wrappers; collective if it is sharded.
        texts: Their ``text`` and ``pooled``.
        empty: Those of the empty text.
        grid: Tokens along one side.
        channels: Values of a token.
        steps: Euler steps.
        scale: Of classifier-free guidance; 1 follows the text alone.
        mu: Shift of the times, see `titan_train.tasks.diffusion.flow.shift_of`; 0 for none (schnell).
        seed: Of the noise.
        guidance: The guidance scale that the model takes as an input; None if it takes none.
        device: Where to sample.

    Returns:
        Packed latents ``[len(texts), grid * grid, channels]``, float32, on ``device``.
    """
    count, tokens = len(texts), grid * grid
    noise = np.stack([draw_noise(seed, number, (tokens, channels)) for number in range(count)])
    x = torch.from_numpy(noise).to(device)
    guided = scale != 1.0
    both = [*texts, *[empty] * count] if guided else list(texts)
    text = torch.from_numpy(np.stack([f.text for f in both])).to(device)
    pooled = torch.from_numpy(np.stack([f.pooled for f in both])).to(device)
    places = grid_positions(text.shape[1], grid, grid)[None].to(device)
    keywords: dict[str, Any] = {"positions": places, "pooled": pooled}
    if guidance is not None:
        keywords["guidance"] = time_features(torch.full((len(both),), guidance)).to(device)
    times = schedule(steps, mu)
    for now, after in itertools.pairwise(times):
        time = time_features(torch.full((len(both),), now)).to(device)
        velocity = model(torch.cat((x, x)) if guided else x, text, time=time, **keywords).float()
        if guided:
            with_text, without = velocity.chunk(2)
            velocity = without + scale * (with_text - without)
        x = x + (after - now) * velocity
    return x


def image_grid(images: Sequence[FloatArray], *, columns: int, zoom: int = 4, gap: int = 4) -> npt.NDArray[np.uint8]:
    """Images ``[side, side, 3]`` of about -1 to 1 side by side, ``[height, width, 3]``.

    Args:
        images: Of one size.
        columns: Images in a row.
        zoom: Each pixel becomes a square of so many.
        gap: White pixels between images.
    """
    side = images[0].shape[0] * zoom
    rows = -(-len(images) // columns)
    page = np.full((rows * (side + gap) + gap, columns * (side + gap) + gap, 3), 255, dtype=np.uint8)
    for number, image in enumerate(images):
        top, left = (gap + (side + gap) * place for place in divmod(number, columns))
        shown = np.clip((image + 1.0) * 127.5, 0.0, 255.0).round().astype(np.uint8)
        page[top : top + side, left : left + side] = shown.repeat(zoom, 0).repeat(zoom, 1)
    return page


def write_png(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    """Write ``[height, width, 3]`` bytes as a PNG file, in one piece."""
    height, width, _ = pixels.shape
    lines = np.concatenate((np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)), axis=1)  # filter 0 each

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)), chunk(b"IEND", b""))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, b"\x89PNG\r\n\x1a\n" + b"".join(parts))
