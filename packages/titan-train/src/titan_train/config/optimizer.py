"""The optimizer and the learning-rate schedule of a run."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titan_train.config.patterns import check_patterns
from titan_train.values import Range, check_values

ADAMW_STATE_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 8.0 / 128}
"""Bytes of AdamW's two running means for each parameter, by ``optimizer.states``; of int8 where rows are multiples of 2048."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    """How Muon updates matrices (optimizer.name = "muon"); all other parameters are AdamW's, with the settings above."""

    lr_scale: Annotated[float, Range(above=0)] = 1.0
    """Muon's learning rate over optimizer.lr. 1 fits scale "moonlight"; "original" wants about 0.02 in all."""

    momentum: Annotated[float, Range(0, below=1, note="the default is 0.95")] = 0.95
    """Decay of the gradient's running mean."""

    nesterov: bool = True
    """Orthogonalize the mean of the gradient and its running mean, not the running mean alone."""

    scale: Literal["moonlight", "original"] = "moonlight"
    """moonlight: 0.2 sqrt(max(rows, columns)), so that lr and weight decay of AdamW fit. original: sqrt(max(1, rows /
    columns))."""

    coefficients: Literal["quintic", "polar_express"] = "quintic"
    """Five Newton-Schulz steps with the same polynomial (quintic), or with five that converge faster (polar_express)."""

    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the Newton-Schulz steps, and of what ranks exchange for them. auto: bf16 on GPUs, and on CPUs that have units for
    it (avx512_bf16, amx_bf16); fp32 on other CPUs, whose products in bf16 take some thirty times as long."""

    normuon: bool = False
    """Divide each row of the update by the root of a running mean of its squares (NorMuon)."""

    normuon_beta2: Annotated[float, Range(0, below=1, note="the default is 0.95")] = 0.95
    """Decay of that running mean."""

    groups: dict[str, Literal["muon", "adamw"]] = field(default_factory=dict)
    """Exceptions by pattern to which matrices Muon takes, such as {"lm_head" = "muon", "projector" = "adamw"}; patterns as in
    lr_scales. By default it takes the matrices of linear layers and experts, without embeddings, head, router and adapters."""

    splits: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Fused matrices by pattern, which are orthogonalized in parts: the proportions of their rows, such as
    {"wqkv" = [4, 1, 1], "gate_up" = [1, 1]}."""

    heads: dict[str, Annotated[int, Range(1)]] = field(default_factory=dict)
    """Matrices by pattern that are orthogonalized by head: the number of equal parts of their rows, such as
    {"attention.wq" = 32, "attention.wk" = 8} of 32 heads that share 8 keys."""

    def __post_init__(self) -> None:
        check_values("optimizer.muon", self)
        for table in ("groups", "splits", "heads"):
            check_patterns(f"optimizer.muon.{table}", getattr(self, table))
        for pattern, parts in self.splits.items():
            if len(parts) < 2 or min(parts) < 1:
                raise ValueError(
                    f"optimizer.muon.splits.{pattern}={list(parts)} is not the proportions of at least two parts. Give positive "
                    "numbers, such as [4, 1, 1]."
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Optimizer, with exceptions by pattern of parameter name."""

    name: Literal["adamw", "muon", "schedule_free", "sgd"] = "adamw"
    """adamw (decoupled weight decay); muon for matrices, with adamw for all else; schedule_free, an adamw that averages its
    weights in place of a decay of the rate; or sgd with momentum beta1 (weight decay added to the gradient)."""

    lr: Annotated[float, Range(above=0)] = 3e-4
    """Peak learning rate; the schedule multiplies it."""

    beta1: Annotated[float, Range(0, below=1, note="the default is 0.9")] = 0.9
    """Decay of the gradient's running mean; of schedule_free the share of the average in the weights that are trained."""

    beta2: Annotated[float, Range(0, below=1, note="the default is 0.95")] = 0.95
    """Decay of the squared gradient's running mean (adamw, schedule_free)."""

    eps: Annotated[float, Range(above=0)] = 1e-8
    """Added to the root of the squared gradient's running mean (adamw, schedule_free)."""

    states: Literal["fp32", "bf16", "int8"] = "fp32"
    """Format of adamw's two running means: 8, 4 or 2 to 3 bytes a parameter. bf16 rounds at random, with the same bits under
    every layout; int8 has a scale for each block of at most 128 elements of a row, and vectors and short rows stay fp32."""

    weights: Literal["fp32", "bf16"] = "fp32"
    """Format of the weights that adamw updates: 4 bytes a parameter, or 2 without a float32 copy; gradients take as many. bf16
    rounds each update at random, with the same bits under every layout, and needs train.dtype = "bf16"."""

    weight_decay: Annotated[float, Range(0, note="0 disables")] = 0.1
    """Weight decay of matrices, embeddings too. Norms, biases, other vectors and A_log have none, unless weight_decays says
    so."""

    cautious: bool = False
    """Decay only those elements of a weight that the update moves towards zero anyway (adamw and muon)."""

    lr_scales: dict[str, Annotated[float, Range(0)]] = field(default_factory=dict)
    """Multipliers of lr by pattern, such as {"tok_embeddings" = 0.5}: regular expressions searched in the full name of
    a parameter, the first that is found counts. Those of the command line come before those of the file, the one given last
    first, and those of a file before those of what it extends. A pattern found in no name is an error, and so is one that may
    not end. A tied weight has one value, by any of its names; patterns that give two of its names different values are an
    error."""

    weight_decays: dict[str, Annotated[float, Range(0)]] = field(default_factory=dict)
    """Weight decay by pattern, such as {"tok_embeddings" = 0.0, "norm" = 0.01}; patterns as in lr_scales."""

    frozen_steps: dict[str, Annotated[int, Range(0)]] = field(default_factory=dict)
    """Steps at the start of the run in which parameters are not trained, by pattern, such as
    {"^(?!vision.projector)" = 200}, which trains the projector first and then all; patterns as in lr_scales."""

    muon: MuonConfig = field(default_factory=MuonConfig)

    fused: Literal["auto", "never"] = "auto"
    """auto takes the fused kernel on CUDA and CPU (sgd: unless weights are sharded); never takes torch's default."""

    @property
    def state_bytes(self) -> tuple[float, float]:
        """Bytes of state for each element of Muon's matrices, and of every other parameter.

        NorMuon's row means, 4 bytes a row, are left out: a row has thousands of elements.
        """
        adamw = ADAMW_STATE_BYTES[self.states]
        other = {"sgd": 4.0 if self.beta1 > 0 else 0.0}.get(self.name, adamw)
        return (4.0 if self.name == "muon" else other), other

    @property
    def weight_bytes(self) -> float:
        """Bytes of each element of a weight, and of its gradient."""
        return 2.0 if self.weights == "bf16" else 4.0

    def __post_init__(self) -> None:
        check_values("optimizer", self)
        if self.cautious and self.name == "sgd":
            raise ValueError(
                "optimizer.cautious with optimizer.name='sgd', which adds weight decay to the gradient: it has no decay of its "
                "own that could be left out. Set cautious=false, or name='adamw'."
            )
        for key, value, what in (
            ("states", self.states, "the format of adamw's running means"),
            ("weights", self.weights, "the format of weights that adamw updates"),
        ):
            if value != "fp32" and self.name != "adamw":
                raise ValueError(
                    f"optimizer.{key}={value!r} with optimizer.name={self.name!r}: it is {what}. Set optimizer.{key}='fp32', or "
                    "optimizer.name='adamw'."
                )
        if self.name == "schedule_free" and (self.cautious or not self.beta1):
            key, value = ("cautious", "false") if self.cautious else ("beta1", "0.9")
            raise ValueError(
                f"optimizer.{key}={getattr(self, key)} with optimizer.name='schedule_free', whose steps mix its average with a "
                f"weight by beta1 and decay all of it. Set optimizer.{key}={value}."
            )
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
