"""torch's tensor-parallel styles, for `torch.distributed.tensor.parallel.parallelize_module`, communicating in float8.

A style cuts a `Float8Linear`'s weight into a DTensor (so that state dicts and FSDP2 know its placement) and has the
layer compute on plain local tensors: tokens arrive and leave as this rank's part of the sequence, dimension -2.

    plan = {"w1": Float8ColwiseParallel(), "w3": Float8ColwiseParallel(), "w2": Float8RowwiseParallel()}
    parallelize_module(feed_forward, mesh["tp"], plan)

Where several layers share an input, gather it once for all: `PrepareFloat8Input` on their parent, and
``Float8ColwiseParallel(gather=False)`` on them.
"""

from types import MethodType
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from titan_fp8.layers.functional import linear
from titan_fp8.layers.linear import Float8Linear
from titan_fp8.parallel.tensor import all_gather_float8, all_gather_linears, linear_reduce_scatter
from titan_fp8.recipe import Recipe


class Float8ColwiseParallel(ParallelStyle):
    """Cut the weight's rows; gather the tokens of all ranks in float8 first.

    Args:
        gather: False where the input is whole already. Its gradient is then this rank's summand, as `PrepareFloat8Input`
            and torchtitan's plain regions expect it.
    """

    def __init__(self, *, gather: bool = True) -> None:
        super().__init__()
        self._gather = gather

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        gather, group = self._gather, device_mesh.get_group()

        def forward(layer: Float8Linear, input: Tensor) -> Tensor:
            weight, bias = _local(layer.weight), _local(layer.bias)
            if not gather:
                return linear(input, weight, bias, layer.recipe)
            (out,) = all_gather_linears(input, [weight], layer.recipe, group=group)
            return out if bias is None else out + bias.to(out.dtype)

        layer = _cut(module, device_mesh, 0)
        layer.forward = MethodType(forward, layer)  # a method: deepcopy binds it to the copy
        return layer


class Float8RowwiseParallel(ParallelStyle):
    """Cut the weight's columns; sum over ranks and keep own tokens. Backward gathers the gradient in float8."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer, group = _cut(module, device_mesh, 1), device_mesh.get_group()
        if cast("Tensor | None", layer.bias) is not None:
            raise ValueError(
                f"{layer} has a bias, which every rank would add, so that the sum over ranks counts it several times; use "
                "bias=False for layers that are cut by columns, as Llama and DeepSeek do."
            )

        def forward(layer: Float8Linear, input: Tensor) -> Tensor:
            return linear_reduce_scatter(input, _local(layer.weight), layer.recipe, group=group)

        layer.forward = MethodType(forward, layer)
        return layer


class PrepareFloat8Input(ParallelStyle):
    """Gather a module's first argument in float8, once for all float8 layers inside.

    Args:
        recipe: Theirs.
    """

    def __init__(self, recipe: str | Recipe = "blockwise") -> None:
        super().__init__()
        self._scaling = Recipe.get(recipe).x

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group: dist.ProcessGroup = device_mesh.get_group()

        def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return all_gather_float8(args[0], self._scaling, group=group), *args[1:]

        module.register_forward_pre_hook(gather)
        return module


def _cut(module: nn.Module, mesh: DeviceMesh, dim: int) -> Float8Linear:
    if not isinstance(module, Float8Linear):
        raise ValueError(
            f"this style shards Float8Linear layers, but got a {type(module).__name__}: call convert_to_float8 before "
            "parallelize_module, or use torch's own style for a layer that stays in high precision."
        )
    size = module.weight.shape[dim]
    if size % mesh.size():
        raise ValueError(
            f"weight {tuple(module.weight.shape)} cannot be split evenly along dimension {dim} over {mesh.size()} ranks."
        )
    weight = distribute_tensor(module.weight.detach(), mesh, [Shard(dim)])
    module.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
    bias = cast("Tensor | None", module.bias)
    if bias is not None and dim == 0:
        cut_bias = distribute_tensor(bias.detach(), mesh, [Shard(0)])
        module.bias = nn.Parameter(cut_bias, requires_grad=bias.requires_grad)
    return module


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
