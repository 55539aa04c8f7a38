"""Where the time of traced steps went, per rank and mesh axis; all ranks' traces in one file, on one clock.

Trace steps with `titan-train run CONFIG --profile.steps 10:13`. The file opens in ui.perfetto.dev. Without traces, it shows
the last step_split that the run has recorded.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_train.cli.shell.parser import CommandParser


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="a run's folder, such as runs/quickstart")
    parser.add_argument(
        "--out", type=Path, default=None, help="file of all ranks (default: RUN_DIR/traces/all.json.gz)"
    )
    arguments = parser.parse_args(words)

    from titan_train.observe import read_history
    from titan_train.observe.timing.traces import folder_of, read_traces
    from titan_train.run_folder import read_config

    run_dir: Path = arguments.run_dir
    read_config(run_dir)  # says so if this is not a run's folder
    events = read_history(run_dir).events
    named = [
        f"{event.fields.get('text', '')} (named at step {event.step})" for event in events if event.kind == "straggler"
    ]
    if any(folder_of(run_dir).glob("rank-*.json.gz")):
        out = arguments.out or folder_of(run_dir) / "all.json.gz"
        traces = read_traces(run_dir, out)
        print(f"steps {traces.first} to {traces.split.step}, {traces.place.world_size} ranks")
        print("\n".join(table(traces.split.fields())))
        named = [cause.text for cause in traces.causes] + named
        print("\n".join(f"cause    {text}" for text in dict.fromkeys(named)) or "cause    none: the ranks are even")
        print(f"trace    {out} (open it in ui.perfetto.dev)")
        return 0
    splits = [event for event in events if event.kind == "step_split"]
    if not splits:
        raise ValueError(
            f"{run_dir} holds neither traces nor a step_split: run it with --profile.steps 10:13, or for more than "
            "metrics.split_every steps."
        )
    print(f"step {splits[-1].step}, the last that was measured; for traces, run with --profile.steps FIRST:LAST")
    print("\n".join(table(splits[-1].fields)))
    print("\n".join(f"cause    {text}" for text in dict.fromkeys(named)) or "cause    none was named")
    return 0


def table(fields: Mapping[str, Any]) -> Iterable[str]:
    """The record `step_split` as lines of text."""
    least, median, most = fields["wall_ms"]
    yield f"{'':<12}{'min':>10}{'median':>10}{'max':>10}   milliseconds of a step, over ranks"
    yield f"{'step':<12}{least:>10.2f}{median:>10.2f}{most:>10.2f}"
    for name, (least, median, most) in fields["phases_ms"].items():
        if most > 0:
            yield f"{name:<12}{least:>10.2f}{median:>10.2f}{most:>10.2f}"
    if not fields["axes"]:
        return
    yield ""
    yield (
        f"{'axis':<12}{'total':>10}{'exposed':>10}{'hidden':>10}{'overlap':>9}{'calls':>8}{'MB sent':>10}{'GB/s':>9}"
        f"{'latency':>12}"
    )
    for name, axis in fields["axes"].items():
        exposed, hidden = axis["exposed_ms"][1], axis["hidden_ms"][1]
        rate = "-" if axis["gb_s"] is None else f"{axis['gb_s']:.3g}"
        latency = "-" if axis["latency_us"] is None else f"{axis['latency_us']:.0f} us"
        yield (
            f"{name:<12}{exposed + hidden:>10.2f}{exposed:>10.2f}{hidden:>10.2f}{axis['overlapped']:>9.0%}{axis['calls']:>8.0f}"
            f"{axis['bytes'] / 1e6:>10.3f}{rate:>9}{latency:>12}"
        )
