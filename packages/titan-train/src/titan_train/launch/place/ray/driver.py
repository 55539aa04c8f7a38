"""The supervisor of a run on a Ray cluster, kept alive by the cluster and not by the terminal that started it.

Problem: the process that watches a run of 1,000 nodes is one process on one machine. When its machine goes, or the
terminal that it was started from, the run goes too.

Idea: a detached actor with a name holds the supervisor as its subprocess. Ray starts the actor again on another node when
its node is lost, and the actor starts the supervisor again when that alone is lost. The agents live on meanwhile: the new
supervisor finds them by name and adopts their ranks, which never stop. The command is only a window: it shows what the
supervisor prints and passes signals on. Killing it changes nothing; the same command opens the window again.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_train.child_processes import owned_folder
from titan_train.config import Config, dump_config
from titan_train.launch.place.ray.cluster import NAMESPACE, agent_prefix, connect, first_line, forwarded
from titan_train.launch.supervise.requests import signal_handlers
from titan_train.run_folder import TAKEN_OVER

KEPT = "--kept"
"""Before the configuration: this process is a supervisor that an actor keeps. Its value is ``first`` or ``again``."""
_MOST_CRASHES = 10
_LOOK_S = 0.3
_UNCOLLECTED_S = 60.0  # how long a finished run's actor waits for a command to show its end
_AWAY_S = 300.0  # for Ray to start the actor on another node: it takes 15 s to believe that one is gone


@dataclass(frozen=True, slots=True)
class Shown:
    """What the supervisor printed since the last time, and its exit code once it has ended."""

    life: str
    """The actor's process: the texts of a new one start at zero."""
    out: bytes
    err: bytes
    exit_code: int | None


class Driver:
    """The actor. Ray calls its methods from several threads."""

    def __init__(self, config_toml: str, folder: str, environ: dict[str, str], code: Sequence[str]) -> None:
        """Start the supervisor; Ray calls this again where it restarts the actor.

        Args:
            config_toml: The whole configuration of the run.
            folder: The working folder of the command, entered where it exists here.
            environ: Environment variables to pass on.
            code: Folders of the user's code.
        """
        import ray

        self._config_toml = config_toml
        self._code = [word for path in code for word in ("--code", path)]
        self._again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._here = owned_folder("titan-train-driver-")
        (self._here / "run.toml").write_text(config_toml, encoding="utf-8")
        self._life = self._here.name
        self._folder = folder if Path(folder).is_dir() else None
        # what Ray sets for its workers is not for a process that connects by itself
        mine = {name: value for name, value in os.environ.items() if name not in _OF_A_WORKER}
        self._environ = mine | environ | {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._exit_code: int | None = None
        self._refused = b""
        """Why the supervisor could not be started, if it could not."""
        self._collected = threading.Event()
        threading.Thread(target=self._keep, name="keep", daemon=True).start()

    def config(self) -> str:
        """What is running."""
        return self._config_toml

    def place(self) -> str:
        """The node that the actor runs on, and its process."""
        import ray

        return f"node {ray.util.get_node_ip_address()}, process {os.getpid()}"

    def show(self, life: str, out_from: int, err_from: int) -> Shown:
        """What is new in the supervisor's two texts; from the beginning, if ``life`` is another one's."""
        if life != self._life:
            out_from = err_from = 0
        code = self._exit_code  # before the texts: they are whole once it is known
        err = self._text("err", err_from) + (self._refused if code is not None else b"")
        shown = Shown(self._life, self._text("out", out_from), err, code)
        if code is not None:
            self._collected.set()
        return shown

    def signal(self, number: int) -> None:
        """Pass a signal on to the supervisor."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "titan_train", "run", KEPT, "again" if self._again else "first"]
        self._again = True
        with (self._here / "out").open("ab") as out, (self._here / "err").open("ab") as err:
            return subprocess.Popen(
                [*command, str(self._here / "run.toml"), *self._code],
                cwd=self._folder,
                env=self._environ,
                stdout=out,
                stderr=err,
                preexec_fn=_end_with_parent,
            )

    def _keep(self) -> None:
        """Start the supervisor again when it dies of anything but its own decision; end when it is done."""
        code = -1
        for _ in range(_MOST_CRASHES):
            try:
                # by this thread, which lives as long as the actor: see `_end_with_parent`
                self._process = self._start()
            except (OSError, subprocess.SubprocessError) as err:
                self._refused = f"\nerror: the supervisor could not be started: {err}\n".encode()
                break
            code = self._process.wait()
            if code == TAKEN_OVER:  # Ray has started this actor elsewhere: end this process, and not that actor
                os._exit(1)
            if code >= 0:
                break
        self._exit_code = code if code >= 0 else 1
        self._collected.wait(_UNCOLLECTED_S)
        time.sleep(1.0)  # for the answer to leave
        shutil.rmtree(self._here, ignore_errors=True)
        import ray

        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _text(self, name: str, start: int) -> bytes:
        try:
            with (self._here / name).open("rb") as file:
                file.seek(start)
                return file.read()
        except OSError:  # not there yet, or removed: the exit code is shown still
            return b""


def _end_with_parent() -> None:
    """Have the kernel kill this process with the thread that started it, before Ray's SIGTERM asks it to stop the run."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


_OF_A_WORKER = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_CLIENT_MODE", "RAY_LD_PRELOAD_ON_WORKERS")


def run_under_driver(config: Config, run_dir: Path, code: Sequence[str] = ()) -> int:
    """Have the cluster run the supervisor, show what it prints, and return its exit code.

    Where the run has a driver already, show that one.

    Args:
        config: What to run.
        run_dir: Its folder.
        code: Folders of the user's code, on a file system that the nodes share.

    Raises:
        ValueError: The cluster does not answer, or the run is under way with another configuration.
    """
    ray = connect(config.launch, 0)
    try:
        text = dump_config(config)
        driver = _driver_of(ray, config, text, run_dir, code)
        with contextlib.suppress(ray.exceptions.RayError):  # it is being restarted elsewhere
            if ray.get(driver.config.remote()) != text:
                raise ValueError(
                    f"{run_dir.name} is under way on this Ray cluster with another configuration. Run the same command to "
                    "watch it, stop it there with Ctrl-C, or choose another --run.name."
                )
        return _Window(ray, driver).show()
    finally:
        ray.shutdown()


def _driver_of(ray: Any, config: Config, text: str, run_dir: Path, code: Sequence[str]) -> Any:
    """The run's actor, made if there is none."""
    name = f"{agent_prefix(run_dir)[:-1]}:driver"
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": 8,
        "num_cpus": 0,
    }
    try:
        driver = ray.get_actor(name, NAMESPACE)
        print(f"driver   watching the one at {ray.get(driver.place.remote())}", flush=True)
        return driver
    except ValueError:
        environ = forwarded(config.launch)
        made = ray.remote(Driver).options(**options).remote(text, str(Path.cwd()), environ, tuple(code))
        try:
            print(f"driver   {ray.get(made.place.remote())}", flush=True)
        except ray.exceptions.RayActorError as err:
            ray.kill(made, no_restart=True)
            last = str(err).strip().splitlines()[-1]
            raise ValueError(
                f"the run's driver could not start on a node of this Ray cluster: {last}. Install the same titan-train on "
                "every node, for the Python that `ray start` runs there."
            ) from err
        return made


class _Window:
    """The command's view of a driver."""

    def __init__(self, ray: Any, driver: Any) -> None:
        self._ray = ray
        self._driver = driver
        self._life, self._out, self._err = "", 0, 0
        self._signals: list[int] = []

    def show(self) -> int:
        """Show what is printed, pass signals on, until the supervisor has ended. Returns its exit code."""
        heard = time.monotonic()
        passed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is unknown to Windows
        with signal_handlers(dict.fromkeys(passed_on, lambda number, _: self._signals.append(number))):
            while True:
                while self._signals:
                    self._driver.signal.remote(self._signals.pop(0))
                try:
                    shown: Shown = self._ray.get(self._driver.show.remote(self._life, self._out, self._err), timeout=10)
                except self._ray.exceptions.RayError as err:
                    if isinstance(err, self._ray.exceptions.ActorDiedError) or time.monotonic() - heard > _AWAY_S:
                        print(f"\nerror: the run's driver is gone: {first_line(err)}", file=sys.stderr)
                        return 1
                    time.sleep(_LOOK_S)
                    continue
                heard = time.monotonic()
                self._print(shown)
                if shown.exit_code is not None:
                    return shown.exit_code
                time.sleep(_LOOK_S)

    def _print(self, shown: Shown) -> None:
        if shown.life != self._life:
            if self._life:
                print("driver   was lost with its node and runs again on another one", file=sys.stderr, flush=True)
            self._life, self._out, self._err = shown.life, 0, 0
        for stream, text in ((sys.stderr, shown.err), (sys.stdout, shown.out)):
            if text:
                stream.write(text.decode("utf-8", errors="replace"))
                stream.flush()
        self._out += len(shown.out)
        self._err += len(shown.err)
