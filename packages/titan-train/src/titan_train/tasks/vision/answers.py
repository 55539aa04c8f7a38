"""How many held-out answers a model gets right, with their images and with shuffled ones.

An answer is right if every one of its tokens is the likeliest, given those before it: then greedy decoding writes exactly it.
So one forward pass scores a whole row. With shuffled images each question is shown the image of another document. A model
that looks falls to what can be guessed from the question alone.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from titan_train.data.loader.source import TensorBatch
from titan_train.models.call import computes_on
from titan_train.models.vision_language.encoder import patch_places
from titan_train.tasks.vision.batches import ImageTextBatches


@torch.no_grad()
def score_answers(
    model: nn.Module, data: ImageTextBatches, items: Sequence[int], *, shuffled: bool, rows_at_once: int = 16
) -> list[bool]:
    """Whether each answer is right.

    Args:
        model: In evaluation mode; every rank that shares it calls this alike.
        data: Held-out documents.
        items: Which of them; of images of one size if ``shuffled``.
        shuffled: Show each question the images of the item half of the items further on.
        rows_at_once: Documents in one forward pass, each in a row of its own.

    Raises:
        ValueError: Images of different sizes cannot be shuffled.
    """
    device = computes_on(model)
    right: list[bool] = []
    for start in range(0, len(items), rows_at_once):
        batch = data.batch_of([[item] for item in items[start : start + rows_at_once]])
        if shuffled:
            others = [items[(start + k + len(items) // 2) % len(items)] for k in range(len(batch.target))]
            batch = _with_images_of(batch, data.batch_of([[item] for item in others]))
        batch = _apart_from_rows(batch, data.merge)
        moved = batch.on_device([tensor.to(device) for tensor in batch.tensors()])
        logits = model(*moved.inputs, **moved.keywords)
        wanted = moved.target >= 0
        correct = (logits.argmax(-1) == moved.target) | ~wanted
        right += (correct.all(-1) & wanted.any(-1)).tolist()
    return right


def guessed(data: ImageTextBatches, items: Sequence[int]) -> float:
    """Share of answers that are right when every question gets the answer most frequent for it: chance, without looking."""
    asked: dict[str, Counter[str]] = {}
    for item in items:
        prompt, answer = data.items.texts(item)
        asked.setdefault(prompt, Counter())[answer] += 1
    return sum(max(counts.values()) for counts in asked.values()) / max(1, len(items))


def _apart_from_rows(batch: TensorBatch, merge: int) -> TensorBatch:
    """With empty images until nothing of images has as many entries as rows: a pipeline would cut it as it cuts rows."""
    keywords: dict[str, Any] = dict(batch.keywords)
    places, _ = patch_places([(merge, merge)], merge)
    while len(batch.target) in (len(keywords["pixels"]), len(keywords["image_bounds"])):
        pixels, bounds = keywords["pixels"], keywords["image_bounds"]
        keywords["pixels"] = torch.cat((pixels, pixels.new_zeros(merge**2, pixels.shape[1])))
        keywords["patches"] = torch.cat((keywords["patches"], places))
        keywords["image_bounds"] = torch.cat((bounds, bounds[-1:] + merge**2))
    return TensorBatch(batch.inputs, keywords, batch.target, batch.samples_consumed)


def _with_images_of(batch: TensorBatch, other: TensorBatch) -> TensorBatch:
    names = ("patches", "image_bounds")
    same = all(torch.equal(_keyword(batch, name), _keyword(other, name)) for name in names)
    if not same:
        raise ValueError("images of different sizes cannot be shuffled: a question would not fit its new image.")
    keywords: dict[str, Any] = {**batch.keywords, "pixels": other.keywords["pixels"]}
    return TensorBatch(batch.inputs, keywords, batch.target, batch.samples_consumed)


def _keyword(batch: TensorBatch, name: str) -> Tensor:
    return batch.keywords[name]
