"""The report of a run in progress, on loopback: the page at ``/``, and at ``/events`` a word for the state it shows.

The page is made again when a browser asks for it. A browser that shows it asks for the word every few seconds, as server-sent
events do by themselves. When it is no longer the page's own, because `metrics.jsonl`, `pipeline.json` or `run.json` has
changed or the run was killed, the browser loads the page again and keeps its place. While the folder cannot be read, the page
says why. Only this machine is answered (`LocalOnly`).
"""

import asyncio
import hashlib
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from titan_train.observe import read_run_info
from titan_train.report.folder import attempts_of, read_folder
from titan_train.report.page import render, report_page
from titan_train.run_folder import run_status
from titan_train.serve.loopback import LocalOnly

_NEW = {"Cache-Control": "no-store"}


def build_live_app(run_dir: Path, *, every_s: float = 2.0) -> Starlette:
    """The application.

    Args:
        run_dir: The run's folder.
        every_s: Seconds between two looks of a browser at its files, so at most one new page in so long.
    """

    async def page(_request: Request) -> Response:
        state = _state(run_dir)  # from before the page is made: what changes meanwhile makes another
        status = 200
        try:
            html = await asyncio.to_thread(lambda: report_page(read_folder(run_dir), state=state))
        except (OSError, ValueError) as err:
            html, status = render("unreadable.html", state=state, name=run_dir.resolve().name, reason=str(err)), 503
        return HTMLResponse(html, status, headers=_NEW)

    async def events(_request: Request) -> Response:
        event = f"retry: {1000 * every_s:.0f}\ndata: {_state(run_dir)}\n\n"
        return Response(event, headers=_NEW, media_type="text/event-stream")

    routes = [Route("/", page), Route("/events", events)]
    return Starlette(routes=routes, middleware=[Middleware(LocalOnly)])


def _state(run_dir: Path) -> str:
    """A word that differs once one of the files has changed, or the run has ended without a word."""
    found: list[object] = [run_status(run_dir, attempts_of(read_run_info(run_dir)))]
    for name in ("metrics.jsonl", "pipeline.json", "run.json"):
        try:
            status = (run_dir / name).stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((0, 0))
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]
