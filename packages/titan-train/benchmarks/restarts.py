"""How long does a lost run take to step again, and does it end where an undisturbed one does?

Question: after a kill, a hang, SIGTERM, a full disk, a damaged newest checkpoint or a killed fork server, how many seconds
pass from the fault to the next finished step of the restarted run, and are the losses the same bits? And on Ray, when a
node goes away?

Method: one undisturbed run of the quick start's model on CPU ranks, one sequence a rank and step, then N runs, each with
one fault of a random kind at a random rank and step (seeded). With `--launcher local`, ranks come from one fork server
that stays warm, as in any run of the command; the fault writes its time when it strikes. With `--launcher ray`, a
cluster of loopback nodes holds one rank a node and one node is spare; a further fault is SIGKILL to the processes of
Ray on the node of a random rank, so that the spare must be taken and imports torch. The first step record after the
restart is the end. `slow` restarts nothing and has no time.

Output: a table on stderr, one JSON object on the last line of stdout; with --out also two files, written anew after
every run; --resume goes on where such files end. A run is told to stop after --limit-s, killed half a minute later,
and counted as not the same. Times are broken down: `noticed` until the attempt is ended, `placed` until its successor's
ranks are told to start, `restored` until they have joined, built the model and read the checkpoint, `step` until the
next step is done.

Limits: one machine, CPU ranks; a checkpoint every second step, so little is done again; hangs are called after
launch.hang_least_s, here 2 s, or eight median steps (60 s and twenty by default). The node that is lost on Ray shares
its machine with all others, so no network is in the times.

Example: python packages/titan-train/benchmarks/restarts.py --runs 50 --out benchmarks/results/restarts_cpu2_202611
         python packages/titan-train/benchmarks/restarts.py --launcher ray --runs 5 --out benchmarks/results/restarts_ray
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path

from titan_train.config import load_config
from titan_train.inputs import prepare_inputs
from titan_train.launch.place.here import LocalLauncher
from titan_train.launch.supervise.supervisor import Supervisor

STEPS = 8
KINDS = {
    "local": ("kill", "hang", "slow", "sigterm", "disk-full", "corrupt-checkpoint", "server"),
    "ray": ("node", "kill", "sigterm", "disk-full", "corrupt-checkpoint"),  # a node that starts would look like a hang
}
PARTS = ("noticed", "placed", "restored", "step")
KILL_AFTER_S = 30  # how long a run that was told to stop may take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--launcher", choices=tuple(KINDS), default="local")
    parser.add_argument("--limit-s", type=int, default=240, help="a run that takes longer counts as hanging")
    parser.add_argument("--cache", default=".cache/titan-train", help="where the tokenized corpus is kept")
    parser.add_argument("--out", type=Path, default=None, help="write OUT.json and OUT.md")
    parser.add_argument("--resume", action="store_true", help="keep the runs that OUT.json has")
    arguments = parser.parse_args()
    rows = earlier_rows(arguments)
    cluster = RayCluster(arguments.ranks) if arguments.launcher == "ray" else None
    try:
        measure(arguments, cluster, rows)
    finally:
        if cluster is not None:
            cluster.close()
    print(json.dumps(report(arguments, rows)))


def measure(arguments: argparse.Namespace, cluster: "RayCluster | None", rows: list[dict]) -> None:
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
        "launch.hang-least-s": 2,
        "launch.hang-factor": 8,  # a slow rank is no hang
        "data.cache-dir": Path(arguments.cache).resolve(),
    }
    if cluster is None:
        settings |= {"launch.nproc": arguments.ranks}
    else:
        settings |= {"launch.launcher": "ray", "launch.nproc": 1, "launch.nnodes": arguments.ranks}
        settings |= {"launch.ray.address": cluster.address, "launch.hang-least-s": 60}
    common = [word for key, value in settings.items() for word in (f"--{key}", str(value))] + ["--metrics.no-report"]
    prepare_inputs(load_config(arguments.config, common))
    if cluster is None:  # the fork server starts and warms up
        Run(arguments, [*common, "--run.name", "warm-up", "--train.steps", "2"]).run()
    reference = Run(arguments, [*common, "--run.name", "undisturbed"])
    code = reference.run()
    wanted = reference.losses()
    if code != 0 or len(wanted) != STEPS:
        raise SystemExit(f"the undisturbed run failed with code {code}:\n{reference.told.getvalue()}")
    print(f"undisturbed: {reference.seconds:.1f} s for {STEPS} steps", file=sys.stderr, flush=True)
    chance = random.Random(arguments.seed)
    kinds = KINDS[arguments.launcher]
    for number in range(arguments.runs):
        kind = kinds[number % len(kinds)] if number < len(kinds) else chance.choice(kinds)
        plan = plan_fault(kind, chance, arguments.ranks)
        if number < len(rows):
            continue
        words = [*common, "--run.name", f"run-{number:02d}"]
        if cluster is not None:
            cluster.add_missing_nodes()
        if kind in ("node", "server"):
            run = Run(arguments, words)
            strike = cluster.strike if kind == "node" else strike_server
            code = run.run(lambda run=run, plan=plan, strike=strike: strike(run, plan))
        else:
            run = Run(arguments, [*words, "--launch.faults", plan])
            code = run.run()
        if code is not None and not run.timed_out and run.attempts()[-1]["end"] == "stopped":
            raise SystemExit("stopped from outside; the runs before this one are kept")
        parts = run.recovery(kind)
        rows.append(
            {
                "kind": kind,
                "plan": plan,
                "exit_code": code,
                "in_time": not run.timed_out,
                "same_losses": run.losses() == wanted,
                "recovery_s": round(sum(parts.values()), 3) if parts else None,
                "parts_s": {name: round(seconds, 3) for name, seconds in parts.items()},
                "run_s": round(run.seconds, 2),
                "load": run.load,
            }
        )
        print(f"{number + 1}/{arguments.runs} {rows[-1]}", file=sys.stderr, flush=True)
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
    if kind in ("node", "server"):  # seen from outside once the step is done, and the last one leaves nothing to lose
        step = min(step, STEPS - 2)
    return f"{kind} rank={rank} step={step}"


def strike_server(run: "Run", plan: str) -> None:
    """Kill the server that ranks are forked from, once a step is done. The plan reads "server rank=R step=S"."""
    from multiprocessing import forkserver

    step = int(plan.split()[-1].partition("=")[2])
    while not any(record["step"] >= step for record in run.records()):
        if run.timed_out:
            return
        time.sleep(0.02)
    faults = run.folder / "faults"
    faults.mkdir(exist_ok=True)
    (faults / "server.json").write_text(json.dumps({"fault": plan, "time": time.time()}))
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)


class Run:
    """One run under the supervisor, in this process."""

    def __init__(self, arguments: argparse.Namespace, words: list[str]) -> None:
        self.config = load_config(arguments.config, words)
        self.folder = Path(self.config.run.dir) / self.config.run.name
        self.folder.mkdir(parents=True)
        self.told = io.StringIO()
        self.timed_out = False
        self.job = None
        self._started: list[float] = []  # when each attempt's ranks were told to start
        self._ranks = arguments.ranks
        self._limit_s = arguments.limit_s

    def run(self, strike=None) -> int | None:
        """Exit code; None if the run had to be killed. ``strike`` runs beside it in a thread."""
        self.load, started = round(os.getloadavg()[0], 1), time.monotonic()
        if self.config.launch.launcher == "ray":
            from titan_train.launch.place.ray.launcher import RayLauncher

            self._launcher = RayLauncher(self.config.launch, 1)
        else:
            self._launcher = LocalLauncher(self._ranks, "cpu")
        self.device = self._launcher.device
        supervisor = Supervisor(self, self.config, self.folder, ranks=self._ranks, out=self.told)
        signal.signal(signal.SIGALRM, self._stop)
        signal.alarm(self._limit_s)
        striker = threading.Thread(target=strike, daemon=True) if strike else None
        code = None
        try:
            if striker is not None:
                striker.start()
            with contextlib.suppress(TimeoutError):
                code = supervisor.run()
        finally:
            signal.alarm(0)
            self.job = None
            (self.folder / "told.txt").write_text(self.told.getvalue())
        if striker is not None:
            striker.join(timeout=KILL_AFTER_S)
        self.seconds = time.monotonic() - started
        return code

    def start(self, attempt):
        """Stand between supervisor and launcher to see when the ranks start and which job they are."""
        self.job = self._launcher.start(attempt)
        self._started.append(time.time())
        return self.job

    def capacity(self) -> int:
        return self._launcher.capacity()

    def close(self, exit_code: int = 1) -> None:
        self._launcher.close(exit_code)

    def records(self, kind: str = "step") -> list[dict]:
        return [line for line in lines_of(self.folder / "metrics.jsonl") if line["kind"] == kind]

    def attempts(self) -> list[dict]:
        return lines_of(self.folder / "attempts.jsonl")

    def losses(self) -> dict[int, float]:
        """By step, every digit."""
        return {record["step"]: record["loss"] for record in self.records()}

    def recovery(self, kind: str) -> dict[str, float]:
        """Seconds of each part of the time from the fault to the next finished step; empty if nothing was lost."""
        attempts = self.attempts()
        struck = [json.loads(file.read_text())["time"] for file in (self.folder / "faults").glob("*.json")]
        if kind == "slow" or len(attempts) < 2 or not struck:
            return {}
        ended = attempts[0]["time"]
        restored = [r["time"] for r in self.records("event") if r["event"] == "checkpoint_restored"]
        stepped = [r["time"] for r in self.records() if r["time"] > ended]
        if not restored or not stepped:
            return {}
        times = [max(struck), ended, self._started[1], restored[0], min(stepped)]
        return {name: after - before for name, (before, after) in zip(PARTS, itertools.pairwise(times), strict=True)}

    def _stop(self, *_: object) -> None:
        if self.timed_out:
            raise TimeoutError
        self.timed_out = True
        signal.alarm(KILL_AFTER_S)
        os.kill(os.getpid(), signal.SIGTERM)  # the supervisor takes it as a request to stop


class RayCluster:
    """Loopback nodes of one core each, Ray's own way to test several nodes on one machine: one more than ranks."""

    def __init__(self, ranks: int) -> None:
        # before Ray is imported, so that its nodes take loopback for their address
        os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
        os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "Raylet is terminated|has been marked dead"
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self._nodes = ranks + 1
        self._add(num_cpus=0, include_dashboard=False)
        self.add_missing_nodes()
        self.address = self._cluster.address

    def add_missing_nodes(self) -> None:
        while len(self._cluster.worker_nodes) < self._nodes:
            self._add(num_cpus=1)

    def strike(self, run: Run, plan: str) -> None:
        """Kill the node of a rank once a step is done. The plan reads "node rank=R step=S"."""
        rank, step = (int(word.partition("=")[2]) for word in plan.split()[1:])
        while run.job is None or not any(record["step"] >= step for record in run.records()):
            if run.timed_out:
                return
            time.sleep(0.02)
        node_id = run.job.node_of(rank).split()[-1]
        node = next(node for node in self._cluster.worker_nodes if node.node_id.startswith(node_id))
        faults = run.folder / "faults"
        faults.mkdir(exist_ok=True)
        (faults / "node.json").write_text(json.dumps({"fault": plan, "time": time.time()}))
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()

    def _add(self, **settings: object) -> None:
        from ray._private import services

        ask, deadline = services.get_node, time.monotonic() + 300

        def patiently(*words: object) -> object:
            while True:  # Ray gives a node 30 s, short where its files are cold, by asking this until it does not raise
                try:
                    return ask(*words)
                except RuntimeError:
                    if time.monotonic() > deadline:
                        raise

        services.get_node = patiently
        try:
            self._cluster.add_node(object_store_memory=80 * 2**20, **settings)
        finally:
            services.get_node = ask


def lines_of(file: Path) -> list[dict]:
    """The whole lines of a file of JSON lines, which may be being written."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def earlier_rows(arguments: argparse.Namespace) -> list[dict]:
    if not arguments.resume:
        return []
    file = arguments.out.with_suffix(".json") if arguments.out else None
    if file is None or not file.exists():
        raise SystemExit("--resume continues an OUT.json: give --out, and leave --resume out the first time")
    earlier = json.loads(file.read_text())
    for name in ("config", "ranks", "seed", "launcher"):
        if earlier[name] != getattr(arguments, name):
            raise SystemExit(f"{file} was measured with --{name} {earlier[name]}, not {getattr(arguments, name)}")
    return earlier["rows"]


def report(arguments: argparse.Namespace, rows: list[dict]) -> dict:
    lost = [row["recovery_s"] for row in rows if row["recovery_s"] is not None]
    good = [row for row in rows if row["same_losses"] and row["exit_code"] == 0 and row["in_time"]]
    result = {
        "benchmark": "restarts",
        "launcher": arguments.launcher,
        "runs": len(rows),
        "finished_with_the_same_losses": len(good),
        "median_recovery_s": round(statistics.median(lost), 2) if lost else None,
        "worst_recovery_s": max(lost, default=None),
        "median_load": round(statistics.median(row["load"] for row in rows), 2) if rows else None,
        "cpus": os.cpu_count(),
        "ranks": arguments.ranks,
        "seed": arguments.seed,
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
    table = "\n".join(
        [
            f"| fault | runs | same losses, bitwise | fault to next step: least | median | worst | {' | '.join(PARTS)} |",
            f"|{' --- |' * (6 + len(PARTS))}",
            *[table_line(kind, [r for r in rows if r["kind"] == kind], good) for kind in KINDS[arguments.launcher]],
            table_line("all", rows, good),
        ]
    )
    if arguments.out is not None:
        head = f"# Restarts after random faults, launcher `{arguments.launcher}`\n\n`{arguments.config}` on {arguments.ranks} "
        text = f"CPU ranks, {os.cpu_count()} cores, torch {result['torch']}, machine load {result['median_load']} (median), "
        last = f"commit {result['commit']}. The last four columns are medians of the parts of the time, in seconds."
        arguments.out.with_suffix(".md").write_text(f"{head}{text}{last}\n\n{table}\n")
        arguments.out.with_suffix(".json").write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    if len(rows) >= arguments.runs:
        print(table, file=sys.stderr)
    return result


def table_line(name: str, rows: list[dict], good: list[dict]) -> str:
    same = sum(row in good for row in rows)
    times = [row["recovery_s"] for row in rows if row["recovery_s"] is not None]
    if not times:
        return f"| {name} | {len(rows)} | {same} | no restart |{'  |' * (2 + len(PARTS))}"
    parts = [statistics.median(row["parts_s"][part] for row in rows if row["parts_s"]) for part in PARTS]
    shown = " | ".join(f"{seconds:.2f}" for seconds in parts)
    span = f"{min(times):.2f} s | {statistics.median(times):.2f} s | {max(times):.2f} s"
    return f"| {name} | {len(rows)} | {same} | {span} | {shown} |"


if __name__ == "__main__":
    main()
