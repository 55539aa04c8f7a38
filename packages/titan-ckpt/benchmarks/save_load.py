"""How fast are save, load and reshard beside torch's checkpointing, all in one run on one machine?

Method: one rank, one state of equal float32 tensors on a RAM disk or any folder. Every contestant takes part in every
round, one after the other, and a ratio is the median over the rounds of the ratio within a round, since the machine
may be shared. Seconds are medians and bests of ``--rounds`` rounds; the first round, in which
buffers are made, is given apart. ``stall`` is how long a save holds training; ``durable`` is from the call to the
commit. titan-ckpt deletes the step that is kept no longer after the commit; ``deleted`` is until that is done too, and
the next contestant starts only then. DCP writes over its old file, so freeing it is part of its ``durable``. The
contestants change places every round. Rivals: `rivals.py`.

A virtual machine returns memory that lies free to its host, and gets it back page by page: 2.3 s of system time for 512
MiB were seen, where 0.3 s is usual. Who overwrites its old file never meets this, who writes beside it does; it says
nothing of either. So from the second round on, all free memory but some four times the state's size is held, and before
each turn three times its size is taken, touched and given back.

Columns: 1/64 of the columns of one tensor, in a RAM disk and in ``--disk`` with the file in the page cache, digests off
where not said otherwise, three ways. "first touch": the file was opened just now. "mapped": the pages are in place, as
they are when blocks have been checked or another part of the tensor was read. "all 64": every slice in turn, each side
from one open file; and by `get_slice` with a file opened anew for each slice. Minor page faults and system time of the
first touch are counted with ``getrusage``.

Output: one line a measurement, then one JSON object (versions, device, commit, configuration, seconds, ratios).

Limits: one rank; no CUDA; nothing but titan-ckpt digests, or brings folders to disk.

Example: ``python benchmarks/save_load.py --gib 1 --folder /dev/shm``
"""

import argparse
import functools
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors
import torch
from rivals import Rival, rivals, version_of_torch_checkpointing
from safetensors import safe_open
from titan_ckpt import Checkpointer, TrainState
from titan_ckpt.load.copies import box_copies, check_copies, run_copies
from titan_ckpt.load.reader import StepReader
from torch import nn

Seconds = dict[str, list[float]]
"""Measurement to its seconds, round after round."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the state")
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="the folder for columns on disk")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seconds: Seconds = {}
    faults: dict[str, Any] = {}
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="ckpt-bench-") as root:
        first, megabytes = measure(Path(root), args, seconds)
    for where, folder in (("ram", args.folder), ("disk", args.disk)):
        with tempfile.TemporaryDirectory(dir=folder, prefix="ckpt-bench-") as root:
            columns(Path(root), where, args.rounds, seconds, faults)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        print(f"{name:48s} median {value:8.4f} s, best {min(seconds[name]):8.4f} s")
    result = {
        "benchmark": "save_load",
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "safetensors": safetensors.__version__,
            "torch_checkpointing": version_of_torch_checkpointing(),
        },
        "device": f"cpu, {os.cpu_count()} cores, load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "commit": _commit(),
        "config": {"gib": args.gib, "tensors": args.tensors, "rounds": args.rounds, "folder": str(args.folder)},
        "median_seconds": {name: round(value, 5) for name, value in medians.items()},
        "best_seconds": {name: round(min(values), 5) for name, values in seconds.items()},
        "first_save_seconds": {name: round(values[0], 3) for name, values in first.items()},
        "first_touch": faults,
        "saver_process_mb": megabytes,
        "ratios": {name: round(value, 3) for name, value in ratios(seconds).items()},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(root: Path, args: argparse.Namespace, seconds: Seconds) -> tuple[Seconds, dict[str, float]]:
    """Fill in the seconds of each measurement; return those of each first save, and the saver's memory."""
    width = 1024
    rows = int(args.gib * 2**30 / 4 / args.tensors / width)
    model = nn.ParameterList([torch.randn(rows, width) for _ in range(args.tensors)])
    state = TrainState(model=model, rng=False)
    plain = {name: value.detach() for name, value in model.state_dict().items()}
    target = {name: torch.empty_like(value) for name, value in plain.items()}
    first: Seconds = {}
    with ExitStack() as stack:
        ours = Checkpointer(root / "ours", keep_last=1)
        with Checkpointer(root / "unprepared", async_=True) as unprepared:
            _note(first, "ours async stall, not prepared", _timed(lambda: unprepared.save(0, state)))
        shutil.rmtree(root / "unprepared")
        behind = stack.enter_context(Checkpointer(root / "behind", keep_last=1, async_=True))
        _note(first, "ours prepare", _timed(lambda: behind.prepare(state)))
        assert behind._saver is not None
        behind._saver._await_prepared()  # in training, steps pass in the meantime
        others = list(rivals(root, plain, target, stack))

        def save_behind(into: Seconds, step: int) -> None:
            began = time.perf_counter()
            for name, value in plain.items():
                target[name].copy_(value)
            _note(into, "memcpy", time.perf_counter() - began)
            began = time.perf_counter()
            job = behind.save(step, state)
            _note_async("ours async", began, job.wait, into)
            while any((root / "behind").glob(".trash-*")):
                time.sleep(0.001)
            _note(into, "ours async deleted", time.perf_counter() - began)

        def save_and_load(into: Seconds, step: int) -> None:
            _note(into, "ours save", _timed(lambda: ours.save(step, state)))
            _note(into, "ours load verified", _timed(lambda: ours.restore(state)))
            _note(into, "ours load unverified", _timed(lambda: ours.restore(state, verify="none")))

        turns = [save_behind, save_and_load, *(functools.partial(_turn, rival) for rival in others)]
        for step in range(args.rounds + 1):
            into = seconds if step else first
            # who frees memory decides how fast the next one gets it: each takes each place
            for turn in turns[step % len(turns) :] + turns[: step % len(turns)]:
                touch_memory(3 * int(args.gib * 2**30)).close()
                turn(into, step)
            if not step:  # every contestant has its buffers
                stack.callback(touch_memory(free_memory() - int((4 * args.gib + 0.5) * 2**30)).close)
            for old in root.glob("tc*"):  # this rival keeps every save
                shutil.rmtree(old, ignore_errors=True)
        status = Path(f"/proc/{behind._saver.process.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    memory = {name: round(int(fields[name].split()[0]) / 1000, 1) for name in ("RssAnon", "RssFile", "RssShmem")}
    return first, memory


def touch_memory(n_bytes: int) -> mmap.mmap:
    """Take and touch memory; when it is closed, the machine has it at hand for whoever asks next."""
    taken = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE)
    for page in range(0, n_bytes, mmap.PAGESIZE):
        taken[page] = 1
    return taken


def free_memory() -> int:
    """Bytes that nothing uses, not even the page cache."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemFree:"))


def _turn(rival: Rival, into: Seconds, step: int) -> None:
    """One save, and load, of a rival."""
    began = time.perf_counter()
    wait = rival.save(step)
    if wait is None:
        _note(into, f"{rival.name} save", time.perf_counter() - began)
    else:
        _note_async(rival.name, began, wait, into)
    if rival.load:
        _note(into, f"{rival.name} load", _timed(rival.load))


def columns(root: Path, where: str, rounds: int, seconds: Seconds, faults: dict[str, Any]) -> None:
    """Columns 1/64 of a tensor, as another layout would read them."""
    rows, width, parts = 8192, 8192, 64
    n = width // parts
    model = nn.ParameterList([torch.randn(rows, width)])
    step = Checkpointer(root / "columns").save(1, TrainState(model=model, rng=False)).path
    assert isinstance(step, Path)
    (file,) = step.glob("model-*.safetensors")
    mine = torch.empty(rows, n)

    def note(name: str, part: int, action: Callable[[], Any]) -> None:
        mine.zero_()
        before = resource.getrusage(resource.RUSAGE_SELF)
        took = _timed(action)
        after = resource.getrusage(resource.RUSAGE_SELF)
        _note(seconds, f"{name}, {where}", took)
        if "first touch" in name:
            system = round(after.ru_stime - before.ru_stime, 4)
            user = round(after.ru_utime - before.ru_utime, 4)
            faults[f"{name}, {where}"] = {"faults": after.ru_minflt - before.ru_minflt, "sys_s": system, "user_s": user}
        assert torch.equal(mine, model[0].detach()[:, part * n : (part + 1) * n])

    def by_reader(reader: StepReader, part: int) -> None:
        box = ((0, part * n), (rows, n))
        run_copies(reader, {"0": box_copies(reader.index.tensors["model"]["0"], box, mine)})

    def by_reader_verified(reader: StepReader) -> None:
        copies = {"0": box_copies(reader.index.tensors["model"]["0"], ((0, n), (rows, n)), mine)}
        assert not check_copies(reader, copies)
        run_copies(reader, copies)

    def by_slice(opened: Any, part: int) -> None:
        mine.copy_(opened.get_slice("0")[:, part * n : (part + 1) * n])

    def by_slice_anew(part: int) -> None:
        with safe_open(file, framework="pt") as opened:
            by_slice(opened, part)

    def ours() -> None:
        reader, last = StepReader(step), parts - 1
        note("ours columns first touch", 1, lambda: by_reader(reader, 1))
        note("ours columns mapped", 1, lambda: by_reader(reader, 1))
        again = StepReader(step)
        note("ours columns all 64", last, lambda: [by_reader(again, part) for part in range(parts)])
        fresh = StepReader(step)
        note("ours columns verified", 1, lambda: by_reader_verified(fresh))

    def theirs() -> None:
        last = parts - 1
        with safe_open(file, framework="pt") as opened:
            note("get_slice columns first touch", 1, lambda: by_slice(opened, 1))
            note("get_slice columns mapped", 1, lambda: by_slice(opened, 1))
        with safe_open(file, framework="pt") as again:
            note("get_slice columns all 64", last, lambda: [by_slice(again, part) for part in range(parts)])
        note("get_slice columns all 64, opened anew", last, lambda: [by_slice_anew(part) for part in range(parts)])

    for number in range(rounds):
        for turn in (ours, theirs) if number % 2 else (theirs, ours):
            turn()


def ratios(seconds: Seconds) -> dict[str, float]:
    """The claims, medians of each round's ratio; above or below 1 as named."""
    pairs = {
        "stall / dcp thread stall": ("ours async stall", "dcp thread stall"),
        "stall / dcp thread with kept buffers": ("ours async stall", "dcp thread, kept buffers stall"),
        "stall / dcp process stall": ("ours async stall", "dcp process stall"),
        "stall / torch_checkpointing stall": ("ours async stall", "torch_checkpointing async stall"),
        "stall / memcpy": ("ours async stall", "memcpy"),
        "durable / dcp thread durable": ("ours async durable", "dcp thread durable"),
        "durable / dcp process durable": ("ours async durable", "dcp process durable"),
        "deleted / dcp process durable": ("ours async deleted", "dcp process durable"),
        "durable / torch_checkpointing durable": ("ours async durable", "torch_checkpointing async durable"),
        "dcp save / save": ("dcp save", "ours save"),
        "dcp hf writer / save": ("dcp hf writer save", "ours save"),
        "torch_checkpointing save / save": ("torch_checkpointing save", "ours save"),
        "dcp load / verified load": ("dcp load", "ours load verified"),
        "torch_checkpointing load / verified load": ("torch_checkpointing load", "ours load verified"),
    }
    for where in ("ram", "disk"):
        for how in ("first touch", "mapped", "all 64"):
            pairs[f"get_slice / columns, {how}, {where}"] = (
                f"get_slice columns {how}, {where}", f"ours columns {how}, {where}"
            )  # fmt: skip
        pairs[f"get_slice opened anew / columns, all 64, {where}"] = (
            f"get_slice columns all 64, opened anew, {where}", f"ours columns all 64, {where}"
        )  # fmt: skip
        pairs[f"get_slice / columns, verified, {where}"] = (
            f"get_slice columns first touch, {where}", f"ours columns verified, {where}"
        )  # fmt: skip
    return {
        name: statistics.median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))
        for name, (a, b) in pairs.items()
        if a in seconds and b in seconds
    }


def _note(into: Seconds, name: str, value: float) -> None:
    into.setdefault(name, []).append(value)


def _note_async(name: str, began: float, wait: Callable[[], Any], into: Seconds) -> None:
    _note(into, f"{name} stall", time.perf_counter() - began)
    wait()
    _note(into, f"{name} durable", time.perf_counter() - began)


def _timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
