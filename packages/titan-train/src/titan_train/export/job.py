"""What is exported: a run's checkpoint, its adapters merged, and its model with the values that artefacts store."""

import contextlib
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from titan_ckpt import Checkpointer, Pair, TrainState
from titan_ckpt.interop.hf import ROUTING_BIASES
from torch import nn

from titan_train.export.float8 import float8_parameters
from titan_train.export.gguf.folder import TRANSPOSED, gguf_library, stored_type
from titan_train.export.hf_folder import DTYPES, ExportDtype
from titan_train.files import read_toml
from titan_train.generation import LoadedRun
from titan_train.generation.run import one_rank
from titan_train.models.family import Family
from titan_train.models.hf.folder import PREFIX
from titan_train.models.hf.lora import merge_adapters, merged_step
from titan_train.models.registry import family_of
from titan_train.models.traits import traits_of
from titan_train.run_folder import checkpoint_folders

AnyDtype = Literal["fp32", "bf16", "fp16", "float8", "q8_0"]


class Load(Protocol):
    """Loads the run again; "meta" reads no values."""

    def __call__(self, *, device: str, group: dist.ProcessGroup | None = None) -> LoadedRun: ...


@dataclass(frozen=True, slots=True)
class Job:
    """What is exported, and how."""

    run: LoadedRun
    """Its model is on the meta device."""
    step: Path
    """The checkpoint's folder."""
    name: str
    dtype: AnyDtype
    max_shard_bytes: int
    load: Load
    adapted: Any = None
    """The model with its adapters and values, where it has adapters; ``run`` and ``step`` are then the merged model's."""
    base: str = ""
    """The folder whose weights the adapters belong to."""

    @property
    def family(self) -> Family:
        """The model's, for targets with names of Hugging Face.

        Raises:
            ValueError: It belongs to none.
        """
        return _family(self.run)

    @property
    def stored(self) -> ExportDtype:
        """How tensors are stored before GGUF quantizes them."""
        return "fp32" if self.dtype == "q8_0" else self.dtype

    def model(self, group: dist.ProcessGroup | None = None) -> nn.Module:
        """A model of its own on the CPU, float32, with the values that the artefacts store; cut over ``group``."""
        if self.adapted is not None:
            model = merge_adapters(self.adapted)
        else:
            model = self.load(device="cpu", group=group).model
        _round_weights(model.float(), self)
        return model


@contextlib.contextmanager
def export_job(run_dir: Path, load: Load, *, dtype: AnyDtype, max_shard_bytes: int, scratch: Path) -> Generator[Job]:
    """The job of a run's checkpoint. Merged adapters and averages of weights are first written as a checkpoint in ``scratch``."""
    run = load(device="meta")
    step = checkpoint_folders(run_dir)[run.step]
    job = partial(Job, name=run_dir.resolve().name, dtype=dtype, max_shard_bytes=max_shard_bytes)
    lora = traits_of(run.model).lora is not None
    if not lora and run.config.evaluated_weights == "none":
        yield job(run=run, step=step, load=load)
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".merged-") as folder:
        trained = load(device="cpu").model
        merged = merge_adapters(trained) if lora else trained
        step = merged_step(merged, Path(folder), one_rank())
        run = replace(run, model=merged.to("meta"))
        if lora:
            yield job(run=run, step=step, load=load, adapted=trained, base=_base_of(run_dir, run))
        else:
            yield job(run=run, step=step, load=partial(_load_written, load, Path(folder)))


def _load_written(load: Load, root: Path, *, device: str, group: dist.ProcessGroup | None = None) -> LoadedRun:
    """The run with the values that were written to ``root``: its average changes if it deletes a checkpoint meanwhile."""
    run = load(device=device, group=group)
    with Checkpointer(root, group=one_rank()) as checkpointer:
        checkpointer.restore(TrainState(model=run.model, rng=False))
    return run


def _base_of(run_dir: Path, run: LoadedRun) -> str:
    """The folder of the weights before adapters, as the run's file names it: the run's own copy holds no weights."""
    init = run.config.model.init
    name = init if init.startswith(PREFIX) else read_toml(run_dir / "config.toml")["model"]["name"]
    return str(name).removeprefix(PREFIX)


def _family(run: LoadedRun) -> Family:
    family = family_of(run.model)
    if family is None:
        raise ValueError(
            f"model.name={run.config.model.name!r} belongs to no registered family, so its names on Hugging Face are unknown. "
            "Register a family with a key map (see the guide on adding a model family), or export "
            "--to dcp, which keeps the model's own names."
        )
    return family


def _round_weights(model: nn.Module, job: Job) -> None:
    """Give the model, in float32, the values that the artefacts store."""
    float8 = float8_parameters(job.run.model, job.family) if job.dtype == "float8" else frozenset[str]()
    names: Any = None
    if job.dtype == "q8_0":
        model_args: Any = job.run.model.args
        names = job.family.load_hf().names(model_args)
    for name, parameter in model.named_parameters():
        if name.endswith(ROUTING_BIASES):
            continue
        if name in float8:
            parameter.data = _through_float8(parameter.data)
        elif job.dtype == "q8_0":
            parameter.data = _through_q8(parameter.data, *names.match_native(name))
        else:
            parameter.data = parameter.data.to(DTYPES[job.stored]).float()


def _through_float8(values: torch.Tensor) -> torch.Tensor:
    from titan_ckpt.interop.float8 import dequantize, quantize

    matrices = values.reshape(-1, *values.shape[-2:])
    return torch.stack([dequantize(*quantize(matrix)) for matrix in matrices]).view(values.shape)


def _through_q8(values: torch.Tensor, pair: Pair, letters: Mapping[str, str]) -> torch.Tensor:
    quants, kind = gguf_library().quants, gguf_library().GGMLQuantizationType.Q8_0
    name = pair.hf.format(**{"j": 0, **letters})
    turned = pair.transposed != name.endswith(TRANSPOSED)  # GGUF turns these back
    laid = values.mT.contiguous() if turned else values
    match stored_type(name, laid.shape, "q8_0"):
        case "fp32":
            return values
        case "fp16":
            return values.half().float()
        case _:
            found = torch.from_numpy(quants.dequantize(quants.quantize(laid.numpy(), kind), kind))
            return found.mT.contiguous() if turned else found
