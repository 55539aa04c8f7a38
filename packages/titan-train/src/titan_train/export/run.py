"""Export a run's model to one target or several, each compared with the run's model.

Everything is written under a temporary name, and appears when it is complete and every check has passed.
"""

import contextlib
import logging
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch.distributed as dist
from titan_ckpt.comm import ByteComm

from titan_train.export.card import model_card
from titan_train.export.float8 import float8_names
from titan_train.export.gate import Check, Exported, Reference, check_artefact, compute_reference, require_passed
from titan_train.export.gguf.folder import GgufType, check_gguf, gguf_library, write_gguf
from titan_train.export.gguf.tokenizer import check_tokenizer
from titan_train.export.hf_folder import DTYPES, hf_config, write_hf, write_json, write_tokenizer_files
from titan_train.export.hf_model import StreamedHfModel
from titan_train.export.job import AnyDtype, Job, Load, export_job
from titan_train.export.load import TARGETS, read_exported
from titan_train.files import write_atomic
from titan_train.generation import load_run
from titan_train.generation.run import saved_step
from titan_train.models import unwrap
from titan_train.models.hf.lora import save_adapter
from titan_train.models.registry import family_of
from titan_train.run_folder import read_config
from titan_train.task import task_name
from titan_train.trust import remember_machine_code

Target = Literal["hf", "gguf", "onnx", "aoti", "dcp"]
_ONLY = {"float8": "hf", "q8_0": "gguf"}
_logger = logging.getLogger(__name__)
_ROUNDING = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "q8_0": 2**-8}
"""What llama.cpp rounds the activations of its products to: the dtype of the matrix, or 8 bits in blocks."""


def export_run(
    run_dir: str | Path,
    out: str | Path,
    *,
    to: Sequence[Target] = ("hf",),
    step: int | None = None,
    dtype: AnyDtype = "bf16",
    max_shard_bytes: int = 5_000_000_000,
    gate: bool = True,
    group: dist.ProcessGroup | None = None,
    trust_code: bool = False,
    code: Sequence[str] = (),
) -> dict[str, list[Check]]:
    """Export a run's model to a new folder.

    Args:
        run_dir: The run's folder.
        out: The folder to make; must not exist. Several targets become folders in it, named after them.
        to: The targets.
        step: Which checkpoint; None takes the newest. A run that goes on must keep it until the end (``checkpoint.keep_last``).
        dtype: Of the weights. Routing biases stay float32. ONNX and AOTInductor hold these values in float32.
        max_shard_bytes: Start another file before one passes this size (hf).
        gate: Load every artefact and compare it with the run's model, one after the other in memory. Without, hf, gguf and
            dcp take memory for one tensor instead of the model, unless it has adapters or is an average of weights.
        group: Ranks that all call this with the same arguments and see the same file system (gloo). For hf, each writes its
            own files; the run's model is cut over them and the folder read layer by layer, so that none holds the model.
            The first rank alone writes other targets, adapters, averages, and models that cannot be cut over so many ranks.
        trust_code: As in `load_run`.
        code: As in `load_run`.

    Returns:
        The checks by target, all passed; none without ``gate``, and none on ranks other than the first.

    Raises:
        ValueError: ``out`` exists, the model cannot be written to a target, a library is missing, or a check failed.
            Nothing is left at ``out`` then.
    """
    run_dir, out = Path(run_dir), Path(out)
    if out.exists():
        raise ValueError(f"{out} exists. Export to a new folder, so that no stale file stays in it.")
    _check_targets(to, dtype)
    group = None if group is None or group.size() == 1 else group
    if task_name(read_config(run_dir)) == "diffusion":
        from titan_train.export.diffusers_folder import export_diffusers

        return export_diffusers(
            run_dir, out, to=to, step=step, dtype=dtype, max_shard_bytes=max_shard_bytes, gate=gate, group=group
        )
    step = _one_step(run_dir, step, group)
    load = cast(Load, partial(load_run, run_dir, step=step, trust_code=trust_code, code=code))
    checks: dict[str, list[Check]] = {}

    def export(ranks: dist.ProcessGroup | None) -> None:
        parent = out.absolute().parent
        with export_job(run_dir, load, dtype=dtype, max_shard_bytes=max_shard_bytes, scratch=parent) as job:
            _check_model(job, to)
            checks.update(_export(job, out, list(to), ranks, gate=gate))

    reason = None if group is None else _why_one_rank(load, group, to, dtype, gate=gate)
    if group is None or reason is None:
        export(group)
    else:
        if group.rank() == 0:
            _logger.warning("%s. The first of %d ranks exports it alone and holds the model", reason, group.size())
        _on_first(ByteComm(group), partial(export, None), f"exporting to {out}")
    return checks


def _one_step(run_dir: Path, step: int | None, group: dist.ProcessGroup | None) -> int:
    """The step that every rank and target takes, though the run may save another meanwhile. Collective."""
    if group is None:
        return saved_step(run_dir, step)
    found = partial(saved_step, run_dir, step)
    return ByteComm(group).from_rank0(found, f"listing the checkpoints of {run_dir}", lambda err: err)


def _why_one_rank(load: Load, group: dist.ProcessGroup, to: Sequence[str], dtype: str, *, gate: bool) -> str | None:
    """Why ranks cannot share an export; None if they can. Collective."""
    if "hf" not in to:
        return "only --to hf is written by several ranks"
    config = load(device="meta").config
    if config.model.lora_rank:
        return "adapters are merged by one process"
    if config.evaluated_weights != "none":
        return f"the average of weights ({config.evaluated_weights}) is written by one process"
    if not gate:
        return None
    if dtype == "float8":
        return "--dtype float8 is compared by one process, as blocks of 128 x 128 do not fit the ranks' parts"
    try:
        load(device="meta", group=group)
    except ValueError as err:
        return str(err).rstrip(".")
    return None


def _on_first(comm: ByteComm | None, work: Callable[[], None], doing: str) -> None:
    """Do it on the first rank; what it raises there, every rank raises."""
    error: Exception | None = None
    try:
        if comm is None or comm.rank == 0:
            work()
    except Exception as err:
        if comm is None:
            raise
        error = err
    if comm is not None:
        comm.agree(error, doing)


def _export(
    job: Job, out: Path, to: list[Target], group: dist.ProcessGroup | None, *, gate: bool
) -> dict[str, list[Check]]:
    comm = None if group is None else ByteComm(group)
    first = comm is None or comm.rank == 0
    token = secrets.token_hex(4).encode()
    staged = out.parent / f".{out.name}.part-{(comm.broadcast(token) if comm else token).decode()}"
    checks: dict[str, list[Check]] = {}
    on_first = partial(_on_first, comm, doing=f"exporting to {out}")

    def appear() -> None:
        if out.exists():
            raise ValueError(f"{out} has appeared meanwhile: another export has written it. Export to a new folder.")
        (staged if len(to) > 1 else staged / to[0]).rename(out)
        if "aoti" in to:
            folder = out if len(to) == 1 else out / "aoti"
            remember_machine_code(folder, folder / "model.pt2")

    try:
        on_first(lambda: staged.mkdir(parents=True))
        reference = None
        if gate:
            run = job.run
            reference = compute_reference(job.model(group), run.tokenizer.vocab_size, seq_len=run.config.model.seq_len)
        for target in to:
            folder = staged / target
            shared = target == "hf" and group is not None
            if shared:
                _write_hf(folder, job, group)
            else:
                on_first(partial(_write, target, folder, job))
            on_first(partial(_finish, target, folder, job, reference, checks, streamed=shared))
        on_first(appear)
    finally:
        if first:
            shutil.rmtree(staged, ignore_errors=True)
    return checks


def _finish(
    target: Target,
    folder: Path,
    job: Job,
    reference: Reference | None,
    checks: dict[str, list[Check]],
    *,
    streamed: bool,
) -> None:
    checks[target] = [] if reference is None else _prove(target, folder, job, reference, streamed=streamed)
    card = model_card(job.run, family_of(job.run.model), job.name, target, job.dtype, checks[target])
    write_atomic(folder / "README.md", card)


def _check_targets(to: Sequence[str], dtype: str) -> None:
    unknown = [target for target in to if target not in TARGETS]
    if unknown or not to or len(set(to)) < len(to):
        raise ValueError(f"--to {','.join(to)} is not a list of targets. Name some of {', '.join(TARGETS)}, each once.")
    only = _ONLY.get(dtype)
    if only is not None and list(to) != [only]:
        raise ValueError(f"--dtype {dtype} is for --to {only} alone. Export the other targets in a second command.")


def _check_model(job: Job, to: Sequence[str]) -> None:
    """Refuse what a target cannot hold before anything is written."""
    if job.dtype == "float8":
        float8_names(job.run.model, job.family)
    if {"hf", "gguf"}.isdisjoint(to):
        return
    config = hf_config(job.run, job.family, job.stored)  # raises for a model that no class of transformers computes
    if "gguf" in to:
        gguf_library()
        check_gguf(config)
        check_tokenizer(job.run.tokenizer)


def _write_hf(folder: Path, job: Job, group: dist.ProcessGroup | None = None) -> None:
    write_hf(folder, job.run, job.family, job.step, dtype=job.stored, max_shard_bytes=job.max_shard_bytes, group=group)


def _write(target: Target, folder: Path, job: Job) -> None:
    run, add_bos = job.run, bool(job.run.begin_ids)
    if target == "hf":
        _write_hf(folder, job)
        if job.adapted is not None:
            save_adapter(job.adapted, folder / "adapter", base=job.base)
        return
    if target == "gguf":
        source = folder.with_name(f".{folder.name}.hf")
        try:
            _write_hf(source, job)
            write_gguf(
                folder, source, run.tokenizer, name=job.name, dtype=cast("GgufType", job.dtype), add_bos=add_bos,
                template=run.template,
            )  # fmt: skip
        finally:
            shutil.rmtree(source, ignore_errors=True)
    elif target == "onnx":
        from titan_train.export.onnx_folder import write_onnx

        length, begin = run.config.model.seq_len, run.begin_ids
        write_onnx(folder, unwrap(job.model()), step=run.step, seq_len=length, begin_ids=begin)
        family = family_of(run.model)
        with contextlib.suppress(ValueError):  # no class of transformers computes it
            if family is not None:
                write_json(folder / "config.json", hf_config(run, family, "fp32"))  # for Optimum
    elif target == "aoti":
        from titan_train.export.aoti_folder import write_aoti

        write_aoti(folder, unwrap(job.model()), step=run.step, seq_len=run.config.model.seq_len)
    else:
        from titan_train.export.dcp_folder import write_dcp

        write_dcp(folder, job.step, dtype=DTYPES[job.stored])
    write_tokenizer_files(folder, run.tokenizer, run.config.model.seq_len, run.template, add_bos=add_bos)


def _prove(target: Target, folder: Path, job: Job, reference: Reference, *, streamed: bool) -> list[Check]:
    """Run the checks on what was stored, write their table, and refuse if one failed."""
    rounding = _ROUNDING[job.dtype] if target == "gguf" else 0.0
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".offloaded-") as scratch:
        exported = StreamedHfModel(folder, Path(scratch)) if streamed else _load(target, folder, job)
        checks = check_artefact(exported, reference, job.run.tokenizer, rounding=rounding)
        del exported
    require_passed(checks, folder, target=target, step=job.run.step)
    return checks


def _load(target: Target, folder: Path, job: Job) -> Exported:
    if target != "dcp":
        return read_exported(folder)
    from titan_train.export.dcp_folder import DcpModel

    return DcpModel(folder, unwrap(job.model()))
