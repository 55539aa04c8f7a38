"""Cast all weights after the optimizer step, in one launch, rather than each when its layer first runs."""

import torch
from torch import nn

from titan_fp8 import ops
from titan_fp8._linear import Float8Linear
from titan_fp8._products import QTensor, cast_weight
from titan_fp8._recipe import Scaling


@torch.no_grad()
def precast_weights(model: nn.Module) -> int:
    """Cast the weights of all float8 layers that keep casts, for the next step's microbatches.

    Call it after ``optimizer.step()``, in eager mode, with weights that are whole (no FSDP2: those are cast as shards
    when they are gathered). 128x128 blocks take one launch for all weights of one format; other scales one a weight.
    A weight changed later is cast afresh, unless by a way that its version counter does not see (``weight.data``).

    Args:
        model: Any module with `Float8Linear` layers.

    Returns:
        Number of weights cast.
    """
    layers = [m for m in model.modules() if isinstance(m, Float8Linear) and m.cache_weight]
    layers = [m for m in layers if type(m.weight) is nn.Parameter and m.amax_group is None]
    in_one_launch: dict[tuple[Scaling, torch.device], list[Float8Linear]] = {}
    for layer in layers:
        if layer.recipe.w.gran == "block128":
            in_one_launch.setdefault((layer.recipe.w, layer.weight.device), []).append(layer)
        else:
            layer.keep_cast(cast_weight(layer.weight, layer.recipe))
    for (scaling, _), group in in_one_launch.items():
        results = ops.cast_weights_block([layer.weight for layer in group], scaling.dtype, scaling.pow2)
        for i, layer in enumerate(group):
            layer.keep_cast(QTensor(layer.out_features, layer.in_features, *results[4 * i : 4 * i + 4]))
    return len(layers)
