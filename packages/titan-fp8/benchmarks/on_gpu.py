"""What float8 costs and gains on one GPU, in one command: casts, linear layers, experts, a stack of blocks.

Question: are the casts at memory speed, and how much faster than bfloat16 is everything around the products, eager?

Method: random normal data (zeros let the chip clock higher). CUDA events, median of 30 calls after warm-up. Casts and
products are kernel times: three inputs in rotation where a cache could hold one, the call queued before the clock
starts. Linear layers are timed as training calls them, one after the other with the host's time in them, and their
kernels and host time beside that. Copy bandwidth and the products' own rates are measured in the same call and every
figure is set beside them, and beside torchao's where that is installed (eager and compiled).

Output: a table per section, and one JSON object on the last line. ``--out FOLDER`` also writes
``fp8_<device>_<yyyymm>.md`` and ``.json`` there.

Limits: one GPU, no communication; the optimizer step is left out of the stack. `--check` runs all of this code on tiny
shapes, on a CPU if need be, to show that it works: its figures mean nothing, and it writes no results.

Example: ``python packages/titan-fp8/benchmarks/on_gpu.py --out benchmarks/results``
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from pathlib import Path

import section_casts
import section_grouped
import section_linears
import section_stack
import torch
from measure import Bench, ceilings
from titan_fp8 import backends

SECTIONS = ("casts", "linears", "grouped", "stack")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="tiny shapes: does all of this code run?")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--shapes", choices=sorted(section_linears.SHAPES), default="all", help="of the linear layers")
    parser.add_argument("--repeats", type=int, default=30, help="timed calls; their median counts")
    parser.add_argument("--out", type=Path, help="folder for the results")
    arguments = parser.parse_args()
    if not arguments.check and not torch.cuda.is_available():
        parser.error("no CUDA device: only --check runs without one.")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench(device, 2 if arguments.check else arguments.repeats, arguments.check)

    record: dict = {"benchmark": "fp8_on_gpu", "check": arguments.check, **_versions(device)}
    record["backends"] = {report.op: report.chosen for report in backends(device)}
    record["ceilings"] = ceilings(bench)
    lines = [_heading("Ceilings"), *(f"| {name} | {value:.3g} |" for name, value in record["ceilings"].items())]
    if "casts" in arguments.sections:
        record["casts"] = section_casts.run(bench, record["ceilings"]["copy_tb_per_s"])
        lines += [_heading("Casts, 16384×4096"), *_rows(record["casts"])]
    if "linears" in arguments.sections:
        record["linears"] = section_linears.run(bench, arguments.shapes)
        for name, rows in record["linears"].items():
            lines += [_heading(f"Linear {name}, forward and backward"), *_rows(rows)]
    if "grouped" in arguments.sections:
        record["grouped"] = section_grouped.run(bench)
        for name, rows in record["grouped"].items():
            lines += [_heading(f"8 experts, {name}"), *_rows(rows)]
    if "stack" in arguments.sections:
        record["stack"] = section_stack.run(bench)
        lines += [_heading("Stack of blocks, forward and backward"), *_rows(record["stack"])]
    record["goals"] = goals(record)
    lines += [_heading("Goals"), *_rows(record["goals"])]
    table = "\n".join(lines)
    print(table, flush=True)
    if arguments.out and not arguments.check:
        _write(arguments.out, record, table)
    print(json.dumps(record))


def goals(record: dict) -> dict[str, dict]:
    """The figures this package sets out to reach, of the sections that were run: value, least wanted, reached or not."""
    wanted: dict[str, tuple[float, float]] = {}
    if casts := record.get("casts"):
        best = min((casts[name] for name in casts if name.startswith("cast_block_dual")), key=lambda row: row["us"])
        wanted["dual cast, share of copy bandwidth"] = (best["share_of_copy"], 0.85)
        wanted["dual cast over two casts"] = (casts["two separate casts, at best"]["us"] / best["us"], 1.35)
        wanted["casts equal to the reference"] = (
            float(all(row.get("mismatches", 0) == 0 for row in casts.values())),
            1.0,
        )
    for name, rows in record.get("linears", {}).items():
        for recipe, least in (("tensorwise", 1.45), ("blockwise", 1.30)):
            wanted[f"{name}: {recipe} over bfloat16"] = (rows[recipe]["speedup"], least)
        for recipe, row in rows.items():
            if row.get("filter_converts"):
                wanted[f"{name}: {recipe}, converted by the filter"] = (row["speedup"], 1.0)
            if recipe.startswith("torchao"):
                ours = rows[recipe.split()[1].rstrip(",")]["speedup"]
                wanted[f"{name}: over {recipe}"] = (ours / row["speedup"], 1.5 if recipe.endswith("eager") else 1.0)
        kept = rows["bf16"]["saved_bytes"] / rows["blockwise"]["saved_bytes"]
        wanted[f"{name}: bfloat16's saved bytes over blockwise's"] = (kept, 1 / 0.55)
    for name, rows in record.get("grouped", {}).items():
        wanted[f"8 experts, {name}: blockwise over bfloat16"] = (rows["blockwise"]["speedup"], 1.2)
    return {
        name: {"value": value, "wanted": least, "reached": value >= least} for name, (value, least) in wanted.items()
    }


def _heading(title: str) -> str:
    return f"\n## {title}\n\n| | |\n|---|---|"


def _rows(rows: dict[str, dict]) -> list[str]:
    def cell(value: object) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return [
        f"| {name} | {', '.join(f'{key} {cell(value)}' for key, value in row.items())} |" for name, row in rows.items()
    ]


def _versions(device: torch.device) -> dict[str, str]:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # images for GPUs often have no git
        commit = ""
    packages = [name for name in ("triton", "torchao") if importlib.util.find_spec(name)]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
        "commit": commit or "unknown",
    }


def _write(folder: Path, record: dict, table: str) -> None:
    stem = f"fp8_{record['device'].split()[-1].lower()}_{datetime.date.today():%Y%m}"
    versions = ", ".join(f"{key} {record[key]}" for key in ("torch", "triton", "torchao", "commit") if key in record)
    title = f"# float8 on one {record['device']}\n\n{versions}. Random data, medians.\n"
    again = "\nRun again: `python packages/titan-fp8/benchmarks/on_gpu.py --out benchmarks/results`\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.md").write_text(title + table + "\n" + again, encoding="utf-8")
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
