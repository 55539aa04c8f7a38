"""Do the commands around a run work on this device?

Question: does what a user types beside `run` (sample, evaluate, export, serve, trace, measure the machine, start from each of
the shipped starting points) end well on a GPU, and print numbers that are numbers?

Method: each chain of commands has a folder of its own, and the chains run at once. A command must end with the code that is
expected, and its output must match. What another library than torch is needed for is left out where that library is missing.

Output: a row per command; one JSON object on the last line; exit code 1 if any failed.

    python benchmarks/gpu/commands.py --device cuda
    python benchmarks/gpu/commands.py --device cpu --tiny
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

TRAIN = f"{sys.executable} -m titan_train"


class Row(NamedTuple):
    """One command."""

    command: str
    """After ``titan-train``; ``{on}`` names the device."""
    says: str = ""
    """A regular expression that its output holds."""
    needs: tuple[str, ...] = ()
    """Modules without which it is left out."""
    code: int = 0
    """Which it must end with."""


STEPS = "--train.steps 6 --checkpoint.every 3 {on}"
CHAINS: dict[str, tuple[Row, ...]] = {
    "around a run": (
        Row(f"run debug {STEPS} --train.dtype bf16 --profile.steps 4:5", "finished"),
        Row("report runs/debug --trace", "whole step"),
        Row("generate runs/debug --prompt 'def f(' --max-new-tokens 24 --temperature 0"),
        Row("generate runs/debug --prompt 'def f(' --prompt 'import' --max-new-tokens 24 --top-k 5 --samples 2"),
        Row("generate runs/debug --prompt 'def f(' --max-new-tokens 24 --temperature 0 --compile"),
        Row("eval runs/debug --text text.txt", r"\d"),
        Row("export runs/debug --to hf --out hf", needs=("transformers",)),
        Row("generate hf --prompt 'def f(' --max-new-tokens 8 --temperature 0", needs=("transformers",)),
        Row("eval hf --text text.txt", r"\d", needs=("transformers",)),
        Row("export runs/debug --to dcp --out dcp"),
        Row("export runs/debug --to aoti --out aoti"),
        Row("report runs/debug"),
    ),
    "starting points": tuple(
        row
        for kind in ("sft", "lora", "continue")
        for row in (
            Row(f"init {kind} --out {kind}.toml"),
            Row(f"run {kind}.toml {STEPS} --run.name {kind}", "finished", needs=("transformers",)),
            Row(f"generate runs/{kind} --prompt 'hello' --max-new-tokens 8", needs=("transformers",)),
        )
    ),
    "images": (
        Row(f"run vlm_shapes {STEPS} --validation.every 0", "finished", needs=("PIL",)),
        Row(f"run flux_shapes {STEPS} --validation.every 0", "finished"),
        Row(
            "generate runs/flux_shapes --prompt 'a red disc at the top left' --out disc.png --sample-steps 4",
            needs=("PIL",),
        ),
    ),
    "other models": (
        Row(
            f"run debug {STEPS} --run.name mtp --model.name qwen3_debug --model.args.mtp_depth 2 --train.dtype bf16",
            "finished",
        ),
        Row("generate runs/mtp --prompt 'def f(' --max-new-tokens 24 --temperature 0 --draft", "accepted|draft"),
        Row(f"run debug {STEPS} --run.name hybrid --model.name qwen3_next_debug --train.dtype bf16", "finished"),
        Row("generate runs/hybrid --prompt 'def f(' --max-new-tokens 24 --temperature 0"),
        Row(f"run debug {STEPS} --run.name mla --model.name deepseek_debug --train.dtype bf16", "finished"),
        Row("generate runs/mla --prompt 'def f(' --max-new-tokens 24 --temperature 0"),
        Row("eval runs/mla --text text.txt", r"\d"),
        Row(f"run debug {STEPS} --run.name muon --optimizer.name muon --train.dtype bf16", "finished"),
        Row("eval runs/muon --text text.txt", r"\d"),
    ),
    "the machine": (
        Row("doctor", "torch"),
        Row("plan calibrate --device --out here.toml"),
        Row("check quickstart --hardware here.toml", "tokens/s"),
        Row("check debug --coordinates {on}", "not flat", code=2),
        Row("check llama3_8b --devices 8 --rehearse", "GiB"),
    ),
}
SERVED = "around a run"


def main() -> int:
    """Run all chains; 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="nothing that needs a compiler")
    parser.add_argument("--only", nargs="+", choices=list(CHAINS), default=list(CHAINS), help="these chains")
    arguments = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="titan-commands-", ignore_cleanup_errors=True) as folder,
        ThreadPoolExecutor(len(arguments.only)) as pool,
    ):
        jobs = [pool.submit(chain, name, Path(folder) / name, arguments) for name in arguments.only]
        for job in jobs:
            rows |= job.result()
    failed = [
        name for name, row in rows.items() if row["outcome"] != "ok" and not str(row["outcome"]).startswith("no ")
    ]
    print(f"{len(rows) - len(failed)} of {len(rows)} commands ok or left out")
    print(json.dumps({"benchmark": "gpu_commands", "device": arguments.device, "rows": rows}), flush=True)
    return int(bool(failed))


def chain(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """The rows of one chain, in its folder."""
    rows: dict[str, dict[str, object]] = {}
    folder.mkdir()
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n" * 400)
    for row in CHAINS[name]:
        command = row.command.format(on=f"--launch.device {arguments.device} --launch.nproc 1")
        compiles = "--compile" in command or "aoti" in command
        missing = [module for module in row.needs if importlib.util.find_spec(module) is None]
        if missing or (arguments.tiny and compiles):
            rows[command] = {"outcome": f"no {', '.join(missing) or 'compiler'}"}
            continue
        rows[command] = _tried(command, row, folder)
        _show(command, rows[command])
    if name == SERVED and importlib.util.find_spec("uvicorn") and importlib.util.find_spec("starlette"):
        rows["serve runs/debug"] = _served(folder)
        _show("serve runs/debug", rows["serve runs/debug"])
    return rows


def _tried(command: str, row: Row, folder: Path) -> dict[str, object]:
    began = time.monotonic()
    try:
        done = subprocess.run(
            f"{TRAIN} {command}", shell=True, cwd=folder, text=True, timeout=150, env=os.environ | {"COLUMNS": "160"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as err:
        output, code = str(err.stdout), "a time limit of 150 s"
    outcome = "ok" if code == row.code else f"failed: it ended with {code}"
    if outcome == "ok" and not re.search(row.says, output):
        outcome = f"failed: no {row.says!r} in what it printed"
    if re.search(r"\bnan\b|Traceback", output):
        outcome = f"failed: nan or a traceback in what it printed; {outcome}"
    return {"outcome": outcome, "s": round(time.monotonic() - began, 1), "output": output[-2500:]}


def _served(folder: Path) -> dict[str, object]:
    """Ask a server of the run for a completion."""
    process = subprocess.Popen(
        f"exec {TRAIN} serve runs/debug --port 0", shell=True, cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                body = json.dumps({"model": "debug", "prompt": "def f(", "max_tokens": 8}).encode()
                asked = urllib.request.Request(
                    f"{found.group()}/v1/completions", body, {"content-type": "application/json"}
                )
                answer = json.loads(urllib.request.urlopen(asked, timeout=60).read())
                return {"outcome": "ok" if answer["choices"] else "failed: no choices", "output": str(answer)[-500:]}
        return {"outcome": "failed: it did not start", "output": "".join(said)[-2500:]}
    except OSError as err:
        return {"outcome": f"failed: {err}", "output": "".join(said)[-2500:]}
    finally:
        process.terminate()
        process.wait()


def _show(command: str, row: dict[str, object]) -> None:
    print(f"{command:100} {row['outcome']}  {row.get('s', '')}", flush=True)
    if row["outcome"] != "ok":
        print(row["output"], flush=True)


if __name__ == "__main__":
    sys.exit(main())
