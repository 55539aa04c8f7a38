"""``titan-ckpt``: look at checkpoints, check them, compare them, move them to and from Hugging Face, clean up.

No torch.distributed and no GPU; everything but moving to and from other formats runs without torch, so that a step on a
login node is listed in a fraction of a second.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_ckpt import _commit
from titan_ckpt._compare import unequal_elements
from titan_ckpt._errors import Damage, DamageError
from titan_ckpt._format import SECTIONS, STATE_NAME
from titan_ckpt._index import StoredTensor
from titan_ckpt._manifest import Manifest
from titan_ckpt._names import KEY_MAPS
from titan_ckpt._progress import Progress
from titan_ckpt._read import StepReader
from titan_ckpt._storage import StorePath, as_path


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if all is well, 1 if something is damaged or different, 2 for a wrong call."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except DamageError as err:
        print(err, file=sys.stderr)
        return 1
    except (ValueError, OSError) as err:
        print(f"titan-ckpt {args.command}: {err}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="titan-ckpt", description="Look at, check, compare and convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("ls", help="list the steps below a folder, and what is wrong with the invalid ones")
    listing.add_argument("root", type=as_path, help="folder of the steps")
    listing.set_defaults(run=_ls)
    show = commands.add_parser("show", help="what a step holds: files, tensors, plain state")
    show.add_argument("step", type=as_path, help="a step's folder")
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    show.set_defaults(run=_show)
    verify = commands.add_parser("verify", help="check every block of a step, or of every step below a folder")
    verify.add_argument("path", type=as_path, help="a step's folder, or the folder of the steps")
    verify.set_defaults(run=_verify)
    diff = commands.add_parser("diff", help="which tensors differ between two steps, bit by bit")
    diff.add_argument("a", type=as_path, help="a step's folder")
    diff.add_argument("b", type=as_path, help="another")
    diff.set_defaults(run=_diff)
    _add_conversions(commands)
    gc = commands.add_parser("gc", help="delete what crashed saves left, and older steps if asked")
    gc.add_argument("root", type=as_path, help="folder of the steps")
    gc.add_argument("--keep-last", type=int, help="also delete all but this many newest valid steps")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    gc.set_defaults(run=_gc)
    return parser


def _add_conversions(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    out = commands.add_parser("export-hf", help="write a step's weights as a Hugging Face folder")
    out.add_argument("step", type=as_path, help="a step's folder")
    out.add_argument("out", type=Path, help="folder to make")
    out.add_argument("--names", choices=sorted(KEY_MAPS), help="the model's family; without it names are kept")
    out.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="convert floating-point tensors; default: keep")
    out.add_argument("--max-shard-gb", type=float, default=5.0, help="largest file in 10^9 bytes (default 5)")
    out.add_argument("--config", type=Path, help="a JSON file to become config.json")
    out.set_defaults(run=_export_hf)
    into = commands.add_parser("import-hf", help="make a step that holds the weights of a Hugging Face folder")
    into.add_argument("folder", type=Path, help="folder of safetensors files")
    into.add_argument("root", type=as_path, help="folder of the steps")
    into.add_argument("--step", type=int, default=0, help="number of the step to make (default 0)")
    into.add_argument("--names", choices=sorted(KEY_MAPS), help="the model's family; without it names are kept")
    into.set_defaults(run=_import_hf)
    dcp = commands.add_parser("import-dcp", help="make a step of a checkpoint of torch.distributed.checkpoint")
    dcp.add_argument("folder", type=Path, help="folder with .metadata and .distcp files")
    dcp.add_argument("root", type=as_path, help="folder of the steps")
    dcp.add_argument("--step", type=int, default=0, help="number of the step to make (default 0)")
    dcp.add_argument("--model", help="entry that is the model, '' if its weights stand at the top (default: look)")
    dcp.add_argument("--optim", help="entry that is the optimizer's state (default: look for optim, optimizer)")
    dcp.set_defaults(run=_import_dcp)


def _export_hf(args: argparse.Namespace) -> int:
    import torch

    from titan_ckpt._hf import export_hf

    dtypes = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    total = sum(tensor.nbytes for tensor in StepReader(args.step).index.tensors["model"].values())
    with Progress("export", total) as progress:
        files = export_hf(
            args.step,
            args.out,
            names=KEY_MAPS.get(args.names),
            dtype=dtypes[args.dtype],
            max_shard_bytes=int(args.max_shard_gb * 1e9),
            config=json.loads(args.config.read_bytes()) if args.config else None,
            progress=progress.advance,
        )
    print(f"{args.out}: {len(files)} files, {sum(file.stat().st_size for file in files) / 2**20:,.1f} MiB")
    return 0


def _import_hf(args: argparse.Namespace) -> int:
    from titan_ckpt._hf import import_hf_step

    print(import_hf_step(args.folder, args.root, step=args.step, names=KEY_MAPS.get(args.names)))
    return 0


def _import_dcp(args: argparse.Namespace) -> int:
    from titan_ckpt._dcp_import import import_dcp

    print(import_dcp(args.folder, args.root, step=args.step, model=args.model, optim=args.optim))
    return 0


def _ls(args: argparse.Namespace) -> int:
    folders = _commit.step_folders(_existing(args.root))
    bad = 0
    for step, path in folders:
        try:
            manifest = Manifest.open(path)
        except (DamageError, ValueError) as err:
            bad += 1
            print(f"{step:>10}  INVALID  {err}")
            continue
        metrics = " ".join(f"{key}={value:g}" for key, value in manifest.metrics.items())
        size = f"{manifest.nbytes / 2**20:,.1f} MiB"
        print(f"{step:>10}  {manifest.saved_at}  {manifest.world_size:>4} ranks  {size:>14}  {metrics}".rstrip())
    unfinished = _commit.unfinished(args.root)
    print(f"{len(folders) - bad} valid steps, {bad} invalid, {len(unfinished)} unfinished")
    return 1 if bad else 0


def _show(args: argparse.Namespace) -> int:
    reader = StepReader(args.step)
    manifest = reader.manifest
    print(f"step {manifest.step}, saved {manifest.saved_at} by {manifest.world_size} ranks, save id {manifest.save_id}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    for section in SECTIONS:
        tensors = reader.index.tensors.get(section, {})
        if tensors:
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            print(f"{section}: {len(tensors)} tensors, {nbytes / 2**20:,.1f} MiB")
        for key, tensor in tensors.items() if args.tensors else ():
            print(f"  {key}  {tensor.dtype} {list(tensor.shape)} in {tensor.columns['count']} parts")
    for alias, first in reader.index.tied.items() if args.tensors else ():
        print(f"  {alias} is {first}")
    state = json.loads(reader.read_state(STATE_NAME))
    print(f"state: {', '.join(state['has'])}; extra: {json.dumps(state['extra'])[:2000]}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    path = _existing(args.path)
    folders = [folder for _, folder in _commit.step_folders(path)] or [path]
    found = 0
    for folder in folders:
        damages = _damages(folder)
        found += len(damages)
        for damage in damages:
            print(f"{folder.name}/{damage}")
        print(f"{folder.name}: {'intact' if not damages else f'{len(damages)} damaged places'}")
    return 1 if found else 0


def _damages(folder: StorePath) -> list[Damage]:
    try:
        reader = StepReader(folder)
    except DamageError as err:
        return list(err.damages)
    damages: list[Damage] = []
    with Progress(f"verify {folder.name}", sum(record.size for record in reader.index.files)) as progress:
        for nbytes, found in reader.check_all():
            damages += found
            progress.advance(nbytes)
    return damages


def _diff(args: argparse.Namespace) -> int:
    a, b = StepReader(args.a), StepReader(args.b)
    differences = 0
    for section in SECTIONS:
        ours, theirs = a.index.tensors.get(section, {}), b.index.tensors.get(section, {})
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            text = _difference(a, ours.get(key), b, theirs.get(key))
            if text:
                differences += 1
                print(f"{section} {key}: {text}")
    print(f"{differences} tensors differ" if differences else "all tensors are equal")
    return 1 if differences else 0


def _difference(a: StepReader, ours: StoredTensor | None, b: StepReader, theirs: StoredTensor | None) -> str:
    if ours is None or theirs is None:
        return f"only in {(a if theirs is None else b).manifest.path}"
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {list(ours.shape)} and {theirs.dtype} {list(theirs.shape)}"
    count = unequal_elements(a, ours, b, theirs)
    return f"{count} of {ours.numel} elements" if count else ""


def _gc(args: argparse.Namespace) -> int:
    root = _existing(args.root)
    if args.keep_last is not None and args.keep_last < 1:
        raise ValueError(f"--keep-last {args.keep_last} would delete every step. Use 1 or more.")
    leftovers = [path for path in root.iterdir() if _commit.is_leftover(path)]
    steps: list[StorePath] = []
    for _, path in reversed(_commit.step_folders(root) if args.keep_last else []):
        try:
            Manifest.open(path)
            steps.append(path)
        except (DamageError, ValueError) as err:
            print(f"left alone, invalid: {err}")
    surplus = list(reversed(steps[args.keep_last :])) if args.keep_last else []
    for path in leftovers + surplus:
        print(f"{'would delete' if args.dry_run else 'deleted'} {path.name}")
        if not args.dry_run:
            _commit.discard(path)
    print(f"{len(leftovers)} leftovers, {len(surplus)} steps")
    return 0


def _existing(path: StorePath) -> StorePath:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder.")
    return path
