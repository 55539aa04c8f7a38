"""Write views as a step, in one process and without a model."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from titan_ckpt.format.names import SECTIONS, STATE_NAME
from titan_ckpt.format.tagged_json import dump_json
from titan_ckpt.interop.views import View, read_box, row_pieces, whole_box
from titan_ckpt.save.job import Lead, SaveLayout, WriteJob, commit_now, write_job
from titan_ckpt.save.plan import Held, plan_save
from titan_ckpt.save.prepare import VERSIONS, layout_files
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.state.train_state import merge_shared
from titan_ckpt.steps.claim import Process
from titan_ckpt.steps.commit import begin_save, discard_unfinished
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.paths import StorePath


def write_step(
    root: StorePath,
    step: int,
    views: Mapping[str, Mapping[str, View]],
    shared: Mapping[str, Any],
    progress: Callable[[int], None],
) -> StorePath:
    """Write views (section to key to view) as a committed step, a few megabytes at a time; return its folder.

    ``shared`` has encoded parts of the plain state: ``has``, ``optim``, ``extra`` (FORMAT.md). ``progress`` is called with the
    bytes of each piece.
    """
    listed = [(section, key, view) for section in SECTIONS for key, view in views.get(section, {}).items()]
    held = [Held(section, key, view.dtype, view.shape, (whole_box(view.shape),)) for section, key, view in listed]
    plan = plan_save([held])
    pieces = plan.pieces[0]
    layout = SaveLayout(layout_files(held, pieces, 0), *plan.index_tensors())
    folder, save_id = begin_save(root, step, Process.of(os.getpid()))
    job = lead_job(folder, step, save_id, 1, layout, **shared)
    try:
        return commit_now(job, write_job(job, (view_bytes(listed[p.held][2], progress=progress) for p in pieces)))
    except BaseException:
        with contextlib.suppress(OSError):
            discard_unfinished(folder)
        raise


def lead_job(folder: StorePath, step: int, save_id: str, world_size: int, layout: SaveLayout, **parts: Any) -> WriteJob:
    """Rank 0's job of a step with only a model; ``parts`` of the plain state take the place of their defaults."""
    empty = {"groups": [], "leaves": {}}
    plain = {"dp": [0, 1], "has": ["model"], "model": {}, "optim": empty, "sched": [], "extra": {}} | parts
    state = dump_json(merge_shared(step, [plain])).decode()
    lead = Lead({}, VERSIONS, {}, Retention())
    return WriteJob(folder, step, save_id, 0, world_size, layout, ((STATE_NAME, state),), lead)


def view_bytes(
    view: View, dtype: torch.dtype | None = None, *, progress: Callable[[int], None]
) -> Iterator[memoryview]:
    """A view's bytes in row-major order, a few megabytes at a time, converted to ``dtype`` if one is given."""
    for box in row_pieces(view):
        piece = read_box(view, box)
        data = tensor_bytes(piece if dtype is None else piece.to(dtype))
        progress(len(data))
        yield data
