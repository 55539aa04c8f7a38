"""Our tokenizers as ``tokenizer.json``, the format of Hugging Face's tokenizers library.

Byte-level vocabularies (bytes, tiktoken) write each byte as a printable character, as GPT-2 does. tiktoken keeps ranks
only, and the format asks for merges: a token's merge is the last one that byte-pair encoding makes of it with the tokens
of smaller rank. SentencePiece BPE models become merges ordered by the pieces' scores. Unigram models are written if their
scores add up without rounding, as those trained here do: SentencePiece adds in float32 and the library in float64, so that
of others paths of nearly equal score are chosen differently.

Known differences: a special token's name inside a text is ordinary text here, and the special token there. A U+2581 in a
text is three bytes here, and a space there (SentencePiece).
"""

import importlib.util
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.tokenizers import (
    ByteTokenizer,
    HfTokenizer,
    IncrementalDecoder,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
)
from titan_train.tokenizers.byte import CHARACTER_OF_BYTE
from titan_train.tokenizers.sentencepiece_model import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, VocabPiece, read_pieces

_SPACE = "\u2581"
_NEVER = -(2.0**20)
"""Score of a piece that no path of learned pieces and bytes is worse than."""


def tokenizer_json(tokenizer: Tokenizer, *, add_bos: bool = False) -> str | None:
    """The text of ``tokenizer.json``; None for a tokenizer that the format cannot express.

    Args:
        tokenizer: The tokenizer.
        add_bos: Begin each text with the beginning-of-text token, where special tokens are asked for. A published file says
            itself what it does.
    """
    if isinstance(tokenizer, HfTokenizer):
        return tokenizer.tokenizer_json.decode()
    text = _converted(tokenizer)
    if text is None or not add_bos or tokenizer.bos_id is None:
        return text
    bos = special_tokens(tokenizer)["bos_token"]
    begun: list[dict[str, Any]] = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    begins = {
        "type": "TemplateProcessing", "single": begun, "pair": [*begun, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_id], "tokens": [bos]}},
    }  # fmt: skip
    return json.dumps({**json.loads(text), "post_processor": begins}, ensure_ascii=False)


def _converted(tokenizer: Tokenizer) -> str | None:
    if isinstance(tokenizer, ByteTokenizer):
        vocabulary = byte_level_vocabulary(tokenizer)
        model = _bpe(vocabulary.tokens, [])
        return _file(model, vocabulary.special, pre_tokenizer=_byte_level(), decoder=_byte_level())
    if isinstance(tokenizer, TiktokenTokenizer):
        return _tiktoken(tokenizer)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _sentencepiece(tokenizer)
    return None


def folder_ids(folder: Path) -> Callable[[str], list[int] | None]:
    """A text to its ids, by the ``tokenizer.json`` of a folder; to None if it has none or the library is missing."""
    file = folder / "tokenizer.json"
    if not file.is_file() or importlib.util.find_spec("tokenizers") is None:
        return lambda text: None
    import tokenizers

    read: Any = tokenizers.Tokenizer.from_file(str(file))  # type: ignore[attr-defined]
    read.no_truncation()
    read.no_padding()
    read.encode_special_tokens = True  # a special token's name in a text is text, as for our tokenizers
    return lambda text: read.encode(text, add_special_tokens=False).ids


def folder_text(folder: Path, ids: Sequence[int], stop_ids: Collection[int] = ()) -> str:
    """Text of ids behind others, by the ``tokenizer.json`` and ``tokenizer_config.json`` of a folder.

    It ends before the end-of-text token, or one of ``stop_ids``.
    """
    try:
        tokenizer = HfTokenizer.from_folder(folder)
    except ValueError:  # it names no token that ends a text, or one of others that are not there
        import tokenizers

        read: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
        before = read.encode("a", add_special_tokens=False).ids  # alone, a text may lose the space that it begins with
        return read.decode([*before, *ids_until(ids, stop_ids)])[len(read.decode(before)) :]
    decoder = IncrementalDecoder(tokenizer)
    kept = ids_until(ids, {tokenizer.eos_id, *stop_ids})
    parts = [decoder.push(token) for token in kept if token < tokenizer.vocab_size]  # a model may have more
    return "".join(parts) + decoder.flush()


def ids_until(ids: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """The ids before the first of ``stop_ids``."""
    return list(itertools.takewhile(lambda token: token not in stop_ids, ids))


def special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and ``pad_token`` of the vocabulary, by their names in ``tokenizer.json``."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    if isinstance(tokenizer, HfTokenizer):
        return {key: tokenizer.config[key] for key, token_id in ids.items() if token_id is not None}
    names = {token_id: name for name, token_id in tokenizer.special_ids.items()}
    if isinstance(tokenizer, SentencePieceTokenizer):
        names = {number: piece.text for number, piece in enumerate(read_pieces(tokenizer.model).pieces)}
    return {key: names[token_id] for key, token_id in ids.items() if token_id is not None}


@dataclass(frozen=True, slots=True)
class ByteLevelVocabulary:
    """A byte-level vocabulary as GPT-2 writes it."""

    tokens: dict[str, int]
    merges: list[list[str]]
    """Pairs in the order in which they are joined."""
    special: dict[str, int]


def byte_level_vocabulary(tokenizer: ByteTokenizer | TiktokenTokenizer) -> ByteLevelVocabulary:
    """The vocabulary with each byte as a printable character."""
    if isinstance(tokenizer, ByteTokenizer):
        return ByteLevelVocabulary({CHARACTER_OF_BYTE[byte]: byte for byte in range(256)}, [], tokenizer.special_ids)
    ranks = tokenizer.ranks()
    merges = [
        [_written(part) for part in _last_merge(ranks, token, rank)]
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
        if len(token) > 1
    ]
    tokens = {_written(token): rank for token, rank in ranks.items()}
    return ByteLevelVocabulary(tokens, [pair for pair in merges if len(pair) == 2], tokenizer.special_ids)


def _tiktoken(tokenizer: TiktokenTokenizer) -> str:
    vocabulary = byte_level_vocabulary(tokenizer)
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated", "invert": False}
    model = _bpe(vocabulary.tokens, vocabulary.merges) | {"ignore_merges": True}
    sequence = {"type": "Sequence", "pretokenizers": [split, _byte_level()]}
    return _file(model, vocabulary.special, pre_tokenizer=sequence, decoder=_byte_level())


def _last_merge(ranks: Mapping[bytes, int], token: bytes, rank: int) -> list[bytes]:
    """The two parts that byte-pair encoding joins last to make ``token``, with the tokens of smaller rank."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
        best, at = min(pairs)
        if best >= rank:
            break  # no path of smaller tokens leads here: encoding finds it whole, as ignore_merges says
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _sentencepiece(tokenizer: SentencePieceTokenizer) -> str | None:
    read = read_pieces(tokenizer.model)
    pieces = read.pieces
    unknown = next(number for number, piece in enumerate(pieces) if piece.kind == UNKNOWN)
    if read.adds_exactly:
        # the library would take the names of control and byte pieces in a text for these
        learned = (NORMAL, USER_DEFINED)
        scored = [[piece.text, piece.score if piece.kind in learned else _NEVER] for piece in pieces]
        model: dict[str, Any] = {"type": "Unigram", "unk_id": unknown, "vocab": scored, "byte_fallback": True}
    elif read.kind == "bpe" and not read.normalizes:
        fallback = {"unk_token": pieces[unknown].text, "byte_fallback": True, "fuse_unk": True}
        model = _bpe({piece.text: number for number, piece in enumerate(pieces)}, _merges(pieces)) | fallback
    else:
        return None  # see the top: float32 and float64 sums of scores
    special = {piece.text: number for number, piece in enumerate(pieces) if piece.kind in (UNKNOWN, CONTROL)}
    plain = {piece.text: number for number, piece in enumerate(pieces) if piece.kind == USER_DEFINED}
    space_in: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    space_out = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [space_out, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if tokenizer.adds_space:  # before every text, and taken away again
        space_in = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, space_in]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    decoder = {"type": "Sequence", "decoders": decoders}
    return _file(model, special, plain, normalizer=space_in, decoder=decoder)


def _merges(pieces: Sequence[VocabPiece]) -> list[list[str]]:
    """Every way to join two pieces into a learned one: the best score first, as the library joins them."""
    ids = {piece.text: number for number, piece in enumerate(pieces)}
    found: list[tuple[float, int, int, list[str]]] = []
    for piece in pieces:
        if piece.kind == NORMAL:
            cuts = ((piece.text[:at], piece.text[at:]) for at in range(1, len(piece.text)))
            found += [(-piece.score, ids[a], ids[b], [a, b]) for a, b in cuts if a in ids and b in ids]
    return [pair for *_, pair in sorted(found)]


def _bpe(vocab: Mapping[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": dict(vocab), "merges": merges,
    }  # fmt: skip


def _byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _file(
    model: Mapping[str, Any],
    special: Mapping[str, int],
    plain: Mapping[str, int] | None = None,
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    decoder: Any = None,
) -> str:
    added = [
        {
            "id": number, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": name in special,
        }
        for name, number in sorted({**special, **(plain or {})}.items(), key=lambda item: item[1])
    ]  # fmt: skip
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": None, "decoder": decoder, "model": dict(model),
    }  # fmt: skip
    return json.dumps(content, ensure_ascii=False)


def _written(token: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)
