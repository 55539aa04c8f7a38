"""Text to tokens on all cores, in order.

Documents are grouped into batches of about a megabyte: a future for each document costs more than it gives. The
tokenizers release the interpreter lock while they encode, so threads are enough; reading and parsing go on meanwhile.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from titan_train.data.sources.chat import encode_conversation
from titan_train.data.sources.document import Document
from titan_train.tokenizers import Tokenizer
from titan_train.tokenizers.protocol import TokenArray

Item = TypeVar("Item")

_BATCH_BYTES = 2**20
_BATCH_ITEMS = 1024


def encode_in_order(
    items: Iterable[Item | Document], tokenizer: Tokenizer, num_threads: int
) -> Iterator[tuple[Item | Document, TokenArray | None]]:
    """Each item with its tokens, in the order given; items that are no documents pass with None.

    The tokens of a conversation say which are learned, as `encode_conversation` does.

    Args:
        items: Documents, and whatever should keep its place among them.
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
