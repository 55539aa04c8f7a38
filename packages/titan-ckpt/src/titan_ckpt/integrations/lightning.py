"""Lightning with titan-ckpt: ``Trainer(plugins=[TitanIO()])``; callbacks and ``ckpt_path=`` as ever.

What Lightning puts into a checkpoint is written digested, in one instant and without pickle. A checkpoint is a folder where
Lightning's own is a file. Lightning gathers the whole state on one rank before it calls a plugin, so that sharded strategies need
as much host memory there as without it.
"""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO

from titan_ckpt import Checkpointer, TrainState
from titan_ckpt.storage.files import remove_tree
from titan_ckpt.storage.paths import as_path


class TitanIO(CheckpointIO):
    """Writes and reads Lightning's checkpoints."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint; Lightning calls it on one rank."""
        with self._open(path) as checkpointer:
            checkpointer.save(0, TrainState(extra={"checkpoint": checkpoint}, rng=False))

    def load_checkpoint(self, path: str | Path, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Read a checkpoint, with every block checked; Lightning calls it on each rank by itself."""
        state = TrainState(rng=False, extra={})
        with self._open(path) as checkpointer:
            checkpointer.restore(state, 0)
        return state.extra["checkpoint"]

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint."""
        remove_tree(as_path(path))

    @contextlib.contextmanager
    def _open(self, path: str | Path) -> Generator[Checkpointer]:
        alone: Any = None  # each call is one rank's alone
        if dist.is_initialized():
            alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        try:
            with Checkpointer(path, group=alone) as checkpointer:
                yield checkpointer
        finally:
            if alone is not None:  # torch keeps a group until it is ended
                dist.destroy_process_group(alone)
