"""The model under its parallelism, in the one order that works.

Built on the meta device (no memory) → pipeline stage → float8 → loss in the head → tensor parallel → expert parallel →
context parallel → activation checkpointing → compile → FSDP2 / HSDP / DDP → weights, drawn from the whole parameters'
names and shapes, so that they are the same whatever the layout. The optimizer comes after, because it must hold the
sharded parameters.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import titan_fp8
import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from titan_mesh import Layout, Mesh
from titan_pipeline import Schedule
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.kernels.apply import apply_kernels, check_taken, choose_kernels, kernel_loss
from titan_train.models import InitFn, accepted_inputs, build_model, count_parameters, flops_per_token, init_for
from titan_train.models.call import active_dropout
from titan_train.models.common.loss import ObservedLoss, TokenLoss
from titan_train.models.common.moe.balance import moe_layers, set_aux_scale, set_sequence_group
from titan_train.parallel.activations.recompute import apply_activation_checkpointing
from titan_train.parallel.check import check_model
from titan_train.parallel.compiled import compile_blocks
from titan_train.parallel.data_parallel import apply_data_parallel
from titan_train.parallel.expert.apply import apply_expert_parallel
from titan_train.parallel.float8 import conversion_table, convert_to_float8, describe_conversion, share_scales
from titan_train.parallel.gradients import Gradients
from titan_train.parallel.head_loss import LossHead, VocabShard, fuse_head_loss
from titan_train.parallel.layout.batch import plan_batch, tokens_at_once
from titan_train.parallel.layout.degrees import Mode
from titan_train.parallel.param_shard import ParamShard
from titan_train.parallel.pipeline import Pipeline, make_transport
from titan_train.parallel.stages import stage_layers, take_stage
from titan_train.parallel.structure import blocks_of, freeze
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.async_linears import overlapped_modules
from titan_train.parallel.tensor.float8_linears import gathers_same_bits
from titan_train.parallel.tensor.loss import vocab_parallel_cross_entropy_sum
from titan_train.parallel.tensor.micro_pipeline import (
    FusedProducts,
    enable_symmetric_memory,
    micro_pipeline_options,
    overlaps_by_compiler,
)
from titan_train.parallel.tensor.styles import merge_tables, style_of, table_for
from titan_train.parallel.tied import (
    ParameterNames,
    TiedCopies,
    meaning_all_copies,
    parameter_names,
    tied_copies,
    tied_to_first,
)
from titan_train.task import ContextCut, Task, TaskBatch, load_task


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """What one rank trains."""

    parts: Sequence[nn.Module]
    """The model; under pipeline parallelism, this rank's stages."""
    plans: Sequence[fsdp.WrapPlan]
    """How each part was wrapped; empty in mode "none"."""
    cuts: Mapping[str, ParamShard]
    """Which box of each parameter is here, where tensor or expert parallelism cut it."""
    task: Task
    """What the model is trained on."""
    loss: TokenLoss
    """From the output (of a decoder: its local logits) and the target to the sum of the loss, unless the head computes it."""
    gradients: Gradients
    context: ContextCut | None
    pipeline: Pipeline | None
    names: ParameterNames
    """Of all parameters of the whole model."""
    experts: Mapping[str, int]
    """Experts of each mixture-of-experts layer of the whole model, by the layer's name."""
    num_parameters: int
    """Of the whole model."""
    flops_per_token: float
    """Of the whole model, forward and backward."""
    fused: FusedProducts | None = None
    """What the compiler overlapped of tensor parallelism, known after the first step; None where it was not asked to."""
    fused_loss: bool = False
    """The head computes the loss, a chunk of tokens at a time."""
    observed: ObservedLoss | None = None
    """The same loss, where the task reports it by parts."""
    float8: Sequence[titan_fp8.ConversionReport] = ()
    """Which linears of each part compute in float8; empty where that was not asked for."""

    def loss_sum(self, batch: TaskBatch) -> Tensor:
        """Sum of the loss over a batch, of text in nats over its valid labels; not under a pipeline."""
        (module,) = self.parts
        taken = accepted_inputs(module, self.task.keywords)
        passed = {name: value for name, value in batch.keywords.items() if name in taken and value is not None}
        if self.fused_loss:
            return module(*batch.inputs, **passed, labels=batch.target)
        return self.loss(module(*batch.inputs, **passed), batch.target)


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
    task = task or load_task(config)
    check_model(config, layout, plan_batch(config, layout), whole, task)
    config = meaning_all_copies(config, whole)
    chosen = choose_kernels(config.kernels, device)
    check_taken(apply_kernels(whole, chosen), config.kernels, config.model.name)
    loss = task.loss(config, vocab_size)
    parts_of_loss = task.loss_parts(config)
    observed = None if parts_of_loss is None else ObservedLoss(loss, parts_of_loss.names, parts_of_loss.sums)
    loss = loss if observed is None else observed
    loss = kernel_loss(loss, chosen, config, vocab_size, whole_vocabulary=layout.spec.tp == 1)
    applied = _Application(task, config, layout, mode, mesh, schedule, device, whole, loss, vocab_size)
    wrapped = [applied.to(part) for part in _parts(config, whole, schedule, mesh)]
    parts = [part for part, _ in wrapped]
    fsdp.share_streams(parts)
    pipeline = None
    copies: Sequence[TiedCopies] = ()
    if schedule is not None and mesh is not None:
        pipeline = Pipeline(
            schedule, parts, make_transport(schedule, mesh, device, config.launch.timeout_s), loss=applied.loss,
            keywords=task.keywords, fused_loss=applied.fused_loss, config=config.pipeline,
            gather_each_microbatch=config.parallel.reshard == "always" or mode == "ddp",  # ddp gathers nothing
        )  # fmt: skip
        copies = tied_copies(config, whole, mesh, schedule)
    return ParallelModel(
        parts=parts,
        plans=[plan for _, plan in wrapped if plan is not None],
        cuts=applied.cuts,
        task=task,
        loss=applied.loss,
        gradients=Gradients(parts, applied.cuts, tied=copies, world_size=layout.num_ranks, pp=layout.spec.pp),
        context=applied.context,
        pipeline=pipeline,
        names=applied.names,
        experts={name: layer.args.num_experts for name, layer in moe_layers(whole)},
        num_parameters=count_parameters(whole),
        flops_per_token=flops_per_token(whole, config.model.seq_len),
        fused=applied.fused,
        fused_loss=applied.fused_loss,
        observed=observed,
        float8=applied.float8,
    )


def describe_options(config: Config, model: ParallelModel) -> list[str]:
    """Lines for the log: what came of options that take effect only where a layer allows it, on this rank's parts."""
    lines: list[str] = []
    if model.float8:
        lines.append(describe_conversion(model.float8, config.float8, model.parts, staged=model.pipeline is not None))
    if config.parallel.async_tp and config.parallel.tp > 1 and model.fused is None:
        names = [name for part in model.parts for name in overlapped_modules(part)]
        found = f"the transfers of {len(names)} modules (layout.txt names them)" if names else (
            "nothing: of a region, all linears must be plain, not float8, and their input goes through one SharedInput"
        )  # fmt: skip
        lines.append(f"parallel.async_tp=true overlaps {found}")
    device = next(model.parts[0].parameters()).device.type
    if config.activations.offload and device != "cuda":
        lines.append(
            f"activations.offload=true moves nothing: this run is on {device}, and only CUDA tensors leave for the host"
        )
    dropped = active_dropout(model.parts)
    if dropped:
        rates = ", ".join(f"{rate} ({count}x)" for rate, count in dropped.items())
        lines.append(
            f"dropout is active: {rates}. What is dropped depends on run.seed, the step, and the rank's place in data and "
            "context parallelism and the pipeline. Set the rates to 0 in model.args to train without dropout"
        )
    if config.profile.range is not None and config.profile.range[0] > config.train.steps:
        lines.append(
            f"profile.steps={config.profile.steps!r} begins after the last step, {config.train.steps}: no trace"
        )
    return lines


def describe_layout(layout: Layout, model: ParallelModel, schedule: Schedule | None) -> str:
    """The text of ``layout.txt``: the rank table, the schedule, what overlaps, then what each wrapped unit does."""
    parts = [layout.explain()]
    parts += [f"float8 {report.recipe}\n{conversion_table(report)}" for report in model.float8]
    if schedule is not None:
        parts.append(f"pipeline schedule {schedule.name}, {schedule.num_stages} stages\n{schedule.to_text()}")
    overlapped = [name for part in model.parts for name in overlapped_modules(part)]
    if overlapped:
        parts.append("asynchronous tensor parallelism: transfers overlap the products of\n  " + "\n  ".join(overlapped))
    return "\n\n".join([*parts, *(plan.explain() for plan in model.plans)])


def _parts(config: Config, whole: nn.Module, schedule: Schedule | None, mesh: Mesh | None) -> Sequence[nn.Module]:
    """The model on meta, or each of this rank's stages of it."""
    if schedule is None or mesh is None:
        return [copy.deepcopy(whole)]
    layers = stage_layers(config, whole, schedule)
    last = schedule.num_stages - 1
    return [
        take_stage(whole, layers[stage], first=stage == 0, last=stage == last)
        for stage in schedule.stages_of(mesh.rank_in("pp"))
    ]


@dataclass
class _Application:
    """Every kind of parallelism, applied to the parts of this rank's model one after the other."""

    task: Task
    config: Config
    layout: Layout
    mode: Mode
    mesh: Mesh | None
    schedule: Schedule | None
    device: torch.device
    whole: nn.Module
    loss: TokenLoss
    """From (local) logits and labels to the sum of the cross-entropy."""
    vocab_size: int | None
    cuts: dict[str, ParamShard] = field(default_factory=dict[str, ParamShard])
    """What tensor and expert parallelism have cut of all parts so far."""
    float8: list[titan_fp8.ConversionReport] = field(default_factory=list[titan_fp8.ConversionReport])

    def __post_init__(self) -> None:
        config, mesh = self.config, self.mesh
        self.spec = self.layout.spec
        self.init = init_for(self.whole)
        self.names = parameter_names(self.whole)
        self.fused = FusedProducts() if overlaps_by_compiler(config.parallel, config.compile, self.device) else None
        self.fused_loss = False
        self.context: ContextCut | None = None
        if self.spec.cp > 1 and mesh is not None:
            dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
            self.context = self.task.context(config, mesh, self.whole, dtype)

    def to(self, part: nn.Module) -> tuple[nn.Module, fsdp.WrapPlan | None]:
        """Apply all of it to one part, in the order that works; the part, and how it was wrapped."""
        config = self.config
        self._float8(part)
        head = None
        if config.train.fused_loss and self.vocab_size is not None:
            head = fuse_head_loss(part, z_loss=config.train.z_loss, vocab_size=self.vocab_size)
        self._tensor(part)
        if head is not None:
            self._locate_vocabulary(part, head)
        self._experts(part)
        if self.context is not None:
            self.context.apply(part)
        apply_activation_checkpointing(part, blocks_of(part), config.activations)
        if config.compile.enabled:
            self._compile(part)
        init = _init_of_shards(self.init, self.cuts, tied_to_first(self.names), config.run.seed)
        # weights that are read from a folder are not drawn first; adapters are in no folder
        skip = (lambda name: ".lora_" not in name) if config.model.init else None
        return apply_data_parallel(part, config, self.layout, self.mode, self.mesh, self.device, init, skip)

    def _float8(self, part: nn.Module) -> None:
        config = self.config
        if config.float8.recipe != "none":
            report = convert_to_float8(
                part,
                config.float8,
                tokens=tokens_at_once(plan_batch(config, self.layout), config, self.layout),
                fuse_norms=self.spec.tp == 1 and self.spec.pp == 1,
                eager=not config.compile.enabled,
            )
            self.float8.append(report)

    def _tensor(self, part: nn.Module) -> None:
        parallel = self.config.parallel
        if self.spec.tp == 1:
            return
        assert self.mesh is not None
        group = self.mesh.group("tp")
        table = merge_tables(self.whole, table_for(self.whole), parallel.tp_plan)
        heads = [name for name, _ in part.named_modules() if name and style_of(name, table) == "head"]
        self.cuts |= apply_tensor_parallel(
            part,
            group,
            table=table,
            sequence_parallel=parallel.sequence_parallel,
            replicate_kv=parallel.replicate_kv,
            async_tp=parallel.async_tp and self.fused is None,
            float8_gather=_gathers_float8(self.config, self.schedule),
        )
        for head in heads:
            if f"{head}.weight" in self.cuts:
                self.loss = _vocab_parallel_loss(group, self.cuts[f"{head}.weight"], self.config.train.z_loss)
        share_scales(part, group)

    def _locate_vocabulary(self, part: nn.Module, name: str) -> None:
        """Tell the head that computes the loss which rows tensor parallelism left it."""
        head = part.get_submodule(name)
        assert isinstance(head, LossHead)
        cut = self.cuts.get(f"{name}.weight")
        self.fused_loss = True
        if cut is None or cut.pieces == 1:
            return
        table = merge_tables(self.whole, table_for(self.whole), self.config.parallel.tp_plan)
        if style_of(name, table) != "head" or self.mesh is None:
            raise ValueError(
                f"parallel.tp_plan cuts {name}, the linear to the vocabulary, by the style {style_of(name, table)!r}: the loss "
                "would miss the logits of other ranks. Give it the style 'head'."
            )
        head.shard = VocabShard(self.mesh.group("tp"), cut.offset[0])

    def _experts(self, part: nn.Module) -> None:
        """Expert parallelism; and which ranks share a row, and how much one row of the step weighs in the balance loss."""
        if self.spec.ep > 1:
            assert self.mesh is not None
            self.cuts |= apply_expert_parallel(part, self.mesh.group("ep"))
        shared = self.spec.tp > 1 and self.config.parallel.sequence_parallel
        set_sequence_group(part, None if self.mesh is None else self.mesh.group("sequence" if shared else "cp"))
        set_aux_scale(part, 1 / self.config.train.global_batch)

    def _compile(self, part: nn.Module) -> None:
        """Compile the blocks, with tensor parallelism's transfers overlapped where the compiler is to do that."""
        config = self.config
        ring = config.parallel.async_tp and self.spec.tp > 1 and self.fused is None
        options: dict[str, Any] = {}
        if self.fused is not None and self.mesh is not None:
            enable_symmetric_memory(self.mesh.group("tp"))
            options = micro_pipeline_options(self.fused)
        whole_graph = self.spec.cp == 1 and self.spec.ep == 1 and not ring
        compile_blocks(
            blocks_of(part), config.compile, config.activations, whole_graph=whole_graph,
            split_backward=self.schedule is not None and self.schedule.splits_backward, inductor_options=options,
        )  # fmt: skip


def _gathers_float8(config: Config, schedule: Schedule | None) -> bool:
    """Whether sequence parallelism gathers in float8: as configured; by itself where nothing is lost."""
    if config.model.lora_rank:  # an adapter reads what its base reads, before the cast
        return False
    if config.float8.recipe == "none" or config.float8.tp_gather != "auto":
        return config.float8.recipe != "none" and config.float8.tp_gather == "on"
    splits = schedule is not None and schedule.splits_backward
    return gathers_same_bits(titan_fp8.Recipe.get(config.float8.recipe)) and not splits


def _vocab_parallel_loss(group: dist.ProcessGroup, head: ParamShard, z_loss: float) -> TokenLoss:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy_sum(logits, labels, group, head.offset[0], z_loss=z_loss)

    return loss


def _init_of_shards(init: InitFn, cuts: Mapping[str, ParamShard], tied: Mapping[str, str], seed: int) -> InitFn:
    """Fill the box of each parameter that is here, from the values of the whole one."""

    def fill(fqn: str, tensor: Tensor, generator: torch.Generator) -> None:
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
