"""How fast are save, load and reshard beside torch's checkpointing, all in one run on one machine?

Method: one rank, one state of equal float32 tensors on a RAM disk or any folder. Every contestant takes part in every
round, one after the other; each number is the best of ``--rounds`` rounds (the first, in which buffers are made, is
given apart), since the machine may be shared and only slowness is noise. The claims are the ratios. ``stall`` is how
long a save holds training; ``durable`` is from the call to the commit. Rivals: `rivals.py`.

Columns: 1/64 of the columns of one tensor, digests off, two ways. "first touch": the file was opened just now, so both
sides pay for mapping its pages, one page fault every 64 KiB. "mapped": the pages are in place, as they are when
blocks have been checked or another tensor of the file was read; both sides keep the file open.

Output: one line a measurement, then one JSON object (versions, device, commit, configuration, seconds, ratios).

Limits: one rank; no CUDA; nothing but titan-ckpt digests, or brings folders to disk.

Example: ``python benchmarks/save_load.py --gib 1 --folder /dev/shm``
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rivals import rivals, version_of_torch_checkpointing
from safetensors import safe_open
from titan_ckpt import Checkpointer, TrainState
from titan_ckpt._load import box_copies, check_copies, run_copies
from titan_ckpt._read import StepReader
from torch import nn

Best = dict[str, float]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=0.5, help="size of the state")
    parser.add_argument("--tensors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(dir=args.folder, prefix="ckpt-bench-"))
    load_before = os.getloadavg()[0]
    try:
        seconds, first, megabytes = measure(root, args)
        columns(root, args.rounds, seconds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for name, value in seconds.items():
        print(f"{name:40s} {value:8.4f} s")
    result = {
        "benchmark": "save_load",
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "torch_checkpointing": version_of_torch_checkpointing(),
        },
        "device": f"cpu, {os.cpu_count()} cores, load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after",
        "commit": _commit(),
        "config": {"gib": args.gib, "tensors": args.tensors, "rounds": args.rounds, "folder": str(args.folder)},
        "seconds": {name: round(value, 5) for name, value in seconds.items()},
        "first_save_seconds": {name: round(value, 3) for name, value in first.items()},
        "saver_process_mb": megabytes,
        "ratios": {name: round(value, 3) for name, value in ratios(seconds).items()},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(root: Path, args: argparse.Namespace) -> tuple[Best, Best, dict[str, float]]:
    """Best seconds of each measurement, those of each first save, and the saver's memory beside the arena."""
    width = 1024
    rows = int(args.gib * 2**30 / 4 / args.tensors / width)
    model = nn.ParameterList([torch.randn(rows, width) for _ in range(args.tensors)])
    state = TrainState(model=model, rng=False)
    plain = {name: value.detach() for name, value in model.state_dict().items()}
    target = {name: torch.empty_like(value) for name, value in plain.items()}
    best: Best = {}
    first: Best = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, float("inf")), seconds)

    with ExitStack() as stack:
        ours = Checkpointer(root / "ours", keep_last=1)
        behind = stack.enter_context(Checkpointer(root / "behind", keep_last=1, async_=True))
        others = list(rivals(root, plain, target, stack))
        for step in range(args.rounds + 1):
            began = time.perf_counter()
            for name, value in plain.items():
                target[name].copy_(value)
            note("memcpy", time.perf_counter() - began)
            note("ours save", _timed(lambda step=step: ours.save(step, state)))
            note("ours load verified", _timed(lambda: ours.restore(state)))
            note("ours load unverified", _timed(lambda: ours.restore(state, verify="none")))
            began = time.perf_counter()
            job = behind.save(step, state)
            _note_async("ours async", began, job.wait, first if step == 0 else best)
            for rival in others:
                began = time.perf_counter()
                wait = rival.save(step)
                if wait is None:
                    note(f"{rival.name} save", time.perf_counter() - began)
                else:
                    _note_async(rival.name, began, wait, first if step == 0 else best)
                if rival.load:
                    note(f"{rival.name} load", _timed(rival.load))
            for old in root.glob("tc*"):  # this rival keeps every save
                shutil.rmtree(old, ignore_errors=True)
        assert behind._saver is not None
        status = Path(f"/proc/{behind._saver.process.pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    memory = {name: round(int(fields[name].split()[0]) / 1000, 1) for name in ("RssAnon", "RssFile", "RssShmem")}
    return best, first, memory


def columns(root: Path, rounds: int, best: Best) -> None:
    """Columns 1/64 of a tensor, as another layout would read them."""
    rows, width = 8192, 8192
    slice_width = width // 64
    model = nn.ParameterList([torch.randn(rows, width)])
    step = Checkpointer(root / "columns").save(1, TrainState(model=model, rng=False)).path
    mine = torch.empty(rows, slice_width)
    box = ((0, slice_width), (rows, slice_width))
    (file,) = (root / "columns" / step.name).glob("model-*.safetensors")
    want = model[0].detach()[:, slice_width : 2 * slice_width]

    def note(name: str, action: Callable[[], Any]) -> None:
        mine.zero_()
        best[name] = min(best.get(name, float("inf")), _timed(action))
        assert torch.equal(mine, want)

    def by_slice(opened: Any) -> None:
        mine.copy_(opened.get_slice("0")[:, slice_width : 2 * slice_width])

    for _ in range(max(rounds, 5)):
        reader = StepReader(step)
        copies = {"0": box_copies(reader.index.tensors["model"]["0"], box, mine)}
        note("ours columns first touch", lambda reader=reader, copies=copies: run_copies(reader, copies))
        note("ours columns mapped", lambda reader=reader, copies=copies: run_copies(reader, copies))
        fresh = StepReader(step)
        note("ours columns verified", lambda fresh=fresh, copies=copies: _checked(fresh, copies))
        with safe_open(file, framework="pt") as opened:
            note("get_slice columns first touch", lambda opened=opened: by_slice(opened))
            note("get_slice columns mapped", lambda opened=opened: by_slice(opened))


def ratios(seconds: Best) -> dict[str, float]:
    """The claims; above or below 1 as named."""
    pairs = {
        "stall / dcp thread stall": ("ours async stall", "dcp thread stall"),
        "stall / dcp thread with kept buffers": ("ours async stall", "dcp thread, kept buffers stall"),
        "stall / dcp process stall": ("ours async stall", "dcp process stall"),
        "stall / torch_checkpointing stall": ("ours async stall", "torch_checkpointing async stall"),
        "stall / memcpy": ("ours async stall", "memcpy"),
        "durable / dcp thread durable": ("ours async durable", "dcp thread durable"),
        "durable / dcp process durable": ("ours async durable", "dcp process durable"),
        "durable / torch_checkpointing durable": ("ours async durable", "torch_checkpointing async durable"),
        "dcp save / save": ("dcp save", "ours save"),
        "dcp hf writer / save": ("dcp hf writer save", "ours save"),
        "torch_checkpointing save / save": ("torch_checkpointing save", "ours save"),
        "dcp load / verified load": ("dcp load", "ours load verified"),
        "torch_checkpointing load / verified load": ("torch_checkpointing load", "ours load verified"),
        "get_slice / columns, first touch": ("get_slice columns first touch", "ours columns first touch"),
        "get_slice / columns, mapped": ("get_slice columns mapped", "ours columns mapped"),
        "get_slice / columns, verified": ("get_slice columns first touch", "ours columns verified"),
    }
    return {name: seconds[a] / seconds[b] for name, (a, b) in pairs.items() if a in seconds and b in seconds}


def _checked(reader: StepReader, copies: dict[str, Any]) -> None:
    assert not check_copies(reader, copies)
    run_copies(reader, copies)


def _note_async(name: str, began: float, wait: Callable[[], Any], into: Best) -> None:
    stall = time.perf_counter() - began
    wait()
    for kind, value in (("stall", stall), ("durable", time.perf_counter() - began)):
        into[f"{name} {kind}"] = min(into.get(f"{name} {kind}", float("inf")), value)


def _timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
