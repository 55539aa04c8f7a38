"""Cut a model over the ranks of a group and put the communication around what was cut.

The model keeps its structure and its names. Each rank's parameters become plain tensors of its own shape (no DTensor:
about 3 ms a layer cheaper on the host, and float8, compilation, pipelines and checkpointing see ordinary modules); the
returned table says which box of the whole each one is.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from titan_fsdp import generator_for
from titan_fsdp.weights.buffers import meta_tables
from torch import nn

from titan_train.models.common.tensor_styles import StyleTable
from titan_train.models.registry import is_shipped
from titan_train.models.traits import traits_of
from titan_train.parallel.param_shard import ParamShard
from titan_train.parallel.tensor.async_linears import overlap
from titan_train.parallel.tensor.boundaries import (
    keep_own_tokens,
    look_up_own_rows,
    look_up_own_tokens,
    make_input_whole,
    norm_over_ranks,
    sum_output,
)
from titan_train.parallel.tensor.checks import ASYNC_WITHOUT_SEQUENCE_PARALLEL
from titan_train.parallel.tensor.cutting import cut_parameters
from titan_train.parallel.tensor.float8_linears import gather_in_float8
from titan_train.parallel.tensor.plan import PlannedModule, plan_tensor_parallel


def compute_buffers(model: nn.Module, seed: int, device: torch.device) -> None:
    """Compute what buffers and tensor attributes of a user's model hold, if it is on the meta device. `titan_fsdp.materialize`
    keeps it, and moves buffers to their device.

    Before `apply_tensor_parallel`, which leaves each rank its own heads: constructors that compute buffers, such as a scale of
    attention, are run again with the numbers that modules keep.

    Args:
        model: A whole model or a pipeline stage of one. One of this package or of transformers is left as it is.
        seed: Of weights, for buffers that are drawn.
        device: Where attributes go.
    """
    if is_shipped(model) or traits_of(model).published is not None:
        return
    host = torch.device("cpu")
    for table in meta_tables(model, lambda path: generator_for(path, host, seed).initial_seed()):
        buffers = table.module._buffers
        for leaf, value in table.values.items():
            if leaf in buffers:
                buffers[leaf] = value
            else:
                setattr(table.module, leaf, value.to(device))


def apply_tensor_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    table: StyleTable,
    sequence_parallel: bool,
    replicate_kv: bool = False,
    async_tp: bool = False,
    float8_gather: bool = False,
    keep_fp32: Sequence[str] = (),
) -> dict[str, ParamShard]:
    """Cut ``model`` in place.

    Collective over ``group`` where key-value heads are replicated (it makes a subgroup); local otherwise.

    Args:
        model: A whole model or a pipeline stage of one, on the meta device or with real weights; after conversion to
            float8, before expert parallelism, activation checkpointing, compilation and FSDP.
        group: The tensor-parallel ranks.
        table: Of the model's family, or a user's own.
        sequence_parallel: Split the tokens outside of regions over the ranks. The model's hidden states are then
            ``[B, S / n, d]`` there, between pipeline stages too; S is the number of ``tokens``.
        replicate_kv: Where there are more ranks than key-value heads, give each head to several ranks.
        async_tp: Overlap each gather and scatter with the matrix product beside it, by the ring of
            `titan_train.parallel.tensor.async_matmul`. Needs ``sequence_parallel``. Float8 linears do not overlap.
        float8_gather: Regions of float8 linears gather their input in float8, where they can. Without
            ``sequence_parallel`` nothing is gathered.
        keep_fp32: Patterns of modules that stay in float32: FSDP gathers their linears by themselves, which do not overlap.

    Returns:
        By clean name, each parameter that was cut or whose gradient is a partial sum. A tied parameter is there under
        each of its names. Logits stay cut by the vocabulary, from the entry ``cuts["HEAD.weight"].offset[0]`` on, with HEAD
        the module of style ``head``.

    Raises:
        ValueError: As `titan_train.parallel.tensor.check_tensor_parallel`.
    """
    if group.size() == 1:
        return {}
    if async_tp and not sequence_parallel:
        raise ValueError(ASYNC_WITHOUT_SEQUENCE_PARALLEL.format(tp=group.size()))
    plan = plan_tensor_parallel(
        model, group.size(), table=table, sequence_parallel=sequence_parallel, replicate_kv=replicate_kv
    )
    cuts = cut_parameters(model, plan, group)
    for module, attribute, count in plan.heads:
        setattr(module, attribute, count)
    hooked = overlap(model, plan.modules, group, keep_fp32) if async_tp else plan.modules
    gathered = gather_in_float8(model, hooked, group) if float8_gather and sequence_parallel else set[str]()
    for entry in hooked:
        if entry.fqn in gathered:
            sum_output(entry.module, group, sequence_parallel=True)
        else:
            _communicate(entry, group, sequence_parallel=sequence_parallel)
    return cuts


def _communicate(entry: PlannedModule, group: dist.ProcessGroup, *, sequence_parallel: bool) -> None:
    """Put the hooks of one module's style on it."""
    module, alone = entry.module, not entry.in_region
    match entry.style:
        case "region":
            make_input_whole(module, group, sequence_parallel=sequence_parallel)
            sum_output(module, group, sequence_parallel=sequence_parallel)
        case "whole" if sequence_parallel:
            make_input_whole(module, group, sequence_parallel=True)
            keep_own_tokens(module, group)
        case "head":
            make_input_whole(module, group, sequence_parallel=sequence_parallel)
        case "colwise" | "heads" | "kv_heads" if alone:
            make_input_whole(module, group, sequence_parallel=sequence_parallel)
        case "rowwise" if alone:
            sum_output(module, group, sequence_parallel=sequence_parallel)
        case "embedding":
            start, count = entry.share(group.size(), group.rank())
            look_up_own_rows(module, group, first_row=start, num_rows=count, sequence_parallel=sequence_parallel)
        case "heads_norm" | "kv_heads_norm":
            norm_over_ranks(module, group)
        case "positions" if sequence_parallel:
            look_up_own_tokens(module, group)
        case _:
            pass
