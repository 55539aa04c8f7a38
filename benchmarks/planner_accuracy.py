"""How far are the planner's predictions from published measurements?

Method: the shipped tables are scored in three parts, each with the few constants its fit may use.

1. ``published_throughput.csv`` (torchtitan): four constants on four rows.
2. SimuMax's rows of ``measured_rows.csv``: six constants on six rows.
3. Megatron-Bridge, NeMo, Automodel, MaxText, Wan: one factor per (stack, precision, machine) on at most two rows, by
   leave-layout-out: the rows of the layout that is predicted are removed before the factors are fitted.

Output: a line for each row, a summary, and one JSON object as the last line. ``--rows FILE.csv`` scores another table of
the same columns with the shipped constants: nothing of it is fitted.

Limits: the third part's spread (the variances of `software.py`) and the cost model's form were chosen with these rows in
view; only rows from elsewhere are a blind test.

Example: ``python benchmarks/planner_accuracy.py --out benchmarks/results/planner_accuracy_202611``
"""

import argparse
import json
import math
import platform
import statistics
from pathlib import Path

from titan_train.planner.calibrate.defaults import (
    TORCH_FIT_ROWS,
    constants_for,
    fit_torch,
    software_model,
    torch_set,
    without_factor,
)
from titan_train.planner.calibrate.fit import fit_constants, predicted
from titan_train.planner.calibrate.rows import MeasuredRow, load_rows
from titan_train.planner.calibrate.software import key_of, leave_layout_out
from titan_train.planner.cost.constants import prior
from titan_train.planner.memory.peak import memory_peak

SIMUMAX_CONSTANTS = ("matmul", "attention", "local", "expert_scale", "exchange", "pointwise")
SIMUMAX_FIT_ROWS = (98, 100, 101, 102, 105, 108)
Z80 = 1.2816


def score(name: str, rows: list[MeasuredRow], speeds: list[float], fitted: set[int], spreads: list[float]) -> dict:
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
    speeds = [predicted(row, torch_set().of(row.setup)) for row in rows]
    spread = [torch_set().compiled.spread] * len(rows)
    out = score("torchtitan: 4 constants on 4 rows", rows, speeds, set(TORCH_FIT_ROWS), spread)
    others = {}
    for chosen in ((0, 1, 3, 4), (5, 1, 2, 4), (0, 1, 9, 4), (0, 6, 2, 4), (10, 1, 2, 4), (10, 6, 3, 4)):
        fit = fit_torch([row for row in rows if row.number in chosen])
        errors = [abs(predicted(r, fit.of(r.setup)) / r.tokens_per_s - 1) for r in rows if r.number not in chosen]
        others[",".join(map(str, chosen))] = [statistics.median(errors), max(errors)]
    print("  other fit rows: not-fitted median / worst", {k: [round(x, 3) for x in v] for k, v in others.items()})
    return out | {"other_fits": others}


def simumax_part() -> dict:
    """SimuMax's depth-cut rows, collectives not overlapped."""
    rows = [row for row in load_rows("measured_rows.csv") if row.collection == "simumax"]
    chosen = [row for row in rows if row.number in SIMUMAX_FIT_ROWS]
    constants = fit_constants(chosen, SIMUMAX_CONSTANTS, prior("te"), pull=0.02)
    print({name: round(getattr(constants, name), 4) for name in SIMUMAX_CONSTANTS})
    speeds = [predicted(row, constants) for row in rows]
    return score("SimuMax: 6 constants on 6 rows", rows, speeds, set(SIMUMAX_FIT_ROWS), [0.05] * len(rows))


def stacks_part() -> dict:
    """Leave-layout-out over the other rows."""
    rows = [row for row in load_rows("measured_rows.csv") if row.collection != "simumax"]
    predictions = leave_layout_out(rows, without_factor)
    speeds, spreads = [p[0] for p in predictions], [p[1] for p in predictions]
    out = score("other stacks: 1 factor per set on <= 2 rows, leave-layout-out", rows, speeds, set(), spreads)
    for name, routed in (("dense", False), ("routed", True)):
        errors = [abs(s / r.tokens_per_s - 1) for s, r in zip(speeds, rows, strict=True) if r.shape.moe is routed]
        out[name] = {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}
    return out | {"pairs": order_pairs(rows, speeds), "floors": floors(rows)}


def floors(rows: list[MeasuredRow]) -> dict:
    """The least possible worst error, with every row in view, for a prediction that tells rows apart by some keys only.

    One number x for speeds from a to b is wrong by (b - a) / (b + a) at least, at x = 2ab / (a + b).
    """
    estimates = {row.number: without_factor(row) for row in rows}

    def ratio(row: MeasuredRow) -> float:
        return row.tokens_per_s / estimates[row.number]

    readings = {
        "any function of layout and batch": (lambda r: (r.layout, r.setup), lambda r: r.tokens_per_s),
        "any function of layout, batch and release": (
            lambda r: (r.layout, r.setup, r.release),
            lambda r: r.tokens_per_s,
        ),
        "this form, the best factor per set": (lambda r: r.set_key, ratio),
        "this form, the best factor per set, dense or routed": (lambda r: (r.set_key, r.shape.moe), ratio),
        "the same and release": (lambda r: (r.set_key, r.shape.moe, r.release), ratio),
    }
    out = {}
    for name, (key, value) in readings.items():
        groups: dict = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row)
        found = []
        for members in groups.values():
            low, high = min(members, key=value), max(members, key=value)
            found.append(((value(high) - value(low)) / (value(high) + value(low)), low.number, high.number))
        worst = max(found)
        out[name] = {
            "worst_at_least": worst[0],
            "rows": worst[1:],
            "groups_over_25_percent": sum(f[0] > 0.25 for f in found),
        }
        print(f"  floor, {name}: {worst[0]:.1%} (rows {worst[1]} and {worst[2]})")
    alone = [r.number for r in rows if all(o.layout == r.layout for o in rows if o.set_key == r.set_key)]
    print(f"  rows whose set has no other layout: {len(alone)}")
    return out | {"rows_alone_in_their_set": alone}


def differs_in_one_axis(a: MeasuredRow, b: MeasuredRow) -> bool:
    """Whether two rows of one model, machine, precision, length and release differ in one choice of layout only."""
    same = (a.shape.name, a.shape.num_layers, a.machine.name, a.setup.precision, a.setup.seq_len, a.setup.task)
    if same != (b.shape.name, b.shape.num_layers, b.machine.name, b.setup.precision, b.setup.seq_len, b.setup.task):
        return False
    if a.collection != b.collection or (a.layout == b.layout and a.setup.microbatches == b.setup.microbatches):
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


def order_pairs(rows: list[MeasuredRow], speeds: list[float]) -> dict:
    """Of two layouts that differ in one axis: how often is the faster one named?"""
    by_number = {row.number: speed for row, speed in zip(rows, speeds, strict=True)}
    simumax = [row for row in load_rows("measured_rows.csv") if row.collection == "simumax"]
    constants = fit_constants(
        [row for row in simumax if row.number in SIMUMAX_FIT_ROWS], SIMUMAX_CONSTANTS, prior("te"), pull=0.02
    )
    by_number |= {row.number: predicted(row, constants) for row in simumax}
    # both layouts of a pair are predicted with the same factor: only the form decides
    form = {row.number: without_factor(row) for row in rows} | {r.number: by_number[r.number] for r in simumax}
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
    simumax = [row for row in load_rows("measured_rows.csv") if row.number in SIMUMAX_FIT_ROWS]
    for row in rows:
        if row.collection == "simumax":
            constants = fit_constants(simumax, SIMUMAX_CONSTANTS, prior("te"), pull=0.02)
            speeds.append(predicted(row, constants))
            spreads.append(0.05)
        elif row.collection == "torchtitan":
            constants = constants_for(row.machine, row.setup, routed=row.shape.moe, model=row.shape.name)
            speeds.append(predicted(row, constants))
            spreads.append(constants.spread)
        else:
            factor, spread = software_model().factor(key_of(row))
            speeds.append(without_factor(row) * factor)
            spreads.append(spread)
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
        result = {"torchtitan": torch_part(), "simumax": simumax_part(), "stacks": stacks_part()}
    result["python"] = platform.python_version()
    if arguments.out:
        Path(arguments.out + ".json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
