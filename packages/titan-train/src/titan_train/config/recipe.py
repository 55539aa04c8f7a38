"""What surrounds the optimizer of a long run: steps that are left out, and averages of weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from titan_train.values import Count, Range, check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikesConfig:
    """What happens to steps whose gradient is far larger than usual."""

    sigma: Annotated[float, Range(0, note="0 disables, 6 to 10 is usual")] = 0.0
    """Skip a step whose gradient norm exceeds the mean of the last ones by so many standard deviations; 0 disables."""

    window: Annotated[int, Range(2)] = 128
    """Steps whose norms are compared with; none is skipped before so many were made."""

    most: Count = 5
    """Skipped steps in a row after which the norms are taken as the new usual, or the run rewinds."""

    rewind: Annotated[int, Range(0, note="0 goes on without")] = 0
    """Steps to go back then: the newest checkpoint that is so many steps older is restored, and training continues with the data
    after the spike (PaLM: 100); 0 goes on without."""

    def __post_init__(self) -> None:
        check_values("spikes", self)
        if self.rewind and not self.sigma:
            raise ValueError(
                f"spikes.rewind={self.rewind} without spikes.sigma: no step counts as a spike. Set spikes.sigma too."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MTPConfig:
    """Multi-token prediction: how much the modules of model.args.mtp_depth count. Their losses are not in the reported loss."""

    weight: Annotated[float, Range(0, note="DeepSeek-V3 begins with 0.3")] = 0.3
    """Weight of the mean of the modules' losses in the gradient, beside 1 for the next token's."""

    late_weight: Annotated[float, Range(0, note="DeepSeek-V3 ends with 0.1")] = 0.1
    """The same in the last part of the run."""

    late_from: Annotated[float, Range(0, 1, note="DeepSeek-V3 changes at 0.68, 10 of its 14.8 T tokens")] = 0.68
    """Where that part begins, as a share of train.steps; 1 never takes late_weight."""

    def __post_init__(self) -> None:
        check_values("mtp", self)

    def weight_at(self, step: int, total: int) -> float:
        """The weight in ``step``, from 1 to ``total``."""
        return self.late_weight if step > self.late_from * total else self.weight


@dataclass(frozen=True, kw_only=True, slots=True)
class QKClipConfig:
    """A bound on attention logits."""

    threshold: Annotated[float, Range(above=0, also=0, note="0 disables, 100 is Kimi K2's")] = 0.0
    """After each step, shrink the query and key weights of heads whose largest attention logit exceeded this (QK-clip); 0
    disables."""

    def __post_init__(self) -> None:
        check_values("qk_clip", self)


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageConfig:
    """Averages of the weights over steps, and who uses them."""

    ema_decay: Annotated[float, Range(0, below=1, note="0 disables, 0.999 is usual")] = 0.0
    """Keep an exponential moving average of the trained weights in float32, sharded like them: what one update leaves of the
    old average. 0 disables."""

    ema_every: Count = 1
    """Steps between updates of the moving average."""

    checkpoints: Annotated[int, Range(2)] = 5
    """With use = "checkpoints": average the weights of so many newest checkpoints, or of all if there are fewer."""

    use: Literal["none", "ema", "checkpoints"] = "none"
    """What validation, export, eval, generate and serve take: the weights as they are (none), their moving average (ema), or the
    mean over the newest checkpoints. Training itself does not change."""

    def __post_init__(self) -> None:
        check_values("average", self)
        if self.use == "ema" and not self.ema_decay:
            raise ValueError(
                "average.use='ema' without average.ema_decay: there is no moving average. Set it, such as to 0.999."
            )
