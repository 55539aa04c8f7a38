"""Go back in a run's own folder: later checkpoints are set aside, and the run goes on from a named step.

The launcher stages the step with the attempt. Ranks restore it, and once all of them have, `commit` of
`titan_train.run_folder.staging` moves the checkpoints of later steps, or saved later, and a copy of ``metrics.jsonl`` into
``set_aside/``, newest first: what is interrupted half-way still has a newest checkpoint that is whole. If ``checkpoints/`` is on
another disk, they are moved to ``checkpoints/set_aside/``, and ``set_aside/`` has links to them.

A run that goes back by itself, after a spike, sets its best checkpoint aside if that is of a later step.
"""

import contextlib
import errno
import shutil
from pathlib import Path

from titan_train.files import read_text, write_atomic
from titan_train.run_folder.contents import best_saved, checkpoint_folders

FOLDER = "set_aside"
_STAGED = "resume_step"


def check_rewind(run_dir: Path, step: int) -> None:
    """Refuse a step that a run's folder does not have.

    Raises:
        ValueError: There is no such checkpoint; the message has those that there are.
    """
    saved = sorted(checkpoint_folders(run_dir))
    if step not in saved:
        has = f"it has {', '.join(map(str, saved[-8:]))}. Name one of these." if saved else "it has none."
        raise ValueError(f"--resume-step {step}: {run_dir} has no checkpoint of this step; {has}")


def stage_rewind(staged: Path, step: int) -> None:
    """Have the staged attempt begin at ``step``."""
    write_atomic(staged / _STAGED, f"{step}\n")


def staged_rewind(staged: Path) -> int | None:
    """The step at which the staged attempt begins; None if it resumes from the newest."""
    with contextlib.suppress(OSError, ValueError):
        return int(read_text(staged / _STAGED))
    return None


def set_aside(run_dir: Path, staged: Path) -> None:
    """Do what `stage_rewind` asked for, if it did."""
    step = staged_rewind(staged)
    if step is None:
        return
    saved = checkpoint_folders(run_dir)
    order = list(saved)
    after = order[order.index(step) + 1 :] if step in saved else []
    later = [number for number in order if number > step or number in after]
    if later:
        folder = _new_folder(run_dir, step)
        if (run_dir / "metrics.jsonl").is_file():
            shutil.copy2(run_dir / "metrics.jsonl", folder)
        for number in reversed(later):
            _move(saved[number], folder)
    (staged / _STAGED).unlink()


def set_best_aside(run_dir: Path, step: int, metric: str = "") -> tuple[dict[int, Path], tuple[float, int] | None]:
    """Set aside the best checkpoint, if its step is after ``step``, to which the run went back; again, until none is.

    ``metric`` is that of `best_saved`.

    Returns:
        Where those are, by step; and loss and step of the best that is left, None if no other was validated.
    """
    moved: dict[int, Path] = {}
    while True:
        saved = checkpoint_folders(run_dir)
        best = best_saved(saved, metric)
        if best is None or best[1] <= step:
            return moved, best
        folder = _new_folder(run_dir, step)
        _move(saved[best[1]], folder)
        moved[best[1]] = folder


def _new_folder(run_dir: Path, step: int) -> Path:
    numbers = [path.name.partition("-")[0] for path in (run_dir / FOLDER).glob("*-after-*")]
    newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    folder = run_dir / FOLDER / f"{newest + 1:03}-after-{step}"
    folder.mkdir(parents=True)
    return folder


def _move(checkpoint: Path, folder: Path) -> None:
    """Move a checkpoint into a folder. If that is on another disk, it stays on its own, and the folder gets a link to it."""
    try:
        checkpoint.rename(folder / checkpoint.name)
    except OSError as err:
        if err.errno != errno.EXDEV:
            raise
        kept = checkpoint.parent.resolve() / FOLDER / folder.name
        kept.mkdir(parents=True, exist_ok=True)
        checkpoint.rename(kept / checkpoint.name)
        (folder / checkpoint.name).symlink_to(kept / checkpoint.name)
