"""The report of a run that goes on, on loopback: the page at ``/``, and at ``/events`` a word each time it changes.

The page is made anew when a browser asks for it. A browser that shows it loads it again when a server-sent event says that
`metrics.jsonl`, `pipeline.json` or `run.json` has changed, and keeps its place. Only names of this machine are answered to.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from titan_train.report.page import build_report

_FOLLOW = """<script>
const source = new EventSource("/events");
source.onmessage = () => { sessionStorage.setItem("top", String(scrollY)); location.reload(); };
scrollTo(0, Number(sessionStorage.getItem("top") || 0));
</script>"""


def build_live_app(run_dir: Path, *, every_s: float = 2.0) -> Starlette:
    """The application.

    Args:
        run_dir: The run's folder.
        every_s: Seconds between two looks at its files, so at most one new page in so long.
    """

    async def page(_request: Request) -> Response:
        try:
            html = await asyncio.to_thread(_page, run_dir)
        except (OSError, ValueError) as err:
            return PlainTextResponse(f"{err}\n", 503)
        return HTMLResponse(html.replace("</body>", _FOLLOW + "</body>"), headers={"Cache-Control": "no-store"})

    async def events(request: Request) -> Response:
        return StreamingResponse(_changes(request, run_dir, every_s), media_type="text/event-stream")

    hosts = ["127.0.0.1", "localhost", "[::1]"]
    routes = [Route("/", page), Route("/events", events)]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


def _page(run_dir: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return build_report(run_dir, Path(folder) / "report.html").read_text(encoding="utf-8")


async def _changes(request: Request, run_dir: Path, every_s: float) -> AsyncGenerator[str]:
    known = _state(run_dir)
    yield ": watching\n\n"  # so that the browser knows that it is connected
    while not await request.is_disconnected():
        await asyncio.sleep(every_s)
        now = _state(run_dir)
        yield "data: changed\n\n" if now != known else ": nothing new\n\n"
        known = now


def _state(run_dir: Path) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for name in ("metrics.jsonl", "pipeline.json", "run.json"):
        try:
            status = (run_dir / name).stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((0, 0))
    return tuple(found)
