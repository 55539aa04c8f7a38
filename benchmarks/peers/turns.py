"""Turns of several contestants on an idle machine: what every comparison with a peer has in common.

A machine that others use gives ratios of nothing, so a comparison waits for an idle one, and refuses above a load of 1.5.
Contestants take turns in rotated order; a ratio is taken within a round, between a peer's figure and ours (above 1 we are
ahead), and given as the median with quartiles, by wall clock and by processor time of all processes of the contestant.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

MOST_LOAD = 1.5
Turn = Callable[[], tuple[float, float]]
"""One turn: seconds by the clock and seconds of processor time for the same work."""


def parser(doc: str, rounds: int) -> argparse.ArgumentParser:
    """What every comparison can be told."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help="turns of each contestant")
    made.add_argument("--patience", type=float, default=180.0, help="seconds to wait for an idle machine")
    made.add_argument(
        "--busy", action="store_true", help="measure all the same, to try the command; the result says so"
    )
    return made


def with_peers(*packages: str) -> None:
    """Start this command again in an environment with these packages beside ours, where they are missing."""
    try:
        for package in packages:
            importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        uv = shutil.which("uv")
        if uv is None:
            raise SystemExit(
                f"the peers {', '.join(packages)} are not installed, and there is no uv to do it"
            ) from None
        added = [word for package in packages for word in ("--with", package)]
        os.execv(uv, [uv, "run", *added, "python", *sys.argv])


def wait_until_idle(options: argparse.Namespace) -> float:
    """The load, once it is low enough."""
    end = time.monotonic() + options.patience
    while (load := os.getloadavg()[0]) > MOST_LOAD and not options.busy:
        if time.monotonic() > end:
            raise SystemExit(
                f"the load is {load:.1f}, above {MOST_LOAD}: others use this machine, so nothing is measured."
            )
        time.sleep(2)
    return load


def compare(
    name: str,
    contestants: Mapping[str, Turn],
    options: argparse.Namespace,
    about: Mapping[str, object],
    load: float | None = None,
) -> None:
    """Take turns and print: ours is the first contestant. With a ``load``, the machine was waited for before."""
    load = wait_until_idle(options) if load is None else load
    names = list(contestants)
    seconds: dict[str, list[tuple[float, float]]] = {one: [] for one in names}
    for turn in range(options.rounds):
        for one in [*names[turn % len(names) :], *names[: turn % len(names)]]:
            seconds[one].append(contestants[one]())
    ours = seconds[names[0]]
    rows = {}
    print(f"{'':28} {'wall ms':>9} {'quartiles':>17} {'CPU ms':>9}   peer / ours, wall      by CPU time")
    for one in names:
        wall, cpu = ([1e3 * s[i] for s in seconds[one]] for i in (0, 1))
        by_wall, by_cpu = ([s[i] / o[i] for s, o in zip(seconds[one], ours, strict=True)] for i in (0, 1))
        rows[one] = {
            "wall_ms": spread(wall), "cpu_ms": spread(cpu), "ratio_wall": spread(by_wall), "ratio_cpu": spread(by_cpu),
        }  # fmt: skip
        low, middle, high = rows[one]["wall_ms"]
        ratios = "   ".join(
            "{1:.2f} ({0:.2f} - {2:.2f})".format(*rows[one][key]) for key in ("ratio_wall", "ratio_cpu")
        )
        print(f"{one:28} {middle:9.1f} {low:7.1f} - {high:7.1f} {rows[one]['cpu_ms'][1]:9.1f}   {ratios}")
    print(json.dumps({"benchmark": name, "rows": rows, **about, **environment(options, load)}, default=str))


def spread(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return [values[0]] * 3
    return [float(f"{value:.5g}") for value in statistics.quantiles(values, n=4, method="inclusive")]


def environment(options: argparse.Namespace, load: float) -> dict[str, object]:
    """What the figures depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    ).stdout.strip()
    versions: dict[str, str] = {}
    for package in ("torch", "numpy", "transformers", "accelerate", "lightning", "datasets"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "commit": commit, "versions": versions, "python": platform.python_version(), "cores": os.cpu_count(),
        "load_before": round(load, 2), "load_after": round(os.getloadavg()[0], 2), "idle": not options.busy,
        "config": vars(options),
    }  # fmt: skip


def timed(work: Callable[[], object]) -> Turn:
    """A turn of this process."""

    def turn() -> tuple[float, float]:
        began, used = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - began, time.process_time() - used

    return turn


class Served:
    """A contestant in a process of its own: it reads a number of steps a line, and answers ``done WALL CPU LOSS``."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, env={**os.environ, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.loss = 0.0

    def turn(self, steps: int) -> tuple[float, float]:
        """Seconds of a step, by the clock and of all its processes."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("done "):
                wall, cpu, self.loss = map(float, line.split()[1:])
                return wall / steps, cpu / steps
        raise SystemExit("a contestant's process ended; its error is above.")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
