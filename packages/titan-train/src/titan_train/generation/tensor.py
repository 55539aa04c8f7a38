"""A model cut over ranks by tensor parallelism, for generating with models that one device cannot hold.

Every rank holds its heads and rows of the weights, read straight from the checkpoint; its part of the key-value cache is that
of its heads. The head's logits are gathered, so that every rank draws the same token.
"""

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from titan_ckpt import LocalShard
from titan_fsdp import materialize
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from titan_train.exchange import gather_values
from titan_train.models import unwrap
from titan_train.models.common.tensor_styles import StyleTable
from titan_train.parallel.param_shard import ParamShard
from titan_train.parallel.tensor.apply import apply_tensor_parallel, compute_buffers
from titan_train.parallel.tensor.styles import merge_tables, style_of, table_for


def cut_for_generation(
    model: nn.Module,
    group: dist.ProcessGroup,
    *,
    device: torch.device | str,
    plan: Mapping[str, str],
    replicate_kv: bool = False,
) -> dict[str, LocalShard]:
    """Cut a model in place and allocate this rank's part. Collective over ``group``.

    Args:
        model: The whole model on the meta device.
        group: The ranks.
        device: Where this rank's part goes; its values are undefined. "meta" allocates nothing.
        plan: Styles of a user's own module, ``parallel.tp_plan``.
        replicate_kv: As ``parallel.replicate_kv``.

    Returns:
        Where each cut parameter lies in the whole one, for the checkpoint.

    Raises:
        ValueError: The ranks do not divide the model's heads, or the model has no styles.
    """
    table = merge_tables(model, table_for(model), plan)
    heads = _heads(model, table)
    if torch.device(device).type != "meta":
        compute_buffers(model, 0, torch.device(device))
    cuts = apply_tensor_parallel(model, group, table=table, sequence_parallel=False, replicate_kv=replicate_kv)
    if torch.device(device).type != "meta":
        # not to_empty: a tied weight would get memory under each name, and a rotary table no values
        materialize(model, device, init=lambda fqn, tensor, generator: None, skip=lambda fqn: True)
    for name in heads:
        cut = cuts.get(f"{name}.weight")
        if cut is not None and cut.pieces > 1:
            _gather_logits(model.get_submodule(name), cut, group)  # never removed
    return {name: LocalShard(cut.global_shape, cut.offset) for name, cut in cuts.items() if cut.pieces > 1}


@contextmanager
def whole_logits(
    model: nn.Module, group: dist.ProcessGroup, *, cuts: Mapping[str, ParamShard], plan: Mapping[str, str]
) -> Generator[None]:
    """Inside, a model that is cut for training gives the logits of all ranks. Collective over ``group``.

    Args:
        model: What a rank trains, with its wrappers.
        group: The ranks.
        cuts: Which box of each parameter this rank holds.
        plan: Styles of a user's own module, ``parallel.tp_plan``.
    """
    whole = unwrap(model)
    with ExitStack() as hooks:
        for name in _heads(whole, merge_tables(whole, table_for(whole), plan)):
            cut = cuts.get(f"{name}.weight")
            if cut is not None and cut.pieces > 1:
                hooks.enter_context(_gather_logits(whole.get_submodule(name), cut, group))
        yield


def _heads(model: nn.Module, table: StyleTable) -> list[str]:
    return [name for name, _ in model.named_modules() if name and style_of(name, table) == "head"]


def _gather_logits(head: nn.Module, cut: ParamShard, group: dist.ProcessGroup) -> RemovableHandle:
    """Have a head give the logits of all ranks, whose parts of the vocabulary may differ in size."""
    whole, ranks = cut.global_shape[0], dist.get_world_size(group)
    offsets = gather_values(cut.offset[0], group)
    order = sorted(range(ranks), key=lambda rank: offsets[rank])
    starts = sorted(offsets)
    sizes = [end - start for start, end in zip(starts, [*starts[1:], whole], strict=True)]

    def gather(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        padded = F.pad(out, (0, max(sizes) - out.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([parts[rank][..., :size] for rank, size in zip(order, sizes, strict=True)], dim=-1)

    return head.register_forward_hook(gather)
