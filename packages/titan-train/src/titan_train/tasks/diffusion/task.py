"""The task of diffusion models: flow matching, validated at fixed times, sampled with guidance."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from titan_mesh import Mesh
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.data import cache_folder
from titan_train.files import write_atomic
from titan_train.models.arguments import model_args
from titan_train.models.call import computes_on
from titan_train.models.flux.args import FluxArgs
from titan_train.models.flux.rope import TIME_FEATURES
from titan_train.task import LossParts, Task, TaskInputs
from titan_train.tasks.diffusion.batches import VALIDATION_TIMES, FlowBatches, FlowTarget
from titan_train.tasks.diffusion.context import joint_context, plan_joint
from titan_train.tasks.diffusion.flow import shift_of
from titan_train.tasks.diffusion.sampling import image_grid, sample_latents, write_png
from titan_train.tasks.diffusion.shards.features import are_indexed
from titan_train.tasks.diffusion.shards.images import list_images
from titan_train.tasks.diffusion.source import check_source, open_source, prepare_source

SAMPLES_FOLDER = "samples"
"""Where a run's folder keeps the images that it sampled."""


class DiffusionTask(Task):
    """Predict the velocity between an image and noise."""

    keywords = ("positions", "pooled", "time", "guidance", "attention_plan")

    def check(self, config: Config, model: nn.Module) -> None:
        """Refuse sizes of data and model that differ, and layouts that two streams do not have."""
        args = _args(config)
        diffusion, parallel = config.diffusion, config.parallel
        tokens = diffusion.text_tokens + diffusion.grid**2
        if config.model.seq_len != tokens:
            raise ValueError(
                f"model.seq_len={config.model.seq_len} must be diffusion.text_tokens + diffusion.grid^2 = {tokens}: a sample's "
                f"tokens of text and image. Set model.seq_len={tokens}."
            )
        check_source(config, args)
        if config.train.z_loss:
            raise ValueError(
                f"train.z_loss={config.train.z_loss}: the loss of diffusion is a squared error, and has no logits to keep small. "
                "Set train.z_loss=0."
            )
        if parallel.tp > 1 and parallel.sequence_parallel:
            raise ValueError(
                f"parallel.tp={parallel.tp} with sequence_parallel: the two streams of this model are not split over "
                "tensor-parallel ranks. Set parallel.sequence_parallel=false."
            )
        if parallel.cp > 1:
            plan_joint(config, args.num_heads, args.head_dim, 0, torch.float32)

    def is_prepared(self, config: Config) -> bool:
        diffusion = config.diffusion
        return diffusion.source != "shards" or are_indexed(Path(diffusion.path).expanduser(), cache_folder(config.data))

    def open(self, config: Config) -> TaskInputs:
        return DiffusionInputs(config)

    def check_inputs(self, config: Config) -> None:
        if config.diffusion.source == "shards" and config.diffusion.images:
            list_images(config.diffusion.images)

    def prepare(self, config: Config, *, quiet: bool = False) -> None:
        """Encode the images that ``diffusion.images`` names; check the shards, and index tar files."""
        prepare_source(config, _args(config), quiet=quiet)

    def loss(self, config: Config, vocab_size: int | None) -> Callable[[Tensor, Any], Tensor]:
        """The sum of squared errors over all elements, in float32."""
        return lambda velocity, target: (velocity.float() - target.velocity.float()).square().sum()

    def loss_parts(self, config: Config) -> LossParts:
        names = tuple(f"t_{time:g}" for time in VALIDATION_TIMES)
        return LossParts(names, loss_by_time)

    def count(self, batch: Any) -> Tensor:
        velocity = batch.target.velocity
        return torch.tensor(velocity.numel(), device=velocity.device)

    def example(self, config: Config, part: nn.Module, rows: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        args, diffusion, cp = _args(config), config.diffusion, config.parallel.cp
        text, image = diffusion.text_tokens // cp, diffusion.grid**2 // cp
        positions = torch.zeros(1, text + image, 3, dtype=torch.int64)
        dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32  # mixed precision casts what is given

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype)

        if getattr(part, "image_in", None) is None:
            hidden = (
                torch.zeros(rows, image, args.dim),
                torch.zeros(rows, text, args.dim),
                torch.zeros(rows, args.dim),
            )
            return hidden, {"positions": positions}
        keywords = {
            "positions": positions,
            "pooled": zeros(args.pooled_dim),
            "time": zeros(TIME_FEATURES),
        }
        if args.guidance:
            keywords["guidance"] = zeros(TIME_FEATURES)
        return (zeros(image, args.in_channels), zeros(text, args.text_dim)), keywords

    def context(self, config: Config, mesh: Mesh, model: nn.Module, dtype: torch.dtype) -> Any:
        return joint_context(config, mesh, model, dtype)


class DiffusionInputs(TaskInputs):
    """The open data of one run."""

    samples_by_forward = True

    def __init__(self, config: Config) -> None:
        args, diffusion = _args(config), config.diffusion
        source = open_source(config, args)
        self._config, self._channels, self._guided = config, args.in_channels, args.guidance
        self._gallery = source.gallery
        seed = config.run.seed
        self.train = FlowBatches(source.train, diffusion, seed=seed, part="train", guided=args.guidance)
        if source.validation is not None:
            # noise of its own: a model could otherwise know the training samples of the same numbers
            self.validation = FlowBatches(
                source.validation, diffusion, seed=seed + 1, part="validation", guided=args.guidance
            )

    def sample(self, model: nn.Module, run_dir: Path, step: int) -> str | None:
        """Sample captions into ``samples/``: a grid of images and their captions.

        Of shapes, it also says how many images show their caption's colour and place.
        """
        diffusion, gallery = self._config.diffusion, self._gallery
        if not diffusion.sample_images:
            return None
        texts = gallery.texts(diffusion.sample_images)
        latents = sample_latents(
            model,
            texts,
            gallery.empty,
            grid=diffusion.grid,
            channels=self._channels,
            steps=diffusion.sample_steps,
            scale=diffusion.sample_scale,
            mu=shift_of(diffusion.grid**2) if diffusion.shift else 0.0,
            seed=self._config.run.seed,
            guidance=diffusion.guidance if self._guided else None,
            device=computes_on(model),
        )
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return None
        images = gallery.images(latents.cpu().numpy(), computes_on(model))
        folder = run_dir / SAMPLES_FOLDER
        write_png(folder / f"step_{step:08}.png", image_grid(images, columns=8, zoom=gallery.zoom))
        found = {"step": step, **gallery.describe(images)}
        write_atomic(folder / f"step_{step:08}.json", json.dumps(found, indent=1) + "\n")
        return None


def loss_by_time(velocity: Tensor, target: FlowTarget) -> Tensor:
    """The sum of squared errors and the elements of each eighth of [0, 1], ``[8, 2]`` float32."""
    errors = (velocity.float() - target.velocity.float()).square().flatten(1).sum(1)
    elements = torch.full_like(errors, target.velocity[0].numel())
    count = len(VALIDATION_TIMES)
    part = (target.time * count).long().clamp(max=count - 1)
    return errors.new_zeros(count, 2).index_add_(0, part, torch.stack((errors, elements), dim=1))


def _args(config: Config) -> FluxArgs:
    if ":" in config.model.name:
        raise ValueError(
            f"model.name={config.model.name!r}: the task 'diffusion' trains models of the family flux. Name one of them."
        )
    args = model_args(config.model, vocab_size=None)
    if not isinstance(args, FluxArgs):
        raise ValueError(
            f"model.name={config.model.name!r} is not of the family flux, which the task 'diffusion' trains. Leave model.task "
            "empty."
        )
    return args
