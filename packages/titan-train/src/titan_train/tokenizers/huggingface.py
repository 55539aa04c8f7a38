"""Hugging Face: any ``tokenizer.json``, run by the tokenizers library (extra ``hf``).

A folder as published beside a model holds ``tokenizer.json`` (vocabulary, merges, normalisation), ``tokenizer_config.json``
(which tokens begin and end a text) and often a chat template. The three are kept together, and saved with a run.

Two settings of such files are for serving, not for training, and are turned off here: truncation, which would drop the end
of every long document without a word, and padding. A special token's name inside a text is ordinary text, as for every
other kind; only the text of a chat template may name special tokens (`HfTokenizer.encode_marked`).

Some tokenizers lose text: a normaliser may fold case or accents, and text outside a vocabulary without byte pieces becomes
the unknown token. `decode(encode(text))` is then not the text; that is a property of the published tokenizer.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from titan_train.files import read_bytes, read_text
from titan_train.lazy import require
from titan_train.tokenizers.byte import BYTE_OF_CHARACTER
from titan_train.tokenizers.protocol import (
    MODEL_NAME,
    SAVED_NAME,
    TokenArray,
    check_ids,
    read_description,
    save_tokenizer,
)

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
"""A folder of templates beside the usual one, each in ``NAME.jinja``, as transformers reads and writes it."""
_SAFE = re.compile(r"\w[\w.-]{0,63}")
_SPACE = "\u2581"
# Where tokenizer_config.json names none: what published vocabularies call the token that ends a text.
_USUAL_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>")
_USUAL_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>")
_USUAL_PAD = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]")


class HfTokenizer:
    """A ``tokenizer.json``.

    Args:
        tokenizer_json: Content of the file.
        config: Content of ``tokenizer_config.json``, parsed; empty if there is none.
        bos_token: Token that begins a document; empty takes the one in ``config``, or the usual name.
        eos_token: Token that ends a document; empty takes the one in ``config``, or the usual name.
        chat_template: The Jinja text; None takes the one in ``config``, if any.
        more_templates: Further Jinja texts by name, beside those in ``config``: ``tool_use`` for conversations with tools;
            others are only saved.
        vocab_size: Embeddings of the model. Where only special tokens lie beyond, such as Gemma 3's for images in its models of
            text, they are left out; a text that names one as a special token is then refused.

    Raises:
        ValueError: If the library is missing or refuses the file, or a named token is not in the vocabulary.
    """

    kind = "hf"

    def __init__(
        self,
        tokenizer_json: bytes,
        config: Mapping[str, Any] | None = None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        chat_template: str | None = None,
        more_templates: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer_json = tokenizer_json
        """Content of ``tokenizer.json``."""
        self.config = dict(config or {})
        """Content of ``tokenizer_config.json``, with the tokens that begin and end a text."""
        self._library = _load_library(tokenizer_json)
        self._marking: _Library | None = None
        added = self._library.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        vocab = self._library.get_vocab(with_added_tokens=True)
        self._vocab = _with_embeddings(vocab, special, vocab_size)
        self.left_out = sorted(vocab.keys() - self._vocab.keys())
        """Special tokens that the model has no embedding for."""
        if not self._vocab:
            raise ValueError("tokenizer.json holds an empty vocabulary. Give the file of a trained tokenizer.")
        self.vocab_size = max(self._vocab.values()) + 1
        self._added = {number: token.content for number, token in added.items() if number < self.vocab_size}
        self.special_ids = {name: number for number, name in self._added.items() if number in special}
        self.bos_id = self._special("bos_token", bos_token, _USUAL_BOS)
        self.pad_id = self._special("pad_token", "", _USUAL_PAD)
        eos_id = self._special("eos_token", eos_token, _USUAL_EOS)
        if eos_id is None:
            raise ValueError(
                "the tokenizer names no token that ends a text: tokenizer_config.json has no eos_token, and the vocabulary "
                f"has none of {', '.join(_USUAL_EOS)}. Set tokenizer.eos_token to one of its special tokens: "
                f"{sorted(self.special_ids)[:12]}."
            )
        self.eos_id: int = eos_id
        self._names = {number: token for token, number in self._vocab.items()}
        self.config |= {
            key: self._names[number]
            for key, number in (("bos_token", self.bos_id), ("eos_token", self.eos_id), ("pad_token", self.pad_id))
            if number is not None
        }
        named = _named_templates(self.config) | dict(more_templates or {})
        usual = named.pop("default", None)
        self.chat_template = chat_template if chat_template is not None else usual
        self.more_templates = {name: text for name, text in named.items() if _SAFE.fullmatch(name)}
        """Further templates by name. One whose name cannot be a file's is left out."""
        decoder: dict[str, Any] | None = json.loads(tokenizer_json).get("decoder")
        self._decoder = json.dumps(decoder)
        self._word_end = _word_end(decoder)
        self._spaced = decoder is None and _drops_spaces(self._library)
        decides = {"bos": self.bos_id, "eos": self.eos_id} | ({"ids": self.vocab_size} if self.left_out else {})
        self.fingerprint = hashlib.sha256(b"hf 1\0" + json.dumps(decides).encode() + b"\0" + tokenizer_json).hexdigest()

    @classmethod
    def from_folder(
        cls, path: str | Path, *, bos_token: str = "", eos_token: str = "", vocab_size: int | None = None
    ) -> "HfTokenizer":
        """Read a folder with ``tokenizer.json``, or that file and what lies beside it.

        Args:
            path: The folder, or the file.
            bos_token: As of the class.
            eos_token: As of the class.
            vocab_size: As of the class; None takes that with which it was saved, or that of a ``config.json`` in the folder.

        Raises:
            ValueError: If a file is missing or cannot be read.
        """
        path = Path(path)
        file = path / TOKENIZER_JSON if path.is_dir() else path
        folder = file.parent
        if not file.is_file():
            raise ValueError(
                f"{path} has no {TOKENIZER_JSON}. Name a folder that has one, such as an exported model's; for a bare "
                'tokenizer.model use tokenizer.kind="sentencepiece" or "tiktoken".'
            )
        config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).is_file() else {}
        template = folder / TEMPLATE_NAME
        text = read_text(template) if template.is_file() else None
        more = {
            file.stem: read_text(file) for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja")) if file.is_file()
        }
        try:
            made = cls(
                read_bytes(file), config, bos_token=bos_token, eos_token=eos_token, chat_template=text,
                more_templates=more,
                vocab_size=_saved_size(folder) or _embeddings(folder) if vocab_size is None else vocab_size,
            )  # fmt: skip
        except ValueError as err:
            raise ValueError(f"{file}: {err}") from err
        made.check_model(folder)
        return made

    def check_model(self, folder: Path) -> None:
        """Compare with the ``config.json`` in the folder, if there is one.

        Raises:
            ValueError: If the model has fewer embeddings than the tokenizer has ids.
        """
        size = _embeddings(folder)
        if size is not None and size < self.vocab_size:
            raise ValueError(
                f"{folder}: the tokenizer has ids up to {self.vocab_size - 1} ({self._names[self.vocab_size - 1]!r}), but "
                f"config.json has vocab_size={size}: those tokens have no embedding. Use the model's own tokenizer, or "
                "extend its vocabulary."
            )

    def encode(self, text: str) -> TokenArray:
        text.encode()  # a lone surrogate is an error of its own kind, for every tokenizer the same
        return np.asarray(self._library.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[TokenArray]:
        for text in texts:
            text.encode()
        # one call encodes all texts on the library's own threads, without the interpreter's lock
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, dtype=np.int32) for one in encoded]

    def encode_marked(self, text: str) -> tuple[TokenArray, npt.NDArray[np.int64]]:
        """Ids of a text whose special tokens are meant, and the characters of each: ``[N]`` and ``[N, 2]``.

        Raises:
            ValueError: The text names a special token that the model has no embedding for.
        """
        text.encode()
        if (
            self._marking is None
        ):  # a second instance: the setting belongs to the object, and other threads encode with it
            marking = _load_library(self.tokenizer_json)
            marking.encode_special_tokens = False
            self._marking = marking
        encoded = self._marking.encode(text, add_special_tokens=False)
        ids = np.asarray(encoded.ids, dtype=np.int32)
        offsets = np.asarray(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        beyond = np.flatnonzero(ids >= self.vocab_size)
        if beyond.size:
            name = text[slice(*offsets[beyond[0]])]
            raise ValueError(
                f"a conversation holds the special token {name!r}, which the model has no embedding for: its ids "
                f"run to {self.vocab_size - 1}. Take it out of the text, or out of the chat template."
            )
        return ids, offsets

    def decode(self, ids: Iterable[int]) -> str:
        values = [int(i) for i in ids]
        for value in values:
            check_ids(self.vocab_size, value)
        return self._library.decode(values, skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        check_ids(self.vocab_size, token_id)
        name = self._names.get(token_id)
        if name is None or name in self.special_ids:
            return b""
        if self._spaced:
            return f" {name}".encode()
        if '"ByteLevel"' in self._decoder:
            if token_id in self._added:
                return name.encode()
            return b"".join(BYTE_OF_CHARACTER.get(character, character.encode()) for character in name)
        if '"ByteFallback"' in self._decoder and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        if '"WordPiece"' in self._decoder:
            return name[2:].encode() if name.startswith("##") else f" {name}".encode()
        if self._word_end:
            return name.replace(self._word_end, " ").encode()
        return name.replace(_SPACE, " ").encode()

    def save(self, folder: str | Path) -> Path:
        config = {key: value for key, value in self.config.items() if key not in ("chat_template", "auto_map")}
        files = {TOKENIZER_JSON: self.tokenizer_json, TOKENIZER_CONFIG: json.dumps(config, indent=2).encode()}
        if self.chat_template is not None:
            files[TEMPLATE_NAME] = self.chat_template.encode()
        files |= {f"{MORE_TEMPLATES}/{name}.jinja": text.encode() for name, text in self.more_templates.items()}
        description = {"kind": self.kind, "vocab_size": self.vocab_size, "fingerprint": self.fingerprint}
        return save_tokenizer(folder, description, files)

    def _special(self, key: str, given: str, usual: Sequence[str]) -> int | None:
        configured = _content(self.config.get(key))
        for where, name in ((f"tokenizer.{key}", given), (f"tokenizer_config.json's {key}", configured)):
            if not name or (key == "pad_token" and name not in self._vocab):  # rows are filled without it
                continue
            if name not in self._vocab:
                raise ValueError(
                    f"{where}={name!r} is not in the vocabulary, or the model has no embedding for it. Use one of the special "
                    f"tokens {sorted(self.special_ids)[:12]}."
                )
            return self._vocab[str(name)]
        return next((self._vocab[name] for name in usual if name in self._vocab), None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ValueError: If it does not.
    """
    try:
        content: Any = json.loads(read_text(path))
    except (ValueError, RecursionError) as err:
        raise ValueError(f"{path} is not valid JSON ({err}). Copy the file again.") from err
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a JSON object. Copy the file again.")
    return cast("dict[str, Any]", content)


def ids_before_text(folder: Path) -> list[int]:
    """Ids that the ``tokenizer.json`` of a folder puts before a text; transformers 5 reads no other file for it.

    Raises:
        ValueError: A file holds no JSON object.
    """
    return _begin(folder)[0] if (folder / TOKENIZER_JSON).is_file() else []


def adds_bos(folder: Path) -> bool:
    """Whether the files of a folder put the token that begins documents, and no other, before a text.

    Raises:
        ValueError: As of `ids_before_text`.
    """
    if not (folder / TOKENIZER_JSON).is_file():
        # transformers makes one of tokenizer.model, and reads this field only then
        settings = folder / TOKENIZER_CONFIG
        made = (folder / MODEL_NAME).is_file() and settings.is_file()
        return made and read_json(settings).get("add_bos_token") is True
    before, bos = _begin(folder)
    return before == [bos]


def _begin(folder: Path) -> tuple[list[int], int | None]:
    """What `ids_before_text` gives, and the token that begins documents."""
    settings = folder / TOKENIZER_CONFIG
    content, config = read_json(folder / TOKENIZER_JSON), read_json(settings) if settings.is_file() else {}
    added = {str(token["content"]): int(token["id"]) for token in content.get("added_tokens", [])}
    named = _content(config.get("bos_token"))
    bos = next((added[name] for name in ([named] if named else _USUAL_BOS) if name in added), None)
    found: list[int] = []
    post = content.get("post_processor") or {}
    for processor in post.get("processors", [post]):
        if processor.get("type") in ("RobertaProcessing", "BertProcessing"):
            found.append(int(processor["cls"][1]))
        if processor.get("type") != "TemplateProcessing":
            continue
        for part in processor["single"]:
            if "SpecialToken" not in part:
                break
            found += processor["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return found, bos


def _content(token: Any) -> Any:
    """The text of a token, also of an AddedToken, which is written as an object."""
    return cast("Mapping[str, Any]", token).get("content") if isinstance(token, Mapping) else token


def _embeddings(folder: Path) -> int | None:
    """The embeddings of the model of a folder, as its ``config.json`` says."""
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _saved_size(folder: Path) -> int | None:
    """The size of the vocabulary that `HfTokenizer.save` wrote down."""
    size = read_description(folder).get("vocab_size") if (folder / SAVED_NAME).is_file() else None
    return size if isinstance(size, int) else None


def _with_embeddings(vocab: dict[str, int], special: set[int], size: int | None) -> dict[str, int]:
    """The tokens below ``size``, if only special ones lie beyond, else all."""
    beyond = {number for number in vocab.values() if size is not None and number >= size}
    if not beyond or len(beyond) == len(vocab) or not beyond <= special:
        return vocab
    return {name: number for name, number in vocab.items() if number not in beyond}


class _Encoding(Protocol):
    ids: list[int]
    offsets: list[tuple[int, int]]


class _Library(Protocol):
    """What is used of `tokenizers.Tokenizer`, which publishes few types."""

    encode_special_tokens: bool
    pre_tokenizer: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> _Encoding: ...
    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[_Encoding]: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]: ...
    def get_added_tokens_decoder(self) -> dict[int, Any]: ...
    def no_truncation(self) -> None: ...
    def no_padding(self) -> None: ...


def _load_library(tokenizer_json: bytes) -> _Library:
    tokenizers = require("tokenizers", extra="hf", purpose='tokenizer.kind="hf"')
    try:
        library = cast("_Library", tokenizers.Tokenizer.from_str(tokenizer_json.decode()))
    except Exception as err:  # the library raises bare Exception for what it cannot parse
        raise ValueError(f"the tokenizers library cannot read it ({err}). Copy the file again.") from err
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    return library


def _word_end(decoder: Mapping[str, Any] | None) -> str:
    """What the decoder turns into a space at the end of a word; empty for another kind of decoder."""
    parts = (decoder or {}).get("decoders") or [decoder or {}]
    return next((part["suffix"] for part in parts if part.get("type") == "BPEDecoder"), "")


def _drops_spaces(library: _Library) -> bool:
    """Whether a text loses its spaces before it is cut; without a decoder the library then writes one between all tokens."""
    cut = library.pre_tokenizer
    return cut is not None and "".join(piece for piece, _ in cut.pre_tokenize_str("a b")) == "ab"


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of ``tokenizer_config.json`` by name; one without is ``default``."""
    found = config.get("chat_template")
    if not isinstance(found, list):
        return {"default": found} if isinstance(found, str) else {}
    listed = [cast("dict[str, Any]", one) for one in cast("list[Any]", found) if isinstance(one, dict)]
    return {str(one.get("name")): text for one in listed if isinstance(text := one.get("template"), str)}
