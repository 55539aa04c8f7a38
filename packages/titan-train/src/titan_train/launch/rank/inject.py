"""Carries out a fault plan inside a rank.

A fault leaves a marker in the run's folder before it strikes, so that the restarted run does not meet it again and a
reader can see when it struck.
"""

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_train.config.faults import Fault, struck_file
from titan_train.run_folder import checkpoint_folders


class InjectedFault(RuntimeError):
    """Raised by the fault `raise`."""


class Injector:
    """The faults of one rank."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, run_dir: Path) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._run_dir = run_dir
        self._hooks: list[RemovableHandle] = []
        self.delays: dict[str, float] | None = None
        """Seconds that each collective takes longer, by mesh axis; whoever makes the collectives reads it."""

    def before_step(self, step: int, parts: Sequence[nn.Module], step_s: float) -> None:
        """Strike with what is due before ``step``.

        Args:
            step: The step about to be made.
            parts: The wrapped model, or this rank's stages of it.
            step_s: What a step takes this rank, waiting left out.
        """
        while self._hooks:
            self._hooks.pop().remove()
        for fault in self._faults:
            if fault.kind == "slow":
                if fault.covers(step):
                    time.sleep((fault.factor - 1) * step_s)
            elif fault.kind == "slow-link":
                if self.delays is not None:
                    self.delays[fault.axis] = fault.seconds if fault.covers(step) else 0.0
            elif fault.kind in ("slow-data", "bad-data"):
                continue
            elif fault.kind != "disk-full" and fault.step == step and self._first_time(fault):
                self._strike(fault, parts)

    def before_data(self, step: int) -> None:
        """Hold back the batch of ``step``, if its source is to be slow."""
        for fault in self._faults:
            if fault.kind == "slow-data" and fault.covers(step):
                time.sleep(fault.seconds)

    def data_loaded(self, step: int, batches: list[Any]) -> list[Any]:
        """The microbatches of ``step``, with wrong labels if bad data is due."""
        due = [f for f in self._faults if f.kind == "bad-data" and f.step == step and self._first_time(f)]
        return [_spoilt(batch) for batch in batches] if due else batches

    @contextlib.contextmanager
    def during_save(self, step: int) -> Generator[None]:
        """Refuse this rank's writes inside the block, if a full disk is due."""
        import resource  # not on Windows

        due = [f for f in self._faults if f.kind == "disk-full" and f.step <= step and self._first_time(f)]
        if not due:
            yield
            return
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for child in _children():  # a background saver keeps the limit until it ends with this rank
            resource.prlimit(child, resource.RLIMIT_FSIZE, (1024, limits[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    def _first_time(self, fault: Fault) -> bool:
        file = struck_file(self._run_dir, fault)
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("x", encoding="utf-8") as marker:
                json.dump({"fault": str(fault), "time": time.time()}, marker)
        except FileExistsError:
            return False
        return True

    def _strike(self, fault: Fault, parts: Sequence[nn.Module]) -> None:
        if fault.kind in ("kill", "lose"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "hang":
            while True:
                time.sleep(3600)
        elif fault.kind == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif fault.kind == "raise":
            raise InjectedFault(f"asked for by --faults {str(fault)!r}")
        elif fault.kind == "nan":
            _spoil_one_forward(parts[-1])
        elif fault.kind in ("bit-flip", "stuck-bit"):
            self._hooks.append(_flip_a_bit(parts[0], once=fault.kind == "bit-flip"))
        else:
            assert fault.kind == "corrupt-checkpoint"
            corrupt_newest_checkpoint(self._run_dir)


def corrupt_newest_checkpoint(run_dir: Path) -> Path | None:
    """Flip one bit in the middle of the newest finished checkpoint's largest file; return the file, if there is one."""
    folders = checkpoint_folders(run_dir)
    if not folders:
        return None
    file = max((f for f in folders[next(reversed(folders))].rglob("*.safetensors")), key=lambda f: f.stat().st_size)
    with file.open("r+b") as damaged:
        middle = file.stat().st_size // 2
        damaged.seek(middle)
        byte = damaged.read(1)[0]
        damaged.seek(middle)
        damaged.write(bytes([byte ^ 1]))
    return file


def _spoil_one_forward(model: nn.Module) -> None:
    def spoil(_module: nn.Module, _args: object, output: object) -> object:
        handle.remove()
        return output * float("nan") if isinstance(output, torch.Tensor) else output

    handle = model.register_forward_hook(spoil)


def _flip_a_bit(model: nn.Module, *, once: bool) -> RemovableHandle:
    """Flip the highest bit of the exponent of one activation."""

    def flip(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        if once:
            handle.remove()
        integer, bit = (torch.int32, 30) if output.dtype == torch.float32 else (torch.int16, 14)
        right = output.detach().flatten()[:1].clone()
        wrong = (right.view(integer) ^ (1 << bit)).view(output.dtype)
        change = torch.zeros_like(output).flatten()
        change[:1] = wrong - right
        return output + change.view_as(output)  # added, so that autograd's graph stays

    linear = [module for module in model.modules() if isinstance(module, nn.Linear)][1]
    handle = linear.register_forward_hook(flip)
    return handle


def _spoilt(batch: Any) -> Any:
    """The batch with token 0 for every label; a batch without labels stays."""
    if not hasattr(batch, "labels"):
        return batch
    return dataclasses.replace(batch, labels=batch.labels.clamp(max=0))  # what is ignored is negative


def _children() -> list[int]:
    return [int(word) for task in Path("/proc/self/task").glob("*/children") for word in task.read_text().split()]
