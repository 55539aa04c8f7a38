"""Bytes as tokens: nothing to train, nothing to load, four times as many tokens as a trained vocabulary."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from titan_train.tokenizers.protocol import TokenArray, check_ids, save_tokenizer


class ByteTokenizer:
    """UTF-8 bytes are ids 0 to 255; then bos 256, eos 257 and pad 258."""

    kind = "bytes"
    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258
    fingerprint = hashlib.sha256(b"titan bytes 1: 0-255, bos 256, eos 257, pad 258").hexdigest()

    def __init__(self) -> None:
        self.special_ids = {"<bos>": self.bos_id, "<eos>": self.eos_id, "<pad>": self.pad_id}

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[TokenArray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        values = np.fromiter(ids, dtype=np.int64)
        if values.size:
            check_ids(self.vocab_size, int(values.min()))
            check_ids(self.vocab_size, int(values.max()))
        return values[values < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        check_ids(self.vocab_size, token_id)
        return bytes([token_id]) if token_id < 256 else b""

    def save(self, folder: str | Path) -> Path:
        return save_tokenizer(folder, {"kind": self.kind, "fingerprint": self.fingerprint}, {})


def _byte_characters() -> list[str]:
    """Bytes as GPT-2 writes them in its vocabulary: itself where it is printable, else from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]


CHARACTER_OF_BYTE = _byte_characters()
"""The character of each byte."""
BYTE_OF_CHARACTER = {character: bytes([byte]) for byte, character in enumerate(CHARACTER_OF_BYTE)}
"""The byte of each such character."""
