"""tiktoken: byte-level BPE from any file of mergeable ranks.

The file holds one `base64(token) rank` per line; Llama 3's `tokenizer.model` is such a file. It carries neither the
pattern that cuts the text before merging nor the special tokens, so both are given beside it. Encoding runs at 6
million tokens a second on a core, which is why it is the encoder to choose for a large corpus.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tiktoken

from titan_train.tokenizers.protocol import MODEL_NAME, TokenArray, check_ids, save_tokenizer

# Published with each model: Llama 3's reference tokenizer, and tiktoken's own registry for the other two.
PATTERNS = {
    "llama3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
        r"|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
}

_LLAMA3_NAMED = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}


class TiktokenTokenizer:
    """Byte-level BPE from mergeable ranks.

    Args:
        ranks_file: Content of the ranks file.
        pattern: llama3, cl100k, gpt2 or a regular expression.
        special_tokens: Tokens after the ranks, in order of their ids. Empty takes Llama 3's 256 for its pattern, and
            ``<|endoftext|>`` otherwise.
        bos_token: Special token that begins a document; empty takes ``<|begin_of_text|>`` if there is one.
        eos_token: Special token that ends a document; empty takes ``<|end_of_text|>`` or ``<|endoftext|>``.

    Raises:
        ValueError: If the content is not a ranks file, or a named special token is not among the special tokens.
    """

    kind = "tiktoken"

    def __init__(
        self,
        ranks_file: bytes,
        *,
        pattern: str = "llama3",
        special_tokens: Sequence[str] = (),
        bos_token: str = "",
        eos_token: str = "",
    ) -> None:
        ranks = parse_ranks(ranks_file)
        specials = tuple(special_tokens) or _default_specials(pattern)
        first = max(ranks.values()) + 1
        self.special_ids = {token: first + i for i, token in enumerate(specials)}
        self.pattern = PATTERNS.get(pattern, pattern)
        """The regular expression that splits text before merging."""
        self._options = {"pattern": pattern, "special_tokens": list(specials)}
        self._ranks_file = ranks_file
        try:
            self._encoding = tiktoken.Encoding(
                "titan",
                pat_str=self.pattern,
                mergeable_ranks=ranks,
                special_tokens=self.special_ids,
            )
        except ValueError as err:
            raise ValueError(f"tiktoken rejected the pattern {pattern!r} or the ranks: {err}.") from err
        self.vocab_size = first + len(specials)
        self._bytes = {rank: token for token, rank in ranks.items()}
        self.bos_id = self._special("bos_token", bos_token, ("<|begin_of_text|>",))
        eos_id = self._special("eos_token", eos_token, ("<|end_of_text|>", "<|endoftext|>"))
        if eos_id is None:
            raise ValueError(
                f"none of the special tokens {list(specials)[:8]} is a known end-of-text token. Name the one that "
                "ends a document as eos_token."
            )
        self.eos_id = eos_id
        self.pad_id = self._special("pad_token", "", ("<|finetune_right_pad_id|>", "<|pad|>"))
        named = {"bos": self.bos_id, "eos": self.eos_id}
        self._options |= {"bos_token": self._name(self.bos_id), "eos_token": self._name(self.eos_id)}
        self.fingerprint = hashlib.sha256(
            b"tiktoken 1\0" + json.dumps([self.pattern, specials, named]).encode() + b"\0" + ranks_file
        ).hexdigest()

    def encode(self, text: str) -> TokenArray:
        text.encode()  # a lone surrogate is an error here; tiktoken would replace it silently
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[TokenArray]:
        if num_threads <= 1 or len(texts) <= 1:
            return [self.encode(text) for text in texts]
        with ThreadPoolExecutor(num_threads) as pool:
            return list(pool.map(self.encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join([self.token_bytes(int(i)) for i in ids]).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        check_ids(self.vocab_size, token_id)
        return self._bytes.get(token_id, b"")

    def save(self, folder: str | Path) -> Path:
        description = {"kind": self.kind, "vocab_size": self.vocab_size, "fingerprint": self.fingerprint}
        return save_tokenizer(folder, description | self._options, {MODEL_NAME: self._ranks_file})

    def ranks(self) -> dict[bytes, int]:
        return {token: rank for rank, token in self._bytes.items()}

    def _special(self, key: str, given: str, usual: Sequence[str]) -> int | None:
        if given and given not in self.special_ids:
            raise ValueError(
                f"{key}={given!r} is not among the special tokens. Use one of {list(self.special_ids)[:12]}, "
                "or add it to special_tokens."
            )
        for token in (given, *usual):
            if token in self.special_ids:
                return self.special_ids[token]
        return None

    def _name(self, token_id: int | None) -> str:
        return next((token for token, i in self.special_ids.items() if i == token_id), "")


def parse_ranks(content: bytes) -> dict[bytes, int]:
    """Read `base64(token) rank` lines.

    Raises:
        ValueError: If a line is not of that form, naming it, or the 256 single bytes are not all there.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        parts = line.split(b" ")
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (binascii.Error, ValueError, IndexError) as err:
            raise ValueError(
                f"line {number} is not `base64(token) rank`: {line[:40]!r}. "
                'A SentencePiece model is read with kind="sentencepiece".'
            ) from err
        if token in ranks or not 0 <= rank < 2**31:
            problem = "gives a token that has a rank already" if token in ranks else f"has rank {rank}"
            raise ValueError(f"line {number} {problem}: {line[:40]!r}. Give the ranks file as it was published.")
        ranks[token] = rank
    if len(set(ranks.values())) < len(ranks) or max(ranks.values(), default=0) > 2 * len(ranks):
        raise ValueError(
            f"the {len(ranks)} ranks are not one for each token, from 0 on: the largest is {max(ranks.values())}, and "
            f"{len(set(ranks.values()))} are different. Give the ranks file as it was published."
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{len(missing)} of the 256 single bytes have no rank (first: 0x{missing[0]:02X}), so some text cannot be encoded. "
            "Give the complete ranks file."
        )
    return ranks


def _default_specials(pattern: str) -> tuple[str, ...]:
    if pattern != "llama3":
        return ("<|endoftext|>",)
    # Llama 3.1's list: 256 ids, the unnamed ones reserved and numbered in order.
    tokens: list[str] = []
    reserved = 0
    for i in range(256):
        if i in _LLAMA3_NAMED:
            tokens.append(_LLAMA3_NAMED[i])
        else:
            tokens.append(f"<|reserved_special_token_{reserved}|>")
            reserved += 1
    return tuple(tokens)
