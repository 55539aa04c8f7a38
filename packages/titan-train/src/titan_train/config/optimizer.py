"""The optimizer and the learning-rate schedule of a run."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_train.config.patterns import check_patterns
from titan_train.values import Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer, with exceptions by pattern of parameter name."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw (decoupled weight decay), or sgd with momentum beta1 (weight decay added to the gradient)."""

    lr: Annotated[float, Range(above=0)] = 3e-4
    """Peak learning rate; the schedule multiplies it."""

    beta1: Annotated[float, Range(0, below=1, note="the default is 0.9")] = 0.9
    """Decay of the gradient's running mean."""

    beta2: Annotated[float, Range(0, below=1, note="the default is 0.95")] = 0.95
    """Decay of the squared gradient's running mean (adamw)."""

    eps: Annotated[float, Range(above=0)] = 1e-8
    """Added to the root of the squared gradient's running mean (adamw)."""

    weight_decay: Annotated[float, Range(0, note="0 disables")] = 0.1
    """Weight decay of matrices, embeddings too. Norms, biases, other vectors and A_log have none, unless weight_decays says
    so."""

    lr_scales: dict[str, Annotated[float, Range(0)]] = field(default_factory=dict)
    """Multipliers of lr by pattern, such as {"tok_embeddings" = 0.5}: regular expressions searched in the full name of
    a parameter, the first that is found counts. A pattern found in no name is an error, and so is one that may not end. A
    tied weight has one value, by any of its names; patterns that give two of its names different values are an error."""

    weight_decays: dict[str, Annotated[float, Range(0)]] = field(default_factory=dict)
    """Weight decay by pattern, such as {"tok_embeddings" = 0.0, "norm" = 0.01}; patterns as in lr_scales."""

    frozen_steps: dict[str, Annotated[int, Range(0)]] = field(default_factory=dict)
    """Steps at the start of the run in which parameters are not trained, by pattern, such as
    {"^(?!vision.projector)" = 200}, which trains the projector first and then all; patterns as in lr_scales."""

    fused: Literal["auto", "never"] = "auto"
    """auto takes the fused kernel on CUDA and CPU (sgd: unless weights are sharded); never takes torch's default."""

    def __post_init__(self) -> None:
        check_values("optimizer", self)
        for table in ("lr_scales", "weight_decays", "frozen_steps"):
            check_patterns(f"optimizer.{table}", getattr(self, table))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the learning rate rises and falls over train.steps."""

    name: Literal["wsd", "cosine", "constant"] = "wsd"
    """wsd: warm up, hold, decay at the end. cosine: warm up, then decay. constant: warm up, hold."""

    warmup_steps: Annotated[int, Range(0, also=-1, note="-1 takes 2 % of train.steps")] = -1
    """Steps over which the rate rises linearly to its peak; -1 takes 2 % of train.steps; 0 starts at the peak."""

    decay_steps: Annotated[int, Range(0, also=-1, note="-1 takes 20 % of train.steps")] = -1
    """Steps of wsd's final decay; -1 takes 20 % of train.steps; 0 never decays."""

    decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """Shape of wsd's decay over its progress t: 1 - t, 1 - sqrt(t), or (1 + cos(pi t)) / 2."""

    min_lr_factor: Annotated[float, Range(0, 1)] = 0.0
    """Final learning rate as a fraction of the peak, reached at step train.steps."""

    def __post_init__(self) -> None:
        check_values("schedule", self)
