"""Maximal-update parametrization: settings that are found on a narrow, shallow model serve a wide, deep one.

With weights and rates as usual, a wider model moves further in a step, and its best learning rate falls. muP (Tensor Programs
V, arXiv:2203.03466) scales initial weights and learning rates by width so that every activation moves as far at any width. With
m the width over that of the base model, for Adam:

    embeddings, norms, biases              as in the base model
    matrices of the layers                 std / sqrt(m)    rate / m    decay * m   (rate * decay stays)
    head, routers (output of fixed width)  std / m          rate / m    decay * m
    tied head                              the last norm's gain instead of the head: start / m, rate / m

With l the depth over that of the base model, a layer adds 1 / l of what it computes (CompleteP, arXiv:2505.01618). A factor of a
matrix's output is the same as one of its weights and its rate, for an optimizer that does not see the gradient's scale:

    matrices that write to the residual stream (wo, w2), and their biases    std / l    rate / l    decay * l

So the model itself does not change: no forward has a multiplier, and an exported folder is what every library reads.

Muon's update has the same size in every direction. Scaled by the root of rows over columns, it moves activations as far at any
width (spectral condition, arXiv:2310.17813): rates stay. Scaled to AdamW's RMS (Moonlight), it grows with the root of the width:
rate / sqrt(m). Where rows are fewer than columns and as many at any width, as in a router or in the rows of one attention head,
both move the output by sqrt(m) more: the rate falls by it too.

Limits: all widths of the model grow together (feed-forward, experts, latents, the number of heads), and heads keep their width,
so that the scale of attention scores needs no change. ``optimizer.eps`` is not scaled: keep it far below the gradients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Update = Literal["adam", "rms", "spectral"]
"""How far an optimizer moves a matrix's output: in proportion to the width, to its root, or as far at any width. For matrices
that grow on both sides, these are an update of each element alike, of all directions alike with the elements' RMS fixed, and of
all directions alike with the root of rows over columns."""


@dataclass(frozen=True, slots=True)
class Parametrization:
    """How far a model is from its base model."""

    width: float
    """m, width over base width."""
    depth: float
    """l, layers over base layers."""
    base_layers: int
    """Layers of the base model."""
    tied: bool
    """The head is the embedding's matrix."""

    def init_scale(self, name: str) -> float:
        """What the base model's standard deviation, or a norm's gain, is multiplied by."""
        kind = kind_of(name)
        if kind == "matrix":
            return 1 / math.sqrt(self.width)
        if kind == "writer":
            return 1 / math.sqrt(self.width) / self.depth
        return 1 / self.width if kind in (self._output, "router") else 1.0

    def rate_scale(self, names: Sequence[str], update: Update = "adam") -> float:
        """What the learning rate of a parameter, with all its names, is multiplied by."""
        kinds = [kind_of(name) for name in names]
        kind = "embedding" if "embedding" in kinds else kinds[0]
        if kind == "writer bias":
            return 1 / self.depth
        if kind in ("matrix", "writer", "head", "router"):
            power = {"adam": 1.0, "rms": 0.5, "spectral": 0.0}[update]
            return self.width**-power / (self.depth if kind == "writer" else 1.0)
        return 1 / self.width if kind == self._output else 1.0

    def decay_scale(self, names: Sequence[str], update: Update = "adam") -> float:
        """What its weight decay is multiplied by, so that rate times decay stays."""
        return 1 / self.rate_scale(names, update)

    @property
    def _output(self) -> str:
        """What carries the factor 1 / m of the logits."""
        return "last norm" if self.tied else "head"


Kind = Literal["embedding", "vector", "writer bias", "last norm", "head", "router", "matrix", "writer"]


def kind_of(name: str) -> Kind:
    """What a parameter of a decoder is, by its name.

    Raises:
        ValueError: It is none of a decoder's.
    """
    first, *inner = name.split(".")
    owner, leaf = ([first, *inner])[-2:] if inner else ("", first)
    if first in ("tok_embeddings", "pos_embeddings", "mtp_embeddings"):
        return "embedding"
    if first == "norm" or (first == "mtp" and owner == "norm"):
        return "last norm"
    if first == "lm_head":
        return "head"
    if first in ("layers", "mtp"):
        if leaf == "bias" or owner.endswith(("norm", "_conv")) or owner == "decay":
            return "writer bias" if owner in ("wo", "w2") else "vector"
        if owner == "gate":
            return "router"
        return "writer" if owner in ("wo", "w2") or leaf == "w2" else "matrix"
    raise ValueError(
        f"model.parametrization='mup' does not know how {name} scales with the width: it serves the decoders of text of "
        "titan-train. Set model.parametrization='standard'."
    )


def parametrize(model: Any, *, base_dim: int, base_layers: int) -> None:
    """Give a decoder the parametrization by which `Decoder.init_weights` and the optimizer's groups scale.

    Args:
        model: A shipped decoder, not initialised.
        base_dim: Width of the base model.
        base_layers: Layers of the base model; 0 does not scale by depth.

    Raises:
        ValueError: It is no such decoder.
    """
    for name, _ in model.named_parameters():
        kind_of(name)
    args = model.args
    layers = base_layers or args.num_layers
    model.parametrization = Parametrization(
        args.dim / base_dim, args.num_layers / layers, layers, bool(args.tied_embeddings)
    )
