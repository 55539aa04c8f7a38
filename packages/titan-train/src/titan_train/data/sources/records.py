"""A record, from a JSON line or a row of a table, as a document: the text at a key, or a conversation."""

from dataclasses import replace
from typing import Any

from titan_train.config import SourceConfig
from titan_train.config.data import AUTO_MESSAGES
from titan_train.data.sources.chat import Conversations, messages_of
from titan_train.data.sources.document import CorpusFile, Document
from titan_train.data.sources.malformed import BadDocument, BadKind


def as_document(
    record: Any,
    source: SourceConfig,
    chats: Conversations,
    *,
    file: CorpusFile,
    number: int,
    offset: int,
    raw: bytes,
) -> Document | BadDocument:
    """The document of one record.

    Args:
        record: The parsed value.
        source: Names the key.
        chats: Writes conversations.
        file: Where it comes from.
        number: Its line or row, from 1.
        offset: Its first byte; -1 in a table.
        raw: What a message about it quotes.
    """

    def bad(kind: BadKind, reason: str) -> BadDocument:
        return BadDocument(str(file.path), number, offset, kind, reason, raw)

    key = source.messages_key or source.text_key
    value = record
    if source.messages_key == AUTO_MESSAGES:
        try:
            value = messages_of(record)
        except ValueError as err:
            return bad("bad_chat", str(err))
        key = ""
    for part in [] if not key else [key] if isinstance(record, dict) and key in record else key.split("."):
        if not isinstance(value, dict) or part not in value:
            return bad("missing_text", f"no key {key!r}")
        value = value[part]
    if source.messages_key:
        try:
            return _within(source, replace(chats.document(value, record, number), byte=max(offset, 0)), bad)
        except UnicodeEncodeError as err:
            return bad("invalid_utf8", f"a lone surrogate, \\u{ord(err.object[err.start]):04x}, is not a character")
        except ValueError as err:
            return bad("bad_chat", f"{source.messages_key!r}: {err}")
    if not isinstance(value, str):
        return bad("missing_text", f"{key!r} is {type(value).__name__}, not a string")
    if not value:
        return bad("empty", f"{key!r} is an empty string")
    try:
        return _within(source, Document(value, value.encode(), number, byte=max(offset, 0)), bad)
    except UnicodeEncodeError as err:
        return bad("invalid_utf8", f"a lone surrogate, \\u{ord(value[err.start]):04x}, is not a character")


def oversize(source: SourceConfig) -> str:
    """Why a document is too long."""
    return f"longer than max_document_bytes={source.max_document_bytes} of its source allows (raise it to read it)"


def _within(source: SourceConfig, document: Document, bad: Any) -> Document | BadDocument:
    # a line is measured before it is parsed; a row of a table only here
    return bad("oversize", oversize(source)) if len(document.utf8) > source.max_document_bytes else document
