"""What is cast to float8, at which granularity, and which products take it: the recipe, a plain frozen value.

A linear layer is three products. With ``x [M, K]``, ``w [N, K]`` and the output's gradient ``g [M, N]``::

    y  = x · wᵀ      sums over K     forward
    dx = g · w       sums over N     input gradient
    dw = gᵀ · x      sums over M     weight gradient

A scale must be constant along the sum it takes part in, or be folded in as the sum proceeds (blocks of 128). So each
tensor is cast along rows for one product and along columns for another, and a recipe says how:

=============== ============ ============ ============ =======================================================
recipe          x            w            g            note
=============== ============ ============ ============ =======================================================
tensorwise      tensor e4m3  tensor e4m3  tensor e5m2  one scale each; the same codes serve rows and columns
rowwise         row e4m3     row e4m3     row e4m3     one scale per row, another per column
rowwise_gw_hp   row e4m3     row e4m3     row e4m3     weight gradient in high precision: no column casts of x, g
blockwise       1x128 e4m3   128x128 e4m3 1x128 e4m3   DeepSeek-V3 (arXiv:2412.19437, section 3.3); Hopper's best
mxfp8           1x32 e4m3    1x32 e4m3    1x32 e4m3    OCP microscaling (arXiv:2310.10537); e8m0 scales
=============== ============ ============ ============ =======================================================
"""

from dataclasses import dataclass
from typing import Literal

import torch

Granularity = Literal["tensor", "row", "block1x128", "block128", "mx32"]
"""How many values share a scale."""

_GRANULARITIES: tuple[Granularity, ...] = ("tensor", "row", "block1x128", "block128", "mx32")
_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How one tensor is cast to float8."""

    gran: Granularity
    """How many values share a scale: a tensor, a row, 1x128 values, 128x128 values, or 1x32 (microscaling)."""
    dtype: torch.dtype = torch.float8_e4m3fn
    """``torch.float8_e4m3fn`` (3 bits of mantissa) or ``torch.float8_e5m2`` (2, and a wider range)."""
    pow2: bool = True
    """Scales are powers of two, found by integer arithmetic: multiplying by one is exact."""

    def __post_init__(self) -> None:
        if self.gran not in _GRANULARITIES:
            raise ValueError(f"gran={self.gran!r} is not a granularity; choose one of {', '.join(_GRANULARITIES)}.")
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"dtype={self.dtype} is not a float8 format of matrix products; choose torch.float8_e4m3fn or "
                "torch.float8_e5m2."
            )
        if self.gran == "mx32" and not self.pow2:
            raise ValueError("mx32 scales are stored as exponents (e8m0), so pow2=False cannot be kept; use pow2=True.")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Which casts a layer makes and which products take them. Hashable; compare by value."""

    name: str
    """For reports and errors."""
    x: Scaling
    """The input, ``[M, K]``."""
    w: Scaling
    """The weight, ``[N, K]``."""
    g: Scaling
    """The gradient of the output, ``[M, N]``."""
    wgrad: Literal["fp8", "hp"] = "fp8"
    """The weight gradient in float8, or from the input and gradient in high precision (which are then kept)."""
    fast_accum: tuple[bool, bool, bool] = (True, False, False)
    """Whether the forward, the input gradient and the weight gradient may use Hopper's short accumulator (about 14 bits). The
    last sums over all tokens, where the error would grow to percents. Only products of tensor and row scales have one: blocks
    are promoted to float32 every 128 values, whatever this says."""

    def __post_init__(self) -> None:
        grans = (self.x.gran, self.w.gran, self.g.gran)
        if grans not in _COMBINATIONS:
            raise ValueError(
                f"recipe {self.name!r} scales (x, w, g) by {grans}, which no matrix product supports; choose one of "
                f"{', '.join(str(c) for c in _COMBINATIONS)}."
            )
        if self.x.dtype == self.w.dtype == torch.float8_e5m2 or self.g.dtype == self.x.dtype == torch.float8_e5m2:
            raise ValueError(
                f"recipe {self.name!r} multiplies e5m2 by e5m2, which no GPU supports; use e4m3 for x and w. Only g may be e5m2."
            )
        if self.g.dtype == self.w.dtype == torch.float8_e5m2:
            raise ValueError(f"recipe {self.name!r} multiplies e5m2 by e5m2 in the input gradient; use e4m3 for w.")

    @staticmethod
    def get(recipe: "str | Recipe") -> "Recipe":
        """The recipe of that name (or of torchao's name for it); a `Recipe` is returned as it is.

        Raises:
            ValueError: If the name is unknown.
        """
        if isinstance(recipe, Recipe):
            return recipe
        found = RECIPES.get(_ALIASES.get(recipe, recipe))
        if found is None:
            raise ValueError(
                f"recipe={recipe!r} is unknown; choose one of {', '.join(RECIPES)} (or torchao's {', '.join(_ALIASES)})."
            )
        return found

    @property
    def fsdp_all_gather(self) -> bool:
        """Weights can be gathered in float8: the same codes serve forward and backward, and scales do not span ranks."""
        return self.w.gran in ("tensor", "block128")


_COMBINATIONS: tuple[tuple[Granularity, Granularity, Granularity], ...] = (
    ("tensor", "tensor", "tensor"),
    ("row", "row", "row"),
    ("block1x128", "block128", "block1x128"),
    ("mx32", "mx32", "mx32"),
)

_TENSOR, _ROW, _MX = Scaling("tensor"), Scaling("row"), Scaling("mx32")
_STRIP, _BLOCK = Scaling("block1x128"), Scaling("block128")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("tensorwise", _TENSOR, _TENSOR, Scaling("tensor", torch.float8_e5m2)),
        Recipe("rowwise", _ROW, _ROW, _ROW),
        Recipe("rowwise_gw_hp", _ROW, _ROW, _ROW, wgrad="hp"),
        Recipe("blockwise", _STRIP, _BLOCK, _STRIP),
        Recipe("mxfp8", _MX, _MX, _MX),
    )
}
"""Every named recipe."""

_ALIASES = {"rowwise_with_gw_hp": "rowwise_gw_hp", "mxfp8_emulated": "mxfp8", "mxfp8_cublas": "mxfp8"}
"""torchao's names."""
