"""`Float8Linear`: an ``nn.Linear`` whose products are float8."""

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from titan_fp8.layers.functional import linear, linear_deferred
from titan_fp8.recipe import Recipe
from titan_fp8.weights.cache import WeightCache
from titan_fp8.weights.gathered import GatheredWeight
from titan_fp8.weights.sharded import ShardCache, ShardedWeight, is_dtensor


class Float8Linear(nn.Linear):
    """A linear layer with float8 products; parameters, names, dtypes and state dict are ``nn.Linear``'s.

    Args:
        in_features: K.
        out_features: N.
        bias: Whether to add a bias.
        recipe: A recipe or its name.
        kwargs: ``device`` and ``dtype`` of the parameters.
    """

    recipe: Recipe
    """What is cast, and how."""
    fsdp_all_gather: bool
    """Whether `apply_float8_all_gather` takes this layer."""
    cache_weight: bool
    """Whether `titan_fp8.ConstantWeights` keeps this weight's cast: 2 bytes per value."""
    weight_cache: WeightCache
    """What `titan_fp8.ConstantWeights` opens. Pass it on where this layer's weight goes to `titan_fp8.linears`."""
    shard_cache: ShardCache
    """The same for the shard of a weight that FSDP2 gathers in float8."""
    amax_group: dist.ProcessGroup | None
    """Ranks that hold the other parts of the input or weight (tensor parallel); see `titan_fp8.linear`. Set it after
    cutting the weight; None where the layer is whole or scales are finer than a tensor."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe = "blockwise",
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
        self._init_float8(Recipe.get(recipe), Recipe.get(recipe).fsdp_all_gather)

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, recipe: str | Recipe = "blockwise", *, fsdp_all_gather: bool | None = None
    ) -> "Float8Linear":
        """Turn a layer into a float8 layer in place: the same object, parameters and hooks.

        Raises:
            ValueError: If it is not exactly an ``nn.Linear``: a subclass's own forward would be lost. Or if a forward is set on
                the object, which would run instead.
        """
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"layer is a {type(layer).__name__}, whose own forward would be lost; pass a torch.nn.Linear, or build on "
                "titan_fp8.linear."
            )
        if "forward" in layer.__dict__:
            raise ValueError(
                f"{layer} has a forward set on the object, which would run instead of float8 products; convert the layer before "
                "its forward is replaced."
            )
        chosen = Recipe.get(recipe)
        layer.__class__ = cls
        assert isinstance(layer, Float8Linear)
        layer._init_float8(chosen, chosen.fsdp_all_gather if fsdp_all_gather is None else fsdp_all_gather)
        return layer

    def _init_float8(self, recipe: Recipe, fsdp_all_gather: bool) -> None:
        self.recipe = recipe
        self.fsdp_all_gather = fsdp_all_gather
        self.cache_weight = True
        self.amax_group = None
        self.weight_cache = WeightCache()
        self.shard_cache = ShardCache()

    def forward(self, input: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``."""
        return linear(input, self.weight, self.bias, self.recipe, cache=self.weight_cache, amax_group=self.amax_group)

    def forward_deferred(self, input: Tensor, *, anchor: Tensor, defer: Callable[..., None]) -> Tensor:
        """`forward` whose weight gradient the caller runs later; see `titan_fp8.linear_deferred`."""
        return linear_deferred(
            input,
            self.weight,
            self.bias,
            self.recipe,
            anchor=anchor,
            defer=defer,
            cache=self.weight_cache,
            amax_group=self.amax_group,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Float8Linear":
        """A copy of its own, of the same ranks: a process group cannot be copied."""
        memo[id(self.amax_group)] = self.amax_group
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 assigns the parameter whenever it gathers or frees it. A kept cast is of another weight then.
        if name == "weight" and "weight_cache" in self.__dict__:
            self.weight_cache.clear()
            held = getattr(self, "weight", None)  # pruning and norms of weights take it away for a while
            if isinstance(held, GatheredWeight):
                held.forget_transpose()
        super().__setattr__(name, value)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars and prefix + "weight" in destination:
            destination[prefix + "weight"] = plain_weight(destination[prefix + "weight"])

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        if local_metadata.get("assign_to_params_buffers", False) and key in state_dict:
            state_dict[key] = _wrapped_like(state_dict[key], self.weight)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def plain_weight(weight: Tensor) -> Tensor:
    """A weight without the subclass that asks FSDP2 for float8, sharing its memory; other tensors as they are."""
    if is_dtensor(weight):
        from torch.distributed.tensor import DTensor

        local = weight._local_tensor
        if not isinstance(local, ShardedWeight):
            return weight
        return DTensor.from_local(
            local.tensor,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    return weight.tensor if isinstance(weight, ShardedWeight) else weight


def _wrapped_like(weight: Tensor, current: Tensor) -> Tensor:
    """``weight`` with the subclass that ``current`` has."""
    if is_dtensor(current) and isinstance(current._local_tensor, ShardedWeight) and is_dtensor(weight):
        from torch.distributed.tensor import DTensor

        if isinstance(weight._local_tensor, ShardedWeight):
            return weight
        local = ShardedWeight(weight._local_tensor, current._local_tensor.scaling)
        return DTensor.from_local(
            local,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )
    if isinstance(current, ShardedWeight) and not isinstance(weight, ShardedWeight) and not is_dtensor(weight):
        return ShardedWeight(weight.detach(), current.scaling)
    return weight
