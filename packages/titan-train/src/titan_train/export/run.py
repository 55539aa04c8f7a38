"""Export a run's model to one target or several, each compared with the run's model.

Everything is written under a temporary name, and appears when it is complete and every check has passed.
"""

import copy
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from titan_train.export.card import model_card
from titan_train.export.float8 import float8_names, is_float8
from titan_train.export.gate import Check, Exported, check_artefact
from titan_train.export.gguf.folder import GgufType, check_gguf, gguf_library, write_gguf
from titan_train.export.hf_folder import (
    DTYPES,
    ExportDtype,
    hf_config,
    write_hf,
    write_json,
    write_tokenizer_files,
)
from titan_train.export.load import TARGETS, read_exported
from titan_train.files import write_atomic
from titan_train.generation import LoadedRun, load_run
from titan_train.models import unwrap
from titan_train.models.family import Family
from titan_train.models.registry import family_of
from titan_train.run_folder import checkpoint_folders
from titan_train.trust import remember_machine_code

Target = Literal["hf", "gguf", "onnx", "aoti", "dcp"]
AnyDtype = Literal["fp32", "bf16", "fp16", "float8", "q8_0"]
_ONLY = {"float8": "hf", "q8_0": "gguf"}
_ROUNDING = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "q8_0": 2**-8}
"""What llama.cpp rounds the activations of its products to: the dtype of the matrix, or 8 bits in blocks."""


@dataclass(frozen=True, slots=True)
class _Export:
    """What is exported, and how."""

    run: LoadedRun
    family: Family
    name: str
    step: Path
    dtype: AnyDtype
    max_shard_bytes: int

    @property
    def stored(self) -> ExportDtype:
        """How tensors are stored before GGUF quantizes them."""
        return "fp32" if self.dtype == "q8_0" else self.dtype


def export_run(
    run_dir: str | Path,
    out: str | Path,
    *,
    to: Sequence[Target] = ("hf",),
    step: int | None = None,
    dtype: AnyDtype = "bf16",
    max_shard_bytes: int = 5_000_000_000,
    gate: bool = True,
    trust_code: bool = False,
    code: Sequence[str] = (),
) -> dict[str, list[Check]]:
    """Export a run's model to a new folder.

    Args:
        run_dir: The run's folder.
        out: The folder to make; must not exist. Several targets become folders in it, named after them.
        to: The targets.
        step: Which checkpoint; None takes the newest.
        dtype: Of the weights. Routing biases stay float32. ONNX and AOTInductor hold these values in float32.
        max_shard_bytes: Start another file before one passes this size (hf).
        gate: Load every artefact and compare it with the run's model. Without, hf, gguf and dcp take memory for one
            tensor instead of the model.
        trust_code: As in `load_run`.
        code: As in `load_run`.

    Returns:
        The checks by target, all passed; none without ``gate``.

    Raises:
        ValueError: ``out`` exists, the model cannot be written to a target, a library is missing, or a check failed.
            Nothing is left at ``out`` then.
    """
    run_dir, out = Path(run_dir), Path(out)
    if out.exists():
        raise ValueError(f"{out} exists. Export to a new folder, so that no stale file stays in it.")
    _check_targets(to, dtype)
    whole = gate or not {"onnx", "aoti"}.isdisjoint(to)
    run = load_run(run_dir, step=step, device="cpu" if whole else "meta", trust_code=trust_code, code=code)
    job = _Export(run, _family(run), run_dir.name, checkpoint_folders(run_dir)[run.step], dtype, max_shard_bytes)
    _check_model(job, to)
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.parent / f".{out.name}.part-{secrets.token_hex(4)}"
    try:
        if whole:
            _round_weights(job)
        checks: dict[str, list[Check]] = {}
        for target in to:
            folder = staged if len(to) == 1 else staged / target
            folder.parent.mkdir(parents=True, exist_ok=True)
            _write(target, folder, job)
            checks[target] = _prove(target, folder, job) if gate else []
            card = model_card(run, job.family, job.name, target, dtype, checks[target])
            write_atomic(folder / "README.md", card)
        staged.rename(out)
        if "aoti" in to:
            folder = out if len(to) == 1 else out / "aoti"
            remember_machine_code(folder, folder / "model.pt2")
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return checks


def _check_targets(to: Sequence[str], dtype: str) -> None:
    unknown = [target for target in to if target not in TARGETS]
    if unknown or not to or len(set(to)) < len(to):
        raise ValueError(f"--to {','.join(to)} is not a list of targets. Name some of {', '.join(TARGETS)}, each once.")
    only = _ONLY.get(dtype)
    if only is not None and list(to) != [only]:
        raise ValueError(f"--dtype {dtype} is for --to {only} alone. Export the other targets in a second command.")


def _family(run: LoadedRun) -> Family:
    family = family_of(run.model)
    if family is None:
        raise ValueError(
            f"model.name={run.config.model.name!r} belongs to no registered family, so its names on Hugging Face are unknown. "
            "Register a family with a key map (see the guide on adding a model family)."
        )
    return family


def _check_model(job: _Export, to: Sequence[str]) -> None:
    """Refuse what a target cannot hold before anything is written."""
    if job.dtype == "float8":
        float8_names(job.run.model, job.family)
    if "gguf" in to:
        gguf_library()
        check_gguf(hf_config(job.run, job.family, job.stored))


def _write(target: Target, folder: Path, job: _Export) -> None:
    run = job.run
    if target == "hf":
        write_hf(folder, run, job.family, job.step, dtype=job.stored, max_shard_bytes=job.max_shard_bytes)
        return
    if target == "gguf":
        source = folder.with_name(f".{folder.name}.hf")
        try:
            write_hf(source, run, job.family, job.step, dtype=job.stored, max_shard_bytes=job.max_shard_bytes)
            write_gguf(folder, source, run.tokenizer, name=job.name, dtype=cast("GgufType", job.dtype))
        finally:
            shutil.rmtree(source, ignore_errors=True)
    elif target == "onnx":
        from titan_train.export.onnx_folder import write_onnx

        write_onnx(folder, copy.deepcopy(unwrap(run.model)), step=run.step)
    elif target == "aoti":
        from titan_train.export.aoti_folder import write_aoti

        write_aoti(folder, copy.deepcopy(unwrap(run.model)), step=run.step)
    else:
        from titan_train.export.dcp_folder import write_dcp

        write_dcp(folder, job.step, dtype=DTYPES[job.stored])
    write_tokenizer_files(folder, run.tokenizer, run.config.model.seq_len, run.template)


def _round_weights(job: _Export) -> None:
    """Give the run's model, in float32, the values that the artefacts store."""
    job.run.model.float()
    for name, parameter in job.run.model.named_parameters():
        if job.dtype == "float8" and is_float8(name, job.run.model, job.family):
            parameter.data = _through_float8(parameter.data)
        elif job.dtype == "q8_0":
            parameter.data = _through_q8(parameter.data, name)
        else:
            parameter.data = parameter.data.to(DTYPES[job.stored]).float()


def _through_float8(values: torch.Tensor) -> torch.Tensor:
    from titan_ckpt.interop.float8 import dequantize, quantize

    matrices = values.reshape(-1, *values.shape[-2:])
    return torch.stack([dequantize(*quantize(matrix)) for matrix in matrices]).view(values.shape)


def _through_q8(values: torch.Tensor, name: str) -> torch.Tensor:
    quants = gguf_library().quants
    kind = gguf_library().GGMLQuantizationType
    if values.ndim == 1 or "router" in name or "pos_embeddings" in name:
        return values
    if values.shape[-1] % 32 or ".wkv_b." in name:
        return values.half().float()
    return torch.from_numpy(quants.dequantize(quants.quantize(values.numpy(), kind.Q8_0), kind.Q8_0))


def _load(target: Target, folder: Path, job: _Export) -> Exported:
    if target != "dcp":
        return read_exported(folder)
    from titan_train.export.dcp_folder import DcpModel

    return DcpModel(folder, unwrap(job.run.model))


def _prove(target: Target, folder: Path, job: _Export) -> list[Check]:
    """Run the checks on what was stored, write their table, and refuse if one failed."""
    run = job.run
    checks = check_artefact(
        _load(target, folder, job),
        run.model,
        run.tokenizer,
        seq_len=run.config.model.seq_len,
        rounding=_ROUNDING[job.dtype] if target == "gguf" else 0.0,
    )
    write_json(
        folder / "parity.json", {"step": run.step, "target": target, "checks": [asdict(check) for check in checks]}
    )
    failed = [check for check in checks if not check.passed]
    if failed:
        rows = "; ".join(f"{check.name}: {check.measured}, required {check.required}" for check in failed)
        raise ValueError(
            f"--to {target}: the exported folder does not compute what the run's model computes ({rows}), so it was not written. "
            "Please report this; --no-gate writes the folder all the same."
        )
    return checks
