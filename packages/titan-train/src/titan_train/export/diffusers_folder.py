"""A run's diffusion model as a folder of diffusers, proven by its own class.

    config.json                            the fields of FluxTransformer2DModel
    diffusion_pytorch_model*.safetensors   in files of 5 GB with an index, streamed from the checkpoint
    parity.json, README.md                 the comparison, and how to load the folder

`FluxTransformer2DModel.from_pretrained` reads it; put in the place of a pipeline's ``transformer``, it is sampled by that
pipeline. Nothing appears before the comparison has passed.
"""

import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from titan_ckpt import export_hf
from torch import Tensor, nn

from titan_train.export.gate import RELATIVE, WITHOUT_PROOF, Check, as_table, require_passed
from titan_train.export.hf_folder import DTYPES
from titan_train.export.job import AnyDtype
from titan_train.files import write_atomic
from titan_train.generation.run import load_model
from titan_train.lazy import require
from titan_train.models.flux.args import FluxArgs
from titan_train.models.flux.diffusers import FLUX_HF
from titan_train.models.flux.rope import grid_positions, time_features
from titan_train.models.hf.lora import merged_step
from titan_train.run_folder import checkpoint_folders

_STEM = "diffusion_pytorch_model"
_TEXT, _ROWS, _COLUMNS = 5, 3, 2
"""Tokens of the samples that are compared: text, and image by row and column."""


def export_diffusers(
    run_dir: Path,
    out: Path,
    *,
    to: Sequence[str],
    step: int | None,
    dtype: AnyDtype,
    max_shard_bytes: int,
    gate: bool,
    group: dist.ProcessGroup | None,
) -> dict[str, list[Check]]:
    """Export a run's diffusion model; arguments and result as of `titan_train.export.run.export_run`.

    Raises:
        ValueError: Another target, dtype or several ranks are asked for; diffusers is not installed; or its class does not
            compute what the run's model computes. Nothing is left at ``out`` then.
    """
    _check(to, dtype, group)
    if gate:
        _diffusers()
    config, model, found = load_model(run_dir, step=step, device="meta")
    args = cast(FluxArgs, model.args)
    staged = out.parent / f".{out.name}.part-{secrets.token_hex(4)}"
    scratch = staged.with_name(f"{staged.name}-average")
    try:
        source = checkpoint_folders(run_dir)[found]
        if config.evaluated_weights != "none":
            source = merged_step(load_model(run_dir, step=found)[1], scratch, None)
        export_hf(
            source,
            staged,
            names=FLUX_HF.names(args),
            dtype=DTYPES[dtype],
            max_shard_bytes=max_shard_bytes,
            config=FLUX_HF.config_of(args),
            stem=_STEM,
        )
        checks = [_compare(run_dir, found, staged, dtype)] if gate else []
        if checks:
            require_passed(checks, staged, target="hf", step=found)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        write_atomic(
            staged / "README.md", _card(run_dir.resolve().name, config.model.name, parameters, dtype, found, checks)
        )
        if out.exists():
            raise ValueError(f"{out} has appeared meanwhile: another export has written it. Export to a new folder.")
        staged.rename(out)
    finally:
        for folder in (staged, scratch):
            shutil.rmtree(folder, ignore_errors=True)
    return {"hf": checks}


def _check(to: Sequence[str], dtype: AnyDtype, group: dist.ProcessGroup | None) -> None:
    if list(to) != ["hf"]:
        raise ValueError(
            f"--to {','.join(to)}: a diffusion model is exported as a folder of diffusers alone, because the other formats hold "
            "text models. Use --to hf."
        )
    if dtype not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"--dtype {dtype}: diffusers reads fp32, bf16 and fp16 of this model. Use one of them.")
    if group is not None:
        raise ValueError(
            f"a diffusion model is written by one process, and these are {group.size()} ranks. Export without torchrun: it "
            "takes memory for one tensor, and for the model where the folder is compared (--no-gate leaves that out)."
        )


@torch.no_grad()
def _compare(run_dir: Path, step: int, folder: Path, dtype: AnyDtype) -> Check:
    """The velocities of two samples by the run's model, with its weights rounded as stored, and by diffusers' class."""
    _, model, _ = load_model(run_dir, step=step)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[dtype]).float()
    args = cast(FluxArgs, model.args)
    batch = _samples(args)
    ours = _velocity(model, args, batch)
    del model
    kind = _diffusers().FluxTransformer2DModel
    theirs = kind.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True, use_safetensors=True).eval()
    image, text, pooled, time, guidance = batch
    places = grid_positions(_TEXT, _ROWS, _COLUMNS).float()
    other = theirs(
        hidden_states=image,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        timestep=time,
        img_ids=places[_TEXT:],
        txt_ids=places[:_TEXT],
        guidance=guidance if args.guidance else None,
        return_dict=False,
    )[0]
    largest = float(ours.abs().max())
    difference = float((ours - other).abs().max())
    return Check(
        "velocities by diffusers",
        f"differ by {difference:.2e} (largest {largest:.3g})",
        f"at most {RELATIVE * largest:.2e}",
        difference <= RELATIVE * largest,
    )


def _samples(args: FluxArgs) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, _ROWS * _COLUMNS, args.in_channels, generator=generator)
    text = torch.randn(2, _TEXT, args.text_dim, generator=generator)
    pooled = torch.randn(2, args.pooled_dim, generator=generator)
    return image, text, pooled, torch.tensor([0.3, 0.85]), torch.tensor([3.5, 1.0])


def _velocity(model: nn.Module, args: FluxArgs, batch: tuple[Tensor, ...]) -> Tensor:
    image, text, pooled, time, guidance = batch
    return model(
        image,
        text,
        positions=grid_positions(_TEXT, _ROWS, _COLUMNS)[None],
        pooled=pooled,
        time=time_features(time),
        guidance=time_features(guidance) if args.guidance else None,
    )


def _card(name: str, model: str, parameters: int, dtype: AnyDtype, step: int, checks: Sequence[Check]) -> str:
    return f"""---
library_name: diffusers
pipeline_tag: text-to-image
---

# {name}

The transformer of a FLUX pipeline, trained with titan-train.

| | |
| --- | --- |
| architecture | FluxTransformer2DModel ({model}) |
| parameters | {parameters:,} |
| weights | {dtype}, of step {step} |

```python
from diffusers import FluxTransformer2DModel

transformer = FluxTransformer2DModel.from_pretrained("PATH")
```

This folder compared with the model of the run:

{as_table(checks)}
"""


def _diffusers() -> Any:
    return require("diffusers", extra="diffusion", purpose="the comparison", otherwise=WITHOUT_PROOF)
