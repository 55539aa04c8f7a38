"""Feed-forwards a part of the sequence at a time, so that their hidden layer never exists for all tokens.

Problem: a feed-forward is three to four times as wide as the model, and at 128k tokens its hidden layers are the largest
tensors of a block, in forward and once more in backward. Idea: it maps each token by itself. Run it on one tile of tokens after
the other, keep the input alone, and let backward compute each tile again before it passes through it (arXiv:2506.13996).

Cost: one more forward of the feed-forwards. Limits: products of a tile's rows are those of the whole, up to the rounding of
another matrix size; the gradient of a weight is a sum over tiles, rounded in its dtype at each, as it is over micro-batches.
"""

import functools
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from titan_train.config import ActivationsConfig
from titan_train.models.traits import traits_of
from titan_train.parallel.structure import wrap_forward


def tile_token_wise(model: nn.Module, config: ActivationsConfig) -> None:
    """Run what maps each token by itself in tiles; in place, below the hooks of tensor parallelism."""
    for module in tiled_modules(model, config):
        _tile(module, config.mlp_tiles)


def tiled_modules(model: nn.Module, config: ActivationsConfig) -> list[nn.Module]:
    """The modules that ``mlp_tiles`` runs in tiles: those of the model's trait ``token_wise``; none where it is 1."""
    if config.mlp_tiles == 1:
        return []
    patterns = traits_of(model).token_wise
    return [module for name, module in model.named_modules() if any(fnmatchcase(name, p) for p in patterns)]


def check_tiles(model: nn.Module, config: ActivationsConfig) -> None:
    """Refuse tiles that would do nothing, or whose hidden layers would be kept all the same.

    Raises:
        ValueError: Names the keys.
    """
    if config.mlp_tiles == 1:
        return
    if config.checkpoint in ("selective", "budget"):
        raise ValueError(
            f"activations.mlp_tiles={config.mlp_tiles} and activations.checkpoint={config.checkpoint!r}, which keeps results of "
            "the products inside the tiles. Use checkpoint 'none', 'full', 'every' or 'pattern', or mlp_tiles=1."
        )
    if not tiled_modules(model, config):
        raise ValueError(
            f"activations.mlp_tiles={config.mlp_tiles}: {type(model).__name__} names no feed-forward that maps each token by "
            "itself, so nothing would change (routed experts are not tiled). Name yours in the attribute token_wise of the "
            'model, such as ("layers.*.mlp",), or set mlp_tiles=1.'
        )


def _tile(module: nn.Module, tiles: int) -> None:
    def forward(inner: Callable[..., Tensor], *args: Any, **keywords: Any) -> Tensor:
        run = functools.partial(checkpoint, inner, use_reentrant=False) if torch.is_grad_enabled() else inner
        given = [*args, *keywords.values()]
        tokens = getattr(given[0], "x", given[0]).shape[:-1]
        parts = zip(*(_of_tiles(value, tokens, tiles) for value in given), strict=True)
        first = len(args)
        outs = [run(*part[:first], **dict(zip(keywords, part[first:], strict=True))) for part in parts]
        return torch.cat(outs, dim=-2)

    wrap_forward(module, forward)


def _of_tiles(value: Any, tokens: torch.Size, tiles: int) -> list[Any]:
    """An argument for each tile: parts of what has something for each token, ``[..., S, d]`` or ``[..., S]``; or all of it."""
    shape = getattr(getattr(value, "x", value), "shape", None)
    if shape is not None and shape[:-1] == tokens:
        return split_tokens(value, tiles)
    size = -(-tokens[-1] // tiles)
    return list(value.split(size, dim=-1)) if shape == tokens else [value] * -(-tokens[-1] // size)


def split_tokens(x: Any, tiles: int) -> list[Any]:
    """``[..., S, d]`` in ``tiles`` parts of as many tokens; also the input of a norm that its reader applies."""
    if isinstance(x, Tensor):
        return list(x.split(-(-x.shape[-2] // tiles), dim=-2))
    replace: Callable[..., Any] = x._replace
    return [replace(x=part) for part in split_tokens(x.x, tiles)]
