"""What a request asks for: OpenAI's fields that make sense here, checked one by one.

A field that would change the answer and is not supported is refused; what only describes the caller is ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titan_train.generation import Sampling

_IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
_FIELDS = {
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n",
    "seed", "stop", "stream", "stream_options",
}  # fmt: skip
# supported with these values only: they then change nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "logprobs": (False, None, 0),
    "top_logprobs": (0, None),
    "echo": (False, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
}


class BadRequestError(ValueError):
    """A request that cannot be answered; ``field`` names what is wrong in it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


_MOST_STOPS = 16
_LONGEST_STOP = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    new_tokens: int
    """Of one answer."""
    prompt_tokens: int
    """Of one prompt."""
    answers: int
    """Prompts times ``n``."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, checked."""

    prompts: tuple[str, ...]
    """Texts to continue; empty for a conversation."""
    messages: tuple[dict[str, Any], ...]
    """A conversation to answer."""
    sampling: Sampling
    max_new_tokens: int | None
    """None takes the server's limit, as far as the model has positions."""
    rows_each: int
    """Answers to each prompt."""
    seed: int
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """A stream ends with an event that counts the tokens."""


def read_completion(body: Any, *, limits: Limits) -> Ask:
    """A request of ``/v1/completions``; the limit of new tokens is their default too.

    Raises:
        BadRequestError: Names the field.
    """
    fields = _object(body)
    prompt = fields.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not prompts or not all(isinstance(text, str) and text for text in prompts):
        raise BadRequestError("prompt must be a text of at least one character, or a list of such texts.", "prompt")
    return _ask(fields, {"prompt"}, tuple(prompts), (), limits)


def read_chat(body: Any, *, limits: Limits) -> Ask:
    """A request of ``/v1/chat/completions``.

    Raises:
        BadRequestError: Names the field.
    """
    fields = _object(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError("messages must be a list of at least one message.", "messages")
    return _ask(fields, {"messages"}, (), tuple(_message(m, i) for i, m in enumerate(messages)), limits)


def _object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object.")
    return body


def _message(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequestError(f"{where} must be an object with a role and a content.", where)
    content = message.get("content")
    if isinstance(content, list):  # the form with parts, of which only text can be read
        texts = [part["text"] for part in content if _is_text(part)]
        if len(texts) < len(content):
            raise BadRequestError(
                f"{where}.content holds a part that is not text. Send text only; about images, use titan-train generate --image.",
                where,
            )
        content = "".join(texts)
    if not isinstance(content, str):
        raise BadRequestError(f"{where}.content must be a text.", where)
    return {"role": message["role"], "content": content}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _ask(
    fields: Mapping[str, Any],
    own: set[str],
    prompts: tuple[str, ...],
    messages: tuple[dict[str, Any], ...],
    limits: Limits,
) -> Ask:
    for name, value in fields.items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise BadRequestError(f"{name} is not supported here. Leave it out.", name)
        if name not in own | _FIELDS | _IGNORED | _NEUTRAL.keys():
            raise BadRequestError(f"{name} is not a field that is known here. Leave it out.", name)
    stop = fields.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(word, str) and word for word in stops):
        raise BadRequestError("stop must be a text, or a list of texts, none of them empty.", "stop")
    if len(stops) > _MOST_STOPS or any(len(word) > _LONGEST_STOP for word in stops):
        raise BadRequestError(f"stop may hold {_MOST_STOPS} texts of {_LONGEST_STOP} characters at most.", "stop")
    rows_each = _integer(fields, "n", default=1, least=1, greatest=limits.answers)
    if rows_each * max(len(prompts), 1) > limits.answers:
        raise BadRequestError(
            f"{rows_each * len(prompts)} answers are asked for (prompts times n), and this server gives {limits.answers} at a "
            "time. Send fewer prompts, or start the server with a larger --max-answers.",
            "prompt",
        )
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    stream = fields.get("stream") or False
    if not isinstance(stream, bool):
        raise BadRequestError("stream must be true or false.", "stream")
    return Ask(
        prompts=prompts,
        messages=messages,
        sampling=_sampling(fields),
        max_new_tokens=_integer(fields, limit, default=0, least=1, greatest=limits.new_tokens) or None,
        rows_each=rows_each,
        seed=_integer(fields, "seed", default=0, least=0, greatest=2**62),
        stop=tuple(stops),
        stream=stream,
        usage=_usage(fields, stream),
    )


def _usage(fields: Mapping[str, Any], stream: bool) -> bool:
    """``stream_options.include_usage``."""
    options = fields.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise BadRequestError("stream_options is for stream=true. Leave it out.", "stream_options")
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise BadRequestError('stream_options must be an object, such as {"include_usage": true}.', "stream_options")
    return options.get("include_usage", False)


def _sampling(fields: Mapping[str, Any]) -> Sampling:
    values: dict[str, float] = {}
    for name, least, greatest in (
        ("temperature", 0, 100), ("top_p", 0, 1), ("min_p", 0, 1), ("repetition_penalty", 0, 100),
    ):  # fmt: skip
        value = fields.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= greatest:
            raise BadRequestError(f"{name} must be a number from {least} to {greatest}.", name)
        values[name] = float(value)
    try:
        return Sampling(
            **{"temperature": 1.0, **values}, top_k=_integer(fields, "top_k", default=0, least=0, greatest=2**31)
        )
    except BadRequestError:
        raise
    except ValueError as err:
        raise BadRequestError(str(err), next((name for name in values if str(err).startswith(name)), None)) from err


def _integer(fields: Mapping[str, Any], name: str, *, default: int, least: int, greatest: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= greatest:
        raise BadRequestError(f"{name} must be an integer from {least} to {greatest}.", name)
    return value


def seeds_of(ask: Ask, rows: Sequence[Any]) -> list[int]:
    """A seed for each row."""
    return [ask.seed + number for number in range(len(rows))]
