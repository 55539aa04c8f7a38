"""Write views as a step, in one process and without a model."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from titan_ckpt.format.names import SECTIONS, STATE_NAME, Entry, shard_name
from titan_ckpt.format.tagged_json import dump_json
from titan_ckpt.interop.views import View, read_box, row_pieces, whole_box
from titan_ckpt.save.job import Lead, SaveLayout, TensorFile, WriteJob, commit_job, write_job
from titan_ckpt.save.plan import Held, plan_save
from titan_ckpt.save.prepare import VERSION, index_tensors, merge_shared
from titan_ckpt.state.leaves import tensor_bytes
from titan_ckpt.steps.claim import Process
from titan_ckpt.steps.commit import begin_save, discard
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.files import remove_tree
from titan_ckpt.storage.paths import StorePath


def write_step(
    root: StorePath, step: int, views: Mapping[str, Mapping[str, View]], shared: Mapping[str, Any] | None = None
) -> StorePath:
    """Write views (section to key to view) as a committed step, a few megabytes at a time; return its folder.

    ``shared`` has encoded parts of the plain state: ``has``, ``optim``, ``extra`` (FORMAT.md).
    """
    listed = [(section, key, view) for section in SECTIONS for key, view in views.get(section, {}).items()]
    held = [Held(section, key, view.dtype, view.shape, (whole_box(view.shape),)) for section, key, view in listed]
    plan = plan_save([held])
    file_names, tensors = index_tensors(plan)
    pieces = plan.pieces[0]
    entries = {section: [p for p in pieces if p.section == section] for section in SECTIONS}
    files = tuple(
        TensorFile(shard_name(section, 0), tuple(Entry(p.name, held[p.held].dtype, held[p.held].shape) for p in mine))
        for section, mine in entries.items()
        if mine
    )
    state = dump_json(merge_shared(step, [plain_state(**(shared or {}))])).decode()
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


def plain_state(**parts: Any) -> dict[str, Any]:
    """The plain state of a step with only a model, and with ``parts`` in place of their defaults."""
    empty = {"groups": [], "leaves": {}}
    return {"dp": [0, 1], "has": ["model"], "model": {}, "optim": empty, "sched": [], "extra": {}} | parts


def view_bytes(view: View, dtype: torch.dtype | None = None) -> Iterator[memoryview]:
    """A view's bytes in row-major order, a few megabytes at a time, converted to ``dtype`` if one is given."""
    for box in row_pieces(view):
        piece = read_box(view, box)
        yield tensor_bytes(piece if dtype is None else piece.to(dtype))
