"""Conversations: checked, written by the chat template, and encoded with a label for what the assistant wrote.

A message is an object with ``role`` and ``content`` (or ``from`` and ``value``, with the roles human and gpt). Its other
fields are given to the template, as is the record's list of ``tools`` (or that list as JSON text).

`messages_of` finds the messages of records in other forms.

A message that names a special token, in its content or a call, is refused: the template's text would end the turn there, and
what follows would pass for another speaker's words.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from titan_train.config import SourceConfig
from titan_train.config.data import AUTO_MESSAGES
from titan_train.data.sources.document import Document
from titan_train.tokenizers import ChatTemplate, HfTokenizer, Tokenizer
from titan_train.tokenizers.chat_template import BUILT_IN, REASONING, check_message_text

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_INSTEAD = ("tool_calls", "function_call", *REASONING)
"""What a turn may hold in place of a content, for templates that read it."""

StoredTokens = npt.NDArray[np.int32]


def messages_of(record: Any) -> Any:
    """The messages of a record whose form its own keys tell: ``messages_key = "auto"``.

    ``messages`` or ``conversations`` (ShareGPT) are lists of messages; ``prompt`` and ``completion``, texts or lists of
    messages; ``instruction``, ``input`` and ``output`` (Alpaca) one question, with the input below the instruction. The record's
    ``system``, a text or a list of parts, comes first, unless one of the messages is the system's or the developer's.

    Raises:
        ValueError: It has none of these forms.
    """
    if not isinstance(record, dict):
        raise ValueError(f"the record is {type(record).__name__}, not an object")
    held = {str(key): value for key, value in cast("dict[Any, Any]", record).items() if value is not None}
    messages, system = _held_messages(held), held.get("system")
    if not system or not isinstance(system, (str, list)) or not isinstance(messages, list):
        return messages
    turns = cast("list[Any]", messages)
    for turn in turns:
        if isinstance(turn, dict) and {"system", "developer"} & {str(turn.get("role")), str(turn.get("from"))}:
            return turns
    return [{"role": "system", "content": system}, *turns]


def _held_messages(held: dict[str, Any]) -> Any:
    for key in ("messages", "conversations"):
        if key in held:
            return held[key]
    for question, answer in (("prompt", "completion"), ("instruction", "output")):
        if question in held and answer in held:
            asked = held[question]
            if question == "instruction" and held.get("input"):
                asked = f"{asked}\n\n{held['input']}"
            return [*_said("user", asked), *_said("assistant", held[answer])]
    raise ValueError(
        f"has none of messages, conversations, prompt and completion, or instruction and output; it has {sorted(held)[:12]}"
    )


def _said(role: str, content: Any) -> list[Any]:
    return cast("list[Any]", content) if isinstance(content, list) else [{"role": role, "content": content}]


class Conversations:
    """Turn records into documents.

    Args:
        template: Writes a conversation as text; None joins the texts of the messages, as a tokenizer is trained on.
        special_tokens: Names that no message may contain.
    """

    def __init__(self, template: ChatTemplate | None, special_tokens: Sequence[str] = ()) -> None:
        self._template = template
        names = sorted(special_tokens, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate) -> "Conversations":
        """For a tokenizer and its template."""
        left_out = tokenizer.left_out if isinstance(tokenizer, HfTokenizer) else []
        return cls(template, [*tokenizer.special_ids, *left_out])

    def document(self, messages: Any, record: Any, line: int) -> Document:
        """The conversation ``messages`` of ``record``.

        Raises:
            ValueError: If it is not a conversation, or the template refuses it.
        """
        turns = _checked(messages)
        if self._template is None:
            text = "\n".join(text for turn in turns for text in _texts(turn.get("content")))
            return Document(text, text.encode(), line)
        for number, turn in enumerate(turns, start=1):
            self._check_texts(f"message {number}", turn)
        tools = _tools(record)
        self._check_texts("tools", tools)
        rendered = self._template.render_spans(turns, tools=tools)
        if not rendered.spans:
            raise ValueError("the chat template marks nothing that the assistant wrote")
        return Document(rendered.text, rendered.text.encode(), line, rendered.spans)

    def _check_texts(self, where: str, value: Any) -> None:
        for text in _strings(value):
            check_message_text(text)
            found = self._names.search(text) if self._names else None
            if found:
                raise ValueError(
                    f"{where} contains the special token {found[0]!r}, which would end the turn there. Remove it from the text"
                )


def conversations_for(
    source: SourceConfig, tokenizer: Tokenizer, template: ChatTemplate | None
) -> Conversations | None:
    """What writes the conversations of a source; None for a source of plain text.

    Raises:
        ValueError: If there is no template for a source of conversations.
    """
    if not source.messages_key:
        return None
    if template is None:
        raise ValueError(
            f"data.sources[{source.name!r}].messages_key={source.messages_key!r}, but the {tokenizer.kind} tokenizer has no chat "
            'template. Set tokenizer.chat_template to a Jinja file, or to "plain" or "chatml".'
        )
    return Conversations.of(tokenizer, template)


def template_key(source: SourceConfig, template: ChatTemplate | None) -> dict[str, Any]:
    """What a chat template contributes to the key of a folder of tokens: nothing for a source of plain text."""
    if not source.messages_key or template is None:
        return {}
    key: dict[str, Any] = {"chat": [source.messages_key, template.source, template.special_tokens]}
    if template.tool_use:
        key["tool_use"] = template.tool_use
    if any(name in template.source + template.tool_use for name in REASONING[:2]):
        key["messages"] = 2  # 1 gave reasoning by the record's own name alone
    if not source.stream and (source.messages_key == AUTO_MESSAGES or template.source not in BUILT_IN.values()):
        # 1 left out a record's system, and wrote parts as Python and JSON text as JSON; streams go on with those behind
        key["records"] = 2
    return key


def encode_conversation(document: Document, tokenizer: Tokenizer) -> StoredTokens:
    """Ids of a conversation, int32; an id that is not learned has the tokenizer's `vocab_size` added.

    With a Hugging Face tokenizer the whole text is encoded at once, as its own library does, and a token is learned if any
    of its characters is. Other kinds encode each stretch between special tokens and answers for itself.

    A text that ends inside an answer, without a special token, gets the end-of-text token as its last label: the model must
    learn to stop.
    """
    assert document.spans is not None
    if isinstance(tokenizer, HfTokenizer):
        ids, offsets = tokenizer.encode_marked(document.text)
        learned = np.zeros(ids.size, dtype=bool)
        for start, end in document.spans:
            learned |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    else:
        ids, learned = encode_stretches(document.text, document.spans, tokenizer)
    specials = set(tokenizer.special_ids.values())
    if ids.size and learned[-1] and int(ids[-1]) not in specials:
        ids, learned = np.append(ids, np.int32(tokenizer.eos_id)), np.append(learned, True)
    return np.where(learned, ids, ids + tokenizer.vocab_size).astype(np.int32)


def encode_stretches(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer
) -> tuple[StoredTokens, npt.NDArray[np.bool_]]:
    """Ids of a template's text, each stretch between special tokens and answers encoded for itself; which lie in ``spans``."""
    special = tokenizer.special_ids
    names = sorted(special, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names))) if names else None
    parts: list[StoredTokens] = []
    flags: list[npt.NDArray[np.bool_]] = []

    def add(stretch: str, learned: bool) -> None:
        place = 0
        for found in pattern.finditer(stretch) if pattern else ():
            plain(stretch[place : found.start()], learned)
            put(np.array([special[found[0]]], dtype=np.int32), learned)
            place = found.end()
        plain(stretch[place:], learned)

    def plain(stretch: str, learned: bool) -> None:
        if stretch:
            put(tokenizer.encode(stretch), learned)

    def put(ids: StoredTokens, learned: bool) -> None:
        parts.append(ids)
        flags.append(np.full(ids.size, learned))

    place = 0
    for start, end in spans:
        add(text[place:start], False)
        add(text[start:end], True)
        place = end
    add(text[place:], False)
    if not parts:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=bool)
    return np.concatenate(parts), np.concatenate(flags)


def _checked(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"not a list of messages, but {type(messages).__name__}" if messages else "no messages")
    turns: list[dict[str, Any]] = []
    for number, message in enumerate(cast("list[Any]", messages), start=1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {type(message).__name__}, not an object with role and content")
        # columns of a table give None for what a row leaves out; transformers drops such fields, a call's content among them
        turn = {str(key): value for key, value in cast("dict[Any, Any]", message).items() if value is not None}
        if "role" not in turn and "from" in turn:
            turn["role"] = _ROLES.get(str(turn["from"]), turn["from"])
            if "value" in turn:
                turn.setdefault("content", turn["value"])
        if not isinstance(turn.get("role"), str):
            raise ValueError(f"message {number} has no role; it has {sorted(turn)}")
        content = turn.get("content")
        if content is None and not any(turn.get(name) for name in _INSTEAD):
            raise ValueError(f"message {number} ({turn['role']}) has no content")
        if content is not None and not isinstance(content, (str, list)):
            raise ValueError(f"message {number} has a content of type {type(content).__name__}, not a string")
        turns.append(turn)
    return turns


def _tools(record: Any) -> list[Any] | None:
    held = record.get("tools") if isinstance(record, dict) else None
    if not held:
        return None
    tools = held
    if isinstance(held, str):
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(held)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in cast("list[Any]", tools)):
        raise ValueError(f"tools is not a list of objects, or that as JSON text, but {str(held)[:80]!r}")
    return cast("list[Any]", tools) or None


def _strings(value: Any) -> Iterator[str]:
    """Every text in a value of JSON, names of fields among them."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            left += [*cast("dict[Any, Any]", part), *cast("dict[Any, Any]", part).values()]
        elif isinstance(part, list):
            left += cast("list[Any]", part)


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    return [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
