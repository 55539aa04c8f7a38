"""How fast are save, load and reshard beside torch's distributed checkpoint (DCP), in one run on one machine?

Method: one process, one state of equal float32 tensors on a RAM disk or any folder. Each number is the best of
``--rounds`` interleaved rounds, since the machine may be shared and only slowness is noise; the claims are the ratios.
``stall`` is how long the call holds training, once buffers exist; ``durable`` is from the call to the commit.

Output: one line a measurement, then one JSON object (versions, device, commit, configuration, seconds, ratios).

Limits: one rank; no CUDA; DCP does not digest, nor bring its folder to disk.

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
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from titan_ckpt import Checkpointer, TrainState
from titan_ckpt._load import box_copies, run_copies
from titan_ckpt._read import StepReader
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


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
    try:
        seconds = measure(root, args)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    result = {
        "benchmark": "save_load",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": f"cpu, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "commit": _commit(),
        "config": {"gib": args.gib, "tensors": args.tensors, "rounds": args.rounds, "folder": str(args.folder)},
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "ratios": {name: round(value, 3) for name, value in ratios(seconds).items()},
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def measure(root: Path, args: argparse.Namespace) -> dict[str, float]:
    """Best seconds of each measurement."""
    columns = 1024
    rows = int(args.gib * 2**30 / 4 / args.tensors / columns)
    model = nn.ParameterList([torch.randn(rows, columns) for _ in range(args.tensors)])
    state = TrainState(model=model, rng=False)
    plain = {name: value.detach() for name, value in model.state_dict().items()}
    target = {name: torch.empty_like(value) for name, value in plain.items()}
    best: dict[str, float] = {}

    def note(name: str, action: Callable[[], Any]) -> None:
        began = time.perf_counter()
        action()
        best[name] = min(best.get(name, float("inf")), time.perf_counter() - began)

    ours = Checkpointer(root / "ours", keep_last=1)
    behind = Checkpointer(root / "behind", keep_last=1, async_=True)
    stager = DefaultStager(StagingOptions(False, True, False, False))
    for step in range(1, args.rounds + 1):
        note("memcpy", lambda: [target[name].copy_(value) for name, value in plain.items()])
        note("ours save", lambda step=step: ours.save(step, state))
        note("dcp save", lambda: dcp.save(plain, checkpoint_id=root / "dcp", no_dist=True))
        note("ours load verified", lambda: ours.restore(state))
        note("ours load unverified", lambda: ours.restore(state, verify="none"))
        note("dcp load", lambda: dcp.load(target, checkpoint_id=root / "dcp", no_dist=True))
        for name, options in {"thread": {}, "thread reused stager": {"async_stager": stager}}.items():
            began = time.perf_counter()
            handle = dcp.async_save(
                plain,
                checkpoint_id=root / f"dcp-{name}",
                async_checkpointer_type=AsyncCheckpointerType.THREAD,
                no_dist=True,
                **options,
            )
            future = getattr(handle, "upload_completion", handle)
            stall = time.perf_counter() - began
            future.result()
            best[f"dcp {name} stall"] = min(best.get(f"dcp {name} stall", 1e9), stall)
            best[f"dcp {name} durable"] = min(best.get(f"dcp {name} durable", 1e9), time.perf_counter() - began)
        began = time.perf_counter()
        job = behind.save(step, state)
        stall = time.perf_counter() - began
        job.wait()
        if step > 1:  # the first one makes the arena
            best["ours stall"] = min(best.get("ours stall", 1e9), stall)
            best["ours durable"] = min(best.get("ours durable", 1e9), time.perf_counter() - began)
        reshard(ours.path(step), note)
    stager.close()
    behind.close()
    for name, value in best.items():
        speed = "" if "columns" in name else f"  {args.gib * 2**30 / 1e9 / value:8.2f} GB/s"
        print(f"{name:32s} {value:8.4f} s{speed}")
    return best


def reshard(step: Path, note: Callable[[str, Callable[[], Any]], None]) -> None:
    """Columns 1/64 of the first tensor, as another layout would read it; digests off on both sides."""
    reader = StepReader(step)
    stored = reader.index.tensors["model"]["0"]
    rows, columns = stored.shape
    width = columns // 64
    mine = torch.empty(rows, width)
    file = next(step.glob("model-*.safetensors"))

    def by_slice() -> None:
        with safe_open(file, framework="pt") as opened:
            mine.copy_(opened.get_slice("0")[:, width : 2 * width])

    box = ((0, width), (rows, width))
    note("ours columns 1/64", lambda: run_copies(reader, {"0": box_copies(stored, box, mine)}))
    note("get_slice columns 1/64", by_slice)


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """The claims; above or below 1 as named."""
    return {
        "stall / dcp thread stall": seconds["ours stall"] / seconds["dcp thread stall"],
        "stall / memcpy": seconds["ours stall"] / seconds["memcpy"],
        "durable / dcp thread durable": seconds["ours durable"] / seconds["dcp thread durable"],
        "dcp save / save": seconds["dcp save"] / seconds["ours save"],
        "dcp load / verified load": seconds["dcp load"] / seconds["ours load verified"],
        "get_slice / columns": seconds["get_slice columns 1/64"] / seconds["ours columns 1/64"],
    }


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
