"""Replace the parameters of a model by this rank's parts, and write down which part each is.

A rowwise linear's bias is to be added once, to the sum. The first rank has it and adds it to its summand, the others
have none: its gradient there is the whole one, and nothing has to be added up.
"""

from dataclasses import dataclass, field, replace
from typing import cast

import torch.distributed as dist
from titan_fsdp import clean_fqn
from titan_mesh import timeout_of
from torch import nn

from titan_train.parallel.param_shard import ParamShard, slice_parameter
from titan_train.parallel.tensor.plan import ROW_CUT, PlannedModule, TensorPlan


def cut_parameters(model: nn.Module, plan: TensorPlan, group: dist.ProcessGroup) -> dict[str, ParamShard]:
    """Carry out a plan on the parameters; ties between them stay ties.

    Collective over ``group`` where ranks share key-value heads (it makes the subgroup that shares one).

    Returns:
        By clean name, and under each name of a tied parameter, what was cut or has a gradient that is a partial sum.

    Raises:
        ValueError: Tied parameters that the table would cut differently.
    """
    wholes = {clean_fqn(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    cutter = _Cutter(group)
    cuts: dict[str, ParamShard] = {}
    for entry in plan.modules:
        if entry.units:
            cuts |= cutter.cut(entry)
    for name in plan.partial:
        shape = tuple(wholes[name].shape)
        cuts[name] = ParamShard(shape, (0,) * len(shape), pieces=1, axis="tp", partial_over=group)
    return cuts


@dataclass
class _Cutter:
    """Cuts one module after the other, and remembers what it has cut."""

    group: dist.ProcessGroup
    _done: dict[int, tuple[nn.Parameter, nn.Parameter, ParamShard]] = field(default_factory=dict)
    """id(whole parameter) -> (whole, shard, ParamShard). Keeping the whole alive prevents reuse of its id."""
    _replicas: dict[int, dist.ProcessGroup] = field(default_factory=dict)

    def cut(self, entry: PlannedModule) -> dict[str, ParamShard]:
        """Cut a module's weight and bias."""
        tp, rank, module = self.group.size(), self.group.rank(), entry.module
        start, length = entry.share(tp, rank)
        pieces = entry.pieces(tp)
        shared_by = self._replica_group(tp // pieces) if pieces < tp else None
        cuts: dict[str, ParamShard] = {}
        for name in entry.names:
            if getattr(module, name, None) is None:
                continue
            if entry.style in ROW_CUT:
                cut = self._slice(entry.fqn, module, name, 0, start, length)
            elif name == "weight":
                cut = self._slice(entry.fqn, module, name, 1, start, length)
            else:  # of a rowwise linear
                whole = module.get_parameter(name)
                cut = ParamShard(tuple(whole.shape), (0,), pieces=1, axis="tp")
                if rank > 0:
                    module.register_parameter(name, None)
            cuts[f"{entry.fqn}.{name}"] = replace(cut, pieces=pieces, partial_over=shared_by)
        if "weight" in entry.names:
            _set_sizes(module, start, length, rows=entry.style in ROW_CUT)
        return cuts

    def _slice(self, fqn: str, module: nn.Module, name: str, dim: int, start: int, length: int) -> ParamShard:
        whole = module.get_parameter(name)
        if id(whole) not in self._done:
            cut = slice_parameter(module, name, dim, start, length)
            self._done[id(whole)] = (whole, module.get_parameter(name), cut)
            return cut
        _, part, cut = self._done[id(whole)]
        expected = [0] * whole.ndim
        expected[dim] = start
        if cut.offset != tuple(expected) or part.shape[dim] != length:
            raise ValueError(
                f"{fqn}.{name} is tied to a parameter that the table cuts in another way: give both modules styles that "
                "cut the same way, such as 'embedding' and 'head'."
            )
        module.register_parameter(name, part)
        return cut

    def _replica_group(self, copies: int) -> dist.ProcessGroup:
        """The ranks that hold the same key-value head: ``copies`` neighbours."""
        if copies not in self._replicas:
            ranks = dist.get_process_group_ranks(self.group)
            first = self.group.rank() // copies * copies
            mine = ranks[first : first + copies]
            made = self.group
            if copies < len(ranks):
                limit = timeout_of(self.group)
                made = dist.new_group(mine, timeout=limit, use_local_synchronization=True)
            self._replicas[copies] = cast(dist.ProcessGroup, made)
        return self._replicas[copies]


def _set_sizes(module: nn.Module, start: int, length: int, *, rows: bool) -> None:
    """Let a module say the sizes that it now has."""
    if isinstance(module, nn.Embedding):
        module.num_embeddings = length
        padding = module.padding_idx
        module.padding_idx = padding - start if padding is not None and start <= padding < start + length else None
    elif isinstance(module, nn.Linear):
        if rows:
            module.out_features = length
        else:
            module.in_features = length
