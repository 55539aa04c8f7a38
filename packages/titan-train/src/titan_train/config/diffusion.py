"""Diffusion: the data, how times are drawn, and the samples that a run shows."""

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_train.values import Count, CountOrOff, Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """Flow matching on packed latents (models of the family flux)."""

    source: Literal["shapes", "shards"] = "shapes"
    """shapes draws coloured shapes with captions, for tests and as an example; shards reads latents and text features."""

    path: str = ""
    """Of source shards: folder with train-*.safetensors or train-*.tar, validation-* likewise, and empty.safetensors."""

    images: str = ""
    """What `titan-train data prepare` encodes into that folder: JSONL files of "image" and "text", or tar files; a glob."""

    encoders: str = ""
    """Folder of a diffusers pipeline (text_encoder, text_encoder_2, tokenizer, tokenizer_2, vae) that encodes the images."""

    shard_format: Literal["folder", "webdataset"] = "folder"
    """How prepared shards are written: folder (safetensors files), webdataset (tar files with .npy entries)."""

    shard_samples: Count = 1000
    """Images that are read for one shard; an interrupted preparation repeats at most as many."""

    latent_scale: Annotated[float, Range(above=0, note="1 leaves latents as they are")] = 1.0
    """Latents z of shards are used as latent_scale * (z - latent_shift). `titan-train data prepare` has done that already."""

    latent_shift: float = 0.0
    """See latent_scale. For shards of raw latents of FLUX's autoencoder: 0.3611 and 0.1159."""

    grid: Count = 16
    """Rows and columns of packed image tokens: 16 for 256 pixels, 64 for 1024."""

    text_tokens: Count = 256
    """Text tokens of a sample. model.seq_len must be text_tokens + grid * grid."""

    times: Literal["uniform", "logit_normal"] = "logit_normal"
    """How a sample's time is drawn: evenly in [0, 1], or the sigmoid of a normal number, which favours the middle."""

    logit_mean: float = 0.0
    """Mean of that normal number."""

    logit_std: Annotated[float, Range(above=0)] = 1.0
    """Its standard deviation."""

    shift: bool = True
    """Move times towards noise as images get larger, by the number of packed tokens: mu is 0.5 at 256, 1.15 at 4096."""

    text_dropout: Annotated[float, Range(0, 1)] = 0.1
    """Share of samples trained without text features, 0 to 1; the pooled features are dropped as often, independently."""

    guidance: float = 1.0
    """Guidance scale that a model with that input (flux_dev) is given."""

    sample_images: CountOrOff = 0
    """Images that each validation samples into the run's folder, one per held-out caption; 0 disables."""

    sample_steps: Count = 16
    """Euler steps of a sampled image."""

    sample_scale: float = 3.0
    """Scale of classifier-free guidance when sampling; 1 follows the caption alone."""

    def __post_init__(self) -> None:
        check_values("diffusion", self)
        if self.source == "shards" and not self.path:
            raise ValueError(
                "diffusion.source='shards' needs diffusion.path: the folder that holds the shards, or to which "
                "`titan-train data prepare` writes them."
            )
        if self.source == "shapes" and (self.path or self.images):
            raise ValueError(
                "diffusion.path and diffusion.images are of diffusion.source='shards', but the source is 'shapes'. Set "
                "diffusion.source='shards', or remove them."
            )
        if self.images and not self.encoders:
            raise ValueError(
                f"diffusion.images={self.images!r} needs diffusion.encoders: the folder of a diffusers pipeline whose text "
                "encoders and autoencoder encode them."
            )
