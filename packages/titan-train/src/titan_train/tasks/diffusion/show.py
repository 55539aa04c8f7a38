"""Images of captions by a trained model, in one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from titan_train.generation.run import load_model
from titan_train.models.flux.args import FluxArgs
from titan_train.run_folder import read_config
from titan_train.task import task_name
from titan_train.tasks.diffusion.batches import Features
from titan_train.tasks.diffusion.flow import FloatArray, shift_of
from titan_train.tasks.diffusion.sampling import image_grid, sample_latents, write_png
from titan_train.tasks.diffusion.shapes import ShapeFeatures, caption_number, to_image
from titan_train.tasks.diffusion.shards.encoders import Encoders
from titan_train.tasks.diffusion.source import decode_latents

if TYPE_CHECKING:
    from titan_train.config import Config


def show_captions(
    run_dir: Path,
    captions: Sequence[str],
    out: Path,
    *,
    step: int | None = None,
    steps: int | None = None,
    scale: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Write one image for each caption into a PNG file, eight in a row.

    Args:
        run_dir: A run of the task diffusion, trained under any layout.
        captions: Of shapes, as `titan_train.tasks.diffusion.shapes.caption_text` writes them; an empty one stands for no text.
        out: The file.
        step: Which checkpoint; None takes the newest valid one.
        steps: Euler steps; None takes ``diffusion.sample_steps``.
        scale: Of classifier-free guidance; None takes ``diffusion.sample_scale``.
        seed: Of the noise; image n has noise n of it.
        device: Where to sample.

    Returns:
        The checkpoint's step.

    Raises:
        ValueError: The run is not of diffusion, has no such checkpoint, or a caption cannot be encoded.
    """
    config = read_config(run_dir)
    if task_name(config) != "diffusion":
        raise ValueError(
            f"{run_dir} trained {config.model.name}, which makes no images. Name a run of a diffusion model."
        )
    diffusion = config.diffusion
    if diffusion.source == "shards" and not diffusion.encoders:
        raise ValueError(
            f"{run_dir} was trained without diffusion.encoders: nothing here encodes a caption or decodes a latent. Export the "
            "run (titan-train export --to hf) and sample it with a pipeline of diffusers."
        )
    numbers = [caption_number(text) for text in captions if text] if diffusion.source == "shapes" else []
    config, model, found = load_model(run_dir, step=step, device=device)
    args = cast(FluxArgs, model.args)
    encoders = None
    if diffusion.source == "shards":
        encoders = Encoders(Path(diffusion.encoders).expanduser(), text_tokens=diffusion.text_tokens, device=device)
    texts, empty = _features(config, args, captions, numbers, encoders)
    latents = sample_latents(
        model,
        texts,
        empty,
        grid=diffusion.grid,
        channels=args.in_channels,
        steps=diffusion.sample_steps if steps is None else steps,
        scale=diffusion.sample_scale if scale is None else scale,
        mu=shift_of(diffusion.grid**2) if diffusion.shift else 0.0,
        seed=seed,
        guidance=diffusion.guidance if args.guidance else None,
        device=device,
    )
    tokens = latents.cpu().numpy()
    images = [to_image(x) for x in tokens] if encoders is None else decode_latents(encoders, diffusion, tokens)
    write_png(out, image_grid(images, columns=8, zoom=4 if encoders is None else 1))
    return found


def _features(
    config: "Config", args: FluxArgs, captions: Sequence[str], numbers: Sequence[int], encoders: Encoders | None
) -> tuple[list[Features], Features]:
    """The features of each caption, and of the empty one."""
    diffusion = config.diffusion
    none: FloatArray = np.zeros((0, args.in_channels), dtype=np.float32)
    if encoders is not None:
        text, pooled = encoders.encode_texts([*captions, ""])
        pairs = zip(text.float().cpu().numpy(), pooled.float().cpu().numpy(), strict=True)
        *found, empty = [Features(none, *pair) for pair in pairs]
        return found, empty
    items = ShapeFeatures(
        grid=diffusion.grid, text_tokens=diffusion.text_tokens, text_dim=args.text_dim, pooled_dim=args.pooled_dim
    )
    shown = iter(numbers)
    return [Features(none, *items.text_of(next(shown))) if text else items.empty for text in captions], items.empty
