"""Everything that one GPU can answer, in one offline command within a time budget.

    python benchmarks/gpu/run.py --out DIR [--wheels DIR] [--budget 800] [--only NAME ...]
    python benchmarks/gpu/run.py --out DIR --device cpu --tiny        # the same code on a CPU, to see that it runs

Needs a Python with torch, triton, numpy and pytest; no network and no other tool. Packages that the machine lacks come as
wheels: `python benchmarks/gpu/wheels.py --out DIR` downloads them on another machine. A section whose modules are missing
is skipped with their names.

Sections run in order of value, each in a process of its own and with a time limit (see `sections.py`). A section is started if
the time that is left covers what it is expected to take. What it has measured is written as it goes, so a section that is ended
keeps its figures. After each of them DIR holds `gpu.json` (results, versions, commands), `gpu.md` (a table) and `gpu.log` (all
output). The same command again goes on with the sections that have not succeeded yet.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from sections import SECTIONS, Section

ROOT = Path(__file__).resolve().parents[2]
_LAST = 60
"""Lines of a section's output that the report shows: its tables."""


def main() -> int:
    """Run what the budget allows; 0 if nothing failed."""
    arguments = _arguments()
    deadline = time.monotonic() + arguments.budget
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = _environment(arguments)
    kept = arguments.out / "gpu.json"
    record = json.loads(kept.read_text()) if kept.is_file() else {"sections": {}}
    record["machine"] = machine = _machine(environment)
    print(f"{record['machine']}", flush=True)
    for section in SECTIONS:
        if arguments.only and section.name not in arguments.only:
            continue
        if record["sections"].get(section.name, {}).get("outcome") == "ok":
            print(f"{section.name:10} done before", flush=True)
            continue
        row = _run(section, arguments, environment, deadline, machine.get("gpus", 0))
        record["sections"][section.name] = row
        _write(arguments.out, record)
        print(f"{section.name:10} {row['outcome']:28} {row['seconds']:6.1f} s  {section.question}", flush=True)
    print(f"{arguments.out / 'gpu.md'}")
    return int(any(row["outcome"].startswith("failed") for row in record["sections"].values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of packages that this machine lacks")
    parser.add_argument("--budget", type=float, default=800, help="seconds for everything (default 800)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes: the code is checked, the figures mean nothing"
    )
    parser.add_argument("--only", nargs="+", choices=[section.name for section in SECTIONS], help="these sections")
    arguments = parser.parse_args()
    if arguments.wheels and not arguments.wheels.is_dir():
        parser.error(f"--wheels {arguments.wheels}: there is no such folder. Make it with benchmarks/gpu/wheels.py.")
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("--device cpu needs --tiny: the figures of a CPU would say nothing about a GPU.")
    if arguments.tiny and arguments.device == "cuda":
        parser.error("--tiny is for --device cpu.")
    return arguments


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The sections': our sources and the wheels on the path, compiler caches outside of the results."""
    cache = Path(tempfile.gettempdir()) / "titan-gpu-cache"
    paths = [str(path) for path in sorted(ROOT.glob("packages/*/src")) + sorted(ROOT.glob("testing/*/src"))]
    if arguments.wheels:
        site = cache / "site"
        for wheel in sorted(arguments.wheels.glob("*.whl")):
            if not (site / f".{wheel.name}").exists():  # a wheel is an archive of what belongs on the path
                zipfile.ZipFile(wheel).extractall(site)
                (site / f".{wheel.name}").touch()
        paths.append(str(site))  # after ours, before nothing: the machine's own packages win only if they come first
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "OMP_NUM_THREADS": "4" if arguments.device == "cuda" else "1",
    }


def _run(
    section: Section, arguments: argparse.Namespace, environment: dict[str, str], deadline: float, gpus: int
) -> dict:
    command = (section.command if arguments.device == "cuda" else section.on_cpu).split()
    workers = ["-n", "8"] if _importable("xdist", environment) else []
    command = [word for part in command for word in (workers if part == "{workers}" else [part])]
    row = {"question": section.question, "command": "python " + " ".join(command), "seconds": 0.0}
    missing = [name for name in section.needs if not _importable(name, environment)]
    if missing:
        return row | {"outcome": f"skipped: no {', '.join(missing)}"}
    if arguments.device == "cuda" and section.gpus > max(1, gpus):
        return row | {"outcome": f"skipped: {gpus} of {section.gpus} GPUs"}
    left = deadline - time.monotonic()
    if left < section.expected_s:
        return row | {"outcome": f"skipped: {max(0, left):.0f} s left of {section.expected_s}"}
    began = time.monotonic()
    # A session of its own, so that a section's ranks and compilers end with it.
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=min(section.limit_s, left))
        outcome = "ok" if process.returncode == 0 else f"failed: exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        outcome = f"failed: over {min(section.limit_s, left):.0f} s"
    with (arguments.out / "gpu.log").open("a", encoding="utf-8") as log:
        log.write(f"\n===== {section.name}: {row['command']}\n{output}\n===== {section.name}: {outcome}\n")
    # torch's profiler traces itself on the same stream; the log above keeps everything
    lines = [line for line in output.strip().splitlines() if not line.startswith("USDT:")] or [""]
    row |= {"outcome": outcome, "seconds": time.monotonic() - began, "last": lines[-_LAST:]}
    # a section prints its result after each piece: the last one that is whole counts, however the section ended
    results = [found for line in lines if line.startswith('{"') and (found := _parsed(line)) is not None]
    if results:
        row |= {"result": results[-1], "last": [line for line in lines if not line.startswith('{"')][-_LAST:]}
    return row


def _parsed(line: str) -> dict | None:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _importable(name: str, environment: dict[str, str]) -> bool:
    if importlib.util.find_spec(name):
        return True
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([sys.executable, "-c", find], env=environment, check=False).returncode == 0


def _machine(environment: dict[str, str]) -> dict[str, str]:
    code = (
        "import json, torch, importlib.metadata as m, importlib.util as u\n"
        "cuda = torch.cuda.is_available()\n"
        "found = {n: m.version(n) for n in ('triton', 'torchao', 'numpy') if u.find_spec(n)}\n"
        "name = torch.cuda.get_device_name() if cuda else 'cpu'\n"
        "print(json.dumps({'device': name, 'torch': torch.__version__, 'cuda': torch.version.cuda, "
        "'gpus': torch.cuda.device_count(), **found}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip()[-500:]}
    return found | {
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join([os.path.relpath(__file__, ROOT), *sys.argv[1:]]),
    }


def _commit() -> str:
    """The commit that stands here; unknown where there is no git."""
    try:
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() or "unknown"


def _write(out: Path, record: dict) -> None:
    """Both files anew, each in one move, so that a stop in between leaves the last whole ones."""
    machine = record["machine"]
    rows = [
        f"| {name} | {row['question']} | {row['outcome']} | {row['seconds']:.0f} |"
        for name, row in record["sections"].items()
    ]
    versions = ", ".join(
        f"{key} {machine[key]}" for key in ("torch", "cuda", "triton", "python", "commit") if machine.get(key)
    )
    parts = [
        f"# One {machine.get('device', 'machine')}, {machine['date']}",
        f"{versions}. Command: `{machine['command']}`",
        "\n".join(["| section | question | outcome | s |", "| --- | --- | --- | --- |", *rows]),
    ]
    for name, row in record["sections"].items():
        if row.get("last"):
            parts.append(f"## {name}\n\n`{row['command']}`\n\n```\n" + "\n".join(row["last"]) + "\n```")
    for name, text in (("gpu.json", json.dumps(record, indent=1)), ("gpu.md", "\n\n".join(parts) + "\n")):
        (out / f".{name}").write_text(text, encoding="utf-8")
        (out / f".{name}").replace(out / name)


if __name__ == "__main__":
    sys.exit(main())
