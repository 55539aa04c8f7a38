"""Serve an app on this machine only: on loopback, to programs of this machine and to the app's own pages.

Any page that a browser of this machine shows can send requests to loopback, by the machine's own names or by a name of the
page's that leads here. So a request is answered only if its Host is a name of this machine, if the browser does not say that it
comes from another page, and if what it posts is declared to be JSON, which a page may not send elsewhere unasked.
"""

import hmac
import json
import re
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from titan_train.lazy import require

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)
_HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",  # what a page's own policy cannot say
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class LocalOnly:
    """ASGI middleware that refuses what comes from elsewhere, and more requests at a time than a limit."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, most_at_once: int = 16) -> None:
        """Wrap ``app``. Requests beyond ``most_at_once`` that are answered or wait get the status 503."""
        self._app, self._most = app, most_at_once
        self._answered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self.refusal(
            scope["method"], [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]]
        )
        if self._answered >= self._most:
            refusal = refusal or (503, f"{self._most} requests are answered or wait already. Ask again later.")
        if refusal is not None:
            await _refuse(*refusal, send)
            return

        async def send_guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                own = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        self._answered += 1
        try:
            await self._app(scope, receive, send_guarded)
        finally:
            self._answered -= 1

    def refusal(self, method: str, headers: list[tuple[str, str]]) -> tuple[int, str] | None:
        """As `refusal_of`."""
        return refusal_of(method, headers)


class WithToken(LocalOnly):
    """The same for requests of any machine that carry a token, which no page of a browser can know."""

    def __init__(
        self, app: Callable[[Scope, Receive, Send], Awaitable[None]], *, token: str, most_at_once: int = 16
    ) -> None:
        """Wrap ``app``."""
        super().__init__(app, most_at_once=most_at_once)
        self._expected = f"Bearer {token}".encode()

    def refusal(self, method: str, headers: list[tuple[str, str]]) -> tuple[int, str] | None:
        """401 without the token."""
        given = [value for name, value in headers if name == "authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), self._expected):
            return (
                401,
                "the header Authorization must be Bearer and the server's token: OpenAI's clients take it as api_key.",
            )
        return None


def refusal_of(method: str, headers: list[tuple[str, str]]) -> tuple[int, str] | None:
    """Why a request is not answered: a status of HTTP and the reason; None if it is.

    Args:
        method: GET or another.
        headers: Names in lower case, and values.
    """
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(value)
    hosts = found.get("host", [])
    if len(hosts) != 1 or not _HOST.fullmatch(hosts[0]):
        return 400, "only names of this machine are answered to: localhost, 127.0.0.1 or [::1]."
    for origin in found.get("origin", []):
        if urlsplit(origin).netloc.lower() != hosts[0].lower() or not origin.lower().startswith("http"):
            return 403, f"requests of other pages ({origin[:80]}) are not answered."
    site = found.get("sec-fetch-site", ["none"])
    opened = (
        method == "GET" and found.get("sec-fetch-mode") == ["navigate"] and found.get("sec-fetch-dest") == ["document"]
    )
    if any(value not in ("none", "same-origin") for value in site) and not opened:
        return 403, "requests of other pages are not answered."
    content = found.get("content-type", [""])
    if method not in ("GET", "HEAD") and content[0].partition(";")[0].strip().lower() != "application/json":
        return 415, "the content must be JSON, with the header Content-Type: application/json."
    return None


async def _refuse(status: int, reason: str, send: Send) -> None:
    error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


def serve_on_loopback(
    what: str, port: int, build: Callable[[], tuple[Any, str]], *, host: str = "127.0.0.1", **settings: Any
) -> None:
    """Serve until interrupted: Ctrl-C ends it as it should end.

    Args:
        what: Asks for it, for the message where a library is missing.
        port: Taken before anything is built; 0 takes a free one.
        host: Address to listen on; the app must guard another one than loopback itself, see `WithToken`.
        build: Returns the ASGI app and the words to announce its address with.
        settings: Of uvicorn's server.

    Raises:
        ValueError: The extra ``serve`` is not installed.
        OSError: The port is taken.
    """
    uvicorn = require("uvicorn", extra="serve", purpose=what)
    require("starlette", extra="serve", purpose=what)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        app, name = build()
        listening.listen()  # a browser that is faster than the server waits for it
        shown = f"[{host}]" if ":" in host else host
        print(f"{name}: http://{shown}:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
        try:
            uvicorn.Server(uvicorn.Config(app, log_level="warning", limit_concurrency=64, **settings)).run(
                sockets=[listening]
            )
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr, flush=True)
