"""The table of the composition matrix: how far is every combination of parallelisms from one process?

Question: for each combination, the largest difference in the loss of the first step, in every gradient of the first
step, and in the loss after ten steps.

Method: reads the JUnit report of ``tests/parallel/test_matrix.py``, where each test notes what it measured. Nothing is
run here, and a combination that the report lacks is not in the table.

Output: the table as ``composition_matrix_*.md`` and ``.json`` in ``--out``; its summary on the terminal.

Example: nox -s matrix
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

NUMBERS = ("first_loss", "gradient", "norm", "last_loss", "validation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="+", help="JUnit XML; of a combination in several, the last counts")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    arguments = parser.parse_args()
    found: dict[tuple[str, str], dict[str, object]] = {}
    for report in arguments.report:
        for case in ET.parse(report).getroot().iter("testcase"):
            row = row_of(case)
            found[row["model"], row["combination"]] = row
    rows = list(found.values())
    today = datetime.now(UTC)
    summary = {
        "benchmark": "composition_matrix",
        "date": f"{today:%Y-%m-%d}",
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        **{outcome: sum(row["outcome"] == outcome for row in rows) for outcome in ("equal", "refused", "failed")},
    }
    name = f"composition_matrix_cpu{os.cpu_count()}_{today:%Y%m}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.json").write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")
    text = page(summary, rows)
    (arguments.out / f"{name}.md").write_text(text)
    print(text.partition("\n| model |")[0])


def row_of(case: ET.Element) -> dict[str, object]:
    """One test as a row: model, combination, outcome and errors."""
    notes = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
    given = re.search(r"\[(\w+)-(.*)\]$", case.get("name", ""))
    model, names = given.groups() if given else ("moe", "pp x fsdp x cp x tp x ep")
    failed = case.find("failure") is not None or case.find("error") is not None
    row: dict[str, object] = {"model": model, "combination": names, "seconds": float(case.get("time", "0"))}
    row["outcome"] = "failed" if failed else "refused" if "refused" in notes else "equal"
    if "ranks" in notes:
        row |= {"ranks": int(notes["ranks"]), "worst": notes["worst"], **{n: float(notes[n]) for n in NUMBERS}}
    return row


def page(summary: dict[str, object], rows: list[dict[str, object]]) -> str:
    """The result as a page."""
    setup = f"{summary['cpus']} cores, gloo ranks, Python {summary['python']}, torch {summary['torch']}"
    refused, failed = summary["refused"], summary["failed"]
    lines = [
        "# Every combination of parallelisms against one process",
        "",
        f"{summary['date']}, {setup}, commit {summary['commit']}; `nox -s matrix`. Float32 but for float8's products.",
        "",
        f"**{summary['equal']} combinations equal one process, {refused} are refused with a reason, {failed} failed.**",
        "Errors over all combinations:",
        "",
        "| | loss of step 1, median | worst | gradients of step 1, median | worst | loss after 10 steps, median | worst |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, float8 in (("float32", False), ("with float8", True)):
        some = [row for row in rows if "ranks" in row and ("float8" in str(row["combination"])) == float8]
        cells = [
            f"{of([float(str(row[key])) for row in some]):.0e}"
            for key in ("first_loss", "gradient", "last_loss")
            for of in (statistics.median, max)
            if some
        ]
        lines.append(f"| {name}, {len(some)} | {' | '.join(cells)} |")
    lines += [
        "",
        "Loss: absolute difference in nats. Gradients: of every parameter, the largest error over the parameter's largest",
        "gradient; the worst parameter counts. Tolerances and where they come from: `tests/parallel/test_matrix.py`.",
        "",
        "| model | combination | ranks | loss of step 1 | gradients | loss after 10 | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if "ranks" in row:
            errors = " | ".join(f"{row[key]:.0e}" for key in ("first_loss", "gradient", "last_loss"))
            lines.append(f"| {row['model']} | {row['combination']} | {row['ranks']} | {errors} | {row['outcome']} |")
        else:
            lines.append(f"| {row['model']} | {row['combination']} | | | | | {row['outcome']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
