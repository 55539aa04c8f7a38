"""Write views as a step, in one process without a model: how foreign checkpoints become steps."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from titan_ckpt.format.header import Entry
from titan_ckpt.format.names import SECTIONS, STATE_NAME, shard_name
from titan_ckpt.format.tagged_json import dump_json
from titan_ckpt.interop.views import View, row_pieces, whole_box
from titan_ckpt.save.carry_out import commit_job, write_job
from titan_ckpt.save.job import Lead, SaveLayout, TensorFile, WriteJob
from titan_ckpt.save.plan import Held, plan_save
from titan_ckpt.save.prepare import index_tensors, merge_shared
from titan_ckpt.state.dtypes import DTYPES
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.steps.commit import begin_save, discard
from titan_ckpt.steps.process import Process
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.files import remove_tree
from titan_ckpt.storage.paths import StorePath
from titan_ckpt.version import VERSION


def write_step(
    root: StorePath, step: int, views: Mapping[str, Mapping[str, View]], shared: Mapping[str, Any] | None = None
) -> StorePath:
    """Write views as a committed step, a few megabytes at a time.

    Args:
        root: The folder of the steps.
        step: The step's number.
        views: Section to key to view.
        shared: Plain state that goes with them, encoded: ``has``, ``optim``, ``extra`` (see FORMAT.md).

    Returns:
        The step's folder.
    """
    listed = [(section, key, view) for section in SECTIONS for key, view in views.get(section, {}).items()]
    held = [Held(section, key, view.dtype, view.shape, (whole_box(view.shape),)) for section, key, view in listed]
    plan = plan_save([held])
    file_names, tensors = index_tensors(plan)
    pieces = plan.pieces[0]
    files = tuple(
        TensorFile(
            shard_name(section, 0),
            tuple(Entry(p.name, held[p.held].dtype, held[p.held].shape) for p in pieces if p.section == section),
        )
        for section in SECTIONS
        if any(p.section == section for p in pieces)
    )
    told = {
        "dp": [0, 1],
        "has": ["model"],
        "model": {},
        "optim": {"groups": [], "leaves": {}},
        "sched": [],
        "extra": {},
    }
    state = dump_json(merge_shared(step, [{**told, **(shared or {})}])).decode()
    lead = Lead({}, {"titan-ckpt": VERSION, "torch": torch.__version__}, {}, Retention())
    folder, save_id = begin_save(root, step, Process.of(os.getpid()))
    job = WriteJob(folder, step, save_id, 0, 1, SaveLayout(files, file_names, tensors), ((STATE_NAME, state),), lead)
    try:
        path, left = commit_job(job, write_job(job, (view_bytes(listed[p.held][2]) for p in pieces)))
        for replaced in left:
            remove_tree(replaced)
        return path
    except BaseException:
        discard(folder)
        raise


def view_bytes(view: View, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
    """A view's bytes in row-major order, a few megabytes at a time, converted to ``dtype`` if one is given."""
    for box in row_pieces(view):
        piece = torch.empty(box[1], dtype=DTYPES[view.dtype])
        view.fill(box, piece)
        yield tensor_bytes(piece if dtype is None else piece.to(dtype))
