"""The ``titan-pipeline`` command: gen, verify, sim, solve, draw, trace, fit.

Example::

    titan-pipeline gen zbv --ranks 4 --microbatches 8 -o zbv.json
    titan-pipeline verify zbv.json --mem-limit 4
    titan-pipeline sim zbv.json --latency 0.02
    titan-pipeline draw zbv.json -o zbv.html
    titan-pipeline trace zbv.json --measured step.json -o both.json
    titan-pipeline fit step.json -o costs.json

Schedule files are JSON, the text form, or torch's CSV (by the ending ``.csv``). Exit code: 0 done, 1 the schedule is
faulty, 2 the request is.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_pipeline.analysis.measure import Measurement, fit_costs
from titan_pipeline.analysis.simulate import simulate
from titan_pipeline.analysis.verify import verify
from titan_pipeline.errors import ScheduleError
from titan_pipeline.families import FAMILIES, build_schedule, load_installed_families
from titan_pipeline.ir.costs import Costs
from titan_pipeline.ir.csv import from_torch_csv, to_torch_csv
from titan_pipeline.ir.lower import lower
from titan_pipeline.ir.schedule import Schedule, read_text
from titan_pipeline.solver.annealing import SolveProgress
from titan_pipeline.solver.search import solve
from titan_pipeline.view.svg import draw_executed_svg, draw_html, draw_svg
from titan_pipeline.view.trace import chrome_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except ScheduleError as err:
        print(f"error: {err}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as err:
        print(f"error: {err}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    load_installed_families()
    parser = argparse.ArgumentParser(prog="titan-pipeline", description="Pipeline schedules as plain data.")
    commands = parser.add_subparsers(required=True, metavar="command")

    gen = commands.add_parser("gen", help="generate a schedule by family name")
    gen.add_argument("family", choices=list(FAMILIES), metavar="family", help=", ".join(FAMILIES))
    gen.add_argument("--ranks", "-p", type=int, required=True)
    gen.add_argument("--microbatches", "-m", type=int, required=True)
    gen.add_argument("--chunks", "-v", type=int, help="stages per rank")
    gen.add_argument("--mem-limit", type=float, help="zb_auto: microbatches of a rank, or the unit of --costs")
    gen.add_argument("--costs", type=Path, help="zb_auto: costs file (JSON)")
    gen.add_argument("--communication", action="store_true", help="write sends and receives out; not as .csv")
    gen.add_argument("-o", "--output", type=Path, help="file (.json, .txt, .csv); standard output without")
    gen.set_defaults(run=_gen)

    check = commands.add_parser("verify", help="prove that a schedule runs, and print its peak memory")
    _add_schedule(check)
    check.add_argument("--transport", choices=("buffered", "rendezvous"), default="rendezvous")
    check.add_argument("--mem-limit", type=float, help="largest memory of a rank")
    check.add_argument("--forward-only", action="store_true", help="an evaluation schedule, without backward")
    check.set_defaults(run=_verify)

    sim = commands.add_parser("sim", help="simulate: times, both bubbles, where idle time comes from")
    _add_schedule(sim)
    sim.add_argument("--json", action="store_true", help="print JSON")
    sim.set_defaults(run=_sim)

    find = commands.add_parser("solve", help="search the best schedule for costs and a memory limit")
    find.add_argument("--costs", type=Path, required=True, help="costs file (JSON)")
    find.add_argument("--microbatches", "-m", type=int, required=True)
    find.add_argument("--ranks", "-p", type=int, help="ranks; as many as stages for a loop, half for a V without")
    find.add_argument("--placement", choices=("loop", "v"), default="loop")
    find.add_argument("--mem-limit", type=float, help="largest memory of a rank, in the unit of the costs")
    find.add_argument("--objective", choices=("makespan", "stage_span"), default="makespan")
    find.add_argument("--time-limit", type=float, default=10.0, help="seconds")
    find.add_argument("--seed", type=int, default=0)
    find.add_argument("--method", choices=("search", "exact"), default="search", help="exact needs the extra [solve]")
    find.add_argument("--workers", type=int, default=1, help="threads of the exact method")
    find.add_argument("-o", "--output", type=Path, required=True, help="schedule file (JSON)")
    find.set_defaults(run=_solve)

    draw = commands.add_parser("draw", help="draw a schedule as .svg or .html")
    _add_schedule(draw)
    draw.add_argument("-o", "--output", type=Path, required=True)
    draw.add_argument("--measured", type=Path, help="draw this measurement (Measurement.save) below the plan (.svg)")
    draw.add_argument("--unit", default="time units", help="of the costs' times, for the axis; s chooses s, ms or µs")
    draw.add_argument("--width", type=int, default=1200)
    draw.set_defaults(run=_draw)

    trace = commands.add_parser("trace", help="write a Chrome/Perfetto trace of the simulated schedule")
    _add_schedule(trace)
    trace.add_argument("--measured", type=Path, help="lay this measurement (Measurement.save) over the plan")
    trace.add_argument("-o", "--output", type=Path, required=True)
    trace.set_defaults(run=_trace)

    fit = commands.add_parser("fit", help="costs from measurements")
    fit.add_argument("measurements", type=Path, nargs="+", help="files of Measurement.save, the first step left out")
    fit.add_argument("--base", type=Path, help="costs file that memory is taken from")
    fit.add_argument("-o", "--output", type=Path, required=True, help="costs file (JSON)")
    fit.set_defaults(run=_fit)
    return parser


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("schedule", type=Path, help="schedule file")
    parser.add_argument("--costs", type=Path, help="costs file (JSON); equal stages of one time unit per rank without")
    parser.add_argument("--latency", type=float, default=0.0, help="time of a hop between ranks, without --costs")


def load_schedule(path: Path) -> Schedule:
    """A schedule from any of the file formats."""
    return from_torch_csv(read_text(path), name=path.stem) if path.suffix == ".csv" else Schedule.load(path)


def _costs(args: argparse.Namespace, schedule: Schedule) -> Costs:
    if args.costs is not None:
        return Costs.load(args.costs)
    return Costs.uniform(schedule.num_stages, num_chunks=schedule.num_chunks, latency=args.latency)


def _gen(args: argparse.Namespace) -> int:
    costs = Costs.load(args.costs) if args.costs else None
    schedule = build_schedule(
        args.family, args.ranks, args.microbatches, num_chunks=args.chunks, costs=costs, mem_limit=args.mem_limit
    )
    if args.communication and args.output is not None and args.output.suffix == ".csv":
        raise ValueError(
            f"--communication with --output {args.output}: torch's CSV holds compute actions alone, and torch adds its own "
            "sends and receives. Leave --communication out, or write .json or .txt."
        )
    if args.communication:
        schedule = lower(schedule, costs)
    if args.output is None:
        sys.stdout.write(schedule.to_text())
    elif args.output.suffix == ".csv":
        args.output.write_text(to_torch_csv(schedule))
    elif args.output.suffix == ".txt":
        args.output.write_text(schedule.to_text())
    else:
        schedule.save(args.output)
    return 0


def _verify(args: argparse.Namespace) -> int:
    schedule = load_schedule(args.schedule)
    costs = _costs(args, schedule)
    proof = verify(
        schedule, transport=args.transport, mem_limit=args.mem_limit, costs=costs, forward_only=args.forward_only
    )
    name = "".join(c if c.isprintable() else "\ufffd" for c in schedule.name)  # of a file that anyone may have made
    print(f"{name}: runs ({proof.transport}); {proof.num_actions} actions, {proof.num_messages} messages")
    print("peak memory per rank: " + " ".join(f"{x:.4g}" for x in proof.peak))
    return 0


def _sim(args: argparse.Namespace) -> int:
    schedule = load_schedule(args.schedule)
    result = simulate(schedule, _costs(args, schedule))
    b = result.breakdown
    numbers = {
        "makespan": result.makespan,
        "makespan_bubble": result.makespan_bubble,
        "stage_bubble": result.stage_bubble,
        "work": result.work,
        "idle_warm_up": b.warm_up,
        "idle_steady": b.steady,
        "idle_drain": b.drain,
        "idle_communication": b.communication,
        "idle_imbalance": b.imbalance,
        "peak_memory": max(result.peak_memory),
    }
    if args.json:
        print(json.dumps(numbers))
    else:
        for name, value in numbers.items():
            print(f"{name:20} {value:.6g}")
    return 0


def _solve(args: argparse.Namespace) -> int:
    def show(p: SolveProgress) -> None:
        gap = p.best / p.bound - 1
        print(f"{p.elapsed_s:5.1f} s  {p.tries} tries  best {p.best:.6g}  gap {gap:.2%}", file=sys.stderr)

    solution = solve(
        Costs.load(args.costs), args.microbatches, placement=args.placement, num_ranks=args.ranks,
        mem_limit=args.mem_limit, objective=args.objective, time_limit=args.time_limit, seed=args.seed,
        method=args.method, workers=args.workers, progress=show,
    )  # fmt: skip
    solution.schedule.save(args.output)
    print(f"{args.objective} {solution.value:.6g}, bound {solution.bound:.6g}, gap {solution.gap:.2%}")
    print(f"from {solution.origin} after {solution.tries} tries; peak memory {max(solution.peak):.6g}")
    return 0


def _draw(args: argparse.Namespace) -> int:
    schedule = load_schedule(args.schedule)
    if args.output.suffix not in (".svg", ".html"):
        raise ValueError(f"--output {args.output}: the ending decides the format. Use .svg or .html.")
    if args.measured is not None:
        if args.output.suffix != ".svg":
            raise ValueError(
                f"--output {args.output}: a measurement over its plan is drawn as .svg. Change the ending."
            )
        measured = Measurement.load(args.measured)
        costs = Costs.load(args.costs) if args.costs is not None else fit_costs([measured])
        plan = simulate(schedule, costs)
        args.output.write_text(draw_executed_svg(measured.timeline(costs), plan, width=args.width), encoding="utf-8")
        return 0
    result = simulate(schedule, _costs(args, schedule))
    text = (draw_svg if args.output.suffix == ".svg" else draw_html)(result, width=args.width, unit=args.unit)
    args.output.write_text(text, encoding="utf-8")
    return 0


def _trace(args: argparse.Namespace) -> int:
    schedule = load_schedule(args.schedule)
    if args.measured is None:
        args.output.write_text(chrome_trace((schedule.name, simulate(schedule, _costs(args, schedule)))))
        return 0
    measured = Measurement.load(args.measured)
    costs = Costs.load(args.costs) if args.costs is not None else fit_costs([measured])
    plan = simulate(schedule, costs)
    args.output.write_text(chrome_trace(("planned", plan), ("measured", measured.timeline(costs))))
    print(f"measured {measured.makespan:.6g} s, planned {plan.makespan:.6g} s")
    print(f"largest lag of an action {measured.largest_lag(plan):.6g} s")
    return 0


def _fit(args: argparse.Namespace) -> int:
    base = Costs.load(args.base) if args.base is not None else None
    args.output.write_text(fit_costs([Measurement.load(path) for path in args.measurements], base).to_json())
    return 0
