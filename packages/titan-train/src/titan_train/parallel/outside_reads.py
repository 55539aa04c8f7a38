"""Weights that a model reads outside of the module that holds them, such as ``F.linear(x, self.embed.weight)`` for a tied head.

FSDP gathers the weights of a unit for the forward of its modules. Read before it, or after it where they are freed again, a
weight is a shard. A forward on the meta device tells, where it can be run.
"""

import itertools
from collections import Counter
from contextlib import suppress
from typing import Any

import titan_fsdp as fsdp
import torch
from titan_fsdp import named_parameters
from titan_mesh import Layout
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titan_train.config import Config
from titan_train.models.call import copy_to_try
from titan_train.parallel.data_parallel import fsdp_policy
from titan_train.parallel.layout.degrees import resolve_mode, wrapped_over

_OF_ANOTHER: frozenset[Any] = frozenset({Tensor.to, Tensor.type_as})
"""They read dtype and device of their second argument alone."""


def check_reads(config: Config, layout: Layout, model: nn.Module) -> None:
    """Refuse a user's model that reads a weight of an FSDP unit while the unit is not gathered.

    Raises:
        ValueError: Names the weight, and what works.
    """
    mode = resolve_mode(config.parallel, layout, dtype=config.train.dtype)
    # DistributedDataParallel, which compresses, leaves weights where they are
    by_hook = mode == "ddp" and config.parallel.compress != "none"
    if mode == "none" or by_hook or layout.spec.pp > 1:
        return
    plan = fsdp.plan(model, wrapped_over(layout, mode), fsdp_policy(config, mode, model))
    tried = copy_to_try(model)
    reads = _Reads(plan, tried)
    with suppress(Exception), torch.no_grad(), reads:  # the user's own code; a run says what is wrong with it
        tried(torch.zeros(1, config.model.seq_len, dtype=torch.int64, device="meta"))
    if reads.found is None:
        return
    name, unit, gathered_before = reads.found
    owner = unit.name.split("+")[0]
    works = (
        f'Set parallel.reshard_overrides={{"{owner}" = "never"}}, which keeps it until backward'
        if gathered_before
        else "Call that module, or make the weight a parameter of the module that reads it"
    )
    raise ValueError(
        f"model.name={config.model.name!r}: {name!r} is read outside of the forward of {name.rpartition('.')[0]!r}, for which "
        f"{mode} gathers it: it would be a shard there. {works}."
    )


class _Reads(TorchFunctionMode):
    """Finds the first read of a weight whose unit is not gathered."""

    def __init__(self, plan: fsdp.WrapPlan, model: nn.Module) -> None:
        super().__init__()
        self.found: tuple[str, fsdp.PlannedUnit, bool] | None = None
        self._running: Counter[str] = Counter()
        self._ran: dict[str, set[str]] = {unit.name: set() for unit in plan.units}
        units = [unit for unit in plan.units if unit.name != "root"]
        names = {parameter.fqn: unit for unit in units for parameter in unit.params}
        self._units = {id(p): (name, names[name]) for name, p in named_parameters(model) if name in names}
        for unit in units:
            for fqn in unit.fqns:
                module = model.get_submodule(fqn)
                module.register_forward_pre_hook(self._begin(unit.name), prepend=True)  # as FSDP's
                module.register_forward_hook(self._end(unit.name, fqn))

    def _begin(self, unit: str) -> Any:
        return lambda _module, _args: self._running.update([unit])

    def _end(self, unit: str, fqn: str) -> Any:
        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._running[unit] -= 1
            self._ran[unit].add(fqn)

        return after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self.found is None:  # and not a shape or a dtype
            given: list[Any] = [*args[:1]] if func in _OF_ANOTHER else [*args, *(kwargs or {}).values()]
            for value in itertools.chain(given, *(item for item in given if isinstance(item, list | tuple))):
                name, unit = self._units.get(id(value), ("", None))
                if unit is not None and not self._is_gathered(unit):
                    self.found = (name, unit, bool(self._ran[unit.name]))
        return result

    def _is_gathered(self, unit: fsdp.PlannedUnit) -> bool:
        ran = self._ran[unit.name]
        between = 0 < len(ran) < len(unit.fqns)  # its modules are gathered together
        return self._running[unit.name] > 0 or between or (bool(ran) and not unit.reshard)
