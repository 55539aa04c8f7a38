"""The model under its parallelism, in the one order that works.

Built on the meta device (no memory) → pipeline stage → float8 → loss in the head → tensor parallel → expert parallel →
context parallel → activation checkpointing → compile → FSDP2 / HSDP / DDP → weights, drawn from the whole parameters'
names and shapes, so that they are the same whatever the layout. The optimizer comes after, because it must hold the
sharded parameters.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from titan_mesh import Layout, Mesh
from titan_pipeline import Schedule
from torch import nn

from titan_train.config import Config
from titan_train.kernels.apply import apply_kernels, check_taken, choose_kernels, kernel_loss
from titan_train.models import InitFn, build_model, count_parameters, flops_per_token, init_for
from titan_train.models.call import take_whole_output
from titan_train.models.common.loss import ObservedLoss
from titan_train.models.common.moe.balance import moe_layers, set_sequence_group
from titan_train.models.common.mtp import AHEAD, mtp_of
from titan_train.models.common.tensor_styles import StyleTable
from titan_train.models.traits import traits_of
from titan_train.parallel.activations.recompute import apply_activation_checkpointing
from titan_train.parallel.check import check_model, has_own_loss
from titan_train.parallel.compiled import compile_blocks, compile_pieces, has_whole_graphs
from titan_train.parallel.data_parallel import apply_data_parallel
from titan_train.parallel.expert.apply import apply_expert_parallel
from titan_train.parallel.float8 import DEFERRING_RULES, convert_to_float8, share_scales
from titan_train.parallel.gradients import Gradients
from titan_train.parallel.head_loss import LossHead, fuse_head_loss, locate_vocabulary
from titan_train.parallel.layout.batch import plan_batch, tokens_at_once
from titan_train.parallel.layout.degrees import Mode
from titan_train.parallel.layout.run import plan_schedule
from titan_train.parallel.model import ParallelModel, Report
from titan_train.parallel.param_shard import ParamShard, init_of_shards
from titan_train.parallel.pipeline import TOKEN_IDS, Pipeline, make_transport
from titan_train.parallel.stages import take_parts, tied_over_stages
from titan_train.parallel.structure import blocks_of, freeze, hold_weights
from titan_train.parallel.tensor.apply import apply_tensor_parallel, compute_buffers
from titan_train.parallel.tensor.float8_linears import gathers_float8
from titan_train.parallel.tensor.loss import whole_loss
from titan_train.parallel.tensor.micro_pipeline import (
    FusedProducts,
    enable_symmetric_memory,
    micro_pipeline_options,
    overlaps_by_compiler,
)
from titan_train.parallel.tensor.styles import merge_tables, table_for
from titan_train.parallel.tied import meaning_all_copies, parameter_names, tied_to_first
from titan_train.task import ContextCut, Task, load_task


def build_parallel_model(
    config: Config,
    *,
    layout: Layout,
    mode: Mode,
    mesh: Mesh | None,
    schedule: Schedule | None,
    vocab_size: int | None,
    device: torch.device,
    task: Task | None = None,
) -> ParallelModel:
    """Build, cut, wrap and initialise this rank's part of the model.

    Args:
        config: The run's configuration.
        layout: The degrees.
        mode: The data-parallel wrapping, from `titan_train.parallel.layout.degrees.resolve_mode`.
        mesh: The ranks; None without a process group.
        schedule: The pipeline's; None without one.
        vocab_size: The tokenizer's, which sizes the embedding and the head; None for a model without one.
        device: Where the weights live.
        task: What the model is trained on; None takes the configuration's.
    """
    whole = build_model(config.model, vocab_size=vocab_size, device="meta")
    freeze(whole, config.train.freeze)
    hold_weights(whole, config.optimizer.weights)
    task = task or load_task(config)
    if "cu_seqlens" not in task.keywords:  # not text
        take_whole_output(whole)
    check_model(config, layout, plan_batch(config, layout), whole, task, vocab_size=vocab_size)
    config = meaning_all_copies(config, whole)
    chosen = choose_kernels(config.kernels, device)
    check_taken(apply_kernels(whole, chosen), config.kernels, config.model.name)

    table = merge_tables(whole, table_for(whole), config.parallel.tp_plan) if layout.spec.tp > 1 else {}
    loss, sums = task.loss(config, vocab_size), task.loss_parts(config)
    own = has_own_loss(task, config, vocab_size)
    if own:
        config = replace(config, train=replace(config.train, fused_loss=False))
    observed = None if sums is None else ObservedLoss(loss, sums.names, sums.sums)
    loss = kernel_loss(observed or loss, chosen, config, vocab_size, whole_vocabulary=layout.spec.tp == 1 and not own)

    depth = len(mtp_of(whole) or ())
    names = parameter_names(whole)
    trained = [name for name, parameter in fsdp.named_parameters(whole) if parameter.requires_grad]
    report = Report(count_parameters(whole), flops_per_token(whole, config.model.seq_len))
    if overlaps_by_compiler(config.parallel, config.compile, device):
        report.fused = FusedProducts()
    context: ContextCut | None = None
    if layout.spec.cp > 1 and mesh is not None:
        context = task.context(config, mesh, whole, torch.bfloat16 if config.train.dtype == "bf16" else torch.float32)
    run = _Run(config, layout, mode, mesh, schedule, device, vocab_size, context, table, report)
    init = init_of_shards(init_for(whole), run.cuts, tied_to_first(names), config.run.seed)
    parts = [_apply(part, run, init) for part in take_parts(config, whole, schedule, mesh)]
    fsdp.share_streams(parts)

    if run.tp is not None:
        loss = whole_loss(loss, run.cuts, table, run.tp, z_loss=config.train.z_loss)
    fused_loss = any(isinstance(module, LossHead) for part in parts for module in part.modules())
    pipeline = None
    copies: dict[str, int] = {}
    if schedule is not None and mesh is not None:
        tied = tied_over_stages(config, whole, schedule)
        read_again = (TOKEN_IDS,) if traits_of(whole).stages_read_tokens else ()
        keywords = (*task.keywords, *(AHEAD if depth else ()), *read_again)
        copies = {name: len(w.names) for w in tied for held in w.names.values() for name in names[held]}
        pipeline = Pipeline(
            schedule, parts, make_transport(schedule, mesh, device, config.launch.timeout_s, tied), loss=loss, tied=tied,
            keywords=keywords, fused_loss=fused_loss, config=config.pipeline,
            schedule_for=lambda n: plan_schedule(config.pipeline, pp=layout.spec.pp, microbatches=n), rules=DEFERRING_RULES,
            gather_each_microbatch=config.parallel.reshard == "always" or mode == "ddp",  # ddp gathers nothing
        )  # fmt: skip
    return ParallelModel(
        parts=parts,
        cuts=run.cuts,
        names=names,
        trained=trained,
        experts={name: layer.args.num_experts for name, layer in moe_layers(whole)},
        task=task,
        loss=loss,
        fused_loss=fused_loss,
        own_loss=own,
        observed=observed,
        gradients=Gradients(parts, run.cuts, copies=copies, world_size=layout.num_ranks, pp=layout.spec.pp),
        mtp_depth=depth,
        context=context,
        pipeline=pipeline,
        report=report,
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """What each step of the application reads, and the two tables that it fills: ``report`` and ``cuts``."""

    config: Config
    layout: Layout
    mode: Mode
    mesh: Mesh | None
    schedule: Schedule | None
    device: torch.device
    vocab_size: int | None
    context: ContextCut | None
    table: StyleTable
    """The styles of tensor parallelism."""
    report: Report
    cuts: dict[str, ParamShard] = field(default_factory=dict[str, ParamShard])

    @property
    def tp(self) -> dist.ProcessGroup | None:
        """The ranks of tensor parallelism; None without it."""
        return None if self.mesh is None or self.layout.spec.tp == 1 else self.mesh.group("tp")

    @property
    def ring(self) -> bool:
        """Transfers overlap matrix products by our own ring, not the compiler's."""
        return self.config.parallel.async_tp and self.layout.spec.tp > 1 and self.report.fused is None

    @property
    def splits_backward(self) -> bool:
        """The pipeline's schedule runs weight gradients later."""
        return self.schedule is not None and self.schedule.splits_backward


def _apply(part: nn.Module, run: _Run, init: InitFn) -> nn.Module:
    """Every kind of parallelism, applied to one part of the model in place; the part as it is wrapped in the end."""
    config, parallel, spec, mesh = run.config, run.config.parallel, run.layout.spec, run.mesh
    if config.float8.recipe != "none":
        tokens = tokens_at_once(plan_batch(config, run.layout), config, run.layout)
        plain = spec.tp == 1 and spec.pp == 1  # nothing stands between a norm and its linears
        eager = not config.compile.enabled
        report = convert_to_float8(part, config.float8, tokens=tokens, fuse_norms=plain, eager=eager)
        run.report.float8.append(report)

    head = None
    if config.train.fused_loss and run.vocab_size is not None:
        head = fuse_head_loss(part, z_loss=config.train.z_loss, vocab_size=run.vocab_size)

    if run.tp is not None:
        compute_buffers(part, config.run.seed, run.device)
        run.cuts.update(
            apply_tensor_parallel(
                part, run.tp, table=run.table, sequence_parallel=parallel.sequence_parallel,
                replicate_kv=parallel.replicate_kv, async_tp=run.ring,
                float8_gather=gathers_float8(config, split_backward=run.splits_backward), keep_fp32=parallel.keep_fp32,
            )
        )  # fmt: skip
        share_scales(part, run.tp)
        if head is not None:
            locate_vocabulary(part, head, run.cuts, run.table, run.tp)

    if mesh is not None and spec.ep > 1:
        run.cuts.update(apply_expert_parallel(part, mesh.group("ep")))
    shared = spec.tp > 1 and parallel.sequence_parallel  # tensor-parallel ranks hold parts of a row too
    set_sequence_group(part, None if mesh is None else mesh.group("sequence" if shared else "cp"))

    if run.context is not None:
        run.context.apply(part)

    activations = config.activations
    if config.compile.enabled:
        options = {}
        if run.report.fused is not None and run.tp is not None:
            enable_symmetric_memory(run.tp)
            options = micro_pipeline_options(run.report.fused)
        how: dict[str, Any] = {"split_backward": run.splits_backward, "inductor_options": options}
        if spec.cp == 1 and spec.ep == 1 and not run.ring and has_whole_graphs(part, config.parallel):
            compile_blocks(blocks_of(part), config.compile, activations, whole_graph=True, **how)
        else:
            activations = compile_pieces(part, blocks_of(part), config.compile, activations, **how)
    apply_activation_checkpointing(part, blocks_of(part), activations)

    # weights that are read from a folder are not drawn first; adapters are in no folder
    skip = (lambda name: ".lora_" not in name) if config.model.init else None
    part, plan = apply_data_parallel(part, config, run.layout, run.mode, mesh, run.device, init, skip)
    if plan is not None:
        run.report.plans.append(plan)
    return part
