"""Write a run's report, one self-contained HTML page, and print a summary.

`titan-train report runs/a runs/b` compares 2 to 8 runs on one page: curves over each other, numbers, settings that differ.

`titan-train report runs/a --trace` shows where the time of the traced steps went, per rank and mesh axis, and joins all ranks'
traces in one file, on one clock, for ui.perfetto.dev. Trace steps with `titan-train run CONFIG --profile.steps 10:13`; without
traces, the last step_split that the run has recorded is shown.
"""

from collections.abc import Sequence
from pathlib import Path

from titan_train.cli.parser import CommandParser


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("runs", metavar="RUN_DIR", type=Path, nargs="+", help="a run's folder, or 2 to 8 to compare")
    parser.add_argument("--trace", action="store_true", help="show where the time of steps went")
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="file to write (default: RUN_DIR/report.html; compare.html for several runs; RUN_DIR/traces/all.json.gz)",
    )
    arguments = parser.parse_args(words)
    if arguments.trace:
        if len(arguments.runs) > 1:
            raise ValueError(f"--trace takes one run, and {len(arguments.runs)} were given. Name one.")
        return _trace(arguments.runs[0], arguments.out)

    from titan_train.report import build_report, compare_runs, summarize

    if len(arguments.runs) > 1:
        page = arguments.out or Path("compare.html")
        print(f"{compare_runs(arguments.runs, page)}\n")
    else:
        from titan_train.report.folder import read_folder
        from titan_train.run_folder import read_config

        (run_dir,) = arguments.runs
        read_config(run_dir)  # refuses what is not a run's folder
        folder = read_folder(run_dir)
        page = build_report(folder, arguments.out)
        print(summarize(folder))
    print(f"report   {page}")
    return 0


def _trace(run_dir: Path, out: Path | None) -> int:
    from titan_train.observe import read_history
    from titan_train.observe.timing.traces import folder_of, read_traces
    from titan_train.report.timeline import RankTables
    from titan_train.run_folder import read_config

    read_config(run_dir)  # refuses what is not a run's folder
    events = read_history(run_dir).events
    causes = [
        f"{event.fields.get('text', '')} (named at step {event.step})" for event in events if event.kind == "straggler"
    ]
    splits = [event for event in events if event.kind == "step_split"]
    if any(folder_of(run_dir).glob("rank-*.json.gz")):
        out = out or folder_of(run_dir) / "all.json.gz"
        traces = read_traces(run_dir, out)
        print(f"steps {traces.first} to {traces.split.step}, {traces.place.world_size} ranks")
        fields, causes = traces.split.fields(), [cause.text for cause in traces.causes] + causes
        none = "none: the ranks are even"
    elif splits:
        print(f"step {splits[-1].step}, the last that was measured; for traces, run with --profile.steps FIRST:LAST")
        fields, out, none = splits[-1].fields, None, "none was named"
    else:
        raise ValueError(
            f"{run_dir} holds neither traces nor a step_split: run it with --profile.steps 10:13, or for more than "
            "metrics.split_every steps."
        )
    print(RankTables.of(0, fields))
    print("\n".join(f"cause    {text}" for text in dict.fromkeys(causes)) or f"cause    {none}")
    if out is not None:
        print(f"trace    {out} (open it in ui.perfetto.dev)")
    return 0
