"""`ConstantWeights`: declares that weights do not change for a while, so that each is cast to float8 once."""

from collections.abc import Sequence

import torch
from torch import nn

from titan_fp8 import ops
from titan_fp8.convert.patterns import clean_fqn
from titan_fp8.layers.linear import Float8Linear
from titan_fp8.parallel.fsdp import sharded_weights, sync_scales
from titan_fp8.products import QTensor, cast_weight
from titan_fp8.recipe import Scaling
from titan_fp8.weights.cache import capturing


class ConstantWeights:
    """Declares that the weights of float8 layers do not change inside a ``with`` block.

    Inside, each weight is cast to float8 once, for all forwards and backwards of all microbatches. Outside (and for
    models that never enter one) each forward and each backward casts the weight it finds, which is always right and
    costs a cast each time::

        constant = titan_fp8.ConstantWeights(model)
        for microbatches in data:
            with constant:  # one optimizer step's forwards and backwards
                for x in microbatches:
                    loss(model(x)).backward()
            optimizer.step()

    What is kept inside: the casts of whole weights, 2 bytes per value, and of weights that FSDP2 gathered in high precision as
    long as they are unsharded; of weights that FSDP2 gathers in float8, the codes of this rank's shard, and the scales
    that span ranks. Those scales are found on entry, in one all-reduce for each process group that has such weights, so
    every rank of the group must enter together.

    The block is reusable and nests; where blocks overlap, the outermost decides. In eager mode only: a compiled graph
    contains its casts. A CUDA graph keeps casts only of blocks entered while it is captured.

    Args:
        models: Modules with `Float8Linear` layers, after they were cut and wrapped. Layers added later are not seen. Layers
            that a tensor-parallel style has cut cast their weights at each use all the same.
        precast: Cast all whole weights on entry, in one launch for all 128x128 blocks of one format.
        frozen: Only weights that require no gradient. For a block around a whole run that trains adapters: the base
            weights are then cast once.
        check: For debugging: compare a checksum of every weight at every use of its cast.

    Raises:
        RuntimeError: At the next use of a cast whose weight was changed inside the block. Without ``check``, only changes
            that the weight's version counter sees are noticed.
    """

    def __init__(self, *models: nn.Module, precast: bool = False, frozen: bool = False, check: bool = False) -> None:
        named = [entry for model in models for entry in model.named_modules()]
        self._layers = [
            (f"{clean_fqn(name)}.weight".lstrip("."), m) for name, m in named if isinstance(m, Float8Linear)
        ]
        self._precast = precast
        self._frozen = frozen
        self._check = check
        self._entered: list[list[Float8Linear]] = []

    def __enter__(self) -> "ConstantWeights":
        named = [(name, layer) for name, layer in self._layers if self._covers(layer)]
        names = {id(layer): name for name, layer in named}
        layers = [layer for _, layer in named]
        self._entered.append(layers)
        for name, layer in named:
            layer.weight_cache.open(name=name, check=self._check)
        shards = sharded_weights(layers)
        for layer, shard, _ in shards:
            layer.shard_cache.open(shard, name=names[id(layer)], check=self._check)
        sync_scales(shards)
        if self._precast and not capturing():
            precast_weights(layers)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self._entered.pop():
            layer.weight_cache.close()
            layer.shard_cache.close()

    def _covers(self, layer: Float8Linear) -> bool:
        if not layer.cache_weight or layer.weight_cache.is_open:
            return False
        return not self._frozen or not layer.weight.requires_grad


@torch.no_grad()
def precast_weights(layers: Sequence[Float8Linear]) -> None:
    """Cast whole weights now rather than each when its layer first runs; into caches that are open."""
    whole = [
        m for m in layers if type(m.weight) is nn.Parameter and m.amax_group is None and m.weight_cache.keeps(m.weight)
    ]
    in_one_launch: dict[tuple[Scaling, torch.device], list[Float8Linear]] = {}
    for layer in whole:
        if layer.recipe.w.gran == "block128":
            in_one_launch.setdefault((layer.recipe.w, layer.weight.device), []).append(layer)
        else:
            layer.weight_cache.keep(layer.weight, cast_weight(layer.weight, layer.recipe))
    for (scaling, _), group in in_one_launch.items():
        results = ops.cast_weights_block([layer.weight for layer in group], scaling.dtype, scaling.pow2)
        for i, layer in enumerate(group):
            cast = QTensor(layer.out_features, layer.in_features, *results[4 * i : 4 * i + 4])
            layer.weight_cache.keep(layer.weight, cast)
