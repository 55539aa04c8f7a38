"""``titan-ckpt``: list, check, compare, convert and delete steps.

No command needs torch.distributed or a GPU. Only the conversions and ``diff`` need torch. ``ls`` on a login node takes a
fraction of a second.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from titan_ckpt.errors import Damage, DamageError, malformed_is_damage
from titan_ckpt.format.index import StoredTensor
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.format.names import MANIFEST_NAME, SECTIONS, parse_object, parse_step_name
from titan_ckpt.interop.key_map import load_key_map
from titan_ckpt.load.reader import StepReader
from titan_ckpt.steps import commit, leftovers, listing
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.paths import StorePath, as_path, is_folder, is_there
from titan_ckpt.terminal import ByteProgress, clean_output, printable

_NAMES_HELP = "key map of the model's family: an installed one or a JSON file (default: keep the names)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0, or 1 if something is damaged or different, or 2 for a wrong call."""
    args = _parser().parse_args(argv)
    try:
        with clean_output():
            return args.run(args)
    except DamageError as err:
        print(printable(str(err)), file=sys.stderr)
        return 1
    except (ValueError, OSError) as err:
        print(printable(f"titan-ckpt {args.command}: {err}"), file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="titan-ckpt", description="Look at, check, compare and convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("ls", help="list the steps below a folder, and what is wrong with the invalid ones")
    listing.add_argument("root", type=_path, help="folder of the steps")
    listing.set_defaults(run=_ls)
    show = commands.add_parser("show", help="what a step holds: files, tensors, plain state")
    show.add_argument("step", type=_path, help="a step's folder")
    show.add_argument("--tensors", action="store_true", help="list every tensor")
    show.set_defaults(run=_show)
    verify = commands.add_parser("verify", help="check every block of a step, or of every step below a folder")
    verify.add_argument("path", type=_path, help="a step's folder, or the folder of the steps")
    verify.set_defaults(run=_verify)
    diff = commands.add_parser("diff", help="which tensors differ between two steps, bit by bit")
    diff.add_argument("a", type=_path, help="a step's folder")
    diff.add_argument("b", type=_path, help="another")
    diff.set_defaults(run=_diff)
    _add_conversions(commands)
    gc = commands.add_parser("gc", help="delete what crashed saves left, and older steps if asked")
    gc.add_argument("root", type=_path, help="folder of the steps")
    gc.add_argument("--keep-last", type=_count, metavar="N", help="also delete all but this many newest valid steps")
    gc.add_argument(
        "--keep-every", type=_count, metavar="N", help="also delete steps, but none divisible by this number"
    )
    gc.add_argument("--keep-best", metavar="METRIC", help="also delete steps, but not the best by this metric")
    gc.add_argument("--best-is", choices=["min", "max"], default="min", help="which metric is best (default min)")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    gc.set_defaults(run=_gc)
    return parser


def _add_conversions(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    out = commands.add_parser("export-hf", help="write a step's weights as a Hugging Face folder")
    out.add_argument("step", type=_path, help="a step's folder")
    out.add_argument("out", type=Path, help="folder to make")
    out.add_argument("--names", type=_key_map, metavar="NAME|FILE.json", help=_NAMES_HELP)
    out.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="convert floating-point tensors; default: keep")
    out.add_argument("--max-shard-gb", type=float, default=5.0, help="largest file in 10^9 bytes (default 5)")
    out.add_argument("--config", type=Path, help="a JSON file to become config.json")
    out.set_defaults(run=_export_hf)
    into = commands.add_parser("import-hf", help="make a step that holds the weights of a Hugging Face folder")
    into.add_argument("folder", type=Path, help="folder of safetensors files")
    into.add_argument("--names", type=_key_map, metavar="NAME|FILE.json", help=_NAMES_HELP)
    into.set_defaults(run=_import_hf)
    dcp = commands.add_parser("import-dcp", help="make a step of a checkpoint of torch.distributed.checkpoint")
    dcp.add_argument("folder", type=Path, help="folder with .metadata and .distcp files")
    dcp.add_argument("--model", help="entry that is the model, '' if its weights stand at the top (default: look)")
    dcp.add_argument("--optim", help="entry that is the optimizer's state (default: look for optim, optimizer)")
    dcp.set_defaults(run=_import_dcp)
    for command in (into, dcp):
        command.add_argument("root", type=_path, help="folder of the steps")
        command.add_argument("--step", type=_step_number, default=0, help="number of the step to make (default 0)")
        command.add_argument("--force", action="store_true", help="replace the step if it exists")


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The type of an argument. argparse shows the text of ArgumentTypeError only."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(f"{err}" + (f" ({err.__cause__})" if err.__cause__ else "")) from err

    return parsed


_path, _key_map = _argument(as_path), _argument(load_key_map)


def _step_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a step number. Use an integer from 0.")
    return int(text)


def _count(text: str) -> int:
    """A number of steps to keep. 0 would delete every step."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} would keep no step. Use 1 or more.")
    return int(text)


def _export_hf(args: argparse.Namespace) -> int:
    import torch

    from titan_ckpt.interop.hf import export_hf

    dtypes = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if args.max_shard_gb <= 0:
        raise ValueError(f"--max-shard-gb {args.max_shard_gb:g} leaves no room for a tensor. Use more than 0.")
    config = parse_object(args.config.read_bytes(), str(args.config)) if args.config else None
    total = sum(tensor.nbytes for tensor in _open_step(args.step).index.tensors["model"].values())
    with ByteProgress("export", total) as progress:
        files = export_hf(
            args.step,
            args.out,
            names=args.names,
            dtype=dtypes[args.dtype],
            max_shard_bytes=int(args.max_shard_gb * 1e9),
            config=config,
            progress=progress.advance,
        )
    nbytes = sum(file.stat().st_size for file in files)
    print(f"{args.out}: {_plural(len(files), 'file')}, {_mebibytes(nbytes)}")
    return 0


def _import_hf(args: argparse.Namespace) -> int:
    from titan_ckpt.interop.hf import import_hf_step

    return _import(args, "*.safetensors", partial(import_hf_step, names=args.names))


def _import_dcp(args: argparse.Namespace) -> int:
    from titan_ckpt.interop.dcp_import import import_dcp

    return _import(args, "*.distcp", partial(import_dcp, model=args.model, optim=args.optim))


def _import(args: argparse.Namespace, pattern: str, run: Callable[..., StorePath]) -> int:
    """Import a folder as a step."""
    root: StorePath = args.root
    _existing(args.folder)
    present = dict(listing.step_folders(root)) if is_folder(root) else {}
    if args.step in present and not args.force:
        raise ValueError(
            f"step {args.step} exists: {present[args.step]}. Choose another number with --step, or pass --force to "
            "replace it."
        )
    total = sum(file.stat().st_size for file in args.folder.glob(pattern))
    with ByteProgress(args.command, total) as progress:
        path = run(args.folder, root, step=args.step, progress=progress.advance)
    print(path)
    return 0


def _ls(args: argparse.Namespace) -> int:
    folders = _steps_below(args.root)
    bad = 0
    for step, path in folders:
        try:
            print(_line(step, path))
        except (DamageError, ValueError) as err:
            bad += 1
            print(f"{step:>10}  INVALID  {_why(err)}")
    unfinished = len(listing.unfinished(args.root))
    if not folders:
        print(f"no steps in {args.root}" + (f", {unfinished} unfinished" if unfinished else ""))
        return 0
    print(f"{len(folders) - bad} valid steps, {bad} invalid, {unfinished} unfinished")
    return 1 if bad else 0


def _line(step: int, path: StorePath) -> str:
    with malformed_is_damage(path, MANIFEST_NAME):
        manifest = Manifest.open(path)
        metrics = " ".join(f"{key}={_number(value)}" for key, value in manifest.metrics.items())
        size, ranks = _mebibytes(manifest.nbytes), _plural(manifest.world_size, "rank")
        return f"{step:>10}  {manifest.saved_at}  {ranks:>10}  {size:>14}  {metrics}".rstrip()


def _show(args: argparse.Namespace) -> int:
    reader = _open_step(args.step)
    state = reader.shared_state()
    manifest = reader.manifest
    ranks = _plural(manifest.world_size, "rank")
    print(f"step {manifest.step}, saved {manifest.saved_at} by {ranks}, save id {manifest.save_id}")
    print("versions: " + ", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    for section in SECTIONS:
        tensors = reader.index.tensors.get(section, {})
        if tensors:
            print(
                f"{section}: {_plural(len(tensors), 'tensor')}, {_mebibytes(sum(tensor.nbytes for tensor in tensors.values()))}"
            )
        for key, tensor in tensors.items() if args.tensors else ():
            print(f"  {key}  {tensor.dtype} {list(tensor.shape)} in {tensor.count} parts")
    for alias, first in reader.index.tied.items() if args.tensors else ():
        print(f"  {alias} is {first}")
    extra = json.dumps(state["extra"])
    print(f"state: {', '.join(map(str, state['has']))}; extra: {extra[:2000]}{' ...' if len(extra) > 2000 else ''}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    found = 0
    folders = [args.path] if _looks_like_a_step(args.path) else [folder for _, folder in _steps_below(args.path)]
    if not folders:
        raise ValueError(f"{args.path} is neither a step (it has no {MANIFEST_NAME}) nor a folder with steps in it.")
    for folder in folders:
        damages = _damages(folder)
        found += len(damages)
        for damage in damages:
            print(f"{folder.name}/{damage}")
        print(f"{folder.name}: {_plural(len(damages), 'damaged place') if damages else 'intact'}")
    return 1 if found else 0


def _damages(folder: StorePath) -> list[Damage]:
    try:
        reader = StepReader(folder)
    except DamageError as err:
        return list(err.damages)
    except ValueError as err:  # of a newer format
        return [Damage(MANIFEST_NAME, str(err))]
    damages: list[Damage] = []
    with ByteProgress(f"verify {folder.name}", sum(record.size for record in reader.index.files)) as progress:
        for nbytes, found in reader.check_all():
            damages += found
            progress.advance(nbytes)
    if not damages:
        try:
            reader.check_values()
        except DamageError as err:
            return list(err.damages)
    return damages


def _diff(args: argparse.Namespace) -> int:
    a, b = _open_step(args.a), _open_step(args.b)
    differences = 0
    total = sum(tensor.nbytes for section in SECTIONS for tensor in a.index.tensors.get(section, {}).values())
    with ByteProgress("diff", total) as progress:
        for section in SECTIONS:
            ours, theirs = a.index.tensors.get(section, {}), b.index.tensors.get(section, {})
            for key in [*ours, *(key for key in theirs if key not in ours)]:
                text = _difference(a, ours.get(key), b, theirs.get(key), progress)
                if text:
                    differences += 1
                    progress.print(f"{section} {key}: {text}")
    print(
        f"{_plural(differences, 'tensor')} differ{'s' if differences == 1 else ''}"
        if differences
        else "all tensors are equal"
    )
    return 1 if differences else 0


def _difference(
    a: StepReader, ours: StoredTensor | None, b: StepReader, theirs: StoredTensor | None, progress: ByteProgress
) -> str:
    if ours is None or theirs is None:
        return f"only in {(a if theirs is None else b).manifest.path}"
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return f"{ours.dtype} {list(ours.shape)} and {theirs.dtype} {list(theirs.shape)}"
    from titan_ckpt.interop.views import StoredView, unequal_elements  # needs torch, which ls and verify start without

    count = unequal_elements(StoredView(a, ours), StoredView(b, theirs), progress.advance)
    return f"{count} of {ours.numel} elements" if count else ""


def _gc(args: argparse.Namespace) -> int:
    root: StorePath = args.root
    retention = Retention(args.keep_last, args.keep_every, args.keep_best, args.best_is)
    _steps_below(root)  # refuses anything but a folder of steps
    surplus: list[StorePath] = []
    if retention != Retention(best_is=args.best_is):
        valid = listing.open_steps(root, lambda path, err: print(f"left alone, invalid: {path.name}: {_why(err)}"))
        _require_metric(args.keep_best, valid)
        surplus = commit.surplus(root, retention)
    found = leftovers.find_leftovers(root)
    surplus = [path for path in surplus if path not in found]
    for path in found + surplus:
        if args.dry_run:
            print(f"would delete {path.name}")
        else:
            commit.discard(path)
            print(f"deleted {path.name}")
    print(f"{_plural(len(found), 'leftover')}, {_plural(len(surplus), 'step')}")
    return 0


def _require_metric(name: str | None, steps: Sequence[Manifest]) -> None:
    """Refuse a metric that no step has: with a misspelled name, the best step would be deleted."""
    values: list[Any] = [step.metrics.get(name or "") for step in steps]
    if name is None or any(type(value) in (int, float) and math.isfinite(value) for value in values):
        return
    known = sorted({metric for step in steps for metric in step.metrics})
    raise ValueError(
        f"no step has a metric {name!r} to keep the best by; {f'they have {known}' if known else 'they have no metrics'}. "
        "Nothing was deleted."
    )


def _open_step(path: StorePath) -> StepReader:
    """Open a step. The error for another path lists the existing steps."""
    if not _looks_like_a_step(path):
        below = [folder.name for _, folder in listing.step_folders(path)]
        listed = f"{', '.join(below[-4:])}{' are its newest' if len(below) > 4 else ''}"
        hint = f"a folder of steps. Give one of them: {listed}" if below else f"no step: it has no {MANIFEST_NAME}"
        raise ValueError(f"{path} is {hint}.")
    return StepReader(path)


def _steps_below(root: StorePath) -> list[tuple[int, StorePath]]:
    """The steps of a folder of steps."""
    if _looks_like_a_step(root):
        raise ValueError(f"{root} is a step; the folder of the steps is {root.parent}. Give that one.")
    return listing.step_folders(root)


def _looks_like_a_step(path: StorePath) -> bool:
    """True also for a step without its manifest: that is damage, not a wrong argument."""
    _existing(path)
    return is_there(path / MANIFEST_NAME) or parse_step_name(path.name) is not None


def _existing(path: StorePath) -> None:
    if is_folder(path):
        return
    if is_there(path):
        raise ValueError(f"{path} is a file. Give the folder.")
    raise ValueError(f"{path} does not exist." + _neighbours(path.parent))


def _neighbours(parent: StorePath) -> str:
    steps = [folder.name for _, folder in listing.step_folders(parent)] if is_folder(parent) else []
    return f" The steps in {parent} are {', '.join(steps[-6:])}." if steps else ""


def _why(err: Exception) -> str:
    """Why a step is invalid, in one line."""
    if not isinstance(err, DamageError):
        return str(err)
    more = f"; and {len(err.damages) - 3} more" if len(err.damages) > 3 else ""
    return "; ".join(str(damage) for damage in err.damages[:3]) + more


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _number(value: Any) -> str:
    return f"{value:g}" if type(value) in (int, float) else json.dumps(value)


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
