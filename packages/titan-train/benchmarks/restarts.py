"""How long does a lost run take to step again, and does it end where an undisturbed one does?

Question: after a kill, a hang, SIGTERM, a full disk or a damaged newest checkpoint, how many seconds pass from the fault
to the next finished step of the restarted run, and are the losses the same bits?

Method: one undisturbed run of the quick start's model on CPU ranks, one sequence a rank and step, then N runs, each with
one fault of a random kind at a random rank and step (seeded). Ranks come from one fork server that stays warm, as in any
run of the command. The fault writes its time when it strikes; the first step record after the restart is the end. `slow`
restarts nothing and has no time.

Output: a table on stderr, one JSON object on the last line of stdout; with --out also two files. A run is stopped and
counted as hanging after --limit-s.

Limits: CPU ranks of one machine; a checkpoint every second step, so little is done again; hangs are called after
launch.hang_least_s, here 2 s, or eight median steps (60 s and twenty by default).

Example: python packages/titan-train/benchmarks/restarts.py --runs 50 --out benchmarks/results/restarts_cpu2_202611
"""

import argparse
import io
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from titan_train.config import load_config
from titan_train.inputs import prepare_inputs
from titan_train.launch.local import LocalLauncher
from titan_train.launch.supervisor import Supervisor

STEPS = 8
KINDS = ("kill", "hang", "slow", "sigterm", "disk-full", "corrupt-checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--limit-s", type=int, default=240, help="a run that takes longer counts as hanging")
    parser.add_argument("--cache", default=".cache/titan-train", help="where the tokenized corpus is kept")
    parser.add_argument("--out", type=Path, default=None, help="write OUT.json and OUT.md")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="restarts-"))
    settings = {
        "run.dir": folder,
        "train.steps": STEPS,
        "train.global-batch": arguments.ranks,
        "schedule.warmup-steps": 2,
        "validation.every": 0,
        "checkpoint.every": 2,
        "checkpoint.keep-last": 0,
        "metrics.progress": "off",
        "launch.device": "cpu",
        "launch.nproc": arguments.ranks,
        "launch.hang-least-s": 2,
        "launch.hang-factor": 8,  # a slow rank is no hang
        "data.cache-dir": arguments.cache,
    }
    common = [word for key, value in settings.items() for word in (f"--{key}", str(value))] + ["--metrics.no-report"]
    prepare_inputs(load_config(arguments.config, common))
    run(arguments, [*common, "--run.name", "warm-up", "--train.steps", "2"])
    _, wanted, seconds, _ = run(arguments, [*common, "--run.name", "undisturbed"])
    print(f"undisturbed: {seconds:.1f} s for {STEPS} steps", file=sys.stderr)
    chance = random.Random(arguments.seed)
    rows = []
    for number in range(arguments.runs):
        kind = KINDS[number % len(KINDS)] if number < len(KINDS) else chance.choice(KINDS)
        plan = plan_fault(kind, chance, arguments.ranks)
        name = f"run-{number:02d}"
        code, losses, seconds, load = run(arguments, [*common, "--run.name", name, "--launch.faults", plan])
        row = {
            "kind": kind,
            "plan": plan,
            "exit_code": code,
            "same_losses": losses == wanted,
            "recovery_s": recovery_s(folder / name, kind),
            "run_s": round(seconds, 2),
            "load": load,
        }
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    report(arguments, rows)


def plan_fault(kind: str, chance: random.Random, ranks: int) -> str:
    rank, step = chance.randrange(ranks), chance.randrange(3, STEPS + 1)
    if kind == "slow":
        return f"slow rank={rank} factor=3 step={step}"
    if kind == "disk-full":
        return f"disk-full rank={rank} step={step - step % 2}"
    if kind == "corrupt-checkpoint":  # damage shows only when it is read; an older checkpoint must be there
        step = max(step, 5)
        return f"corrupt-checkpoint rank={rank} step={step}; kill rank={rank} step={step}"
    return f"{kind} rank={rank} step={step}"


def run(arguments: argparse.Namespace, words: list[str]) -> tuple[int, dict[int, float], float, float]:
    """Exit code, loss by step, seconds, machine load before it."""
    config = load_config(arguments.config, words)
    run_dir = Path(config.run.dir) / config.run.name
    run_dir.mkdir(parents=True)
    load, started = os.getloadavg()[0], time.monotonic()
    told = io.StringIO()
    supervisor = Supervisor(LocalLauncher(arguments.ranks, "cpu"), config, run_dir, ranks=arguments.ranks, out=told)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.alarm(arguments.limit_s)  # a request to stop: the run then has fewer losses than it should
    code = supervisor.run()
    signal.alarm(0)
    (run_dir / "told.txt").write_text(told.getvalue())
    return code, {r["step"]: r["loss"] for r in records(run_dir)}, time.monotonic() - started, round(load, 1)


def records(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def recovery_s(run_dir: Path, kind: str) -> float | None:
    """From the fault to the next finished step; of the restarted run, where there is one."""
    attempts = [json.loads(line) for line in (run_dir / "attempts.jsonl").read_text().splitlines()]
    if kind == "slow":
        return None  # nothing is lost
    struck = max(json.loads(file.read_text())["time"] for file in (run_dir / "faults").glob("*.json"))
    after = [r["time"] for r in records(run_dir) if len(attempts) > 1 and r["time"] > attempts[0]["time"]]
    return round(min(after) - struck, 3) if after else None


def report(arguments: argparse.Namespace, rows: list[dict]) -> None:
    lost = [row["recovery_s"] for row in rows if row["recovery_s"] is not None]
    result = {
        "benchmark": "restarts",
        "runs": len(rows),
        "finished_with_the_same_losses": sum(row["same_losses"] and row["exit_code"] == 0 for row in rows),
        "median_recovery_s": round(statistics.median(lost), 2),
        "worst_recovery_s": max(lost),
        "median_load": statistics.median(row["load"] for row in rows),
        "cpus": os.cpu_count(),
        "ranks": arguments.ranks,
        "config": arguments.config,
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parent,
        ).stdout.strip(),
    }
    lines = [
        "| fault | runs | same losses, bitwise | fault to next step, median | worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for kind in KINDS:
        mine = [row for row in rows if row["kind"] == kind]
        times = [row["recovery_s"] for row in mine if row["recovery_s"] is not None]
        shown = f"{statistics.median(times):.2f} s | {max(times):.2f} s" if times else "no restart | "
        lines.append(f"| {kind} | {len(mine)} | {sum(row['same_losses'] for row in mine)} | {shown} |")
    lines.append(
        f"| all | {len(rows)} | {result['finished_with_the_same_losses']} | {result['median_recovery_s']} s | "
        f"{result['worst_recovery_s']:.2f} s |"
    )
    table = "\n".join(lines)
    print(table, file=sys.stderr)
    if arguments.out is not None:
        head = f"# Restarts after random faults\n\n`{arguments.config}` on {arguments.ranks} CPU ranks, {os.cpu_count()} cores"
        text = f"{head}, torch {result['torch']}, machine load {result['median_load']} (median), commit {result['commit']}."
        arguments.out.with_suffix(".md").write_text(f"{text}\n\n{table}\n")
        arguments.out.with_suffix(".json").write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
