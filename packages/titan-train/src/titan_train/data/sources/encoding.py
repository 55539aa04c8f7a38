"""Text to tokens on all cores, in order.

Documents are grouped into batches of about a megabyte: a future for each document costs more than it gives. The
tokenizers release the interpreter lock while they encode, so threads are enough; reading and parsing go on meanwhile.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from titan_train.config import DataConfig
from titan_train.data.sources.chat import Conversations, encode_conversation
from titan_train.data.sources.document import Document
from titan_train.tokenizers import Tokenizer
from titan_train.tokenizers.protocol import TokenArray

Item = TypeVar("Item")

_BATCH_BYTES = 2**20
_BATCH_ITEMS = 1024


def encode_in_order(
    items: Iterable[Item | Document], tokenizer: Tokenizer, num_threads: int
) -> Iterator[tuple[Item | Document, TokenArray | None]]:
    """Each item with its tokens, in the order given; items that are not documents pass with None.

    The tokens of a conversation say which are learned, as `encode_conversation` does.

    Args:
        items: Documents, and other items that keep their place among them.
        tokenizer: Encodes the documents.
        num_threads: Threads; 0 takes every core.
    """
    threads = num_threads or os.cpu_count() or 1

    def encode(batch: list[Item | Document]) -> list[TokenArray | None]:
        texts = [item.text for item in batch if isinstance(item, Document) and item.spans is None]
        encoded = iter(tokenizer.encode_batch(texts))

        def tokens(item: Item | Document) -> TokenArray | None:
            if not isinstance(item, Document):
                return None
            return next(encoded) if item.spans is None else encode_conversation(item, tokenizer)

        return [tokens(item) for item in batch]

    waiting: deque[tuple[list[Item | Document], Future[list[TokenArray | None]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="titan-encode") as pool:
        try:
            for batch in _batches(items):
                waiting.append((batch, pool.submit(encode, batch)))
                if len(waiting) > 2 * threads:
                    done, tokens = waiting.popleft()
                    yield from zip(done, tokens.result(), strict=True)
            while waiting:
                done, tokens = waiting.popleft()
                yield from zip(done, tokens.result(), strict=True)
        finally:
            for _, future in waiting:
                future.cancel()


def _batches(items: Iterable[Item | Document]) -> Iterator[list[Item | Document]]:
    batch: list[Item | Document] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.utf8) if isinstance(item, Document) else 0
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def begin_ids(config: DataConfig, tokenizer: Tokenizer) -> list[int]:
    """The ids that documents of text, and prompts to continue, begin with (``data.add_bos``).

    Raises:
        ValueError: ``config`` asks for a beginning-of-document token that the tokenizer lacks.
    """
    if not config.add_bos:
        return []
    if tokenizer.bos_id is None:
        raise ValueError(
            f"data.add_bos=true, but the {tokenizer.kind} tokenizer has no beginning-of-document token. "
            "Set add_bos=false, or use a tokenizer that has one."
        )
    return [tokenizer.bos_id]


class DocumentTokens:
    """The tokens stored for a document: its ids between those that begin and end it; a chat template writes its own.

    Raises:
        ValueError: As of `begin_ids`.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer, chats: Conversations | None) -> None:
        before = begin_ids(config, tokenizer)
        self.vocab_size = tokenizer.vocab_size * (1 if chats is None else 2)
        """Bound of the stored ids: those of a chat that are not learned have the tokenizer's size added."""
        self._before, self._after = (
            [np.array(ids, dtype=np.int32)] if chats is None and ids else [] for ids in (before, [tokenizer.eos_id])
        )

    def of(self, ids: TokenArray) -> list[TokenArray]:
        """The parts that make up a document with these ids."""
        return [*self._before, ids, *self._after]
