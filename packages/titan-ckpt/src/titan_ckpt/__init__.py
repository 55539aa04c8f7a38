"""Sharded safetensors checkpoints: atomic, checksummed, resharding, free of pickle.

>>> ck = Checkpointer("runs/a/ckpt", keep_last=2)
>>> state = TrainState(model=model, optim=optim, sched=sched, data=loader, extra={"tokens": 0})
>>> start = ck.restore(state)  # 0 if there is nothing yet
>>> ck.save(step, state)
"""

from titan_ckpt._checkpointer import Checkpointer, SaveJob
from titan_ckpt._errors import CheckpointError, Damage, DamageError
from titan_ckpt._manifest import Manifest
from titan_ckpt._retention import Retention
from titan_ckpt._state import Stateful, TrainState

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Damage",
    "DamageError",
    "Manifest",
    "Retention",
    "SaveJob",
    "Stateful",
    "TrainState",
]
