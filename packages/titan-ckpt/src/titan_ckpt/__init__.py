"""Sharded safetensors checkpoints: atomic, checksummed, resharding, free of pickle.

>>> ck = Checkpointer("runs/a/ckpt", keep_last=2)
>>> state = TrainState(model=model, optim=optim, sched=sched, data=loader, extra={"tokens": 0})
>>> start = ck.restore(state)  # 0 if there is nothing yet
>>> ck.save(step, state)

What needs torch is imported when it is first used, so that the saver process and the command line's ``ls`` and
``verify`` start without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from titan_ckpt._errors import CheckpointError, Damage, DamageError
from titan_ckpt._manifest import Manifest
from titan_ckpt._names import DEEPSEEK, KEY_MAPS, LLAMA, QWEN3, KeyMap, Pair
from titan_ckpt._retention import Retention
from titan_ckpt._storage import RemotePath, StorePath

if TYPE_CHECKING:
    from titan_ckpt._checkpointer import Checkpointer
    from titan_ckpt._dcp_import import import_dcp
    from titan_ckpt._dcp_storage import TitanStorageReader, TitanStorageWriter
    from titan_ckpt._hf import export_hf, import_hf
    from titan_ckpt._layout import LocalShard
    from titan_ckpt._save_job import SaveJob
    from titan_ckpt._state import Stateful, TrainState

__all__ = [
    "DEEPSEEK",
    "KEY_MAPS",
    "LLAMA",
    "QWEN3",
    "CheckpointError",
    "Checkpointer",
    "Damage",
    "DamageError",
    "KeyMap",
    "LocalShard",
    "Manifest",
    "Pair",
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
]

_LAZY = {
    "Checkpointer": "_checkpointer",
    "LocalShard": "_layout",
    "SaveJob": "_async",
    "Stateful": "_state",
    "TitanStorageReader": "_dcp_storage",
    "TitanStorageWriter": "_dcp_storage",
    "TrainState": "_state",
    "export_hf": "_hf",
    "import_dcp": "_dcp_import",
    "import_hf": "_hf",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
