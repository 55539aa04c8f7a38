"""Chat templates: a conversation as the text that a chat model reads, and which of it the model itself wrote.

A template is a Jinja text that is published with a tokenizer. It is data from elsewhere: it is rendered in Jinja's immutable
sandbox, which reaches no attribute, file or module of Python. The current date is not given to it while training, where the same
conversation must give the same tokens on every day: a template that cannot do without one (gpt-oss, SmolLM3, Mistral Small 3,
Granite 3) gets the day that Llama 3's writes without one, 26 July 2024.

What the assistant wrote is found in one of two ways. Where the template marks it (``{% generation %}``), the marks are
followed. Otherwise the conversation is rendered turn by turn: the assistant's turn k is what rendering the first k messages
adds to rendering the first k - 1 with the generation prompt. That holds only for templates that never change an earlier
turn; one that does (by dropping earlier reasoning, for example) is refused, and needs the marks.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any, cast

from titan_train.tokenizers.huggingface import HfTokenizer
from titan_train.tokenizers.protocol import Tokenizer

BUILT_IN = {
    "plain": (
        "{% for message in messages %}{% if message.role == 'assistant' %}Assistant: "
        "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
        "{% else %}{{ message.role | capitalize }}: {{ message.content }}{{ '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Assistant: {% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
        "{% else %}{{ message.content }}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
"""Templates for tokenizers that have none, by name. They write the roles and the texts of messages, and nothing else."""

# Characters that Unicode reserves for use inside a program: they stand around what the assistant wrote.
_START, _END = "\ufdd0", "\ufdd1"

# Another of them: it stands in texts of which the template shows whether it reads them.
_MARK = "\ufdd2"
_ARGUMENTS = f'{{"{_MARK}": 1}}'

_A_DAY = datetime(2024, 7, 26)
_ANSWER = "What is behind this text ends it"

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that may hold what was thought before the answer; the first that is there counts."""

Message = Mapping[str, Any]
"""One turn: ``role``, ``content``, and what else the template reads."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """What the assistant wrote, as characters of ``text``: first and one behind the last."""


class ChatTemplate:
    """A template, ready to render.

    Args:
        source: The Jinja text.
        special_tokens: Variables such as ``bos_token`` and ``eos_token``.
        names: Names of all special tokens: an answer ends behind the last of them, not at the line break after it.
        tool_use: The Jinja text for conversations with tools; empty takes ``source`` for them too.

    Raises:
        ValueError: If it is not a template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], names: Collection[str] = (), *, tool_use: str = ""
    ) -> None:
        self.source = source
        self.tool_use = tool_use
        self._with_tools = ChatTemplate(tool_use, special_tokens, names) if tool_use else self
        self._names = tuple(name for name in (*names, *special_tokens.values()) if name)
        self.special_tokens = dict(special_tokens)
        import jinja2

        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as err:
            raise ValueError(f"the chat template is not valid Jinja ({err}). Correct it, or name another.") from err
        self.marks_answers = "endgeneration" in source
        """Whether the template says itself what the assistant wrote."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str = "") -> "ChatTemplate | None":
        """The template for a tokenizer: ``source``, else its own, with its ``tool_use`` for tools; None if it has none."""
        text, tool_use = source or None, ""
        if not source and isinstance(tokenizer, HfTokenizer):
            text, tool_use = tokenizer.chat_template, tokenizer.more_templates.get("tool_use", "")
        variables, names = special_variables(tokenizer), tokenizer.special_ids
        return None if text is None else cls(text, variables, names, tool_use=tool_use)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as text.

        Args:
            messages: The turns.
            tools: Descriptions of the functions that the assistant may call.
            add_generation_prompt: End with what begins the assistant's turn.
            now: Gives ``strftime_now`` to the template; None leaves it undefined, but for one that calls it without asking
                whether it is there: that gets a fixed day.
            variables: Further variables of the template.

        Raises:
            ValueError: If the template refuses the conversation, or asks for what it may not have.
        """
        template = self._with_tools if tools else self
        readable = template._readable(messages, tools, now, variables)
        text = template._render(readable, tools, add_generation_prompt, now, variables)
        return text.replace(_START, "").replace(_END, "")

    def render_prompt(self, messages: Sequence[Message], *, now: datetime | None = None) -> RenderedChat:
        """A conversation that the assistant is to answer, with the places of earlier answers if the template marks them.

        Raises:
            ValueError: As `render`; or a message holds one of the characters that mark answers.
        """
        if not self.marks_answers:
            return RenderedChat(self.render(messages, add_generation_prompt=True, now=now), ())
        check_message_text(json.dumps([*messages], ensure_ascii=False, default=str))
        return _split_marks(self._render(self._readable(messages, None, now, {}), None, True, now, {}))

    def render_spans(self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None) -> RenderedChat:
        """A conversation as text, with the places of what the assistant wrote.

        Raises:
            ValueError: As `render`; or no turn is the assistant's; or the template changes earlier turns and has no
                generation block; or it does not write the name of a function that a turn calls.
        """
        if tools and self.tool_use:
            return self._with_tools.render_spans(messages, tools=tools)
        if not any(message.get("role") == "assistant" for message in messages):
            raise ValueError("no message has the role 'assistant', so there is nothing to learn")
        messages = self._readable(messages, tools, None, {})
        if self.marks_answers:
            rendered = _split_marks(self._render(messages, tools, False, None, {}))
            for number, message in enumerate(messages, start=1):
                _check_calls(number, message, rendered.text)
            return rendered
        whole = self._render(messages, tools, False, None, {})
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:number], tools, True, None, {}) if number else ""
            after = self._render(messages[: number + 1], tools, False, None, {})
            if not (after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"the chat template writes the turns before message {number + 1} differently once it is there, so what "
                    "the assistant wrote cannot be told apart. Put {% generation %} and {% endgeneration %} around it in a "
                    "copy of the template, and set tokenizer.chat_template to that file"
                )
            _check_calls(number + 1, message, after[len(before) :])
            spans.append((len(before), self._answer_end(after, len(before))))
        return RenderedChat(whole, tuple(spans))

    def answer_end(self) -> str:
        """What the template writes behind an answer and is learned with it, such as ``<|im_end|>``; empty if that is unknown."""
        try:
            rendered = self.render_spans([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER}])
        except ValueError:  # it rewrites turns, or needs others
            return ""
        start, end = rendered.spans[-1] if rendered.spans else (0, 0)
        _, found, behind = rendered.text[start:end].rpartition(_ANSWER)
        return behind.rstrip() if found else ""

    def _answer_end(self, text: str, start: int) -> int:
        """Where an answer ends: behind its last special token, if only white space follows."""
        end = len(text.rstrip())
        return end if self._names and text.endswith(self._names, start, end) else len(text)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
        now: datetime | None,
        variables: Mapping[str, Any],
    ) -> str:
        import jinja2

        given = dict(self.special_tokens) | dict(variables)
        if now is not None:
            given["strftime_now"] = now.strftime
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except (jinja2.TemplateError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as err:
            if "'strftime_now' is undefined" in str(err) and "strftime_now" not in given:
                return self._render(messages, tools, add_generation_prompt, _A_DAY, variables)
            raise ValueError(f"the chat template refuses the conversation ({err})") from err

    def _readable(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        now: datetime | None,
        variables: Mapping[str, Any],
    ) -> Sequence[Message]:
        """The messages in the forms that the template reads: parts of text or their text, JSON text of arguments or its object.

        A template that does not know a form loses it, writes it as Python or JSON, encodes it once more, or raises. Which forms
        it knows shows in what it writes of the same conversation with marks in place of these texts.
        """
        if self.source in BUILT_IN.values():
            return [_text_alone(number, message) for number, message in enumerate(messages, start=1)]
        marked = [_marked(number, message) for number, message in enumerate(messages, start=1)]
        if marked == [*messages] and not any(isinstance(message.get("content"), list) for message in messages):
            return messages
        try:
            text = self._render(marked, tools, False, now, variables)
        except ValueError:
            with contextlib.suppress(ValueError):
                others = [_as_read(number, message, message, "") for number, message in enumerate(messages, start=1)]
                self._render(others, tools, False, now, variables)
                return others
            return messages  # their error is the one to tell
        pairs = zip(messages, marked, strict=True)
        return [_as_read(number, message, marks, text) for number, (message, marks) in enumerate(pairs, start=1)]


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under both names that templates read; any of three holds it, as in transformers."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _text_alone(number: int, message: Message) -> Message:
    """The message with the text of its parts, for a template that knows neither parts nor calls of functions."""
    content = message.get("content")
    parts = cast("list[Any]", content if isinstance(content, list) else [content])
    texts: list[Any] = [cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else part for part in parts]
    calls = message.get("tool_calls") or message.get("function_call")
    if calls or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"message {number} holds more than text, or none, which the chat template does not write. Set "
            "tokenizer.chat_template to a Jinja file that does"
        )
    return {**message, "content": "".join(texts)}


def _marked(number: int, message: Message) -> Message:
    """The message with marks, which occur nowhere else, in place of texts that a template may not read in their form."""
    message = _with_arguments(message, lambda _: _ARGUMENTS)
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for place, part in enumerate(cast("list[Any]", content)):
        mark = f"{_MARK}{number}.{place}{_MARK}"
        holds = isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("text"), str)
        parts.append({**part, "text": mark} if holds else mark if isinstance(part, str) else part)
    return {**message, "content": parts}


def _as_read(number: int, message: Message, marked: Message, text: str) -> Message:
    """The message in the form that the template reads; ``text`` is what it wrote of ``marked``."""
    if _ARGUMENTS not in text:
        message = _with_arguments(message, json.loads)
    if not isinstance(message.get("content"), list) or not message["content"]:
        return message
    parts = cast("list[Any]", marked["content"])
    held = [cast("dict[str, Any]", part) for part in parts if isinstance(part, dict)]
    encoded = [_to_json(part) for part in held if part.get("type") == "text"]
    if (
        text
        and all(mark in text for mark in _texts_of(parts))
        and not any(form in text for form in (*map(str, held), *encoded))
    ):
        return message
    return {**message, **_text_alone(number, {"content": message["content"]})}


def _texts_of(parts: Sequence[Any]) -> list[str]:
    texts = (cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]


def _with_arguments(message: Message, change: Callable[[str], Any]) -> Message:
    """The message with ``change`` of the arguments of its calls where they are the JSON text of an object."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        held = cast("dict[str, Any]", call)
        if isinstance(held.get("function"), dict):
            return {**held, "function": changed(held["function"])}
        arguments = held.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(json.loads(arguments), dict):
                    return {**held, "arguments": change(arguments)}
        return held

    if isinstance(calls := message.get("tool_calls"), list):
        message = {**message, "tool_calls": [changed(call) for call in cast("list[Any]", calls)]}
    if call := message.get("function_call"):
        message = {**message, "function_call": changed(call)}
    return message


def _check_calls(number: int, message: Message, text: str) -> None:
    """Raise ValueError if a function that the message calls is not named in the text that the template wrote."""
    listed = message.get("tool_calls")
    calls = [*(cast("list[Any]", listed) if isinstance(listed, list) else []), message.get("function_call")]
    for call in (cast("dict[str, Any]", call) for call in calls if isinstance(call, dict)):
        function = call.get("function")
        name = (cast("dict[str, Any]", function) if isinstance(function, dict) else call).get("name")
        if isinstance(name, str) and name not in text:
            raise ValueError(
                f"message {number} calls the function {name!r}, which the chat template does not write, so the call would be "
                "lost. Set tokenizer.chat_template to a Jinja file that writes calls"
            )


def answer_stops(tokenizer: Tokenizer, template: ChatTemplate | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What ends an answer besides the end-of-text token: ids of special tokens, and words, as `ChatTemplate.answer_end` says."""
    end = "" if template is None else template.answer_end()
    names = [name for name in tokenizer.special_ids if name and end.lstrip().startswith(name)]
    if names:
        return (tokenizer.special_ids[max(names, key=len)],), ()
    return (), (end,) if end else ()


def special_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """``bos_token``, ``eos_token``, ``pad_token`` and so on, as templates call them."""
    names = {number: name for name, number in tokenizer.special_ids.items()}
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, "pad_token": tokenizer.pad_id}
    found = {key: names[number] for key, number in ids.items() if number is not None and number in names}
    if isinstance(tokenizer, HfTokenizer):
        found = {k: v for k, v in tokenizer.config.items() if k.endswith("_token") and isinstance(v, str)} | found
    return found


@cache
def _environment() -> Any:
    """Jinja's sandbox. It is imported when there is a template: a command that needs none would take a tenth longer."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """``{% generation %}…{% endgeneration %}``: puts marks around what the block renders."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return _START + str(caller()) + _END

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    given: dict[str, Any] = environment.globals
    given["raise_exception"] = _raise
    return environment


def _split_marks(marked: str) -> RenderedChat:
    text, spans, length = [], [], 0
    for number, part in enumerate(marked.split(_START)):
        answer, mark, rest = part.partition(_END) if number else ("", "", part)
        if number and not mark:
            raise ValueError("the chat template nests its generation blocks. Close one before the next begins")
        if answer:
            spans.append((length, length + len(answer)))
        text += [answer, rest]
        length += len(answer) + len(rest)
    return RenderedChat("".join(text), tuple(spans))


def check_message_text(text: str) -> None:
    """Raise ValueError if ``text`` holds one of the two characters that mark answers while a template is rendered."""
    if _START in text or _END in text:
        raise ValueError("a message holds U+FDD0 or U+FDD1, which are not characters")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
