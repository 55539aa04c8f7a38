"""Our tokenizers in a GGUF file's metadata.

llama.cpp knows byte-level vocabularies with merges (``gpt2``), cut by a pattern that it has under a name, and SentencePiece
BPE with scores (``llama``). Both ways, no token is added after a text, and one before it only if the run's documents have it.
"""

from typing import Any

from titan_train.export.tokenizer_json import byte_level_vocabulary
from titan_train.tokenizers import (
    ByteTokenizer,
    ChatTemplate,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
)
from titan_train.tokenizers.chat_template import answer_stops
from titan_train.tokenizers.sentencepiece_model import read_pieces
from titan_train.tokenizers.tiktoken import PATTERNS

# llama.cpp's names of these patterns. Bytes have no merges, so that any pattern gives the same ids.
_PRE = {PATTERNS["llama3"]: "llama-bpe", PATTERNS["cl100k"]: "llama-bpe", PATTERNS["gpt2"]: "gpt-2"}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


def check_tokenizer(tokenizer: Tokenizer) -> None:
    """Whether llama.cpp has a tokenizer that gives the same ids.

    Raises:
        ValueError: It has not, or not here.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return
    if isinstance(tokenizer, TiktokenTokenizer):
        if tokenizer.pattern not in _PRE:
            raise ValueError(
                "--to gguf: llama.cpp knows the patterns that cut text by name, and the tokenizer's own pattern is none of "
                "llama3, cl100k and gpt2. Use --to hf."
            )
    elif isinstance(tokenizer, SentencePieceTokenizer):
        kind = read_pieces(tokenizer.model).kind
        if kind != "bpe" or tokenizer.adds_space:
            raise ValueError(
                f"--to gguf: SentencePiece models of kind {kind}{' with a dummy prefix' if tokenizer.adds_space else ''} "
                "are not written as GGUF; BPE without a dummy prefix is. Use --to hf."
            )
    else:
        raise ValueError(f"--to gguf: tokenizers of kind {tokenizer.kind} are not written as GGUF. Use --to hf.")


def write_tokenizer(
    writer: Any, tokenizer: Tokenizer, *, rows: int, add_bos: bool = False, template: ChatTemplate | None = None
) -> None:
    """Add a tokenizer to a file.

    Args:
        writer: A ``gguf.GGUFWriter``.
        tokenizer: The run's.
        rows: Of the embedding; ids that the tokenizer lacks become unused tokens.
        add_bos: Begin each text with the beginning-of-text token.
        template: Writes conversations; where it ends an answer with a special token, that ends a turn.

    Raises:
        ValueError: llama.cpp has no tokenizer that gives the same ids.
    """
    check_tokenizer(tokenizer)
    if isinstance(tokenizer, ByteTokenizer | TiktokenTokenizer):
        texts, kinds = _byte_level(writer, tokenizer)
        scores = None
    else:
        assert isinstance(tokenizer, SentencePieceTokenizer)
        texts, kinds, scores = _sentencepiece(writer, tokenizer)
    missing = rows - len(texts)
    writer.add_token_list([*texts, *(f"[UNUSED{i}]" for i in range(missing))])
    writer.add_token_types([*kinds, *([_UNUSED] * missing)])
    if scores is not None:
        writer.add_token_scores([*scores, *([-10_000.0] * missing)])
    for name in ("bos", "eos", "pad"):
        token_id = getattr(tokenizer, f"{name}_id")
        if token_id is not None:
            getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_add_bos_token(add_bos and tokenizer.bos_id is not None)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    if template is None:
        return
    named = {"default": template.source, **({"tool_use": template.tool_use} if template.tool_use else {})}
    writer.add_chat_template([{"name": name, "template": text} for name, text in named.items()])
    for token_id in answer_stops(tokenizer, template)[0]:
        if token_id != tokenizer.eos_id:
            writer.add_eot_token_id(token_id)


def _byte_level(writer: Any, tokenizer: ByteTokenizer | TiktokenTokenizer) -> tuple[list[str], list[int]]:
    vocabulary = byte_level_vocabulary(tokenizer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2" if isinstance(tokenizer, ByteTokenizer) else _PRE[tokenizer.pattern])
    # llama.cpp wants at least one merge; one whose result is no token changes nothing
    writer.add_token_merges([" ".join(pair) for pair in vocabulary.merges] or ["\u0100 \u0100"])
    by_id = {number: (text, _NORMAL) for text, number in vocabulary.tokens.items()}
    by_id |= {number: (text, _CONTROL) for text, number in vocabulary.special.items()}
    entries = [by_id.get(number, (f"[UNUSED{number}]", _UNUSED)) for number in range(max(by_id) + 1)]
    return [text for text, _ in entries], [kind for _, kind in entries]


def _sentencepiece(writer: Any, tokenizer: SentencePieceTokenizer) -> tuple[list[str], list[int], list[float]]:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    # the kinds of SentencePiece's pieces have the same numbers in llama.cpp
    pieces = read_pieces(tokenizer.model).pieces
    return [piece.text for piece in pieces], [piece.kind for piece in pieces], [piece.score for piece in pieces]
