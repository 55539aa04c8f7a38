"""Gloo ranks for tests, forked from one server that has torch preloaded.

Problem: a multi-rank test under torchrun or ``multiprocessing.spawn`` imports torch once a rank; on two cores four
ranks take 36 s to start, so distributed code goes untested.

Idea: Python's forkserver imports torch once; each rank is a fork of it (milliseconds). The server has never run a
kernel, opened a thread pool or touched CUDA, so forking it is safe, which forking the test process is not.

Each rank joins a gloo group over loopback through a file store in a private folder (no port to race for), runs the
function, and sends back its value. It ends with barrier, destroy, then exit: gloo aborts the process otherwise
(torch issue 190489). The parent waits with a deadline. If a rank raises, its traceback is the error of the call and
the other ranks are ended; if the deadline passes, every rank's Python stack is in the error.

Where gloo itself could not connect the ranks (a port of another process's), before any of the function ran, they are
started once more.

Limits: the function must be importable by name at module level, since the rank finds it by its file and name; its
arguments and result travel by pickle (tensors are fine: they travel by value).
"""

import contextlib
import datetime
import faulthandler
import gc
import importlib.util
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

# torch._dynamo is what the first optimizer imports, in every rank again if the server does not.
_PRELOAD = ["pytest", "numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"]


def preload(*modules: str) -> None:
    """Have the server import more modules, once for all ranks. Call it in ``conftest.py``, before the first ranks.

    They must not run kernels, start threads or touch CUDA when they are imported.
    """
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)


class RankFailure(AssertionError):
    """A rank raised, or died. The message holds the first failing rank's number and traceback."""


class RankTimeout(AssertionError):
    """The ranks did not finish in time. The message holds each remaining rank's Python stack."""


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout_s: float = 60.0,
    init: bool = True,
    allow_death: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ``n`` ranks at once and return what each returned, in rank order.

    Inside ``fn``, ``torch.distributed`` is initialised (gloo, CPU) and ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and
    ``LOCAL_WORLD_SIZE`` are set.

    Args:
        fn: A module-level function. Its module is loaded in each rank from its file.
        n: Number of ranks.
        args: Positional arguments, the same for all ranks. Must pickle.
        timeout_s: Seconds before the ranks are ended and `RankTimeout` is raised; also the group's timeout.
        init: Initialise the default process group. False leaves that to ``fn`` (``TITAN_TEST_STORE`` in the
            environment then names a file that a ``FileStore`` can use).
        allow_death: A rank that dies without a word (``kill -9``) gives ``None`` rather than `RankFailure`.
        kwargs: Keyword arguments, the same for all ranks.

    Returns:
        One value a rank. Tensors come back detached, on the CPU.

    Raises:
        RankFailure: A rank raised or died.
        RankTimeout: The time is over.
    """
    task = pickle.dumps((_locate(fn), args, kwargs))
    try:
        return _start(n, task, timeout_s, init, allow_death)
    except _NotConnected:
        return _start(n, task, timeout_s, init, allow_death)


class _NotConnected(RankFailure):
    """Gloo's ranks did not reach one another."""


def _start(n: int, task: bytes, timeout_s: float, init: bool, allow_death: bool) -> list[Any]:
    context = _context()
    with tempfile.TemporaryDirectory(prefix="titan-ranks-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(n)]
        # Only what pickles by reference goes through Process: the task itself travels as bytes.
        processes = [
            context.Process(target=_rank_main, args=(r, n, folder, task, pipes[r][1], timeout_s, init), daemon=True)
            for r in range(n)
        ]
        with _without_main():
            for process in processes:
                process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return _collect([receiver for receiver, _ in pipes], processes, folder, timeout_s, allow_death)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
            for receiver, _ in pipes:
                receiver.close()


def _collect(
    receivers: list[multiprocessing.connection.Connection],
    processes: list[Any],
    folder: str,
    timeout_s: float,
    allow_death: bool,
) -> list[Any]:
    """Wait for every rank's result; the first failure ends the others after a short grace."""
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str, type[RankFailure]]] = []
    waiting = dict(enumerate(receivers))
    while waiting:
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait(list(waiting.values()), timeout=max(left, 0.0))
        if not ready:
            if failures:
                break
            raise RankTimeout(_stacks(waiting, processes, folder, timeout_s))
        for rank, receiver in list(waiting.items()):
            if receiver not in ready:
                continue
            del waiting[rank]
            try:
                kind, when, payload = cast("tuple[str, float, Any]", pickle.loads(receiver.recv_bytes()))
            except EOFError:
                processes[rank].join()
                if allow_death:
                    results[rank] = None
                    continue
                kind, when, payload = "died", time.time(), f"exit code {processes[rank].exitcode}, no traceback\n"
            if kind == "ok":
                results[rank] = _load(payload)
            else:
                failures.append((when, rank, payload, _NotConnected if kind == "not connected" else RankFailure))
                # The others often fail as a consequence. Give them a moment: the earliest failure is the cause.
                deadline = min(deadline, time.monotonic() + 1.0)
    if failures:
        _, rank, text, error = min(failures, key=lambda failure: failure[:2])
        others = sorted(failure[1] for failure in failures if failure[1] != rank)
        after = f"\n(ranks {others} failed after it)" if others else ""
        raise error(f"rank {rank} of {len(receivers)} failed first:\n{text}{after}")
    for process in processes:
        process.join(timeout=10)
    return [results[rank] for rank in range(len(receivers))]


def _stacks(waiting: dict[int, Any], processes: list[Any], folder: str, timeout_s: float) -> str:
    for rank in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    lines = [f"ranks {sorted(waiting)} did not finish within {timeout_s:g} s; their Python stacks:"]
    for rank in sorted(waiting):
        file = Path(folder, f"stack-{rank}")
        lines.append(f"--- rank {rank}\n{file.read_text() if file.exists() else '(not started)'}")
    return "\n".join(lines)


def _rank_main(rank: int, n: int, folder: str, task: bytes, sender: Any, timeout_s: float, init: bool) -> None:
    stack_file = Path(folder, f"stack-{rank}").open("w")  # noqa: SIM115 - must outlive this function
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    gc.freeze()  # what the server imported: a collection would walk all of torch and copy the pages it shares
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = str(Path(folder, "store"))
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(n),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(n),
        GLOO_SOCKET_IFNAME="lo",
        TITAN_TEST_STORE=store,
    )
    code, step = 0, "error"
    try:
        locator, args, kwargs = pickle.loads(task)
        fn = _resolve(*locator)
        if init:
            step = "not connected"
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, n),  # pyright: ignore[reportPrivateImportUsage]
                rank=rank,
                world_size=n,
                timeout=datetime.timedelta(seconds=timeout_s),
            )
            step = "error"
        value = fn(*args, **kwargs)
        message = ("ok", time.time(), _dump(value))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:  # a rank reports everything, SystemExit too; the parent raises it
        message = (step, time.time(), traceback.format_exc())
        code = 1
    sender.send_bytes(pickle.dumps(message))
    sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter teardown: gloo's threads abort it now and then, after all the work is done and reported.
    os._exit(code)


def _locate(fn: Callable[..., Any]) -> tuple[str, str, str]:
    if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
        raise ValueError(
            f"run_ranks got {fn.__qualname__}, which a rank cannot import. Move it to module level and pass what it "
            "closes over as arguments."
        )
    file = str(sys.modules[fn.__module__].__file__)
    # a script is __main__ here, but not in the ranks
    name = f"ranks_of_{Path(file).stem}" if fn.__module__ == "__main__" else fn.__module__
    return name, file, fn.__qualname__


def _resolve(module_name: str, file: str, qualname: str) -> Callable[..., Any]:
    module = sys.modules.get(module_name)
    if module is None:
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # a test module under --import-mode=importlib has no importable name: load its file
            spec = importlib.util.spec_from_file_location(module_name, file)
            if spec is None or spec.loader is None:
                raise
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
    target: Any = module
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def _dump(value: Any) -> bytes:
    """Pickle by value: torch's own reducer for multiprocessing would share file descriptors of an ended process."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(payload: Any) -> Any:
    # The bytes come from a process that this call started a moment ago, through a pipe it owns.
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=False)


@contextlib.contextmanager
def _without_main() -> Any:
    """Hide ``__main__`` from multiprocessing, which would otherwise import it (pytest, a notebook) in every rank."""
    main = sys.modules["__main__"]
    saved = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    for name in saved:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(main, name, value)


def _context() -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, "titan_testing"])
    return context
