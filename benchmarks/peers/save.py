"""The stall of an asynchronous save, beside DCP's.

Method: one dictionary of equal float32 tensors on one rank, in a RAM disk. ``stall`` is from the call until the state may
change, which is when the call returns and staging is done; ours digests what it writes, DCP's does not. Each contestant's
save is committed before the next one starts. Its memory is touched by two saves before anything is timed.

Limits: one rank, no CUDA. Only the stall is compared; `packages/titan-ckpt/benchmarks/save_load.py` has the rest.

    python benchmarks/peers/save.py
"""

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import turns
from titan_ckpt import Checkpointer, TrainState
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages/titan-ckpt/benchmarks"))
from rivals import rivals

RIVALS = ("dcp thread, kept buffers", "dcp process")


def main() -> None:
    """Measure and print."""
    made = turns.parser(__doc__ or "", rounds=15)
    made.add_argument("--mib", type=int, default=256, help="size of the state")
    made.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = made.parse_args()
    turns.wait_until_idle(options)
    model = nn.ParameterList([torch.rand(1024, 1024) for _ in range(options.mib // 4)])
    state = TrainState(model=model, rng=False)
    plain = {name: value.detach() for name, value in model.state_dict().items()}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
        root = Path(folder)
        ours = stack.enter_context(Checkpointer(root / "titan", keep_last=1, async_=True))
        ours.prepare(state)
        steps = iter(range(1, 10**6))

        def titan() -> tuple[float, float]:
            began, used = time.perf_counter(), time.thread_time()
            job = ours.save(next(steps), state)
            taken = time.perf_counter() - began, time.thread_time() - used
            job.wait()
            return taken

        def stall_of(save):
            def turn() -> tuple[float, float]:
                began, used = time.perf_counter(), time.thread_time()
                wait = save(next(steps))
                taken = time.perf_counter() - began, time.thread_time() - used
                wait()
                return taken

            return turn

        contestants = {"titan-ckpt": titan} | {
            rival.name: stall_of(rival.save)
            for rival in rivals(root, plain, {k: torch.empty_like(v) for k, v in plain.items()}, stack)
            if rival.name in RIVALS
        }
        for turn in contestants.values():
            turn()
            turn()
        os.sync()
        turns.compare("peers_save", contestants, options, {"mib": options.mib})


if __name__ == "__main__":
    main()
