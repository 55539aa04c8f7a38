"""What every tokenizer offers, decoding one token at a time, and the folder that a tokenizer is saved to.

A token is a string of bytes, not of characters: one character may take several tokens. Text therefore comes out of
`IncrementalDecoder` only when its last byte has arrived.

A saved tokenizer is a folder with `titan_tokenizer.json` and, unless it is bytes, the model file beside it. The JSON names
the kind, the options and the fingerprint; it is written last, so that a folder without it is unfinished.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from titan_train.files import read_text, write_atomic

TokenArray = npt.NDArray[np.int32]
SAVED_NAME = "titan_tokenizer.json"
MODEL_NAME = "tokenizer.model"


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. `decode(encode(text)) == text` for every text that UTF-8 can carry.

    Tokenizers of other libraries (kind "hf") keep the text as far as their normalisation does.
    """

    @property
    def kind(self) -> str:
        """sentencepiece, tiktoken, hf or bytes."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Id that begins a document, or None if the vocabulary has none."""
        ...

    @property
    def eos_id(self) -> int:
        """Id that ends a document."""
        ...

    @property
    def pad_id(self) -> int | None:
        """Id that fills a row, or None if the vocabulary has none."""
        ...

    @property
    def special_ids(self) -> dict[str, int]:
        """The special tokens by name, as chat templates write them."""
        ...

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides an id: equal fingerprints give equal ids for every text."""
        ...

    def encode(self, text: str) -> TokenArray:
        """Ids of ``text``, int32, without bos and eos. A special token's name in the text is ordinary text.

        Raises:
            UnicodeEncodeError: If ``text`` holds a lone surrogate, which no UTF-8 text can.
        """
        ...

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[TokenArray]:
        """`encode` of each text, in order, on ``num_threads`` threads."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``. Special tokens give no text; bytes that are not UTF-8 give U+FFFD."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes one token stands for in the middle of a text; empty for a special token.

        Raises:
            ValueError: If ``token_id`` is not in the vocabulary.
        """
        ...

    def save(self, folder: str | Path) -> Path:
        """Write what `load_tokenizer` needs into ``folder`` (made if missing), and return it."""
        ...


class IncrementalDecoder:
    """Decode a stream of ids, holding back the bytes of an unfinished character.

    Example: ``for i in ids: print(decoder.push(i), end="")``, then ``print(decoder.flush())``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that this token completes, possibly none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What is left: U+FFFD if the stream ended inside a character, else nothing."""
        return self._utf8.decode(b"", final=True)


def check_ids(vocab_size: int, token_id: int) -> None:
    """Raise ValueError unless ``token_id`` is in a vocabulary of ``vocab_size``."""
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"token id {token_id} is outside the vocabulary: ids run from 0 to {vocab_size - 1}.")


def save_tokenizer(folder: str | Path, description: Mapping[str, Any], files: Mapping[str, bytes]) -> Path:
    """Write ``files``, then ``description`` as JSON, each under a temporary name first."""
    folder = Path(folder)
    text = json.dumps(description, indent=2, ensure_ascii=False) + "\n"
    for name, content in [*files.items(), (SAVED_NAME, text.encode())]:
        write_atomic(folder / name, content, sync=True)
    return folder


def read_description(folder: Path) -> dict[str, Any]:
    """The description `save_tokenizer` wrote.

    Raises:
        ValueError: If it is not a JSON object that names a kind.
    """
    path = folder / SAVED_NAME
    try:
        description = json.loads(read_text(path))
    except ValueError as err:
        raise ValueError(f"{path} is not valid JSON ({err}). Save the tokenizer again.") from err
    if not isinstance(description, dict) or not isinstance(description.get("kind"), str):
        raise ValueError(f"{path} names no tokenizer kind. Save the tokenizer again.")
    return description
