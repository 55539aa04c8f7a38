"""What planning, opening and committing cost when many ranks save many tensors, in processor seconds.

    python many_ranks.py                         # 3,000 tensors x 1,024 ranks; 1, 10 and 40 kept steps of 3,072 files
    python many_ranks.py --ranks 64 --tensors 300 --kept 1 5

Ranks are simulated in one process: what rank 0 does to plan, what each rank does to open the step and to find its part
of every tensor, and what a small save costs beside steps that many ranks wrote. ``--uneven`` takes dimensions that do
not divide by the ranks, ``--replicas 2`` has each part held by two ranks.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from titan_ckpt import Checkpointer, TrainState
from titan_ckpt.format.codec import block_digests
from titan_ckpt.format.index import FileRecord, Index
from titan_ckpt.format.validate import check_index
from titan_ckpt.load.copies import box_copies
from titan_ckpt.load.reader import StepReader
from titan_ckpt.save.plan import Held, encode_held, encode_pieces, plan_encoded
from titan_ckpt.steps import commit
from titan_ckpt.steps.claim import Process

SHAPES = [(4096, 64), (1024, 64), (4096,), (14336, 64), (4096, 128), (12288, 32)]
UNEVEN = [(4097, 64), (1023, 64), (4099,), (14337, 64), (4098, 128), (12289, 32)]


def held(rank: int, args: argparse.Namespace) -> list[Held]:
    """What a rank holds: rows of every tensor, as FSDP cuts them."""
    shapes, parts = (UNEVEN if args.uneven else SHAPES), args.ranks // args.replicas
    part = rank % parts
    tensors: list[Held] = []
    for i in range(args.tensors):
        shape = shapes[i % len(shapes)]
        rows = -(-shape[0] // parts)
        begin, end = min(part * rows, shape[0]), min((part + 1) * rows, shape[0])
        box = ((begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:]))
        section = ("model", "optim", "optim")[i % 3]
        tensors.append(Held(section, f"layers.{i // 3}.weight/{i % 3}", "F32", shape, (box,) if begin < end else ()))
    return tensors


def seconds(action: Callable[[], object]) -> float:
    """Processor seconds of this process."""
    began = time.process_time()
    action()
    return time.process_time() - began


def make_step(root: Path, step: int, args: argparse.Namespace) -> tuple[Path, dict[str, float]]:
    """A committed step of the simulated ranks, with sparse files, and what planning and committing it took."""
    said = [encode_held(held(rank, args)) for rank in range(args.ranks)]
    times: dict[str, float] = {}
    began = time.process_time()
    plan = plan_encoded(said)
    texts = {id(pieces): pieces for pieces in plan.pieces}
    for pieces in texts.values():
        encode_pieces(pieces)
    names, tensors = plan.index_tensors()
    times["plan"] = time.process_time() - began
    folder, save_id = commit.begin_save(root, step, Process.of(0))
    records: list[FileRecord] = []
    size = 4096 + args.tensors * 14336 * 128 * 4 // args.ranks * args.replicas + (1 << 20)
    blocks = tuple("0" * 32 for _ in range(-(-size // (4 << 20))))
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(size)
        records.append(FileRecord(name, size, blocks, 4096))
    state = json.dumps(
        {
            "step": step,
            "dp": [[0, 1]],
            "has": [],
            "model": {},
            "optim": {"groups": [], "leaves": {}},
            "sched": [],
            "extra": {},
        }
    ).encode()
    (folder / "state").mkdir(exist_ok=True)
    for name in ["state/state.json", *(f"state/rank-r{rank:05d}.json" for rank in range(args.ranks))]:
        (folder / name).write_bytes(state)
        records.append(FileRecord(name, len(state), tuple(block_digests(state))))
    began = time.process_time()
    index = Index(tuple(records), tensors, {})
    path = commit.commit_save(
        folder, step=step, save_id=save_id, world_size=args.ranks, files=records, index=index, versions={}, metrics={}
    )
    times["commit"] = time.process_time() - began
    assert isinstance(path, Path)
    return path, times


def opening(path: Path, args: argparse.Namespace) -> dict[str, float]:
    """What one rank does to open a step and to find its part of every tensor."""
    readers: list[StepReader] = []
    times = {"open": seconds(lambda: readers.append(StepReader(path)))}
    (reader,) = readers
    mine = held(args.ranks // 3, args)
    targets = [(tensor, torch.empty(tensor.boxes[0][1])) for tensor in mine if tensor.boxes]

    def find() -> None:
        for tensor, into in targets:
            assert box_copies(reader.index.tensors[tensor.section][tensor.key], tensor.boxes[0], into)

    times["find"] = seconds(find)
    times["of which checks"] = seconds(lambda: check_index(reader.index))
    return times


def saving(root: Path, first: Path, args: argparse.Namespace) -> None:
    """One small save beside kept steps that many ranks wrote."""
    state = TrainState(model=torch.nn.Linear(8, 8), rng=False)
    kept = [first]
    for count in args.kept:
        while len(kept) < count:
            kept.append(make_step(root, len(kept) + 1, args)[0])
        with Checkpointer(root, keep_last=args.keep_last) as ck:
            ck.save(10**6 + count, state)  # the first one also sweeps
            spent = seconds(lambda ck=ck, count=count: ck.save(10**6 + count, state))
            listed = seconds(ck.steps)
            shutil.rmtree(ck.path(10**6 + count))
        print(f"{count:3} kept steps: one small save {spent:.3f} cpu-s, steps() {listed:.2f} cpu-s", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=3000)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--kept", type=int, nargs="*", default=[1, 10, 40])
    parser.add_argument("--keep-last", type=int, default=1000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="titan-many-ranks-"))
    try:
        path, times = make_step(root, 1, args)
        print(f"{args.tensors} tensors x {args.ranks} ranks, index {(path / 'INDEX.json.zst').stat().st_size:,} bytes")
        print(f"rank 0: plan {times['plan']:.2f} cpu-s, commit {times['commit']:.2f} cpu-s", flush=True)
        spent = opening(path, args)
        print("each rank: " + ", ".join(f"{name} {value:.2f} cpu-s" for name, value in spent.items()), flush=True)
        saving(root, path, args)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
