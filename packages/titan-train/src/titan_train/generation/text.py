"""Text from the model of a run, as tokens come: several prompts at once, stop words, conversations.

A stop word may begin in one token and end in another. Text that could be the beginning of one is held back until the next
token decides, so that nothing after a stop word, and nothing of it, is ever given out.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from torch import nn

from titan_train.config import Config
from titan_train.data.sources.chat import encode_stretches
from titan_train.generation.decode import stream
from titan_train.generation.sampling import Sampling
from titan_train.tokenizers import ChatTemplate, HfTokenizer, IncrementalDecoder, Tokenizer
from titan_train.tokenizers.chat_template import answer_stops

Finish = Literal["", "stop", "length"]
_DEFAULT = Sampling(temperature=0.8, top_p=0.95)


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """The model of one checkpoint, and what it was trained with."""

    config: Config
    model: nn.Module
    """In evaluation mode; its parameters require no gradients."""
    tokenizer: Tokenizer
    step: int
    """The checkpoint's step."""
    template: ChatTemplate | None = None
    """Writes conversations; None if the run has no chat template."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a text besides the tokenizer's end-of-text token."""
    begin_ids: tuple[int, ...] = ()
    """Tokens that a text to continue begins with; a conversation begins as its template has it."""

    def stream(
        self, prompt: str, *, max_new_tokens: int = 200, sampling: Sampling = _DEFAULT, seed: int = 0
    ) -> Iterator[str]:
        """Continue ``prompt``, yielding text as tokens are chosen; it ends at the end-of-text token.

        Args:
            prompt: Text to continue, at least one character.
            max_new_tokens: The most tokens to add.
            sampling: How to choose tokens.
            seed: Fixes the draws.

        Raises:
            ValueError: An empty prompt, or more positions than the model has.
        """
        ids = encode_prompt(self, prompt)
        for piece in stream_text(self, [ids], max_new_tokens=max_new_tokens, sampling=sampling, seeds=[seed]):
            yield piece.text

    def complete(self, prompt: str, *, max_new_tokens: int = 200, sampling: Sampling = _DEFAULT, seed: int = 0) -> str:
        """The continuation of ``prompt`` as one string. Arguments and errors as in `stream`."""
        return "".join(self.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed))


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More text of one row."""

    row: int
    text: str
    finish: Finish = ""
    """Why the row ends with this piece: an end-of-text token or stop word, or max_new_tokens; empty if it goes on."""
    tokens: int = 0
    """New tokens of the row so far."""


class StopWords:
    """Finds the first stop word in text that comes in pieces."""

    def __init__(self, words: Collection[str]) -> None:
        """Take the words.

        Raises:
            ValueError: One is empty.
        """
        if "" in words:
            raise ValueError("a stop word is empty, which would end every text before it begins. Leave it out.")
        self._words = tuple(words)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take a piece: what may be given out, and whether a stop word was found, which ends the text."""
        self._held += text
        places = [place for word in self._words if (place := self._held.find(word)) >= 0]
        if places:
            found, self._held = self._held[: min(places)], ""
            return found, True
        kept = max((n for word in self._words for n in range(1, len(word)) if self._held.endswith(word[:n])), default=0)
        ready = self._held[: len(self._held) - kept]
        self._held = self._held[len(ready) :]
        return ready, False

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        left, self._held = self._held, ""
        return left


def stream_text(
    run: LoadedRun,
    prompts: Sequence[Sequence[int]],
    *,
    chat: bool = False,
    stop: Collection[str] = (),
    **options: Any,
) -> Iterator[TextPiece]:
    """Continue every prompt, yielding text as tokens are chosen.

    Args:
        run: A loaded run.
        prompts: Token ids of each row, see `encode_prompt` and `encode_chat`.
        chat: The prompts are conversations: a row also ends at what the run's template writes behind an answer.
        stop: Words that end a row; they are not part of its text.
        options: Fields of `titan_train.generation.Decoding`; the run gives ``stop_ids`` and ``vocab_size``.

    Yields:
        Pieces of the rows, in order for each row. The last of a row has a ``finish``.

    Raises:
        ValueError: As `titan_train.generation.stream`; an empty stop word.
    """
    tokenizer = run.tokenizer
    ids, words = answer_stops(tokenizer, run.template if chat else None)
    stop_ids = {tokenizer.eos_id, *run.stop_ids, *ids}
    steps = stream(run.model, prompts, stop_ids=stop_ids, vocab_size=tokenizer.vocab_size, **options)
    return _pieces(tokenizer, steps, [StopWords([*stop, *words]) for _ in prompts], options["max_new_tokens"])


def encode_prompt(run: LoadedRun, prompt: str) -> list[int]:
    """Token ids of a text to continue, behind those that each begins with.

    Raises:
        ValueError: It is empty.
    """
    ids = run.tokenizer.encode(prompt).tolist()
    if not ids:
        raise ValueError("the prompt is empty: give at least one character to continue.")
    return [*run.begin_ids, *ids]


def encode_chat(run: LoadedRun, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a conversation that the assistant is to answer.

    Raises:
        ValueError: The run has no chat template, or its template refuses the conversation.
    """
    if run.template is None:
        raise ValueError(
            "this run has no chat template, so a conversation cannot be written as its text. Set tokenizer.chat_template in "
            "its configuration, or give a prompt to continue."
        )
    prompt, tokenizer = run.template.render_prompt(messages, now=datetime.now()), run.tokenizer
    if isinstance(tokenizer, HfTokenizer):
        return tokenizer.encode_marked(prompt.text)[0].tolist()
    return encode_stretches(prompt.text, prompt.spans, tokenizer)[0].tolist()


def _pieces(
    tokenizer: Tokenizer, steps: Iterator[list[int | None]], stops: list[StopWords], most: int
) -> Iterator[TextPiece]:
    decoders = [IncrementalDecoder(tokenizer) for _ in stops]
    counts = [0] * len(stops)
    done = [False] * len(stops)

    def rest(row: int) -> TextPiece:
        text, found = stops[row].push(decoders[row].flush())
        text += "" if found else stops[row].flush()
        return TextPiece(row, text, "length" if counts[row] == most and not found else "stop", counts[row])

    for step in steps:
        for row, token in enumerate(step):
            if done[row]:
                continue
            if token is None:
                done[row] = True
                yield rest(row)
                continue
            counts[row] += 1
            text, done[row] = stops[row].push(decoders[row].push(token))
            if text or done[row]:
                yield TextPiece(row, text, "stop" if done[row] else "", counts[row])
        if all(done):
            break
    for row, ended in enumerate(done):
        if not ended:
            yield rest(row)
