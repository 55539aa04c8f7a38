"""What one rank of a layout would hold, without ranks and without memory.

The model is built on the meta device, cut as the rank would cut it, and one micro-batch runs through it on fake tensors.
Tensor parallelism is given a process group that pretends: it has the size and sends nothing.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from titan_mesh import Layout
from titan_pipeline import Schedule, verify
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.layout import BatchPlan, Mode
from titan_train.models import build_model, count_parameters
from titan_train.models.moe import moe_layers
from titan_train.parallel.activations import apply_activation_checkpointing
from titan_train.parallel.cut import slice_parameter
from titan_train.parallel.pipeline import keep_stage
from titan_train.parallel.tensor import apply_tensor_parallel, merge_tables
from titan_train.parallel.tensor.tables import table_for
from titan_train.train.build import blocks_of, fsdp_policy, stage_layers


@dataclass(frozen=True, slots=True)
class RankEstimate:
    """Bytes on one rank."""

    pipeline_rank: int
    """Its place in the pipeline; 0 without one."""
    num_parameters: int
    """Elements of the parameters it computes with, after tensor, expert and pipeline parallelism, before sharding."""
    params: int
    grads: int
    optimizer: int
    gathered: int
    """Most parameters gathered at one time."""
    activations: int
    """Saved for backward, of all micro-batches that are under way at the same time."""
    peak: int
    """Most at any time of a step."""


def estimate_ranks(
    config: Config, *, layout: Layout, mode: Mode, batch: BatchPlan, schedule: Schedule | None, vocab_size: int | None
) -> list[RankEstimate]:
    """Estimate one rank of each pipeline rank; those that differ in other axes hold as much."""
    whole = build_model(config.model, vocab_size=vocab_size, device="meta")
    with _pretended_group(layout.spec.tp) as group:
        if schedule is None:
            return [_estimate([whole], 0, [1.0], config, layout, mode, batch, whole, group)]
        layers = stage_layers(config, whole, schedule)
        peaks = verify(schedule).peak
        found: list[RankEstimate] = []
        for rank in range(schedule.num_ranks):
            parts: list[nn.Module] = []
            for stage in schedule.stages_of(rank):
                part = build_model(config.model, vocab_size=vocab_size, device="meta")
                keep_stage(part, layers[stage], first=stage == 0, last=stage == schedule.num_stages - 1)
                parts.append(part)
            under_way = [peaks[rank]] * len(parts)  # in the unit of one rank's share of one micro-batch
            found.append(_estimate(parts, rank, under_way, config, layout, mode, batch, whole, group))
        return found


def _estimate(
    parts: list[nn.Module],
    rank: int,
    under_way: list[float],
    config: Config,
    layout: Layout,
    mode: Mode,
    batch: BatchPlan,
    whole: nn.Module,
    group: dist.ProcessGroup | None,
) -> RankEstimate:
    spec = layout.spec
    sizes = {"shard": spec.dp_shard * spec.cp, "replicate": spec.dp_replicate}
    if mode == "ddp":
        sizes = {"replicate": spec.dp_replicate * spec.cp}
    table = merge_tables(whole, table_for(whole), config.parallel.tp_plan) if spec.tp > 1 else {}
    totals = dict.fromkeys(("params", "grads", "optimizer", "gathered", "activations", "peak"), 0)
    numel = 0
    for part, times in zip(parts, under_way, strict=True):
        if group is not None:
            apply_tensor_parallel(
                part, group, table=table, sequence_parallel=config.parallel.sequence_parallel,
                replicate_kv=config.parallel.replicate_kv,
            )  # fmt: skip
        apply_activation_checkpointing(part, blocks_of(part), config.activations)
        policy = fsdp_policy(config, mode)
        inputs = _inputs(part, config, batch, spec.cp, spec.tp if config.parallel.sequence_parallel else 1, whole)
        measured = fsdp.plan(part, sizes, policy).estimate(part, inputs, loss=_sum, in_place=True)
        part.to(torch.float32)  # the measurement left it in the dtype of forward
        experts = [f"{name}.experts" for name, _ in moe_layers(part)] if spec.ep > 1 else []
        _cut_experts(part, spec.ep)
        expert_sizes = {"shard": max(1, spec.dp_shard * spec.cp * spec.tp // spec.ep), "replicate": spec.dp_replicate}
        plan = fsdp.plan(
            part, sizes, fsdp_policy(config, mode, experts=experts), meshes={"experts": expert_sizes} if experts else None
        )
        held = plan.estimate(microbatches=batch.accumulation, keep=config.parallel.accumulate)
        activations = int(measured.activations * times)
        numel += count_parameters(part)
        for name in ("params", "grads", "optimizer", "gathered"):
            totals[name] += getattr(held, name)
        totals["activations"] += activations
        totals["peak"] += held.peak + activations
    return RankEstimate(pipeline_rank=rank, num_parameters=numel, **totals)


def _inputs(
    part: nn.Module, config: Config, batch: BatchPlan, cp: int, sequence_ranks: int, whole: nn.Module
) -> tuple[Tensor, ...]:
    """One micro-batch of this rank: tokens for the first stage, hidden states for the others."""
    seq_len = config.model.seq_len // cp
    if getattr(part, "tok_embeddings", part) is not None:
        return (torch.zeros(batch.microbatch, seq_len, dtype=torch.int64, device="meta"),)
    # a stage in the middle learns the length of its rows from their positions
    part.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "positions": torch.arange(seq_len).unsqueeze(0)}), with_kwargs=True
    )
    width = next(p.shape[-1] for name, p in whole.named_parameters() if name.startswith("tok_embeddings"))
    return (torch.zeros(batch.microbatch, seq_len // sequence_ranks, width, device="meta"),)


def _sum(output: Tensor) -> Tensor:
    """A loss that saves what cross-entropy on float32 logits would."""
    return torch.logsumexp(output.float(), dim=-1).sum()


def _cut_experts(part: nn.Module, ep: int) -> None:
    for _, layer in moe_layers(part):
        for name, parameter in list(layer.experts.named_parameters(recurse=False)):
            slice_parameter(layer.experts, name, 0, 0, parameter.shape[0] // ep)


@contextmanager
def _pretended_group(size: int) -> Generator[dist.ProcessGroup | None]:
    """A group of ``size`` ranks that sends nothing; None for one rank."""
    if size == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
