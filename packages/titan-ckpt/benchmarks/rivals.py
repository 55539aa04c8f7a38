"""The other ways to save the same tensors, behind one shape, for `save_load.py`.

Each rival saves and loads a plain dictionary of CPU tensors on one rank, as its documentation says to for speed:
buffers of asynchronous saves are kept from save to save where it can do that.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

Plain = dict[str, Tensor]


@dataclass(frozen=True)
class Rival:
    """One way to save: ``save(step)`` returns what waits for the commit, None if that has happened."""

    name: str
    save: Callable[[int], Callable[[], Any] | None]
    load: Callable[[], Any] | None = None


def rivals(root: Path, plain: Plain, target: Plain, stack: ExitStack) -> Iterator[Rival]:
    """Every rival that can be had here; ``stack`` closes what they open."""
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 1), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    yield Rival(
        "dcp",
        lambda step: dcp.save(plain, checkpoint_id=root / "dcp", no_dist=True) and None,
        lambda: dcp.load(target, checkpoint_id=root / "dcp", no_dist=True),
    )
    yield Rival(
        "dcp hf writer",
        lambda step: dcp.save(plain, storage_writer=HuggingFaceStorageWriter(str(root / "hf")), no_dist=True) and None,
    )
    for name, kind, staged in (
        ("dcp thread", AsyncCheckpointerType.THREAD, False),
        ("dcp thread, kept buffers", AsyncCheckpointerType.THREAD, True),
        ("dcp process", AsyncCheckpointerType.PROCESS, True),
    ):
        options: dict[str, Any] = {"async_checkpointer_type": kind}
        if staged:
            stager = DefaultStager(StagingOptions(False, True, False, False))
            stack.callback(stager.close)
            options["async_stager"] = stager
        yield Rival(name, _async_dcp(plain, root / name.replace(" ", "-"), options))
    yield from _torch_checkpointing(root, plain, target, stack)


def _async_dcp(plain: Plain, folder: Path, options: dict[str, Any]) -> Callable[[int], Callable[[], Any]]:
    def save(step: int) -> Callable[[], Any]:
        handle = dcp.async_save(plain, checkpoint_id=folder, **options)
        staged = getattr(handle, "staging_completion", None)
        if staged is not None:
            staged.result()
        return getattr(handle, "upload_completion", handle).result

    return save


def _torch_checkpointing(root: Path, plain: Plain, target: Plain, stack: ExitStack) -> Iterator[Rival]:
    try:
        from torch_checkpointing import CheckpointManager
    except ImportError:
        print("torch_checkpointing is not installed: left out")
        return
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig

    sync = CheckpointManager(CheckpointManager.Config.with_sync_save())
    # its process imports torch, which takes longer than the 30 s it allows where many do so at once
    patient = CheckpointProcessConfig(subprocess_init_timeout_secs=600)
    behind = CheckpointManager(CheckpointManager.Config(save=AsyncCheckpointSaverConfig(process_config=patient)))
    stack.callback(sync.close)
    stack.callback(behind.close)
    saved: list[str] = []

    def save(step: int) -> None:
        saved.append(str(root / f"tc-{step}-{time.monotonic_ns()}"))  # an existing folder is refused
        sync.save(saved[-1], {"model": plain})

    def save_behind(step: int) -> Callable[[], Any]:
        done = behind.save(str(root / f"tca-{step}-{time.monotonic_ns()}"), {"model": plain})
        assert done is not None
        with behind.lock():  # as before the optimizer's step
            pass
        return done.result

    yield Rival("torch_checkpointing", save, lambda: sync.load(saved[-1], into={"model": target}))
    yield Rival("torch_checkpointing async", save_behind)


def version_of_torch_checkpointing() -> str | None:
    """Its version; None where it is not installed."""
    try:
        import torch_checkpointing
    except ImportError:
        return None
    return str(torch_checkpointing.__version__)
