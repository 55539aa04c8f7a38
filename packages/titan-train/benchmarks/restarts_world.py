"""How long does a run take to step again after the disk, the clock, the memory or the network failed under it?

Question: after a real ENOSPC, EIO, a jump of the clock, a kill by the kernel for memory, a network that goes away: how many
seconds pass from the loss that the supervisor noticed to the next finished step?

Method: the tests of these faults (tests/launch/test_full_disk.py, test_cannot_die.py) run once each; they hold that the
losses are those of an undisturbed run, bit for bit. The seconds are the supervisor's own, from the first line "resumed"
of each run, and from the last one where the network went away: hangs are called after 3 s there, a slow step among them.

Output: a table on stderr, one JSON object on the last line of stdout; with --out also two files.

Limits: needs root for a tmpfs, a memory cgroup and a network namespace; tests that may not make them are skipped and have
no row. The disk and the network come back only when the test lets them (1 s, 2 s and 8 s after the loss), which is in the
times; so is a restart that was lost to the same fault.

Example: python packages/titan-train/benchmarks/restarts_world.py --out benchmarks/results/restarts_world_cpu2_202611
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests" / "launch"
RUNS = {
    "ENOSPC, 1 s": "told",
    "EIO, 2 s": "eio.told",
    "clock on and back by 3 years": "clock.told",
    "OOM kill": "oom.told",
    "network away, 8 s": "partition.told",
}


def main() -> None:
    """Run the tests, or read the folder of a run of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write OUT.md and OUT.json")
    parser.add_argument("--basetemp", type=Path, help="read what an earlier pytest --basetemp left instead of running")
    args = parser.parse_args()
    base = args.basetemp or _run()
    rows = []
    for fault, name in RUNS.items():
        for file in sorted(base.rglob(name)):
            seconds = [
                float(found) for found in re.findall(r"^resumed .* done, ([\d.]+) s after", file.read_text(), re.M)
            ]
            if seconds:
                rows.append(
                    {
                        "fault": fault,
                        "restarts": file.read_text().count("\nlost "),
                        "seconds": seconds[-1 if name.startswith("partition") else 0],
                    }
                )
                break
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    setting = {"torch": version("torch"), "load": os.getloadavg()[1], "commit": commit.stdout.strip()}
    text = _table(rows, setting)
    print(text, file=sys.stderr)
    result = json.dumps({"benchmark": "restarts_world", **setting, "rows": rows})
    if args.out:
        args.out.with_suffix(".md").write_text(text)
        args.out.with_suffix(".json").write_text(result + "\n")
    print(result)


def _run() -> Path:
    base = Path(tempfile.mkdtemp(prefix="restarts-world-")) / "runs"
    which = "full_disk or errors_is_waited or clock or kernel_kills or network"
    files = [str(TESTS / name) for name in ("test_full_disk.py", "test_cannot_die.py")]
    command = [sys.executable, "-m", "pytest", "-q", "--slow", f"--basetemp={base}", "-k", which, *files]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return base


def _table(rows: list[dict[str, object]], setting: dict[str, object]) -> str:
    about = (
        f"A tiny Llama on 2 CPU ranks, 2 cores, torch {setting['torch']}, machine load {setting['load']:.1f}, commit "
        f"{setting['commit']}. One run each; all end with the losses of an undisturbed run, bit for bit. The seconds behind "
        "a fault are how long it lasts at least after the loss."
    )
    lines = [
        "# Restarts after the disk, the clock, the memory or the network failed",
        "",
        about,
        "",
        "| fault | losses of ranks | loss to next step |",
        "| --- | --- | --- |",
        *(f"| {row['fault']} | {row['restarts']} | {row['seconds']:.1f} s |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
