"""What planning, committing and opening a step cost beside torch's DCP, in processor seconds, paired.

    python against_dcp.py                                   # 64 x 300, 64 x 900 and 256 x 900 (ranks x tensors per rank)
    python against_dcp.py --sizes 16x100 --rounds 5 --json out.json

Question: how long do rank 0 and every other rank wait for metadata, not for bytes? Method: ranks are simulated in one
process. Each round does the same for both: rank 0 plans what all ranks hold (each holds rows of every tensor, as FSDP
cuts them), commits (titan-ckpt: index, manifest, rename and fsync; DCP: `FileSystemWriter.finish`, which pickles
``.metadata``), then one rank opens the result (titan-ckpt: manifest, index, all checks, sizes of all files; DCP:
`FileSystemReader.read_metadata`). Files are sparse. Output: medians over the rounds. Limits: what ranks send to rank 0 is
encoded beforehand on both sides, and what it sends back is not counted; DCP checks neither sizes nor digests.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from many_ranks import held, make_step, seconds
from titan_ckpt.load.reader import StepReader
from titan_ckpt.state.dtypes import DTYPES
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult


def dcp_plans(args: argparse.Namespace) -> list[SavePlan]:
    """What each rank of DCP would send: the same parts of the same tensors."""
    plans: list[SavePlan] = []
    for rank in range(args.ranks):
        items: list[WriteItem] = []
        for tensor in held(rank, args):
            for offsets, sizes in tensor.boxes:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                properties = TensorProperties(dtype=DTYPES[tensor.dtype])
                data = TensorWriteData(chunk, properties, torch.Size(tensor.shape))
                name = f"{tensor.section}.{tensor.key}"
                items.append(WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    return plans


def dcp_round(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Processor seconds of DCP."""
    plans = dcp_plans(args)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    made = []
    times = {"plan": seconds(lambda: made.append(planner.create_global_plan(plans)))}
    ((final, metadata),) = made
    results = [
        [WriteResult(item.index, 1, _StorageInfo(f"__{rank}_0.distcp", 0, 1)) for item in plan.items]
        for rank, plan in enumerate(final)
    ]
    folder.mkdir()
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    times["commit"] = seconds(lambda: writer.finish(metadata, results))
    times["open"] = seconds(lambda: FileSystemReader(folder).read_metadata())
    times["bytes"] = float((folder / ".metadata").stat().st_size)
    return times


def titan_round(root: Path, step: int, args: argparse.Namespace) -> dict[str, float]:
    """Processor seconds of titan-ckpt."""
    path, times = make_step(root, step, args)
    return {
        **times,
        "open": seconds(lambda: StepReader(path)),
        "bytes": float((path / "INDEX.json.zst").stat().st_size),
    }


def measure(size: str, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of both at one size."""
    ranks, tensors = map(int, size.split("x"))
    args = argparse.Namespace(ranks=ranks, tensors=tensors, replicas=1, uneven=False)
    found: dict[str, list[dict[str, float]]] = {"titan-ckpt": [], "DCP": []}
    for _ in range(rounds):
        root = Path(tempfile.mkdtemp(prefix="titan-against-dcp-"))
        try:
            found["titan-ckpt"].append(titan_round(root / "titan", 1, args))
            found["DCP"].append(dcp_round(root / "dcp", args))
        finally:
            shutil.rmtree(root, ignore_errors=True)
    return {who: {key: statistics.median(r[key] for r in runs) for key in runs[0]} for who, runs in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["64x300", "64x900", "256x900"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for size in args.sizes:
        results[size] = measure(size, args.rounds)
        for who, times in results[size].items():
            spent = ", ".join(f"{key} {times[key]:.3f} cpu-s" for key in ("plan", "commit", "open"))
            print(f"{size:9} {who:10} {spent}, metadata {times['bytes']:,.0f} bytes", flush=True)
    told = {"torch": torch.__version__, "python": platform.python_version(), "device": f"cpu {platform.machine()}"}
    text = json.dumps({**told, "rounds": args.rounds, "results": results})
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
