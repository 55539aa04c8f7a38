"""Lightning with titan-ckpt: ``Trainer(plugins=[TitanIO()])``; callbacks and ``ckpt_path=`` as ever."""

import shutil
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO
from titan_ckpt import Checkpointer, TrainState


class TitanIO(CheckpointIO):
    """Writes what Lightning puts into a checkpoint: digested, in one instant, without pickle."""

    def _open(self, path) -> Checkpointer:
        alone = None  # Lightning writes on one rank, and reads on each by itself
        if dist.is_initialized():
            alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return Checkpointer(path, group=alone)

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        with self._open(path) as checkpointer:
            checkpointer.save(0, TrainState(extra={"checkpoint": checkpoint}, rng=False))

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        state = TrainState(rng=False)
        self._open(path).restore(state, 0)
        return state.extra["checkpoint"]

    def remove_checkpoint(self, path) -> None:
        shutil.rmtree(Path(path), ignore_errors=True)
