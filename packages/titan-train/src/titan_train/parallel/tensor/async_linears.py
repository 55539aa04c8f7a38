"""Put asynchronous products in the place of a region's gather, linears and scatter.

A region can be overlapped if it hands its input to its linears through one `SharedInput` (and to nothing else), and ends
in a rowwise linear. That module is replaced, the rowwise linear by one of the same name and the same parameters, and
the region's own hooks are left out. The head, which is a product after a gather, is replaced likewise.

A region that is not built like that, whose linears are not plain (float8) or of which one is kept in float32, and so gathered
by itself, keeps its hooks: the same values, nothing overlapped. `overlapped_modules` says which modules are.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from titan_fsdp import clean_fqn
from torch import Tensor, nn

from titan_train.models.common.shared_input import SharedInput
from titan_train.parallel.float8 import run_forward_hooks
from titan_train.parallel.tensor.async_matmul import all_gather_matmul, matmul_reduce_scatter
from titan_train.parallel.tensor.boundaries import enter
from titan_train.parallel.tensor.plan import PlannedModule
from titan_train.parallel.tied import is_kept


class GatherLinears(SharedInput):
    """Linears of one input that is gathered while it is multiplied. Forward hooks are given this rank's tokens as the input."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Gather over ``group``."""
        super().__init__()
        self._group = group

    def forward(self, x: Tensor, *linears: nn.Module) -> tuple[Tensor, ...]:
        """``[B, S / n, K]`` to ``[B, S, F]`` for each linear."""
        outs = all_gather_matmul(x, [cast(nn.Linear, linear).weight for linear in linears], self._group)
        outs = [_add_bias(out, linear) for out, linear in zip(outs, linears, strict=True)]
        return run_forward_hooks(linears, x, outs)


class GatherLinear(nn.Linear):
    """One linear whose input is gathered while it is multiplied; before, without gradients: generation has hooks that read it."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        """Take over the parameters of ``linear``."""
        _take_over(self, linear)
        self._group = group
        self.register_forward_pre_hook(_gather_without_gradients)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, S / n, K]`` to ``[B, S, F]``; without gradients ``[B, S, K]``, which a hook has gathered."""
        if not torch.is_grad_enabled():
            return super().forward(input)
        (out,) = all_gather_matmul(input, [self.weight], self._group)
        return _add_bias(out, self)


class ScatterLinear(nn.Linear):
    """A rowwise linear whose outputs are summed over the ranks and cut while they are computed."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        """Take over the parameters of ``linear``; its bias is with the first rank, and every token's."""
        _take_over(self, linear)
        self._group = group

    def forward(self, input: Tensor) -> Tensor:
        """``[B, S, K]`` to ``[B, S / n, F]``."""
        return matmul_reduce_scatter(input, self.weight, self._group, cast("Tensor | None", self.bias))


def overlap(
    model: nn.Module, modules: Sequence[PlannedModule], group: dist.ProcessGroup, keep_fp32: Sequence[str] = ()
) -> list[PlannedModule]:
    """Replace what can be overlapped.

    Args:
        model: The model, its parameters cut.
        modules: Of its plan.
        group: The ranks.
        keep_fp32: Patterns of modules that stay in float32.

    Returns:
        The entries that are still to be given hooks.
    """
    left: list[PlannedModule] = []
    for entry in modules:
        if entry.style == "region":
            inside = [e for e in modules if e.fqn.startswith(f"{entry.fqn}.")]
            one_unit = not _keeps_linears(entry, keep_fp32) or is_kept(entry.fqn, entry.module, keep_fp32)
            done = one_unit and _overlap_region(model, entry, inside, group)
        elif entry.style == "head" and type(entry.module) is nn.Linear:
            _replace(model, entry.fqn, GatherLinear(entry.module, group))
            done = True
        else:
            done = False
        if not done:
            left.append(entry)
    return left


def overlapped_modules(model: nn.Module) -> list[str]:
    """Names of the modules that overlap their transfers."""
    kinds = (GatherLinears, GatherLinear, ScatterLinear)
    return [clean_fqn(name) for name, module in model.named_modules() if isinstance(module, kinds)]


def _keeps_linears(region: PlannedModule, keep_fp32: Sequence[str]) -> bool:
    linears = [(name, m) for name, m in region.module.named_modules() if hasattr(m, "in_features")]
    return any(is_kept(f"{region.fqn}.{name}", linear, keep_fp32) for name, linear in linears)


def _overlap_region(
    model: nn.Module, region: PlannedModule, inside: Sequence[PlannedModule], group: dist.ProcessGroup
) -> bool:
    first = [name for name, child in region.module.named_children() if type(child) is SharedInput]
    last = [e for e in inside if e.style == "rowwise" and e.fqn.rpartition(".")[0] == region.fqn]
    plain = all(type(m) is nn.Linear for m in region.module.modules() if hasattr(m, "in_features"))
    if len(first) != 1 or len(last) != 1 or not plain:
        return False
    _replace(model, f"{region.fqn}.{first[0]}", GatherLinears(group))
    linear = last[0].module
    assert isinstance(linear, nn.Linear)
    _replace(model, last[0].fqn, ScatterLinear(linear, group))
    return True


def _replace(model: nn.Module, fqn: str, new: nn.Module) -> None:
    owner, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(owner), name, new)


def _take_over(new: nn.Linear, old: nn.Linear) -> None:
    nn.Linear.__init__(new, old.in_features, old.out_features, bias=False, device="meta")
    new.weight = old.weight
    new.register_parameter("bias", cast("nn.Parameter | None", old.bias))


def _gather_without_gradients(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    if torch.is_grad_enabled():
        return None
    group = cast(GatherLinear, module)._group  # pyright: ignore[reportPrivateUsage]
    return (enter(args[0], group, sequence_parallel=True),)


def _add_bias(out: Tensor, linear: nn.Module) -> Tensor:
    bias: Tensor | None = getattr(linear, "bias", None)
    return out if bias is None else out + bias
