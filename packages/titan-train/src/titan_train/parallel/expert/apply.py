"""Give each rank of a group its part of the experts of every layer.

Experts are cut on their first dimension, whole experts a rank, and the layer's dispatch is replaced by one that travels.
FSDP2 may then shard what is left, over its own mesh: the ranks that hold the same experts (efsdp), not those that hold the
same dense parameters, because the ranks of the group see each other's tokens and their expert gradients are whole already.

With tensor parallelism the tokens must be split over its ranks (sequence parallelism): otherwise each of them would send
the same tokens.
"""

from dataclasses import replace

import torch.distributed as dist
from torch import nn

from titan_train.models.common.moe.routed import expert_stacks
from titan_train.parallel.expert.dispatch import ExpertParallelDispatch
from titan_train.parallel.param_shard import ParamShard, slice_parameter


def apply_expert_parallel(model: nn.Module, group: dist.ProcessGroup, *, pad_rows_to: int = 1) -> dict[str, ParamShard]:
    """Cut the experts of ``model`` in place; local, no communication.

    Args:
        model: A whole model or a pipeline stage, which may have no such layer, on the meta device or with real weights;
            after tensor parallelism, before activation checkpointing, compilation and FSDP.
        group: The expert-parallel ranks; each holds the r-th part of every layer's experts.
        pad_rows_to: Round the rows that experts get up to a multiple of this.

    Returns:
        By clean name, the box of each stack of experts. These entries replace those that tensor parallelism made for the
        same names. Empty for a group of one.

    Raises:
        ValueError: The number of experts is not a multiple of the ranks.
    """
    n, rank = group.size(), group.rank()
    if pad_rows_to < 1:
        raise ValueError(f"pad_rows_to={pad_rows_to} must be at least 1, which pads nothing.")
    if n == 1:
        return {}
    _check_counts(model, n)
    cuts: dict[str, ParamShard] = {}
    for stack in expert_stacks(model):
        held = stack.num_experts // n
        for name, _ in list(stack.experts.named_parameters(recurse=False)):
            cut = slice_parameter(stack.experts, name, 0, rank * held, held)
            cuts[f"{stack.fqn}.{name}"] = replace(cut, pieces=n, axis="ep")
        stack.holder.dispatch = ExpertParallelDispatch(group, pad_rows_to=pad_rows_to)
    return cuts


def check_expert_parallel(model: nn.Module, ep: int, *, tp: int = 1, sequence_parallel: bool = False) -> None:
    """Whether a model's experts can be spread over ``ep`` ranks; without any process group.

    Args:
        model: The whole model, on any device.
        ep: Expert-parallel ranks; 1 always passes.
        tp: Tensor-parallel ranks.
        sequence_parallel: Tokens are split over them.

    Raises:
        ValueError: No experts, a number of experts that is not a multiple of ``ep``, or tensor parallelism without
            sequence parallelism.
    """
    if ep == 1:
        return
    if not any(True for _ in expert_stacks(model)):
        raise ValueError(f"ep={ep} spreads experts over ranks, but {type(model).__name__} has none. Use ep=1.")
    _check_counts(model, ep)
    if tp > 1 and not sequence_parallel:
        raise ValueError(
            f"ep={ep} with tp={tp} and no sequence parallelism: all {tp} tensor-parallel ranks hold the same tokens and "
            f"would send each of them {tp} times. Set sequence_parallel=true, or use ep=1 or tp=1."
        )


def _check_counts(model: nn.Module, ep: int) -> None:
    for stack in expert_stacks(model):
        experts = stack.num_experts
        if experts % ep:
            divisors = [d for d in range(1, experts + 1) if experts % d == 0]
            raise ValueError(
                f"ep={ep} does not divide the {experts} experts of {stack.layer or type(model).__name__}: ranks would hold "
                f"different numbers of experts. Use one of {divisors}."
            )
