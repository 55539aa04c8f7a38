"""Which box of each parameter a rank holds, where tensor or expert parallelism has cut it.

Compute runs on plain local tensors; FSDP2 then shards what is left. Three parties need to know the whole: initialisation
(so that weights do not depend on the layout), the gradient norm (so that each element counts once) and the checkpoint (so
that another layout can load it). They read it from a table ``dict[str, ParamShard]`` by parameter name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_train.models.initialize import InitFn


@dataclass(frozen=True, slots=True)
class ParamShard:
    """The box of one parameter that this rank holds; the parameter itself has the box's shape."""

    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""
    offset: tuple[int, ...]
    """Where the box starts in the whole."""
    pieces: int
    """Different boxes among the ranks of ``axis``; 1: every rank holds the whole."""
    axis: Literal["tp", "ep"]
    """The ranks it was cut over."""
    partial_over: dist.ProcessGroup | None = None
    """The local gradient is a partial sum: once in an optimizer step, add it over this group (norms under sequence
    parallelism, replicas of key-value heads)."""

    def of(self, whole: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The box of ``whole`` (shape ``global_shape``) as a view; ``shape`` is the box's."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, shape, strict=True))]


ParamShards = Mapping[str, ParamShard]
"""By the parameter's clean name; parameters that are not in it were not cut."""


def slice_parameter(module: nn.Module, name: str, dim: int, start: int, length: int) -> ParamShard:
    """Replace parameter ``name`` of ``module`` by rows ``start … start + length`` of its dimension ``dim``.

    Works on the meta device and on real weights. A parameter that two modules share must be put into the other one by the
    caller, or they are tied no more.

    Returns:
        The cut, with ``pieces`` 1 and axis "tp" for the caller to complete with `dataclasses.replace`.

    Raises:
        ValueError: The rows are not in the parameter.
    """
    whole = module.get_parameter(name)
    if not 0 <= start <= start + length <= whole.shape[dim]:
        raise ValueError(
            f"rows {start} to {start + length} are not in dimension {dim} of {name}, shape {tuple(whole.shape)}."
        )
    part = whole.detach().narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
    module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
    offset = [0] * whole.ndim
    offset[dim] = start
    return ParamShard(tuple(whole.shape), tuple(offset), pieces=1, axis="tp")


def init_of_shards(init: InitFn, cuts: ParamShards, tied: Mapping[str, str], seed: int) -> InitFn:
    """Fill the box of each parameter that is here, from the values of the whole one.

    Args:
        init: Of whole parameters.
        cuts: What was cut; read when a parameter is filled.
        tied: Further names of tied parameters, to the first.
        seed: Of the run.
    """

    def fill(fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
        if tensor.dtype == torch.bfloat16:  # the float32 run's values, rounded
            wide = torch.empty_like(tensor, dtype=torch.float32)
            fill(fqn, wide, generator)
            tensor.copy_(wide)
            return
        if fqn in tied:  # the copy of a tied parameter on another pipeline stage starts as the first one does
            generator = fsdp.generator_for(tied[fqn], tensor.device, seed)
        cut = cuts.get(fqn)
        if cut is None:
            init(tied.get(fqn, fqn), tensor, generator)
            return
        whole = tensor.new_empty(cut.global_shape)
        init(tied.get(fqn, fqn), whole, generator)
        tensor.copy_(cut.of(whole, tuple(tensor.shape)))

    return fill
