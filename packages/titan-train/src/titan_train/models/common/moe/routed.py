"""Experts without a router of their own: for layers of other libraries that route by themselves.

Such a layer calls ``experts(tokens, chosen, weights)``. `RoutedExperts` takes the place of that module with the experts and
the dispatch that `titan_train.models.common.moe.layer.MoE` has, so that expert parallelism, grouped products and float8
work there too. `StackedExperts` gives the same to a module of transformers that keeps its own stacks and its own activation.
Auxiliary losses and expert biases stay the layer's own business.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from titan_fsdp import clean_fqn, unwrap
from torch import Tensor, nn

from titan_train.models.common.moe.dispatch import LocalDispatch
from titan_train.models.common.moe.experts import Experts, GroupedMM
from titan_train.models.common.moe.layer import MoE


class RoutedExperts(Experts):
    """Stacked experts that are given the experts of each token."""

    def __init__(self, num_experts: int, dim: int, ffn_dim: int, *, experts_per_token: int, init_std: float) -> None:
        """Build the stacks; ``init_std`` is the standard deviation of initial weights."""
        super().__init__(num_experts, dim, ffn_dim)
        self.num_experts = num_experts
        self.experts_per_token = experts_per_token
        self.init_std = init_std
        self.dispatch: nn.Module = LocalDispatch()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Apply each token's experts.

        Args:
            x: Tokens ``[T, d]``.
            chosen: Experts of each token, ``[T, K]`` int64.
            weights: Their weights, ``[T, K]``.

        Returns:
            Weighted sums ``[T, d]``, in the dtype of ``x``.
        """
        return _dispatched(self, x, chosen, weights, cast("Callable[..., Tensor]", super().forward))


class StackedExperts(nn.Module):
    """What a module of transformers with stacks of two products is given, besides what its class has.

    Its parameters (``gate_up_proj`` or ``up_proj``, and ``down_proj``) keep their names and their layout. What stands between
    the two products stays its own.
    """

    num_experts: int
    experts_per_token: int

    @staticmethod
    def take_over(module: Any, experts_per_token: int) -> None:
        """Change a module of a class that transformers' ``use_experts_implementation`` has decorated, in place."""
        module.__class__ = _stacked(type(module))
        module.experts_per_token = experts_per_token
        module.num_experts = module.get_parameter("down_proj").shape[0]
        module.dispatch = LocalDispatch()
        module.grouped_mm = GroupedMM()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Arguments and result as those of `RoutedExperts.forward`."""
        return _dispatched(self, x, chosen, weights, self._compute)

    def _compute(self, x: Tensor, counts: Tensor) -> Tensor:
        """As `Experts.forward`."""
        own: Any = self
        offs = counts.cumsum(0).int()
        if own.has_gate:
            hidden = own._apply_gate(self._product(x, "gate_up_proj", offs))
        else:
            hidden = own.act_fn(self._product(x, "up_proj", offs))
        return self._product(hidden, "down_proj", offs)

    def _product(self, x: Tensor, name: str, offs: Tensor) -> Tensor:
        own: Any = self
        stack, bias = self.get_parameter(name), getattr(own, f"{name}_bias", None)
        out = own.grouped_mm(x, stack if own.is_transposed else stack.transpose(-2, -1), offs=offs)
        if bias is None:
            return out
        expert = torch.searchsorted(offs, torch.arange(x.shape[0], dtype=offs.dtype, device=x.device), right=True)
        return out + bias.index_select(0, expert.clamp(max=bias.shape[0] - 1))  # rows after the last group are dropped


@functools.cache
def _stacked(kind: type[nn.Module]) -> type[nn.Module]:
    """One class for all layers: torch.compile compiles a block again for each class that it has not met inside it."""
    return type(kind.__name__, (StackedExperts, kind), {"__module__": kind.__module__})


def _dispatched(
    experts: Any, x: Tensor, chosen: Tensor, weights: Tensor, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    wide = torch.promote_types(weights.dtype, torch.float32)
    counts = torch.zeros(experts.num_experts, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
    return experts.dispatch(x, weights.to(wide), chosen, counts, compute)


class ExpertStack:
    """The routed experts of one layer, whichever kind of layer it is."""

    def __init__(self, fqn: str, experts: nn.Module, holder: Any, num_experts: int, experts_per_token: int) -> None:
        self.fqn = fqn
        """Name of the module that holds the stacked parameters."""
        self.experts = experts
        self.holder = holder
        """Its ``dispatch`` brings tokens to the experts."""
        self.num_experts = num_experts
        """Of the whole layer."""
        self.experts_per_token = experts_per_token

    @property
    def layer(self) -> str:
        """Name of the mixture of experts that they belong to; empty for the model itself."""
        return self.fqn.rpartition(".")[0]


def expert_stacks(model: nn.Module) -> Iterator[ExpertStack]:
    """Every layer's routed experts, by their names without wrappers."""
    for name, module in unwrap(model).named_modules():
        fqn = clean_fqn(name)
        if isinstance(module, MoE):
            args = module.args
            inner = f"{fqn}.experts".lstrip(".")
            yield ExpertStack(inner, module.experts, module, args.num_experts, args.experts_per_token)
        elif isinstance(module, RoutedExperts | StackedExperts):
            yield ExpertStack(fqn, module, module, module.num_experts, module.experts_per_token)
