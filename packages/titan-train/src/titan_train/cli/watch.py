"""Watch a run from its folder: in the terminal, or with --web as its report in a browser, live.

Where the output is not a terminal, each new step, validation and event is a line. It ends when the run does. --web serves on
this machine only (127.0.0.1) and needs the extra `serve`.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_train.cli.parser import CommandParser, integer

_SHOWN = 4000  # lines of metrics.jsonl that the panel is drawn from


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/quickstart")
    parser.add_argument("--web", action="store_true", help="serve the report live on 127.0.0.1 instead")
    parser.add_argument(
        "--port", type=integer(0, 65535), default=8001, help="with --web; 0 takes a free one; default 8001"
    )
    parser.add_argument("--once", action="store_true", help="show the present state and end")
    arguments = parser.parse_args(words)

    from titan_train.run_folder import read_config

    config = read_config(arguments.run_dir)  # says so if this is not a run's folder
    if arguments.web:
        return _serve(arguments.run_dir, arguments.port)
    try:
        return _watch(arguments.run_dir, config.train.steps, once=arguments.once)
    except KeyboardInterrupt:
        return 0


def _watch(run_dir: Path, total_steps: int, *, once: bool) -> int:
    from titan_train.observe import read_history, read_run_info
    from titan_train.observe.terminal import resolve_mode
    from titan_train.observe.watching import Follower, find_goodput, goodput_line, last_written, panel
    from titan_train.report.folder import attempts_of
    from titan_train.run_folder import run_status

    follower = Follower(run_dir, _SHOWN)
    drawn = resolve_mode("auto", sys.stdout) == "bar"

    def state() -> tuple[str, Any]:
        attempts = attempts_of(read_run_info(run_dir))
        status = run_status(run_dir, attempts)
        ended = None if status == "running" else last_written(run_dir)
        return status, find_goodput(read_history(run_dir), attempts, ended) if attempts else None

    if not drawn:
        while True:
            status, goodput = state()
            new = follower.new_lines()
            for line in _newest(new) if once else new:
                print(_text(line, total_steps), flush=True)
            if once or status != "running":
                print(f"run {status}" + (f"; {goodput_line(goodput)}" if goodput is not None else ""))
                return 0
            time.sleep(1.0)

    from rich.live import Live

    from titan_train.terminal import clean_console

    console = clean_console()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status, goodput = state()
            follower.new_lines()
            width = min(console.width, 110)
            shown = panel(run_dir.resolve().name, status, total_steps, list(follower.lines), goodput, width)
            live.update(shown, refresh=True)
            if once or status != "running":
                return 0
            time.sleep(1.0)


def _newest(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last step, the last validation, and the last five events, in their order."""
    places: dict[str, list[int]] = {}
    for place, line in enumerate(lines):
        places.setdefault(str(line.get("kind", "step")), []).append(place)
    kept = [place for kind, found in places.items() for place in found[-5 if kind == "event" else -1 :]]
    return [lines[place] for place in sorted(kept)]


def _text(line: dict[str, Any], total_steps: int) -> str:
    from titan_train.observe.watching import event_line

    if line.get("kind") == "event":
        return event_line(line)
    shown = ("loss", "bits_per_byte", "grad_norm", "lr", "tokens_per_s", "mfu", "peak_mem_gib", "step_time_s")
    pairs = [f"{name}={line[name]:.5g}" for name in shown if isinstance(line.get(name), (int, float))]
    kind = "validation " if line.get("kind") == "validation" else ""
    return f"{kind}step={line.get('step')}/{total_steps} {' '.join(pairs)}"


def _serve(run_dir: Path, port: int) -> int:
    from titan_train.serve.loopback import serve_on_loopback

    def build() -> tuple[Any, str]:
        from titan_train.report.live import build_live_app

        return build_live_app(run_dir), run_dir.resolve().name

    serve_on_loopback("--web", port, build, timeout_graceful_shutdown=1)
    return 0
