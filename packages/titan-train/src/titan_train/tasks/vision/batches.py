"""Microbatches of packed rows: tokens, the patches of all their images, and which token stands for which feature."""

import hashlib
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from titan_train.data.loader.source import BatchSource, TensorBatch
from titan_train.data.order.permutation import permute
from titan_train.models.vision_language.args import EncoderArgs
from titan_train.models.vision_language.encoder import patch_places
from titan_train.tasks.image_files import BrokenImage
from titan_train.tasks.vision.images import FloatArray
from titan_train.tasks.vision.rows import (
    Grid,
    ImageTextDocument,
    ImageTextSet,
    document_length,
    pack_rows,
    write_document,
)
from titan_train.tokenizers import Tokenizer

_FEW = 10_000
"""Of fewer documents as many may be broken as of these."""

_logger = logging.getLogger(__name__)


class ImageTextBatches(BatchSource):
    """Rows in the order of their epoch. What a row holds is a function of its number alone."""

    def __init__(
        self,
        items: ImageTextSet,
        tokenizer: Tokenizer,
        args: EncoderArgs,
        *,
        seq_len: int,
        seed: int,
        part: Literal["train", "validation"],
        threads: int,
        begin: Sequence[int] = (),
        max_bad_fraction: float = 1.0,
    ) -> None:
        """Pack the rows.

        Args:
            items: The documents.
            tokenizer: Of their texts.
            args: Of the model.
            seq_len: Places of a row.
            seed: Of the order.
            part: Validation takes rows in order.
            threads: That decode images.
            begin: Ids that every document begins with.
            max_bad_fraction: Share of the documents whose images may be broken for this rank, which knows of its own alone.

        Raises:
            ValueError: There is no document, or one is longer than a row.
        """
        self.seed, self.seq_len, self.tokenizer = seed, seq_len, tokenizer.fingerprint
        self.items, self.merge, self._begin = items, args.merge, begin
        self._tokenizer, self._args, self._part = tokenizer, args, part
        lengths = [self._length(item) for item in range(len(items))]
        if not lengths:
            raise ValueError(f"there is nothing to take for {part}: add data, or change vision.held_out.")
        self.rows = pack_rows(lengths, seq_len)
        self._broken: set[int] = set()
        self._max_bad_fraction = max_bad_fraction
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="images")

    @property
    def fingerprint(self) -> str:
        """Hash of the documents and of what changes rows."""
        content = [
            self.items.fingerprint,
            self.seq_len,
            self._part,
            self._args.image_token,
            self._args.patch,
            *self._begin,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def row_of(self, sample: int) -> list[int]:
        epoch, place = divmod(sample, len(self.rows))
        if self._part == "validation":
            return self.rows[place]
        return self.rows[int(permute(np.array([place]), len(self.rows), self.seed, "vision", epoch)[0])]

    def build_batch(self, samples: npt.NDArray[np.int64], *, ignore_index: int, samples_consumed: int) -> TensorBatch:
        """Tokens ``[B, S]`` and labels, with the keywords of `titan_train.models.vision_language.decoder.SeesImages`."""
        rows = [self.row_of(int(sample)) for sample in samples]
        return self.batch_of(rows, ignore_index=ignore_index, samples_consumed=samples_consumed)

    def batch_of(
        self, rows: Sequence[Sequence[int]], *, ignore_index: int = -100, samples_consumed: int = 0
    ) -> TensorBatch:
        """The microbatch of rows that hold these documents.

        Raises:
            ValueError: More documents than ``max_bad_fraction`` have a broken image.
            OSError: The disk does not answer.
        """
        items = [item for row in rows for item in row]
        images = dict(zip(items, self._pool.map(self._patches, items), strict=True))
        if len(self._broken) > self._max_bad_fraction * max(len(self.items), _FEW):
            raise ValueError(
                f"{len(self._broken)} of {len(self.items)} documents for {self._part} have images that were there when they were "
                f"indexed and that this rank cannot read now, more than data.max_bad_fraction={self._max_bad_fraction} allows; "
                f"one is {self.items.name(max(self._broken))}. Bring the files back (is their disk mounted?), or raise the limit."
            )
        layout = RowLayout(len(rows), self.seq_len, self._tokenizer.eos_id, ignore_index)
        pixels: list[FloatArray] = []
        grids: list[Grid] = []
        for number, row in enumerate(rows):
            for item in row:
                found = images[item]
                layout.add(number, self.document(item), learn=found is not None)
                grids += self.items.grids(item)
                pixels += self._blank(item) if found is None else found
        return layout.batch(pixels, grids, self._args, samples_consumed)

    def document(self, item: int) -> ImageTextDocument:
        grids, texts = self.items.grids(item), self.items.texts(item)
        return write_document(self._tokenizer, self._args, grids, *texts, begin=self._begin)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _length(self, item: int) -> int:
        text_tokens = self.items.count_tokens(item, self._tokenizer)
        length = document_length(self._args, self.items.grids(item), text_tokens, begin=self._begin)
        if length > self.seq_len:
            raise ValueError(
                f"{self.items.name(item)} takes {length} tokens with its images, and a row has model.seq_len={self.seq_len}: "
                f"cut, an image would lose part of itself. Set model.seq_len to at least {length}, lower "
                "vision.max_image_tokens, or take it out."
            )
        return length

    def _patches(self, item: int) -> list[FloatArray] | None:
        """The images of a document; None if one is broken, whose answer is then not learned."""
        try:
            return self.items.patches(item)
        except BrokenImage as err:
            if item not in self._broken:
                self._broken.add(item)
                _logger.warning("quarantined %s, its answer is not learned: %s", self.items.name(item), err)
            return None

    def _blank(self, item: int) -> list[FloatArray]:
        values = self._args.patch_values
        return [np.zeros((rows * columns, values), np.float32) for rows, columns in self.items.grids(item)]


class RowLayout:
    """Rows being filled with documents."""

    def __init__(self, rows: int, seq_len: int, pad: int, ignore_index: int) -> None:
        self._tokens = np.full((rows, seq_len), pad)
        self._labels = np.full((rows, seq_len), ignore_index)
        self._positions = np.zeros((rows, seq_len, 3), dtype=np.int64)
        self._source = np.full((rows, seq_len), -1)
        self._ends: list[list[int]] = [[0] for _ in range(rows)]
        self._features = 0

    def add(self, row: int, document: ImageTextDocument, *, learn: bool = True) -> None:
        """Put a document at the end of a row; without ``learn`` nothing of it is predicted."""
        length = len(document.tokens) - 1
        start = self._ends[row][-1]
        here = slice(start, start + length)
        assert start + length <= self._tokens.shape[1]
        self._tokens[row, here] = document.tokens[:-1]
        if learn:
            self._labels[row, here] = np.where(document.learned[1:], document.tokens[1:], self._labels[row, here])
        self._positions[row, here] = document.positions[:-1]
        image = document.image[:-1]
        self._source[row, here] = np.where(image < 0, -1, image + self._features)
        self._features += int(image.max(initial=-1)) + 1
        self._ends[row].append(start + length)

    def batch(
        self, pixels: Sequence[FloatArray], grids: Sequence[Grid], args: EncoderArgs, samples_consumed: int
    ) -> TensorBatch:
        """The microbatch; without an image it has an empty one, which stands nowhere."""
        if not grids:
            grids = [(args.merge, args.merge)]
            pixels = [np.zeros((args.merge**2, args.patch_values), np.float32)]
        places, bounds = patch_places(grids, args.merge)
        if (made := sum(len(image) for image in pixels)) != len(places) or self._features > made // args.merge**2:
            raise ValueError(f"{made} patches were decoded for images that take {len(places)}: they would be shifted.")
        seq_len = self._tokens.shape[1]
        width = max(len(ends) for ends in self._ends) + 1
        documents = [[*ends, *([seq_len] * (width - len(ends)))] for ends in self._ends]
        return TensorBatch(
            inputs=(torch.from_numpy(self._tokens),),
            keywords={
                "positions": torch.from_numpy(self._positions),
                "cu_seqlens": torch.tensor(documents, dtype=torch.int32),
                "padding": torch.arange(seq_len) >= torch.tensor([ends[-1:] for ends in self._ends]),
                "image_source": torch.from_numpy(self._source),
                "pixels": torch.from_numpy(np.concatenate(pixels)),
                "patches": places,
                "image_bounds": bounds,
            },
            target=torch.from_numpy(self._labels),
            samples_consumed=samples_consumed,
        )
