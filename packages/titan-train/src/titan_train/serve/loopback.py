"""Serve an app on this machine only."""

import importlib
import socket
import sys
from collections.abc import Callable
from typing import Any


def serve_on_loopback(what: str, port: int, build: Callable[[], tuple[Any, str]], **settings: Any) -> None:
    """Serve until interrupted: Ctrl-C ends it as it should end.

    Args:
        what: Asks for it, for the message where a library is missing.
        port: On 127.0.0.1, taken before anything is built; 0 takes a free one.
        build: Returns the ASGI app and the words to announce its address with.
        settings: Of uvicorn's server.

    Raises:
        ValueError: The extra ``serve`` is not installed.
        OSError: The port is taken.
    """
    try:
        uvicorn: Any = importlib.import_module("uvicorn")
        importlib.import_module("starlette")
    except ImportError as err:
        raise ValueError(f"{what} needs {err.name}, which is not installed. Install titan-train[serve].") from err
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        app, name = build()
        listening.listen()  # a browser that is faster than the server waits for it
        print(f"{name}: http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
        try:
            uvicorn.Server(uvicorn.Config(app, log_level="warning", **settings)).run(sockets=[listening])
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr, flush=True)
