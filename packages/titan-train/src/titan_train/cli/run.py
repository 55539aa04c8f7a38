"""Train the model that a configuration describes.

CONFIG is a TOML file or the name of a shipped configuration (`titan-train list`). Command-line settings override
the file: `titan-train run quickstart --train.steps 20 --devices 2`.
`titan-train run CONFIG --help` lists every setting with its value.

--devices N                     ranks on each machine; short for --launch.nproc
--launcher local|machines|ray   where ranks run; short for --launch.launcher
--ray.address HOST:PORT|auto    a Ray cluster; short for --launch.ray.address
--faults "kill rank=1 step=20"  faults to inject; short for --launch.faults
--from RUN[@STEP|@best]         branch from a step of another run; short for --checkpoint.start-from

A branch takes weights, optimizer and position in the data into a folder of its own: `titan-train run runs/a/config.toml
--run.name b --from runs/a@1000`; with `--decay 10%` what follows is one decay of the learning rate.

Running the same configuration again resumes it from its last finished checkpoint. SIGTERM or Ctrl-C saves and stops;
SIGUSR1 saves and continues. After a lost or hanging rank the run restarts, up to launch.max_restarts times.
"""

import contextlib
import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_train.cli.boundary import interrupt
from titan_train.cli.branch import add_start_options, read_start, written_out
from titan_train.cli.parser import CommandParser
from titan_train.config import Config
from titan_train.launch.job import Attempt, Launcher
from titan_train.launch.rank.device import set_cuda_defaults
from titan_train.launch.rank.environment import check_meeting_place
from titan_train.launch.rank.failure import clear_failures, first_failure
from titan_train.launch.rank.info import device_type, ranks_from_torchrun, ranks_per_node, under_torchrun
from titan_train.launch.validate import check_start
from titan_train.observe import RunInfo, read_run_info
from titan_train.observe.run_info import stopped_early
from titan_train.parallel.layout.degrees import check_placement
from titan_train.run_folder import (
    TAKEN_OVER,
    Lease,
    LeaseLostError,
    changes,
    check_unused,
    discard,
    newest_checkpoint,
    run_folder,
    stage,
    stage_rewind,
    staged_folder,
    staged_rewind,
)
from titan_train.task import Task, load_task, task_name
from titan_train.trust import CodeRecord, admit_own_code, remember_code

if TYPE_CHECKING:
    from titan_train.launch.supervise.supervisor import Before

_KEPT = "--kept"  # see `titan_train.launch.place.ray.driver`, which writes it before the configuration


def main(parser: CommandParser, words: Sequence[str]) -> int:
    """Run the command."""
    parser.usage = "titan-train run CONFIG [--launcher local|machines|ray] [--from RUN@STEP] [--section.key value ...]"
    parser.add_config()
    parser.add_code()
    add_start_options(parser)
    kept = words[1] if words[:1] == [_KEPT] else ""
    if kept:  # until the supervisor listens: a stop is an end, not a crash that the actor starts again
        signal.signal(signal.SIGTERM, interrupt)
    arguments, settings = parser.parse_with_settings(words[2:] if kept else words, written_out)
    config, note = read_start(parser, arguments, settings)
    if note:
        print(f"note     {note}")
    source = admit_own_code(run_folder(config), config.model.name, arguments.code)
    if under_torchrun():
        _refuse_rewind(arguments.resume_step, "a torchrun of yours")
        return _be_a_torchrun_worker(config, source)
    return _run_here(config, source, kept, arguments.resume_step)


def _refuse_rewind(step: int | None, where: str) -> None:
    if step is not None:
        raise ValueError(
            f"--resume-step under {where} could go back more than once. Branch instead: --from RUN@{step}."
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """A run that can start, resolved once and handed on."""

    config: Config
    run_dir: Path
    task: Task
    source: CodeRecord | None
    """Code of the user's that the configuration names."""
    per_node: int
    """Ranks of one machine."""
    world_size: int
    resume_step: int | None = None
    """A step to go back to."""


def _run_here(config: Config, source: CodeRecord | None, kept: str = "", resume_step: int | None = None) -> int:
    """Start the ranks, supervise them, write the report.

    Args:
        config: What to run.
        source: Code of the user's that it names.
        kept: ``first`` or ``again`` if an actor of a Ray cluster keeps this process.
        resume_step: A step to go back to; None goes on from the newest.
    """
    per_node = ranks_per_node(config.launch, config.parallel.num_ranks)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read while torch is imported: its profiler's lines are no user's
    if config.launch.launcher != "ray" and device_type(config.launch) == "cuda":
        set_cuda_defaults(os.environ, pipeline=config.parallel.pp > 1)  # read while torch is imported
    world_size = per_node * config.launch.nnodes
    layout = check_start(config, world_size).layout
    run_dir = run_folder(config)
    if config.checkpoint.resume == "auto" and resume_step is None and _is_complete(config, run_dir):
        return 0

    if config.launch.launcher == "machines" and config.launch.node_rank > 0:
        from titan_train.launch.place.machines import is_led

        if not is_led(run_dir):  # machine 0 may refuse before this one listens; one that comes back to the run goes on
            check_unused(config, run_dir)
        return _follow(config, per_node)
    if config.launch.launcher == "ray" and config.launch.ray.on_cluster and not kept:
        _refuse_rewind(resume_step, "a Ray cluster")
        from titan_train.launch.place.ray.driver import run_under_driver

        code = run_under_driver(config, run_dir, source.paths if source is not None else ())
        if code == 0:  # what the driver refused is not this account's run
            remember_code(run_dir, source)
        return code
    if config.launch.nnodes > 1:
        for note in check_placement(layout, per_node):
            print(f"note     {note}")
    launcher = _launcher(config, per_node, run_dir if kept else None)
    try:
        run = _Run(config, run_dir, load_task(config), source, per_node, world_size, resume_step)
        adopted = launcher.adopt(run_dir) if kept == "again" else None
        if kept != "again":  # here, so that `close` tells other machines, and a window opens on a run under way
            check_unused(config, run_dir)
        if adopted is None:
            run.task.check_inputs(config)
            launcher.validate(config, world_size)
        with Lease(run_dir, chain="ray" if kept else "", on_lost=_leave if kept else lambda _: None) as lease:
            remember_code(run_dir, source)
            from titan_train.launch.supervise.supervisor import Before

            try:
                code = _supervise(run, lease, launcher, Before(kept == "again", adopted))
            except LeaseLostError:  # what is staged is the other run's
                raise
            except BaseException:
                discard(run_dir)
                raise
            discard(run_dir)
            return code
    except BaseException:
        launcher.close()
        raise


def _is_complete(config: Config, run_dir: Path) -> bool:
    """Whether the run has made its steps or stopped early; says so, and what can be done next."""
    done = newest_checkpoint(run_dir)
    early = done is not None and stopped_early(run_dir, config.validation.patience) == done
    if done is None or not (early or done >= config.train.steps):
        return False
    more = "--validation.patience (0 disables it)" if early else "--train.steps"
    print(
        f"{run_dir} is complete: step {done} of {config.train.steps} is saved{', where it stopped early' if early else ''}. "
        f"For more, raise {more}; for a new run, set --run.name."
    )
    _print_next(config, run_dir)
    return True


def _leave(message: str) -> None:
    """End this process at once, and touch nothing: ranks that outlive it belong to another run."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(TAKEN_OVER)


def _supervise(run: _Run, lease: Lease, launcher: Launcher, before: "Before") -> int:
    """Run all attempts, then report."""
    config, run_dir = run.config, run.run_dir
    where = f" on {config.launch.nnodes} nodes" if config.launch.nnodes > 1 else ""
    ranks = f"{run.world_size} {launcher.device} rank{'s' if run.world_size > 1 else ''}"
    print(f"run      {run_dir}  ({ranks}{where})", flush=True)
    if config.launch.nproc == 0 and launcher.device == "cpu" and run.world_size == 1:
        print(
            "note     one process with all cores, the fastest on one machine's CPU; --devices 2 runs two ranks with FSDP2"
        )

    from titan_train.launch.supervise.supervisor import Supervisor

    infos = [RunInfo.running(run_dir)] if before.adopted is not None else []
    attempts_before = _attempts(run_dir) if before.adopted is None else set[str]()

    def record(attempt: Attempt) -> None:
        lease.attempt(attempt.number)
        back = run.resume_step if not infos or staged_rewind(staged_folder(run_dir)) is not None else None
        infos.append(_stage(run, launcher.device, attempt.world_size, back))

    run.task.prepare(config)
    for change in changes(config, run_dir):
        print(f"changed  {change}")
    supervisor = Supervisor(
        launcher,
        config,
        run_dir,
        ranks=run.world_size,
        unit=run.per_node if config.launch.nnodes > 1 else 1,  # several machines are lost whole
        on_attempt=record,
        still_ours=lease.check,
        before=before,
    )
    try:
        code = supervisor.run()
    except ValueError as err:  # the ranks could not be placed
        for info in infos[-1:]:
            info.finish("failed", step=newest_checkpoint(run_dir) or 0, error=str(err))
        raise
    if signal.getsignal(signal.SIGTERM) is interrupt:  # set by `main`, for an actor's process
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # saved and over: a second stop must not make it a failure
    if not infos:  # no attempt began; the supervisor has said why
        return code
    try:
        return _finish(run, infos[-1], code, attempts_before)
    except OSError as err:  # the run is over, and what it saved is there
        with contextlib.suppress(OSError):  # a terminal that was closed
            print(f"note     {err.filename or run_dir}: {err.strerror}; the report and run.json are not up to date")
    return code


def _stage(run: _Run, device: str, world_size: int, back: int | None = None) -> RunInfo:
    """What an attempt writes to the run's folder once its ranks have restored; ``back`` is the step that it goes back to."""
    staged = stage(run.config, run.run_dir)
    step = back or newest_checkpoint(run.run_dir) or 0
    if back is not None:
        stage_rewind(staged, back)
    extra: dict[str, Any] = {} if run.source is None else {"code": asdict(run.source)}
    return RunInfo(run.run_dir, device=device, world_size=world_size, resume_step=step, staged=staged, **extra)


def _follow(config: Config, per_node: int) -> int:
    """Be one of several machines, not the first."""
    from titan_train.launch.node.agent import NodeAgent, NodeRanks
    from titan_train.launch.place.machines import follow

    device = device_type(config.launch)
    agent = NodeAgent.sharing_cores(per_node, device)

    def prepare() -> None:
        load_task(config).prepare(config, quiet=True)

    return follow(config, run_folder(config), per_node, device, lambda job: NodeRanks(agent, job), prepare)


def _launcher(config: Config, per_node: int, outlives: Path | None) -> Launcher:
    launch = config.launch
    if launch.launcher == "machines" and launch.nnodes > 1:
        from titan_train.launch.place.machines import MachinesLauncher

        return MachinesLauncher(launch, per_node, device_type(launch), run_folder(config))
    if launch.launcher == "ray":
        from titan_train.launch.place.ray.launcher import RayLauncher

        return RayLauncher(launch, per_node, outlives)
    from titan_train.launch.place.here import LocalLauncher

    return LocalLauncher(per_node, device_type(launch))


def _be_a_torchrun_worker(config: Config, source: CodeRecord | None) -> int:
    if config.launch.faults:
        raise ValueError(
            f"launch.faults={config.launch.faults!r} does nothing under a torchrun of yours: only ranks that this command starts "
            "inject faults. Leave it out, or start the run without torchrun."
        )
    ranks = ranks_from_torchrun(config.launch)
    check_meeting_place()
    check_start(config, ranks.world_size)

    from titan_train.launch.rank.worker import torchrun_worker

    run = _Run(config, run_folder(config), load_task(config), source, ranks.local_world_size, ranks.world_size)
    if ranks.rank != 0:
        run.task.prepare(config, quiet=True)
        return torchrun_worker(config, ranks, run.run_dir)
    with Lease(run.run_dir, on_lost=_leave):
        remember_code(run.run_dir, source)
        run.task.prepare(config)
        clear_failures(run.run_dir)
        attempts_before = _attempts(run.run_dir)
        info = _stage(run, ranks.device_type, ranks.world_size)
        try:
            code = torchrun_worker(config, ranks, run.run_dir)
        finally:
            discard(run.run_dir)
        return _finish(run, info, code, attempts_before)


def _attempts(run_dir: Path) -> set[str]:
    """When each attempt on record started: a run that begins again forgets the earlier ones, so their number says little."""
    return {str(attempt.get("started")) for attempt in read_run_info(run_dir).get("attempts", [])}


def _finish(run: _Run, info: RunInfo, code: int, attempts_before: set[str]) -> int:
    """Record how the run ended, write its report unless every attempt was refused, say what can be done next.

    Returns:
        The exit code: that of the ranks, or 1 if the folder lost its configuration while they ran.
    """
    config, run_dir = run.config, run.run_dir
    step = newest_checkpoint(run_dir) or 0
    completed = code == 0 and (step >= config.train.steps or stopped_early(run_dir, config.validation.patience) == step)
    failure = first_failure(run_dir) if code else None
    info.finish(
        "finished" if completed else "stopped" if code == 0 else "failed",
        step=step,
        error=None if code == 0 else f"{failure.kind}: {failure.message}" if failure else "a rank was killed",
    )
    took_effect = bool(_attempts(run_dir) - attempts_before)
    if config.metrics.report and took_effect and (run_dir / "metrics.jsonl").exists():
        from titan_train.report import build_report, summarize

        page = build_report(run_dir)
        if code == 0:
            print(summarize(run_dir))
            _print_samples(run_dir)
        print(f"report   {page.resolve().as_uri()}", file=sys.stdout if code == 0 else sys.stderr)
    if code == 0 and step and not (run_dir / "config.toml").exists():
        print(
            f"error: {run_dir / 'config.toml'} was deleted or moved away while the run went on, and maybe other files too. "
            f"The weights of step {step} are in {run_dir / 'checkpoints'}. Put the files back from a copy, or train again in "
            "a new folder.",
            file=sys.stderr,
        )
        return 1
    if code == 0:
        _print_next(config, run_dir)
    return code


def _print_next(config: Config, run_dir: Path) -> None:
    if samples := sorted((run_dir / "samples").glob("*.png")):
        print(f"samples  {samples[-1]}")
    elif task_name(config) == "text":
        print(f"generate titan-train generate {shlex.quote(str(run_dir))} {_first_words(config)}")


def _first_words(config: Config) -> str:
    """What to ask the run's model: its own first prompt, a message where it learned chats, else the beginning of any text."""
    if any(source.messages_key for source in config.data.sources):
        return '--chat --prompt "Hello"'
    python = config.data.sources[0].kind == "stdlib"
    own = config.validation.prompts[0] if config.validation.prompts else "def main(" if python else "The"
    return "--prompt " + (f'"{own}"' if re.fullmatch(r"[\w (),.:;?-]+", own) else shlex.quote(own))


def _print_samples(run_dir: Path) -> None:
    """What the model wrote after its first validation, one in the middle, and the last: how it became better."""
    from titan_train.observe.terminal import printable
    from titan_train.report.samples import sampled_texts

    found = sampled_texts(run_dir, newest_checkpoint(run_dir) or 0)
    for i in sorted({0, len(found) // 2, len(found) - 1} if found else ()):
        sample = found[i]
        prompt, text = sample.texts[0]
        first, *rest = printable(prompt + text).rstrip().splitlines()[:4] or [""]
        print(f"  after step {sample.step:<6} {first}")
        for line in rest:
            print(f"  {'':<17} {line}")
