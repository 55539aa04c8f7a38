"""Windows of tokens straight from text, without a cache: one pass, in the order of the files.

This is for looking at a corpus, or for a single pass where the disk has no room for shards. It has no random access,
so no shuffle, no mixture and no resume; training reads shards.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from titan_train.config import DataConfig, SourceConfig
from titan_train.data.sources.document import Document
from titan_train.data.sources.documents import list_files, read_documents
from titan_train.data.sources.encoding import encode_in_order
from titan_train.data.sources.files import FileReader
from titan_train.data.sources.malformed import BadDocument, BadDocuments
from titan_train.tokenizers import Tokenizer


def stream_windows(
    source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, *, seq_len: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Windows of ``seq_len + 1`` tokens, overlapping by one, of one text source.

    Args:
        source: stdlib, text or jsonl.
        config: Its malformed-input policy and number of threads are used.
        tokenizer: Makes the tokens; its end-of-sequence id ends every document.
        seq_len: Tokens of a sample.

    Yields:
        int64 ``[seq_len + 1]``; what is left at the end, less than a window, is not given.

    Raises:
        MalformedInputError: As the policy says.
    """
    bad = BadDocuments(
        source.name, on_error=config.on_error, max_fraction=config.max_bad_fraction, max_count=config.max_bad
    )
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    held: list[npt.NDArray[np.int32]] = []
    held_tokens = 0
    for item, ids in encode_in_order(_items(source), tokenizer, config.num_threads):
        if ids is None:
            assert isinstance(item, BadDocument)
            bad.add(item)
            continue
        bad.add_good()
        held += [ids, eos]
        held_tokens += ids.size + 1
        if held_tokens > seq_len:
            run = np.concatenate(held)
            count = (run.size - 1) // seq_len
            for number in range(count):
                yield run[number * seq_len : number * seq_len + seq_len + 1].astype(np.int64)
            held = [run[count * seq_len :]]
            held_tokens = held[0].size
    bad.check_share()


def _items(source: SourceConfig) -> Iterator[Document | BadDocument]:
    for file in list_files(source):
        yield from read_documents(file, source, FileReader(file.path))
