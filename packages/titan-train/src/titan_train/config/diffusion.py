"""Diffusion: the data, how times are drawn, and the samples that a run shows."""

from dataclasses import dataclass
from typing import Literal

from titan_train.config.values import check_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """Flow matching on packed latents (models of the family flux)."""

    source: Literal["shapes"] = "shapes"
    """shapes draws coloured shapes with captions, for tests and as an example."""

    grid: int = 16
    """Rows and columns of packed image tokens: 16 for 256 pixels, 64 for 1024."""

    text_tokens: int = 256
    """Text tokens of a sample. model.seq_len must be text_tokens + grid * grid."""

    times: Literal["uniform", "logit_normal"] = "logit_normal"
    """How a sample's time is drawn: evenly in [0, 1], or the sigmoid of a normal number, which favours the middle."""

    logit_mean: float = 0.0
    """Mean of that normal number."""

    logit_std: float = 1.0
    """Its standard deviation."""

    shift: bool = True
    """Move times towards noise as images get larger, by the number of packed tokens: mu is 0.5 at 256, 1.15 at 4096."""

    text_dropout: float = 0.1
    """Share of samples trained without text features; the pooled features are dropped as often, independently."""

    guidance: float = 1.0
    """Guidance scale that a model with that input (flux_dev) is given."""

    sample_images: int = 0
    """Images that each validation samples into the run's folder, one per held-out caption; 0 disables."""

    sample_steps: int = 16
    """Euler steps of a sampled image."""

    sample_scale: float = 3.0
    """Scale of classifier-free guidance when sampling; 1 follows the caption alone."""

    def __post_init__(self) -> None:
        check_at_least("diffusion.grid", self.grid, 1)
        check_at_least("diffusion.text_tokens", self.text_tokens, 1)
        check_at_least("diffusion.sample_images", self.sample_images, 0)
        check_at_least("diffusion.sample_steps", self.sample_steps, 1)
        if not 0.0 <= self.text_dropout < 1.0:
            raise ValueError(
                f"diffusion.text_dropout={self.text_dropout} is not in [0, 1): it is a share of the samples. 0.1 is usual."
            )
        if self.logit_std <= 0.0:
            raise ValueError(f"diffusion.logit_std={self.logit_std} must be positive; 1 is usual.")
