"""The model of a server: one request at a time, in a thread of its own.

A request's pieces cross to the event loop through a queue. When a client leaves, its generation stops at the next token.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from titan_train.generation import LoadedRun, TextPiece, encode_chat, encode_prompt, stream_text
from titan_train.serve.requests import Ask, BadRequestError, seeds_of


class Worker:
    """Answers requests with a run's model."""

    def __init__(self, run: LoadedRun, *, max_prompt_tokens: int, compiled: bool = False) -> None:
        """Take a loaded run, and the limit of a prompt; ``compiled`` as in `titan_train.generation.stream`."""
        self.run = run
        self._most = max_prompt_tokens
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
        if (longest := max(map(len, rows))) > self._most:
            raise BadRequestError(
                f"a prompt has {longest} tokens, and this server takes {self._most}. Send a shorter one, or start the server "
                "with a larger --max-prompt-tokens.",
                "messages" if ask.messages else "prompt",
            )
        return [row for row in rows for _ in range(ask.rows_each)]

    async def pieces(self, ask: Ask, prompts: list[list[int]]) -> AsyncIterator[TextPiece]:
        """The answer, as its text comes.

        Raises:
            BadRequestError: The prompt and the new tokens need more positions than the model has.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[TextPiece | BaseException | None] = asyncio.Queue()
        left = threading.Event()

        def work() -> None:
            def put(item: TextPiece | BaseException | None) -> None:
                loop.call_soon_threadsafe(queue.put_nowait, item)

            try:
                if left.is_set():
                    return
                stream = stream_text(
                    self.run, prompts, max_new_tokens=ask.max_new_tokens, sampling=ask.sampling, stop=ask.stop,
                    seeds=seeds_of(ask, prompts), compiled=self._compiled,
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
