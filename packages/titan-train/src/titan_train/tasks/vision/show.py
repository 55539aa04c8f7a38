"""Show a trained model images, so that it continues a prompt about them.

Generation calls the model on tokens alone. While images are shown, a hook adds their patches and the positions of all tokens.
The whole sequence is computed for every new token: the key-value cache finds its places by positions that count tokens.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titan_train.generation import LoadedRun
from titan_train.models.qwen3_vl.model import Qwen3VL
from titan_train.models.qwen3_vl.vision import patch_places
from titan_train.tasks.vision.images import BrokenImage, FloatArray, fit_grid, image_size, read_image, to_patches
from titan_train.tasks.vision.rows import Grid, write_document


@contextmanager
def images_shown(run: LoadedRun, images: Sequence[Path], prompts: Sequence[str]) -> Generator[list[list[int]]]:
    """Inside, the run's model sees ``images`` before each prompt.

    Args:
        run: Of a model of the family qwen3_vl.
        images: Files, or members of tar shards.
        prompts: One for each row of the batch.

    Yields:
        The token ids of each row, for `titan_train.generation.stream_text`.

    Raises:
        ValueError: The run's model takes no images, or an image cannot be used.
    """
    model: Any = run.model
    if not isinstance(model, Qwen3VL):
        raise ValueError(
            f"--image: the run trained {run.config.model.name}, which takes no images. Leave it out, or name a run of a "
            "vision-language model."
        )
    patches, grids = _patches(run, model, images)
    documents = [write_document(run.tokenizer, model.args, grids, prompt, None) for prompt in prompts]
    device = next(model.parameters()).device
    places, bounds = patch_places(grids * len(prompts), model.args.merge)
    keywords: dict[str, Any] = {
        "pixels": torch.from_numpy(np.concatenate(patches * len(prompts))).to(device),
        "patches": places.to(device),
        "image_bounds": bounds.to(device),
    }

    def add_images(module: nn.Module, inputs: tuple[Tensor, ...], given: dict[str, Any]) -> Any:
        rows, length = inputs[0].shape
        positions = np.zeros((rows, length, 3), dtype=np.int64)
        source = np.full((rows, length), -1)
        for row, document in enumerate(documents):
            known = len(document.tokens)
            more = document.positions.max() + 1 + np.arange(max(0, length - known))
            positions[row] = np.concatenate((document.positions, np.repeat(more[:, None], 3, axis=1)))[:length]
            features = int(document.image.max()) + 1
            here = document.image[:length]
            source[row, : len(here)] = np.where(here < 0, -1, here + row * features)
        moved = {"positions": positions, "image_source": source}
        return inputs, given | keywords | {name: torch.from_numpy(x).to(device) for name, x in moved.items()}

    hook = model.register_forward_pre_hook(add_images, with_kwargs=True)
    model.supports_kv_cache = False
    try:
        yield [document.tokens.tolist() for document in documents]
    finally:
        hook.remove()
        del model.supports_kv_cache


def _patches(run: LoadedRun, model: Qwen3VL, images: Sequence[Path]) -> tuple[list[FloatArray], list[Grid]]:
    vision = run.config.vision
    patches: list[FloatArray] = []
    grids: list[Grid] = []
    for path in images:
        try:
            size = image_size(str(path), most=vision.max_pixels)
            grid = fit_grid(*size, model.args, least=vision.min_image_tokens, most=vision.max_image_tokens)
            patches.append(to_patches(read_image(str(path), grid, model.args, most=vision.max_pixels), model.args))
        except BrokenImage as err:
            raise ValueError(f"--image: {err}. Give an image that Pillow reads.") from err
        grids.append(grid)
    return patches, grids
