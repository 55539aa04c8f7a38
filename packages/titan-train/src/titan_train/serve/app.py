"""The routes: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions``, and a page to chat in at ``/``.

Only programs of this machine and the page itself are answered (`LocalOnly`), or programs of any machine that know a token
(`WithToken`). Memory is bounded by the settings: a request has at
most so many answers, tokens in a prompt and new tokens, and only so many requests wait.
"""

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from titan_train.generation import LoadedRun, TextPiece, supports_cache
from titan_train.serve.loopback import LocalOnly, WithToken
from titan_train.serve.requests import Ask, BadRequestError, Limits, read_chat, read_completion
from titan_train.serve.worker import Worker
from titan_train.trust.published import content_policy

_LARGEST_BODY = 1_000_000
_LEFT = 499
"""For logs alone: the client has left."""


def build_app(
    run: LoadedRun,
    name: str,
    *,
    max_new_tokens: int = 512,
    max_prompt_tokens: int = 0,
    max_answers: int = 16,
    compiled: bool = False,
    token: str = "",
) -> Starlette:
    """The application.

    Args:
        run: A loaded run.
        name: Of the model, as clients see it.
        max_new_tokens: Default and limit of one answer.
        max_prompt_tokens: Limit of one prompt; 0 takes the length of the sequences that the model was trained on.
        max_answers: Limit of one request: prompts times ``n``.
        compiled: As in `titan_train.generation.stream`.
        token: Answer any machine that sends this token, as OpenAI's clients send an API key, and no page; empty: this machine.

    Raises:
        ValueError: ``compiled`` for a model whose step cannot be compiled.
    """
    if compiled and not supports_cache(run.model):
        raise ValueError(
            f"--compile: the step of {name} cannot be compiled, which needs a run's model with the key-value cache that "
            "generation gives it. Leave it out."
        )
    limits = Limits(max_new_tokens, max_prompt_tokens or run.config.model.seq_len, max_answers)
    server = _Server(run, name, limits, compiled)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        yield
        server.worker.close()

    routes = [
        Route("/", server.page),
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat, methods=["POST"]),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(WithToken, token=token) if token else Middleware(LocalOnly)],
        exception_handlers={
            HTTPException: lambda request, err: _error(str(err.detail), status=err.status_code),  # type: ignore[attr-defined]
            BadRequestError: lambda request, err: _error(str(err), field=err.field),  # type: ignore[attr-defined]
        },
    )


class _Server:
    def __init__(self, run: LoadedRun, name: str, limits: Limits, compiled: bool) -> None:
        self.worker = Worker(run, limits=limits, compiled=compiled)
        self._name, self._limits = name, limits
        self._since = int(time.time())
        page = files("titan_train.serve").joinpath("chat.html").read_text(encoding="utf-8")
        script = page.rpartition("<script>")[2].partition("</script>")[0]
        self._page = page.replace("{{ policy }}", content_policy(script, connect=True))

    async def page(self, request: Request) -> Response:
        run = self.worker.run
        settings = {
            "model": self._name, "chat": run.template is not None, "step": run.step, "max_tokens": self._limits.new_tokens
        }  # fmt: skip
        text = json.dumps(settings).replace("<", "\\u003c")
        return HTMLResponse(self._page.replace("{{ settings }}", text))

    async def models(self, request: Request) -> Response:
        model = {"id": self._name, "object": "model", "created": self._since, "owned_by": "titan-train"}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, read_completion(await self._body(request), limits=self._limits), chat=False)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, read_chat(await self._body(request), limits=self._limits), chat=True)

    async def _body(self, request: Request) -> Any:
        content = bytearray()
        async for part in request.stream():
            content += part
            if len(content) > _LARGEST_BODY:
                raise BadRequestError(f"the body is larger than {_LARGEST_BODY} bytes. Send a shorter prompt.")
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as err:
            raise BadRequestError(f"the body is not valid JSON ({err}).") from err
        if isinstance(body, dict) and body.get("model", self._name) != self._name:
            raise HTTPException(404, f"the model {str(body['model'])[:80]!r} does not exist; this is {self._name!r}.")
        return body

    async def _answer(self, request: Request, ask: Ask, *, chat: bool) -> Response:
        prompts = self.worker.prompts(ask)
        read = sum(map(len, prompts[:: ask.rows_each]))
        head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._name,
        }
        pieces = self.worker.pieces(ask, prompts)
        if ask.stream:
            first = await anext(pieces)  # a request that cannot be answered must get an error, not a stream
            events = _events(head, first, pieces, chat=chat, prompt_tokens=read if ask.usage else None)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        texts, finishes, tokens = [""] * len(prompts), ["stop"] * len(prompts), [0] * len(prompts)
        async for piece in pieces:
            texts[piece.row] += piece.text
            finishes[piece.row], tokens[piece.row] = piece.finish, piece.tokens
            if await request.is_disconnected():
                await pieces.aclose()
                return Response(status_code=_LEFT)
        choices = [_choice(row, texts[row], finishes[row], chat=chat) for row in range(len(prompts))]
        usage = _usage(read, sum(tokens))
        return JSONResponse({**head, "object": _kind(chat), "choices": choices, "usage": usage})


def _kind(chat: bool, *, chunk: bool = False) -> str:
    return ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"


def _usage(read: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}


def _choice(row: int, text: str, finish: str, *, chat: bool) -> dict[str, Any]:
    content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": row, **content, "logprobs": None, "finish_reason": finish}


async def _events(
    head: Mapping[str, Any],
    first: TextPiece,
    pieces: AsyncIterator[TextPiece],
    *,
    chat: bool,
    prompt_tokens: int | None,
) -> AsyncIterator[str]:
    """Server-sent events, ended by ``[DONE]``; before it the tokens are counted, if ``prompt_tokens`` is given."""
    tokens: dict[int, int] = {}
    common = {**head, "object": _kind(chat, chunk=True)}

    def event(piece: TextPiece) -> str:
        role = {} if piece.row in tokens else {"role": "assistant"}
        tokens[piece.row] = piece.tokens
        content = {"delta": {**role, "content": piece.text}} if chat else {"text": piece.text}
        choice = {"index": piece.row, **content, "logprobs": None, "finish_reason": piece.finish or None}
        usage = {} if prompt_tokens is None else {"usage": None}
        return f"data: {json.dumps({**common, 'choices': [choice], **usage})}\n\n"

    yield event(first)
    try:
        async for piece in pieces:
            yield event(piece)
    except Exception as err:  # the answer has begun: only an event can say it
        yield f"data: {json.dumps(_error_body(str(err), 'server_error'))}\n\n"
    if prompt_tokens is not None:
        usage = _usage(prompt_tokens, sum(tokens.values()))
        yield f"data: {json.dumps({**common, 'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def _error(message: str, *, status: int = 400, field: str | None = None) -> Response:
    return JSONResponse(_error_body(message, "invalid_request_error", field), status_code=status)


def _error_body(message: str, kind: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}
