"""SentencePiece: load any model, or train one that loses nothing.

The library's defaults lose text: they normalise Unicode, squeeze spaces and add one in front, so that no source file
survives a round trip. Training here turns that off (`byte_fallback`, identity normalisation, no dummy prefix), keeps
runs of spaces as pieces (code shrinks by a third) and makes the newline a piece. One loss is built in: SentencePiece
writes a space as U+2581 inside pieces, so a U+2581 in the text would come back as a space. Where the vocabulary has
byte pieces, that character is encoded as its three bytes instead.

Sentences longer than 4192 bytes are skipped by the trainer without a word; it is fed lines, and long lines in pieces.
"""

import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import sentencepiece

from titan_train.tokenizers.protocol import MODEL_NAME, TokenArray, check_ids, save_tokenizer
from titan_train.tokenizers.sentencepiece_model import read_pieces, round_scores

_SPACE = "\u2581"
# The trainer drops sentences over 4192 bytes; a piece of 1000 characters is at most 4000.
_MAX_SENTENCE_CHARS = 1000
# The pieces do not depend on it, but it is written into the model: a machine's own number would change the fingerprint.
_TRAINER_THREADS = 8


class SentencePieceTokenizer:
    """A SentencePiece model.

    Args:
        model: Content of a `.model` file.

    Raises:
        ValueError: If ``model`` is not a SentencePiece model, or has no token that ends a document.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError) as err:
            raise ValueError(f"the file is not a SentencePiece model ({err}); give a `.model` file.") from err
        self.vocab_size: int = self._processor.get_piece_size()
        self.eos_id = self._id(self._processor.eos_id(), "eos")
        self.bos_id: int | None = self._optional(self._processor.bos_id())
        self.pad_id: int | None = self._optional(self._processor.pad_id())
        self.special_ids: dict[str, int] = {
            self._processor.id_to_piece(i): i for i in range(self.vocab_size) if self._processor.is_control(i)
        }
        self.fingerprint = hashlib.sha256(b"sentencepiece 1\0" + model).hexdigest()
        self._bytes = [self._piece_bytes(i) for i in range(self.vocab_size)]
        self._newline: int | None = self._processor.piece_to_id("\n") if read_pieces(model).adds_exactly else None
        # Llama 2's models put a space before every text; the decoder takes it away again.
        self.adds_space = self._starts_with_space("a")
        self._escape = self._escape_ids()

    def encode(self, text: str) -> TokenArray:
        text.encode()  # a lone surrogate is an error here, not a question mark later
        if self._escape is not None and _SPACE in text:
            return self._encode_escaped(text, self._escape)
        return np.asarray(self._encode(text), dtype=np.int32)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[TokenArray]:
        if num_threads <= 1 or len(texts) <= 1:
            return [self.encode(text) for text in texts]
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self.encode, texts, chunksize=1))

    def decode(self, ids: Iterable[int]) -> str:
        joined = b"".join([self.token_bytes(int(i)) for i in ids])
        if self.adds_space and joined.startswith(b" "):
            joined = joined[1:]
        return joined.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        check_ids(self.vocab_size, token_id)
        return self._bytes[token_id]

    def save(self, folder: str | Path) -> Path:
        return save_tokenizer(
            folder,
            {"kind": self.kind, "vocab_size": self.vocab_size, "fingerprint": self.fingerprint},
            {MODEL_NAME: self.model},
        )

    def _encode(self, text: str) -> list[int]:
        if self._newline is None:
            return self._processor.encode(text)
        ids: list[int] = []
        for line in self._processor.encode(text.split("\n"), num_threads=1):
            ids += line
            ids.append(self._newline)
        return ids[:-1]

    def _encode_escaped(self, text: str, escape: list[int]) -> TokenArray:
        ids: list[int] = []
        for number, part in enumerate(text.split(_SPACE)):
            if number:
                ids += escape
            ids += self._encode(part)
        return np.asarray(ids, dtype=np.int32)

    def _escape_ids(self) -> list[int] | None:
        pieces = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        if all(self._processor.is_byte(piece) for piece in pieces) and not self.adds_space:
            return pieces
        return None

    def _starts_with_space(self, text: str) -> bool:
        ids = self._encode(text)
        return bool(ids) and self._bytes[ids[0]].startswith(b" ")

    def _piece_bytes(self, token_id: int) -> bytes:
        if self._processor.is_control(token_id) or self._processor.is_unused(token_id):
            return b""
        if self._processor.is_unknown(token_id):
            return "\ufffd".encode()
        piece: str = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE, " ").encode()

    def _id(self, value: int, name: str) -> int:
        if value < 0:
            raise ValueError(
                f"the SentencePiece model has no {name} token, so a document's end could not be marked. "
                f"Train it with {name}_id set."
            )
        return value

    @staticmethod
    def _optional(value: int) -> int | None:
        return value if value >= 0 else None


def train_sentencepiece(
    texts: Iterable[str],
    vocab_size: int,
    out_dir: str | Path | None = None,
    *,
    model_type: Literal["bpe", "unigram"] = "bpe",
    progress: Callable[[int], None] | None = None,
) -> SentencePieceTokenizer:
    """Train a lossless SentencePiece model.

    The same text gives the same model, byte for byte, on every machine. A unigram vocabulary may come out smaller
    than ``vocab_size`` when the text does not hold as many pieces; its scores are multiples of 2^-10 and it encodes line by
    line, so that a ``tokenizer.json`` of it gives the same ids.

    Args:
        texts: Documents; read once.
        vocab_size: Pieces to have, 300 or more: 256 bytes, 4 control tokens and the newline are among them.
        out_dir: Folder to save the tokenizer in; None saves nothing.
        model_type: bpe or unigram.
        progress: Called as ``progress(bytes_read)`` while the text is read; the library trains silently after that.

    Raises:
        ValueError: If the text is too short for ``vocab_size``, with the library's own words. What ``texts`` raises is raised
            as it is.
    """
    if vocab_size < 300:
        raise ValueError(
            f"vocab_size={vocab_size} leaves no room for learned pieces: bytes, control tokens and newline take 261. "
            "Use 300 or more."
        )
    model = io.BytesIO()
    failed: list[BaseException] = []
    try:
        sentencepiece.SentencePieceTrainer.train(  # pyright: ignore[reportAttributeAccessIssue]
            sentence_iterator=_noted(_sentences(texts, progress), failed),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            hard_vocab_limit=model_type != "unigram",
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            num_threads=_TRAINER_THREADS,
            minloglevel=2,
        )
    except RuntimeError as err:
        if failed:  # the library gives the error of its iterator as text
            raise failed[0] from None
        raise ValueError(
            f"SentencePiece could not train vocab_size={vocab_size} ({model_type}) on this text: {err}. "
            "Give it more text, or ask for a smaller vocabulary."
        ) from err
    content = round_scores(model.getvalue()) if model_type == "unigram" else model.getvalue()
    tokenizer = SentencePieceTokenizer(content)
    if out_dir is not None:
        tokenizer.save(out_dir)
    return tokenizer


def _noted(lines: Iterator[str], failed: list[BaseException]) -> Iterator[str]:
    try:
        yield from lines
    except (Exception, KeyboardInterrupt) as err:
        failed.append(err)
        raise


def _sentences(texts: Iterable[str], progress: Callable[[int], None] | None) -> Iterator[str]:
    done = 0
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line) + 1, _MAX_SENTENCE_CHARS):
                # U+2581 means a space in here; NUL ends a string in the trainer.
                piece = line[start : start + _MAX_SENTENCE_CHARS].replace(_SPACE, "").replace("\0", "")
                yield piece + "\n" if start + _MAX_SENTENCE_CHARS > len(line) else piece
        done += len(text.encode())
        if progress is not None:
            progress(done)
