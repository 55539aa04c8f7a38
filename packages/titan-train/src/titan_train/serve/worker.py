"""The model of a server: one request at a time, in a thread of its own.

A request's pieces cross to the event loop through a queue. When a client leaves, its generation stops at the next token.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor

from titan_train.generation import LoadedRun, TextPiece, encode_chat, encode_prompt, stream_text
from titan_train.models.traits import traits_of
from titan_train.serve.requests import Ask, BadRequestError, Limits, seeds_of


class Worker:
    """Answers requests with a run's model."""

    def __init__(self, run: LoadedRun, *, limits: Limits, compiled: bool = False) -> None:
        """Take a loaded run, and what a request may ask for; ``compiled`` as in `titan_train.generation.stream`."""
        self.run = run
        self._limits = limits
        self._compiled = compiled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")

    def prompts(self, ask: Ask) -> list[list[int]]:
        """Token ids of every row of a request.

        Raises:
            BadRequestError: The conversation cannot be written, a text not be encoded, or one has too many tokens.
        """
        try:
            if ask.messages:
                rows = [encode_chat(self.run, ask.messages)]
            else:
                rows = [encode_prompt(self.run, prompt) for prompt in ask.prompts]
        except (ValueError, UnicodeError) as err:
            raise BadRequestError(str(err), "messages" if ask.messages else "prompt") from err
        field = "messages" if ask.messages else "prompt"
        longest = max(map(len, rows))
        if longest > self._limits.prompt_tokens:
            raise BadRequestError(
                f"a prompt has {longest} tokens, and this server takes {self._limits.prompt_tokens}. Send a shorter one, or "
                "start the server with a larger --max-prompt-tokens.",
                field,
            )
        new, positions = ask.max_new_tokens or 1, traits_of(self.run.model).max_seq_len
        if positions is not None and longest + new > positions:
            raise BadRequestError(
                f"a prompt of {longest} tokens and max_tokens={new} need {longest + new} positions, and the model has learned "
                f"{positions}. Send a shorter prompt, or ask for at most "
                f"{max(0, positions - longest)} new tokens.",
                field,
            )
        return [row for row in rows for _ in range(ask.rows_each)]

    async def pieces(self, ask: Ask, prompts: list[list[int]]) -> AsyncGenerator[TextPiece]:
        """The answer, as its text comes.

        Raises:
            BadRequestError: The prompt and the new tokens need more positions than the model has.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TextPiece | BaseException | None] = asyncio.Queue()
        left = threading.Event()
        most = self._limits.new_tokens
        if (positions := traits_of(self.run.model).max_seq_len) is not None:
            most = min(most, positions - max(map(len, prompts)))

        def work() -> None:
            def put(item: TextPiece | BaseException | None) -> None:
                loop.call_soon_threadsafe(queue.put_nowait, item)

            try:
                if left.is_set():
                    return
                stream = stream_text(
                    self.run, prompts, chat=bool(ask.messages), stop=ask.stop, max_new_tokens=ask.max_new_tokens or most,
                    sampling=ask.sampling, seeds=seeds_of(ask, prompts), compiled=self._compiled,
                )  # fmt: skip
                for piece in stream:
                    if left.is_set():
                        return
                    put(piece)
                put(None)
            except ValueError as err:
                put(BadRequestError(str(err)))
            except BaseException as err:  # the waiting request must end, whatever the error
                put(err)

        self._thread.submit(work)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            left.set()

    def close(self) -> None:
        """Wait for the request that runs, and end the thread."""
        self._thread.shutdown(cancel_futures=True)
