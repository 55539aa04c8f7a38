"""The model under its parallelism, in the one order that works.

Built on the meta device (no memory) → pipeline stage → float8 → tensor parallel → expert parallel → context parallel →
activation checkpointing → compile → FSDP2 / HSDP / DDP → weights, drawn from the whole parameters' names and shapes, so
that they are the same whatever the layout. The optimizer comes after, because it must hold the sharded parameters.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import titan_fp8
import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from titan_mesh import Layout, Mesh, MeshSpec
from titan_pipeline import Schedule
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.models import InitFn, build_model, count_parameters, flops_per_token, init_for
from titan_train.models.moe import moe_layers, set_aux_scale, set_sequence_group
from titan_train.parallel.activations import apply_activation_checkpointing
from titan_train.parallel.compiled import compile_blocks
from titan_train.parallel.context import ContextParallel, Heads, plan_rows
from titan_train.parallel.cut import Cut
from titan_train.parallel.expert import apply_expert_parallel, check_expert_parallel
from titan_train.parallel.float8 import convert_to_float8, share_scales
from titan_train.parallel.gradients import Gradients, TiedCopies
from titan_train.parallel.pipeline import Pipeline, check_can_be_cut, make_transport, plan_layers, take_stage
from titan_train.parallel.tensor import (
    FusedProducts,
    apply_tensor_parallel,
    check_tensor_parallel,
    merge_tables,
    micro_pipeline_options,
    overlapped_modules,
    vocab_parallel_cross_entropy_sum,
)
from titan_train.parallel.tensor.float8_linears import can_gather_float8, gathers_same_bits
from titan_train.parallel.tensor.micro_pipeline import enable_symmetric_memory, overlaps_by_compiler
from titan_train.parallel.tensor.styles import table_for
from titan_train.plan.batch import BatchPlan, plan_batch
from titan_train.plan.layout import Mode
from titan_train.plan.schedule import plan_pipeline
from titan_train.train.loss import TokenLoss, cross_entropy_sum


@dataclass(frozen=True, slots=True)
class ParallelModel:
    """What one rank trains."""

    parts: Sequence[nn.Module]
    """The model; under pipeline parallelism, this rank's stages."""
    plans: Sequence[fsdp.WrapPlan]
    """How each part was wrapped; empty in mode "none"."""
    cuts: Mapping[str, Cut]
    """Which box of each parameter is here, where tensor or expert parallelism cut it."""
    loss: TokenLoss
    """From (local) logits and labels to the sum of the cross-entropy."""
    gradients: Gradients
    context: ContextParallel | None
    pipeline: Pipeline | None
    names: tuple[str, ...]
    """Of all parameters of the whole model."""
    experts: Mapping[str, int]
    """Experts of each mixture-of-experts layer of the whole model, by the layer's name."""
    num_parameters: int
    """Of the whole model."""
    flops_per_token: float
    """Of the whole model, forward and backward."""
    fused: FusedProducts | None = None
    """What the compiler overlapped of tensor parallelism, known after the first step; None where it was not asked to."""


def build_parallel_model(
    config: Config,
    *,
    layout: Layout,
    mode: Mode,
    mesh: Mesh | None,
    schedule: Schedule | None,
    vocab_size: int,
    device: torch.device,
) -> ParallelModel:
    """Build, cut, wrap and initialise this rank's part of the model.

    Args:
        config: The run's configuration.
        layout: The degrees.
        mode: The data-parallel wrapping, from `titan_train.plan.layout.resolve_mode`.
        mesh: The ranks; None without a process group.
        schedule: The pipeline's; None without one.
        vocab_size: The tokenizer's, which sizes the embedding and the head.
        device: Where the weights live.
    """
    spec = layout.spec
    whole = build_model(config.model, vocab_size=vocab_size, device="meta")
    init = init_for(whole)
    check_model(config, layout, plan_batch(config, layout), whole)
    tied = tied_to_first(whole)
    context = _context_parallel(config, mesh, whole) if spec.cp > 1 and mesh is not None else None
    table = merge_tables(whole, table_for(whole), config.parallel.tp_plan) if spec.tp > 1 else {}
    loss: TokenLoss = cross_entropy_sum
    fused = FusedProducts() if overlaps_by_compiler(config.parallel, config.compile, device) else None
    parts: list[nn.Module] = []
    plans: list[fsdp.WrapPlan] = []
    cuts: dict[str, Cut] = {}
    for part in _parts(config, whole, schedule, mesh):
        if config.float8.recipe != "none":
            convert_to_float8(
                part,
                config.float8,
                tokens=config.model.seq_len // spec.cp * (config.train.microbatch or 1),
            )
        if spec.tp > 1:
            assert mesh is not None
            cuts |= apply_tensor_parallel(
                part,
                mesh.group("tp"),
                table=table,
                sequence_parallel=config.parallel.sequence_parallel,
                replicate_kv=config.parallel.replicate_kv,
                async_tp=config.parallel.async_tp and fused is None,
                float8_gather=_gathers_float8(config, schedule),
            )
            if "lm_head.weight" in cuts:
                loss = _vocab_parallel_loss(mesh.group("tp"), cuts["lm_head.weight"])
            share_scales(part, mesh.group("tp"))
        if spec.ep > 1:
            assert mesh is not None
            cuts |= apply_expert_parallel(part, mesh.group("ep"))
        _balance_experts(part, config, mesh)
        if context is not None:
            context.apply(part)
        apply_activation_checkpointing(part, blocks_of(part), config.activations)
        if config.compile.enabled:
            _compile(part, config, spec, mesh, fused)
        wrapped, plan = _wrap(part, config, layout, mode, mesh, device, _global_init(init, cuts, tied, config.run.seed))
        parts.append(wrapped)
        if plan is not None:
            plans.append(plan)
    pipeline = None
    if schedule is not None:
        assert mesh is not None
        pipeline = Pipeline(
            schedule, parts, make_transport(schedule, mesh, device), loss=loss, config=config.pipeline,
            gather_each_microbatch=config.parallel.reshard == "always" or mode == "ddp",  # ddp gathers nothing
        )  # fmt: skip
    copies = _tied_copies(tied, mesh, schedule) if schedule is not None and mesh is not None else None
    return ParallelModel(
        parts=parts,
        plans=plans,
        cuts=cuts,
        loss=loss,
        gradients=Gradients(parts, cuts, tied=copies, world_size=layout.num_ranks, pp=spec.pp),
        context=context,
        pipeline=pipeline,
        names=tuple(name for name, _ in whole.named_parameters()),
        experts={name: layer.args.num_experts for name, layer in moe_layers(whole)},
        num_parameters=count_parameters(whole),
        flops_per_token=flops_per_token(whole, config.model.seq_len),
        fused=fused,
    )


def check_model(config: Config, layout: Layout, batch: BatchPlan, model: nn.Module) -> None:
    """Refuse what this model cannot do under this layout, before any rank starts.

    Args:
        config: The run's configuration.
        layout: The degrees.
        batch: How a step is cut.
        model: The whole model, on the meta device.

    Raises:
        ValueError: Heads, widths, experts, layers or lengths do not fit; the message names both numbers.
    """
    spec = layout.spec
    parallel = config.parallel
    if spec.tp > 1:
        check_tensor_parallel(
            model,
            spec.tp,
            table=merge_tables(model, table_for(model), parallel.tp_plan),
            seq_len_local=config.model.seq_len // spec.cp,
            sequence_parallel=parallel.sequence_parallel,
            replicate_kv=parallel.replicate_kv,
            async_tp=parallel.async_tp,
        )
    check_expert_parallel(model, spec.ep, tp=spec.tp, sequence_parallel=parallel.sequence_parallel)
    if spec.cp > 1:
        plan_rows(
            config.context, spec.cp, 0, Heads.of(model, spec.tp), seq_len=config.model.seq_len, dtype=torch.float32
        )
        mixed_rows = config.data.document_mask and batch.microbatch > 1
        if mixed_rows and any(layer.args.balance_loss for _, layer in moe_layers(model)):
            raise ValueError(
                f"parallel.cp={spec.cp}, data.document_mask and train.microbatch={batch.microbatch} with a balance loss: context "
                "parallelism lays the rows of a micro-batch into one, and the balance loss is defined on a row. Set "
                "train.microbatch=1."
            )
    schedule = plan_pipeline(config, layout, batch)
    if schedule is not None:
        stage_layers(config, model, schedule)
    recipe = config.float8.recipe
    if recipe != "none" and config.float8.all_gather == "on" and not titan_fp8.Recipe.get(recipe).fsdp_all_gather:
        raise ValueError(
            f"float8.all_gather='on' and float8.recipe={recipe!r}: a scale of this recipe spans what several ranks hold of a "
            "weight. Use recipe 'blockwise' or 'tensorwise', or all_gather='auto'."
        )
    if recipe != "none" and config.float8.tp_gather == "on" and not can_gather_float8(titan_fp8.Recipe.get(recipe)):
        raise ValueError(
            f"float8.tp_gather='on' and float8.recipe={recipe!r}: scales of this recipe span the tokens of all ranks in the "
            "weight gradient. Use recipe 'blockwise' or 'tensorwise', or tp_gather='auto'."
        )
    if config.activations.checkpoint == "budget" and not config.compile.enabled:
        raise ValueError(
            "activations.checkpoint='budget' is what torch.compile decides while it compiles. Set compile.enabled=true, or "
            "use 'selective'."
        )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: children of the containers that hold several modules of one class, outermost first."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for container in model.modules():
        blocks = list(container.children())
        repeats = isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if repeats and blocks and len({type(b) for b in blocks}) == 1 and id(container) not in inside:
            found += blocks
            inside |= {id(m) for block in blocks for m in block.modules()}
    return found


def tied_to_first(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, to the first."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            names[name] = first[id(parameter)]
    return names


def fsdp_policy(config: Config, mode: Mode, *, experts: Sequence[str] = ()) -> fsdp.Policy:
    """The titan-fsdp policy that a configuration means.

    Args:
        config: The run's configuration.
        mode: The resolved mode.
        experts: Modules that expert parallelism has cut, to be sharded over the ranks that hold the same ones.
    """
    parallel = config.parallel
    return fsdp.Policy(
        mode="fsdp" if mode == "none" else mode,
        units=["auto", *(fsdp.Unit(name, mesh="experts") for name in experts)],
        reshard=parallel.reshard,
        reshard_overrides=dict(parallel.reshard_overrides),
        mp=fsdp.MixedPrecision(
            param=config.train.dtype, reduce=parallel.reduce_dtype, keep_fp32=list(parallel.keep_fp32)
        ),
        offload=None if parallel.offload == "none" else parallel.offload,
        # the loss is already divided by the step's tokens over all ranks
        grad_divide="sum",
        comm=fsdp.Comm(
            reduce_scatter="bf16" if parallel.compress == "bf16" and mode != "ddp" else "native",
            ddp_hook=parallel.compress if mode == "ddp" and parallel.compress != "none" else None,
        ),
        pp=parallel.pp > 1,
    )


def describe_layout(layout: Layout, model: ParallelModel, schedule: Schedule | None) -> str:
    """The text of ``layout.txt``: the rank table, the schedule, what overlaps, then what each wrapped unit does."""
    parts = [layout.explain()]
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


def stage_layers(config: Config, whole: nn.Module, schedule: Schedule) -> list[range]:
    """The layers of each pipeline stage, balanced by FLOPs unless the configuration cuts by hand."""
    check_can_be_cut(whole)
    costs = [flops_per_token(block, config.model.seq_len) for block in whole.get_submodule("layers").children()]
    head = flops_per_token(whole, config.model.seq_len) - sum(costs)
    return plan_layers(config.pipeline, costs, (0.0, max(0.0, head)), schedule.num_stages)


def _context_parallel(config: Config, mesh: Mesh, whole: nn.Module) -> ContextParallel:
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    heads = Heads.of(whole, config.parallel.tp)
    return ContextParallel(config.context, mesh, heads, seq_len=config.model.seq_len, dtype=dtype)


def _compile(part: nn.Module, config: Config, spec: MeshSpec, mesh: Mesh | None, fused: FusedProducts | None) -> None:
    """Compile the blocks, with tensor parallelism's transfers overlapped where the compiler is to do that."""
    ring = config.parallel.async_tp and spec.tp > 1 and fused is None
    options: dict[str, Any] = {}
    if fused is not None and mesh is not None:
        enable_symmetric_memory(mesh.group("tp"))
        options = micro_pipeline_options(fused)
    whole_graph = spec.cp == 1 and spec.ep == 1 and not ring
    compile_blocks(
        blocks_of(part), config.compile, config.activations, whole_graph=whole_graph, inductor_options=options
    )


def _gathers_float8(config: Config, schedule: Schedule | None) -> bool:
    """Whether sequence parallelism gathers in float8: as configured; by itself where nothing is lost."""
    if config.float8.recipe == "none" or config.float8.tp_gather != "auto":
        return config.float8.recipe != "none" and config.float8.tp_gather == "on"
    splits = schedule is not None and schedule.splits_backward
    return gathers_same_bits(titan_fp8.Recipe.get(config.float8.recipe)) and not splits


def _vocab_parallel_loss(group: dist.ProcessGroup, head: Cut) -> TokenLoss:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy_sum(logits, labels, group, head.offset[0])

    return loss


def _balance_experts(part: nn.Module, config: Config, mesh: Mesh | None) -> None:
    """Tell mixtures of experts which ranks share a row, and how much one row of the step weighs."""
    shared = mesh is not None and mesh.layout.spec.tp > 1 and config.parallel.sequence_parallel
    set_sequence_group(part, mesh.group("sequence" if shared else "cp") if mesh is not None else None)
    set_aux_scale(part, 1 / config.train.global_batch)


def _wrap(
    part: nn.Module,
    config: Config,
    layout: Layout,
    mode: Mode,
    mesh: Mesh | None,
    device: torch.device,
    init: Callable[[str, Tensor, torch.Generator], None],
) -> tuple[nn.Module, fsdp.WrapPlan | None]:
    """Data parallelism around one part, and its weights."""
    if mode == "none":
        fsdp.materialize(part, device, init, seed=config.run.seed)
        return part, None
    assert mesh is not None
    if mode == "ddp":  # DistributedDataParallel wraps real parameters
        ranks = mesh["dp_replicate"] if layout.spec.cp == 1 else mesh["loss"]
        plan = fsdp.plan(part, ranks, fsdp_policy(config, mode))
        fsdp.materialize(part, device, init, seed=config.run.seed)
        return plan.apply(part), plan
    experts = [f"{name}.experts" for name, _ in moe_layers(part)] if layout.spec.ep > 1 else []
    meshes = {"experts": mesh.fsdp_mesh(experts=True)} if experts else None
    if config.float8.recipe != "none" and config.float8.all_gather != "off":
        titan_fp8.apply_float8_all_gather(part)
    plan = fsdp.plan(part, mesh.fsdp_mesh(), fsdp_policy(config, mode, experts=experts), meshes=meshes)
    wrapped = plan.apply(part)
    fsdp.materialize(wrapped, device, init, seed=config.run.seed)
    return wrapped, plan


def _global_init(init: InitFn, cuts: Mapping[str, Cut], tied: Mapping[str, str], seed: int) -> InitFn:
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


def _tied_copies(tied: Mapping[str, str], mesh: Mesh, schedule: Schedule) -> TiedCopies | None:
    """Where the two ends of a pipeline share a parameter, the ranks that hold its copies. Collective over all ranks."""
    if not tied:
        return None
    ends = sorted({schedule.placement[0], schedule.placement[-1]})
    mine: Any = None
    if len(ends) > 1:
        for ranks in mesh.layout.groups("pp"):
            members = [ranks[end] for end in ends]
            group = dist.new_group(members)
            if mesh.global_rank in members:
                mine = group
    (second, first), *more = tied.items()
    if more:
        raise ValueError(f"parallel.pp: {len(tied)} tied parameters; a pipeline can share one, between its two ends.")
    return TiedCopies((first, second), mine)
