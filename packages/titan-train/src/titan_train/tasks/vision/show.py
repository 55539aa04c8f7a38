"""Show a trained model images, so that it continues a prompt about them.

Generation calls the model on tokens and their places. While images are shown, a hook adds the patches to a forward of the prompt,
and which feature stands in which place. Places stay what the key-value cache finds its entries by; where the model rotates by
rows and columns, they are turned into those when the angles are computed.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titan_train.generation import LoadedRun
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.models.vision_language.decoder import SeesImages
from titan_train.models.vision_language.encoder import patch_places
from titan_train.tasks.image_files import BrokenImage
from titan_train.tasks.vision.images import FloatArray, fit_grid, image_size, read_image, to_patches
from titan_train.tasks.vision.rows import Grid, write_document


@contextmanager
def images_shown(run: LoadedRun, images: Sequence[Path], prompts: Sequence[str]) -> Generator[list[list[int]]]:
    """Inside, the run's model sees ``images`` before each prompt.

    Args:
        run: Of a vision-language model.
        images: Files, or members of tar shards.
        prompts: One for each row of the batch.

    Yields:
        The token ids of each row, for `titan_train.generation.stream_text`.

    Raises:
        ValueError: The run's model takes no images, or an image cannot be used.
    """
    model: Any = run.model
    if not isinstance(model, SeesImages):
        raise ValueError(
            f"--image: the run trained {run.config.model.name}, which takes no images. Leave it out, or name a run of a "
            "vision-language model."
        )
    patches, grids = _patches(run, model.args, images)
    documents = [
        write_document(run.tokenizer, model.args, grids, prompt, None, begin=run.begin_ids) for prompt in prompts
    ]
    device = next(model.parameters()).device
    places, bounds = patch_places(grids * len(prompts), model.args.merge)
    keywords: dict[str, Any] = {
        "pixels": torch.from_numpy(np.concatenate(patches * len(prompts))).to(device),
        "patches": places.to(device),
        "image_bounds": bounds.to(device),
    }
    longest = max(len(document.tokens) for document in documents)
    source = torch.full((len(prompts), longest), -1)
    known = torch.zeros((len(prompts), longest, 3), dtype=torch.int64)
    for row, document in enumerate(documents):
        length, features = len(document.tokens), int(document.image.max()) + 1
        image = torch.from_numpy(document.image)
        source[row, :length] = torch.where(image < 0, -1, image + row * features)
        after = int(document.positions.max()) + 1 + torch.arange(longest - length)
        known[row] = torch.cat((torch.from_numpy(document.positions), after[:, None].expand(-1, 3)))
    source, known = source.to(device), known.to(device)
    rotate: Any = model.rope if model.args.grid_positions else None

    def add_images(module: nn.Module, inputs: tuple[Tensor, ...], given: dict[str, Any]) -> Any:
        length = inputs[0].shape[1]
        if length == 1:  # a token after the prompt: the cache knows the images
            return inputs, given
        where = source[:, :length]
        where = torch.cat((where, where.new_full((len(where), length - where.shape[1]), -1)), dim=1)
        return inputs, given | keywords | {"image_source": where}

    def rotate_places(positions: Tensor) -> tuple[Tensor, Tensor]:
        rows = positions.expand(len(known), -1)
        inside = rows.clamp(max=longest - 1)
        axes = known.gather(1, inside[..., None].expand(-1, -1, 3))
        return rotate(axes + (rows - inside)[..., None])

    hook = model.register_forward_pre_hook(add_images, with_kwargs=True)
    if rotate is not None:
        vars(model)["rope"] = rotate_places
    try:
        yield [document.tokens.tolist() for document in documents]
    finally:
        hook.remove()
        if rotate is not None:
            del vars(model)["rope"]


def _patches(run: LoadedRun, args: EncoderArgs, images: Sequence[Path]) -> tuple[list[FloatArray], list[Grid]]:
    vision = run.config.vision
    patches: list[FloatArray] = []
    grids: list[Grid] = []
    for path in images:
        try:
            size = image_size(str(path), most=vision.max_pixels)
            grid = fit_grid(*size, args, least=vision.min_image_tokens, most=vision.max_image_tokens)
            patches.append(to_patches(read_image(str(path), grid, args, most=vision.max_pixels), args))
        except BrokenImage as err:
            raise ValueError(f"--image: {err}. Give an image that Pillow reads.") from err
        grids.append(grid)
    return patches, grids
