"""Sharded safetensors checkpoints: atomic, checksummed, resharding, free of pickle.

>>> ck = Checkpointer("runs/a/ckpt", keep_last=2)
>>> state = TrainState(model=model, optim=optim, sched=sched, data=loader, extra={"tokens": 0})
>>> start = ck.restore(state)  # 0 if there is nothing yet
>>> ck.save(step, state)

Modules that need torch are imported on first use: the saver process, ``titan-ckpt ls`` and ``titan-ckpt verify`` run
without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from titan_ckpt.errors import CheckpointError, Damage, DamageError, NoIntactStepError, NoSuchStepError
from titan_ckpt.format.manifest import Manifest
from titan_ckpt.interop.key_map import KeyMap, Pair, load_key_map
from titan_ckpt.steps.claim import Process
from titan_ckpt.steps.retention import Retention
from titan_ckpt.storage.paths import RemotePath, StorePath

if TYPE_CHECKING:
    from titan_ckpt.background.client import SaveJob
    from titan_ckpt.checkpointer import Checkpointer
    from titan_ckpt.interop.dcp_import import import_dcp
    from titan_ckpt.interop.dcp_storage import TitanStorageReader, TitanStorageWriter
    from titan_ckpt.interop.hf import export_hf, import_hf
    from titan_ckpt.state.sharding import LocalShard
    from titan_ckpt.state.train_state import Stateful, TrainState

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Damage",
    "DamageError",
    "KeyMap",
    "LocalShard",
    "Manifest",
    "NoIntactStepError",
    "NoSuchStepError",
    "Pair",
    "Process",
    "RemotePath",
    "Retention",
    "SaveJob",
    "Stateful",
    "StorePath",
    "TitanStorageReader",
    "TitanStorageWriter",
    "TrainState",
    "export_hf",
    "import_dcp",
    "import_hf",
    "load_key_map",
]

_LAZY = {
    "Checkpointer": "checkpointer",
    "LocalShard": "state.sharding",
    "SaveJob": "background.client",
    "Stateful": "state.train_state",
    "TitanStorageReader": "interop.dcp_storage",
    "TitanStorageWriter": "interop.dcp_storage",
    "TrainState": "state.train_state",
    "export_hf": "interop.hf",
    "import_dcp": "interop.dcp_import",
    "import_hf": "interop.hf",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
