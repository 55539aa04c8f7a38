"""Launcher `torchrun`: torchrun starts the ranks of this machine, and only starts them.

Problem: torchrun's own restarts hand the dead round's store to the next one, where gloo finds the addresses of processes
that are gone (measured: every retry fails), and it notices neither hangs nor how far the run got.

Idea: torchrun with ``--max-restarts 0`` for each attempt of our supervisor, a new rendezvous and a new store each time.
On one machine both are files, so nothing listens; on several they meet at ``launch.endpoint``, and the machines agree
on the attempt through ``torchrun.json`` in the run's folder, which all of them see: machine 0 supervises and writes it,
the others follow (`titan_train.launch.launchers.follow`).
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from titan_train.config import Config, LaunchConfig, dump_config
from titan_train.launch.job import Attempt, Board, RankExit, RankJob
from titan_train.launch.launchers.follow import Leader
from titan_train.launch.rank.heartbeat import Beat, Phase
from titan_train.launch.rank.info import DeviceType, RankInfo
from titan_train.launch.rank.orders import Order
from titan_train.launch.validate import validate
from titan_train.run_folder.temporary import owned_folder

_POLL_S = 0.05
_REPORT = re.compile(r"[WE]\d{4} .*torch/distributed/elastic/.*(failed|closing signal)")
_CLOSING = re.compile(r"Sending process (\d+) closing signal")
_FAILURE = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\n\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
_TORCHRUNS_OWN = re.compile(r"[WEI]\d{4} .*torch/distributed/|\*{20,}|Setting OMP_NUM_THREADS|$")
_FIRST_CALL_S = 120.0  # machines of a job start at different times
_CALL_S = 15.0  # they are there already; one that is not is done without
_PEERS_S = 2.0  # how long the peers of a lost rank may take to fail by themselves


class TorchrunLauncher:
    """Starts ranks through torchrun on this machine."""

    def __init__(self, launch: LaunchConfig, per_node: int, device: DeviceType, run_dir: Path) -> None:
        """Prepare.

        Args:
            launch: Machines and where they meet.
            per_node: Ranks on this machine.
            device: What each rank computes on.
            run_dir: The run's folder, where several machines agree.
        """
        self.device: DeviceType = device
        self._launch = launch
        self._per_node = per_node
        self._leader = Leader(run_dir, launch.nnodes) if launch.nnodes > 1 else None
        self._machines = tuple(range(launch.nnodes))
        self._job: TorchrunJob | None = None
        self._met = False

    def capacity(self) -> int:
        """Ranks of the machines that are there: between attempts they are called, during one they show it themselves."""
        if self._leader is None or not self._launch.elastic:
            return self._per_node * self._launch.nnodes
        if self._job is not None and self._job.running():
            return self._per_node * len({*self._machines, *self._leader.present()})
        self._machines = self._leader.call(_CALL_S if self._met else _FIRST_CALL_S)
        self._met = True
        return self._per_node * len(self._machines)

    def validate(self, config: Config, world_size: int) -> None:
        """See `titan_train.launch.job.Launcher`. In this process, which then imports torch."""
        validate(config, world_size)

    def start(self, attempt: Attempt) -> "TorchrunJob":
        """Start all ranks of an attempt on this machine.

        Raises:
            ValueError: Something else listens where the machines would meet.
        """
        machines = self._machines[: attempt.world_size // self._per_node] or (0,)
        if self._leader is not None:
            if attempt.number == 0:
                check_endpoint(self._launch.endpoint)
            self._leader.attempt(attempt.number, machines)
        per_node = min(self._per_node, attempt.world_size)
        self._job = TorchrunJob(attempt, per_node, self.device, leader=self._leader)
        return self._job

    def adopt(self, run_dir: Path) -> None:
        """None: the ranks end with the process that started them."""

    def close(self, exit_code: int = 1) -> None:
        """Tell the other machines that all is over."""
        if self._leader is not None:
            self._leader.finish(exit_code)


class TorchrunJob:
    """The ranks of this machine in one attempt."""

    def __init__(
        self, attempt: Attempt, per_node: int, device: DeviceType, place: int = 0, leader: Leader | None = None
    ) -> None:
        """Start them.

        Args:
            attempt: What to run.
            per_node: Ranks on each machine.
            device: What each rank computes on.
            place: This machine's number among those that take part.
            leader: Machine 0's voice, there.
        """
        self._leader = leader
        launch = attempt.config.launch
        nodes = attempt.world_size // per_node
        self._run_dir = attempt.run_dir
        self._folder = owned_folder("titan-train-")
        first = place * per_node
        self._ranks = range(first, first + per_node)
        self._board = Board(self._folder, self._ranks)
        alone = nodes == 1
        job = RankJob(
            config_toml=dump_config(attempt.config),
            run_dir=str(attempt.run_dir.resolve()),
            board=str(self._folder),
            attempt=attempt.number,
            ranks=RankInfo(0, 0, 0, 0, device, str(self._folder / "store") if alone else None),
        )
        job_file = self._folder / "job.json"
        job_file.write_text(job.dumps(), encoding="utf-8")
        self._log = self._folder / "torchrun.log"
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", str(nodes), "--nproc-per-node", str(per_node), "--node-rank", str(place),
            "--max-restarts", "0", "--monitor-interval", "0.1", "--rdzv-id", f"{attempt.run_dir.name}-{attempt.number}",
            *self._rendezvous(nodes, launch.endpoint),
            "-m", "titan_train.launch.rank.worker", str(job_file),
        ]  # fmt: skip
        # PYTHONSAFEPATH: the working directory does not shadow modules
        environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONSAFEPATH": "1"}
        environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // per_node) if device == "cpu" else 1))
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C at the terminal is for the supervisor, which passes on an order.
            self._process = subprocess.Popen(command, env=environ, stderr=log, start_new_session=True)
        self._world_size = attempt.world_size
        self._told = False
        self._shown = 0  # bytes of the log that were passed on
        self._reporting = False  # torchrun has begun to report a failure, which takes all the rest
        self._lost_at: float | None = None
        self._killed: set[int] = set()  # process ids of peers of a lost rank

    def _rendezvous(self, nodes: int, endpoint: str) -> tuple[str, ...]:
        if nodes == 1:
            file = str(self._folder / "rendezvous")
            return ("--rdzv-backend", "c10d", "--rdzv-endpoint", file, "--rdzv-conf", "store_type=file",
                    "--local-addr", "127.0.0.1")  # fmt: skip
        # static: machine i holds the i-th ranks, which a dynamic rendezvous does not promise
        return ("--rdzv-backend", "static", "--rdzv-endpoint", endpoint)

    def running(self) -> bool:
        """Whether torchrun is still there."""
        return self._process.poll() is None

    def exits(self, timeout_s: float) -> list[RankExit]:
        """See `titan_train.launch.job.RunningJob`."""
        deadline = time.monotonic() + timeout_s
        if self._leader is not None:
            self._leader.touch()
        while True:
            if found := self._look():
                return found
            if time.monotonic() >= deadline:
                return []
            time.sleep(_POLL_S)

    def beats(self) -> dict[int, Beat]:
        """See `titan_train.launch.job.RunningJob`. None while a rank is gone and torchrun has yet to say how."""
        return {} if self._lost_at is not None and self._process.poll() is None else self._board.beats()

    def order(self, order: Order) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        self._board.order(order)
        if self._leader is not None:
            self._leader.order(order)

    def node_of(self, rank: int) -> str:
        """On which machine."""
        return "this machine" if rank in self._ranks else "another machine"

    def end(self) -> None:
        """See `titan_train.launch.job.RunningJob`."""
        if not self._folder.exists():
            return
        if self._process.poll() is None:
            # first the ranks, which torchrun would give 30 s; torchrun ends when it sees it
            for beat in self._board.beats().values():
                _kill(beat.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        logs = self._run_dir / "logs"
        with contextlib.suppress(OSError):  # a full disk does not keep the rest from being freed
            logs.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._log, logs / f"torchrun-{self._ranks[0]}.log")
        self._board.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _look(self) -> list[RankExit]:
        """Nothing until torchrun ends: it alone knows the exit codes. A lost rank ends it within a second or so."""
        code = self._process.poll()
        if code is None:
            self._pass_on_errors()
            self._end_what_waits_for_the_dead()
            return []
        if self._told:
            return []
        self._told = True
        self._pass_on_errors()
        beats = self._board.beats()
        exits: list[RankExit] = []
        root = root_cause(self._log.read_text(encoding="utf-8", errors="replace"), self._killed) if code else None
        if root is not None:
            exits.append(RankExit(*root))
        for rank in range(self._world_size):
            done = rank in beats and beats[rank].phase >= Phase.STOPPED
            if root is None or rank != root[0]:
                exits.append(RankExit(rank, 0 if code == 0 or done else 1))
        return exits

    def _pass_on_errors(self) -> None:
        """Show what rank 0 printed to stderr, without torchrun's own lines."""
        with self._log.open("rb") as log:
            log.seek(self._shown)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._shown += len(whole + newline)
        for line in whole.decode("utf-8", errors="replace").splitlines():
            self._reporting = self._reporting or _REPORT.match(line) is not None
            if not self._reporting and not _TORCHRUNS_OWN.match(line):
                print(line, file=sys.stderr, flush=True)

    def _end_what_waits_for_the_dead(self) -> None:
        """Torchrun gives the peers of a lost rank 30 s to end, which they spend in a collective: shorten that."""
        beats = {rank: beat for rank, beat in self._board.beats().items() if beat.phase < Phase.STOPPED}
        if all(_alive(beat.pid) for beat in beats.values()):
            self._lost_at = None
            return
        self._lost_at = self._lost_at or time.monotonic()
        if time.monotonic() - self._lost_at > _PEERS_S:
            for beat in beats.values():
                if _alive(beat.pid):
                    self._killed.add(beat.pid)
                    _kill(beat.pid)


def check_endpoint(endpoint: str) -> None:
    """Refuse a port on which something listens already; torchrun would say so only in a traceback of its own.

    Raises:
        ValueError: The port is taken on this machine.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(endpoint.rpartition(":")[2])))  # bound, never listening
        except OSError as err:
            raise ValueError(
                f"launch.endpoint={endpoint!r} cannot be used on this machine: {err.strerror}. Stop what listens there (an "
                "earlier run?), or give all machines another port."
            ) from err


def root_cause(log: str, killed: Collection[int] = ()) -> tuple[int, int] | None:
    """Rank and exit code of the failure that took the others along, from torchrun's report.

    torchrun calls the earliest one the root cause, by whole seconds and then by rank: a rank that was killed and a peer
    that lost its connection in the same poll are the wrong way round. So a rank ended by a signal comes first, unless
    torchrun or this program sent the signal, or the process aborted, as gloo and NCCL do when a peer is gone.

    Args:
        log: What torchrun printed.
        killed: Process ids that this program killed.
    """
    report = log.rpartition("Failures:")[2]
    sent = {int(pid) for pid in _CLOSING.findall(log)} | set(killed)
    found = [(int(rank), int(code), int(pid)) for rank, code, pid in _FAILURE.findall(report)]
    if not found:
        return None
    for rank, code, pid in found:
        if code < 0 and code != -signal.SIGABRT and pid not in sent:
            return rank, code
    return found[-1][:2]  # torchrun's own "Root Cause" is the last one it prints


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
