"""The optimizer and the learning-rate schedule of a run."""

from dataclasses import dataclass, field
from typing import Literal

from titan_train.config.patterns import check_patterns


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer, with exceptions by pattern of parameter name."""

    name: Literal["adamw", "sgd"] = "adamw"
    """adamw (decoupled weight decay), or sgd with momentum beta1 (weight decay added to the gradient)."""

    lr: float = 3e-4
    """Peak learning rate; the schedule multiplies it."""

    beta1: float = 0.9
    """Decay of the gradient's running mean."""

    beta2: float = 0.95
    """Decay of the squared gradient's running mean (adamw)."""

    eps: float = 1e-8
    """Added to the root of the squared gradient's running mean (adamw)."""

    weight_decay: float = 0.1
    """Weight decay of matrices, embeddings too. Norms, biases, other vectors and A_log have none, unless weight_decays says
    so."""

    lr_scales: dict[str, float] = field(default_factory=dict)
    """Multipliers of lr by pattern, such as {"tok_embeddings" = 0.5}: regular expressions searched in the full name of
    a parameter, the first that is found counts. A pattern found in no name is an error, and so is one that may not end. A
    tied weight has one value, by any of its names; patterns that give two of its names different values are an error."""

    weight_decays: dict[str, float] = field(default_factory=dict)
    """Weight decay by pattern, such as {"tok_embeddings" = 0.0, "norm" = 0.01}; patterns as in lr_scales."""

    frozen_steps: dict[str, int] = field(default_factory=dict)
    """Steps at the start of the run in which parameters are not trained, by pattern, such as
    {"^(?!vision.projector)" = 200}, which trains the projector first and then all; patterns as in lr_scales."""

    fused: Literal["auto", "never"] = "auto"
    """auto takes the fused kernel on CUDA and CPU (sgd: unless weights are sharded); never takes torch's default."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr={self.lr} must be positive; the default is 0.0003.")
        for name, default in (("beta1", 0.9), ("beta2", 0.95)):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"optimizer.{name}={value} must be in [0, 1); the default is {default}.")
        if not self.eps > 0:
            raise ValueError(f"optimizer.eps={self.eps} must be positive; the default is 1e-08.")
        if not self.weight_decay >= 0:
            raise ValueError(f"optimizer.weight_decay={self.weight_decay} must be >= 0; 0 turns it off.")
        for table in ("lr_scales", "weight_decays", "frozen_steps"):
            check_patterns(f"optimizer.{table}", getattr(self, table))
            for pattern, value in getattr(self, table).items():
                if not value >= 0:
                    raise ValueError(f"optimizer.{table}.{pattern}={value} must be >= 0; the nearest choice is 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the learning rate rises and falls over train.steps."""

    name: Literal["wsd", "cosine", "constant"] = "wsd"
    """wsd: warm up, hold, decay at the end. cosine: warm up, then decay. constant: warm up, hold."""

    warmup_steps: int = -1
    """Steps over which the rate rises linearly to its peak; -1 takes 2 % of train.steps; 0 starts at the peak."""

    decay_steps: int = -1
    """Steps of wsd's final decay; -1 takes 20 % of train.steps; 0 never decays."""

    decay_shape: Literal["linear", "sqrt", "cosine"] = "sqrt"
    """Shape of wsd's decay over its progress t: 1 - t, 1 - sqrt(t), or (1 + cos(pi t)) / 2."""

    min_lr_factor: float = 0.0
    """Final learning rate as a fraction of the peak, reached at step train.steps."""

    def __post_init__(self) -> None:
        for name, automatic in (("warmup_steps", "2 %"), ("decay_steps", "20 %")):
            value = getattr(self, name)
            if value < -1:
                raise ValueError(f"schedule.{name}={value} must be >= 0, or -1 for {automatic} of train.steps.")
        if not 0 <= self.min_lr_factor <= 1:
            near = 0.0 if self.min_lr_factor < 0 else 1.0
            raise ValueError(
                f"schedule.min_lr_factor={self.min_lr_factor} must be in [0, 1]; the nearest valid choice is {near}."
            )
