"""What an asynchronous save costs the training step on one device.

Question: how long does `Checkpointer.save` hold the caller, against one copy of the same bytes to pinned memory, and
does the restored model equal the saved one?

Method: a model of ``--gib`` in bfloat16; after a first save (which prepares the staging memory) the median of three.

Output: a row per case; one JSON object on the last line.

    python benchmarks/gpu/staging.py --device cuda
    python benchmarks/gpu/staging.py --device cpu --tiny
"""

import argparse
import json
import statistics
import tempfile
import time

import torch
from titan_ckpt import Checkpointer, TrainState
from torch import nn


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--gib", type=float, default=4.0)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    count = 4
    width = 64 if arguments.tiny else int((arguments.gib * 2**30 / 2 / count) ** 0.5)
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count)))
    size = sum(p.nbytes for p in model.parameters())
    rows = {"copy to pinned memory": {"s": _copy(model, device)}}
    with tempfile.TemporaryDirectory() as folder:
        for overlap in (False, True):
            held, committed = [], []
            with Checkpointer(f"{folder}/{overlap}", async_=True, overlap=overlap) as ck:
                state = TrainState(model=model, rng=False)
                for step in range(1, 5):
                    _sync(device)
                    began = time.perf_counter()
                    ck.save(step, state)
                    held.append(time.perf_counter() - began)
                    ck.wait()
                    committed.append(time.perf_counter() - began)
                with torch.device(device):
                    again = nn.Sequential(
                        *(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count))
                    )
                ck.restore(TrainState(model=again, rng=False))
                same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
            name = "save, copied while training goes on" if overlap else "save, copied before it returns"
            rows[name] = {"held_s": statistics.median(held[1:]), "committed_s": statistics.median(committed[1:])}
            assert same, "the restored model differs from the saved one"
    for name, row in rows.items():
        print(f"{name:38} " + "  ".join(f"{key} {value:.4f}" for key, value in row.items()))
    print(json.dumps({"benchmark": "gpu_staging", "device": str(device), "bytes": size, "rows": rows}))


def _copy(model: nn.Module, device: torch.device) -> float:
    """Seconds of one copy of all parameters to page-locked memory, median of three."""
    pinned = [torch.empty(p.shape, dtype=p.dtype, pin_memory=device.type == "cuda") for p in model.parameters()]
    times = []
    for _ in range(4):
        _sync(device)
        began = time.perf_counter()
        for target, source in zip(pinned, model.parameters(), strict=True):
            target.copy_(source.detach(), non_blocking=True)
        _sync(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
