"""How far are the planner's predictions from published measurements?

Method: the tables in ``published`` are scored in three parts, each with the few constants its fit may use.

1. ``published_throughput.csv`` (torchtitan): four constants on four rows.
2. SimuMax's rows of ``measured_rows.csv``: six constants on six rows.
3. Megatron-Bridge, NeMo, Automodel, MaxText, Wan: nothing is fitted. Intervals are scored three times, as if rows of the same
   model, of the same release, of the same stack had not been seen: they are wider on a machine without another row. The same
   with the rows as their pages print them, without the settings that were looked up in recipes.

Output: a line for each row, a summary, and one JSON object as the last line. ``--rows FILE.csv`` scores another table of
the same columns with the shipped constants: nothing of it is fitted.

Limits: the deviations, the priors and the cost model's form were chosen with these rows in view;
only rows from elsewhere are a blind test.

Example: ``python packages/titan-train/benchmarks/planner_accuracy.py --out benchmarks/results/planner_accuracy_202611``
"""

import argparse
import csv
import json
import math
import platform
import statistics
from pathlib import Path

from published_rows import (
    SIMUMAX_CONSTANTS,
    SIMUMAX_FIT_ROWS,
    TABLES,
    TORCH_FIT_ROWS,
    PublishedRow,
    by_prior,
    fit_torch,
    load_rows,
    measured_machines,
    parse_row,
    predict_other,
    simumax_set,
)
from titan_train.planner.calibrate.defaults import TORCH, constants_for
from titan_train.planner.calibrate.fit import predicted
from titan_train.planner.memory.peak import memory_peak

RECIPE_COLUMNS = (
    "graphs",
    "ep_overlap",
    "mtp",
    "bf16_blocks",
    "recipe",
    "activation_checkpointing",
    "dispatcher",
    "offload",
)
Z80 = 1.2816
LEFT_OUT = {
    "model": lambda row: row.shape.name,
    "release": lambda row: (row.collection, row.release),
    "stack": lambda row: "bridge" if row.collection == "skills" else row.collection,  # pages of one repository
}
"""What the rows that are hidden together have in common."""


def score(
    name: str,
    rows: list[PublishedRow],
    speeds: list[float],
    fitted: set[int],
    spreads: list[float],
    *,
    quiet: bool = False,
) -> dict:
    """Print each row and return the summary of a part."""
    print(f"\n{name}")
    errors, memory = [], []
    for row, speed, spread in zip(rows, speeds, spreads, strict=True):
        error = speed / row.tokens_per_s - 1
        errors.append(error)
        peak = ""
        if row.memory_gib:
            memory.append(memory_peak(row.shape, row.setup).allocated_gib / row.memory_gib - 1)
            peak = f"memory {memory[-1]:+7.1%}"
        inside = abs(math.log1p(error)) <= Z80 * spread
        mark = "fit" if row.number in fitted else "   "
        if quiet:
            continue
        print(
            f"{row.number:4} {mark} {row.shape.name:18} {row.machine.name:10} {row.setup.describe()[:62]:62} "
            f"{row.release:8} {speed:9.0f} / {row.tokens_per_s:9.1f} {error:+7.1%} {'in ' if inside else 'OUT'} {peak}"
        )
    inside = [
        abs(math.log1p(e)) <= Z80 * s for e, s, r in zip(errors, spreads, rows, strict=True) if r.number not in fitted
    ]
    held = [abs(e) for e, r in zip(errors, rows, strict=True) if r.number not in fitted]
    summary = {
        "rows": len(rows),
        "fitted": sorted(fitted),
        "time_median": statistics.median(map(abs, errors)),
        "time_worst": max(map(abs, errors)),
        "time_mean_signed": statistics.mean(errors),
        "not_fitted_median": statistics.median(held) if held else None,
        "not_fitted_worst": max(held) if held else None,
        "over_25_percent": sum(abs(e) > 0.25 for e in errors),
        "interval_80_covers": statistics.mean(inside) if inside else None,
    }
    if memory:
        summary |= {"memory_median": statistics.median(map(abs, memory)), "memory_worst": max(map(abs, memory))}
    for key, value in summary.items():
        print(f"  {key:20} {value if not isinstance(value, float) else f'{value:.4f}'}")
    return summary


def torch_part() -> dict:
    """The torchtitan table, and six other fits of the same constants."""
    rows = load_rows("published_throughput.csv")
    speeds = [predicted(row, TORCH[row.setup.stack]) for row in rows]
    out = score("torchtitan: 4 constants on 4 rows", rows, speeds, set(TORCH_FIT_ROWS), [0.09] * len(rows))
    others = {}
    for chosen in ((0, 1, 3, 4), (5, 1, 2, 4), (0, 1, 9, 4), (0, 6, 2, 4), (10, 1, 2, 4), (10, 6, 3, 4)):
        fit = fit_torch([row for row in rows if row.number in chosen])
        errors = [abs(predicted(r, fit[r.setup.stack]) / r.tokens_per_s - 1) for r in rows if r.number not in chosen]
        others[",".join(map(str, chosen))] = [statistics.median(errors), max(errors)]
    print("  other fit rows: not-fitted median / worst", {k: [round(x, 3) for x in v] for k, v in others.items()})
    return out | {"other_fits": others}


def simumax_part() -> dict:
    """SimuMax's depth-cut rows, collectives not overlapped."""
    rows = [row for row in load_rows("measured_rows.csv") if row.collection == "simumax"]
    print({name: round(getattr(simumax_set(), name), 4) for name in SIMUMAX_CONSTANTS})
    speeds = [predicted(row, simumax_set()) for row in rows]
    return score("SimuMax: 6 constants on 6 rows", rows, speeds, set(SIMUMAX_FIT_ROWS), [0.05] * len(rows))


def stacks_part(rows: list[PublishedRow], title: str) -> dict:
    """Intervals that saw no row of the same model, of the same release, of the same stack."""
    out: dict = {}
    for name, key in LEFT_OUT.items():
        predictions = [
            predict_other(row, measured_machines([other for other in rows if key(other) != key(row)])) for row in rows
        ]
        speeds, spreads = [p[0] for p in predictions], [p[1] for p in predictions]
        out[name] = score(f"{title}, without its {name}", rows, speeds, set(), spreads, quiet=name != "model")
        for kind, routed in (("dense", False), ("routed", True)):
            found = [
                (s / r.tokens_per_s - 1, w)
                for s, w, r in zip(speeds, spreads, rows, strict=True)
                if r.shape.moe is routed
            ]
            inside = [abs(math.log1p(e)) <= Z80 * w for e, w in found]
            errors = [abs(e) for e, _ in found]
            out[name][kind] = {
                "rows": len(errors),
                "median": statistics.median(errors),
                "worst": max(errors),
                "interval_80_covers": statistics.mean(inside),
            }
    return out


def as_printed(number: int, record: dict[str, str]) -> PublishedRow | None:
    """The row as its page prints it: what was looked up in the publishers' recipes is left out again."""
    looked_up = RECIPE_COLUMNS if record["recipe"] else ()
    if "Megatron-Bridge docs" not in record["source"]:  # the other pages print their dispatcher
        looked_up = tuple(name for name in looked_up if name != "dispatcher")
    return parse_row({name: "" if name in looked_up else value for name, value in record.items()}, number)


def layout(row: PublishedRow) -> tuple:
    """What makes two rows the same layout: the batch and the software are left out."""
    s, shape = row.setup, (row.shape.name, row.shape.num_layers, row.machine.name)
    return (*shape, s.world_size, s.tp, s.cp, s.pp, s.ep, s.seq_len, s.sharding, s.task)


def differs_in_one_axis(a: PublishedRow, b: PublishedRow) -> bool:
    """Whether two rows of one model, machine, precision, length and release differ in one choice of layout only."""
    same = (a.shape.name, a.shape.num_layers, a.machine.name, a.setup.precision, a.setup.seq_len, a.setup.task)
    if same != (b.shape.name, b.shape.num_layers, b.machine.name, b.setup.precision, b.setup.seq_len, b.setup.task):
        return False
    if a.collection != b.collection or (layout(a) == layout(b) and a.setup.microbatches == b.setup.microbatches):
        return False
    choices = (
        "tp",
        "cp",
        "pp",
        "ep",
        "microbatch",
        "microbatches",
        "sharding",
        "dispatcher",
        "ep_overlap",
        "dp_replicate",
    )
    changed = [name for name in choices if getattr(a.setup, name) != getattr(b.setup, name)]
    # dp and the number of microbatches follow from a model-parallel axis at a given number of devices
    if any(name in changed for name in ("tp", "cp", "pp")):
        changed = [name for name in changed if name != "microbatches"]
    return len(changed) == 1 and a.tokens_per_s != b.tokens_per_s


def order_pairs(rows: list[PublishedRow]) -> dict:
    """Of two layouts that differ in one axis: how often is the faster one named?"""
    simumax = [row for row in load_rows("measured_rows.csv") if row.collection == "simumax"]
    form = {row.number: by_prior(row) for row in rows}
    form |= {row.number: predicted(row, simumax_set()) for row in simumax}
    every = [*rows, *simumax]
    pairs = [(a, b) for i, a in enumerate(every) for b in every[i + 1 :] if differs_in_one_axis(a, b)]
    right = sum((form[a.number] > form[b.number]) == (a.tokens_per_s > b.tokens_per_s) for a, b in pairs)
    clear = [(a, b) for a, b in pairs if abs(math.log(a.tokens_per_s / b.tokens_per_s)) > 0.03]
    right_clear = sum((form[a.number] > form[b.number]) == (a.tokens_per_s > b.tokens_per_s) for a, b in clear)
    print(
        f"  pairs that differ in one axis: {right} of {len(pairs)} right; measured > 3 % apart: {right_clear} of {len(clear)}"
    )
    for a, b in pairs:
        if (form[a.number] > form[b.number]) != (a.tokens_per_s > b.tokens_per_s):
            print(
                f"    wrong: rows {a.number} and {b.number}: {a.shape.name} {a.setup.describe()} | {b.setup.describe()}"
            )
    return {"pairs": len(pairs), "right": right, "clear_pairs": len(clear), "clear_right": right_clear}


def other_rows(path: str) -> dict:
    """Another table with the shipped constants."""
    rows = load_rows(path)
    speeds, spreads = [], []
    for row in rows:
        if row.collection == "simumax":
            found = predicted(row, simumax_set()), 0.05
        elif row.collection == "torchtitan":
            constants = constants_for(row.machine, row.setup, routed=row.shape.moe)
            found = predicted(row, constants), constants.spread
        else:
            found = predict_other(row)
        speeds.append(found[0])
        spreads.append(found[1])
    return {"rows": score(path, rows, speeds, set(), spreads)}


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help="score this table with the shipped constants instead")
    parser.add_argument("--out", help="write the summary to OUT.json")
    arguments = parser.parse_args()
    if arguments.rows:
        result = other_rows(arguments.rows)
    else:
        rows = [row for row in load_rows("measured_rows.csv") if row.collection != "simumax"]
        text = (TABLES / "measured_rows.csv").read_text()
        printed = [as_printed(number, record) for number, record in enumerate(csv.DictReader(text.splitlines()))]
        result = {
            "torchtitan": torch_part(),
            "simumax": simumax_part(),
            "stacks": stacks_part(rows, "other stacks, settings of the recipes"),
            "stacks_as_printed": stacks_part(
                [row for row in printed if row is not None and row.collection != "simumax"], "other stacks, as printed"
            ),
            "pairs": order_pairs(rows),
        }
    result["python"] = platform.python_version()
    if arguments.out:
        Path(arguments.out + ".json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
