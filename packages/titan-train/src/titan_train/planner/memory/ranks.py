"""What one rank of a layout would hold, without ranks and without memory.

The model is built on the meta device and cut as the rank would cut it; tensor parallelism is given a process group that
pretends: it has the size and sends nothing. What a micro-batch leaves for backward has a closed form for the shipped
families (`titan_train.planner.memory.saved`). Any other model, and what the closed form does not cover, runs on fake tensors.
"""

import copy
import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import titan_fsdp as fsdp
import torch
import torch.distributed as dist
from titan_mesh import Layout
from titan_pipeline import Schedule, verify
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.models import accepted_inputs, count_parameters
from titan_train.models.build import build_model
from titan_train.models.common.moe.routed import expert_stacks
from titan_train.models.common.mtp import AHEAD, mtp_of
from titan_train.models.hf.cut import sort_of
from titan_train.models.registry import find_model, is_shipped
from titan_train.models.shape import ModelShape
from titan_train.models.traits import traits_of
from titan_train.parallel.activations.recompute import apply_activation_checkpointing
from titan_train.parallel.check import check_model, has_own_loss
from titan_train.parallel.compiled import compile_blocks, compile_pieces, has_whole_graphs
from titan_train.parallel.data_parallel import fsdp_policy
from titan_train.parallel.expert.apply import apply_expert_parallel
from titan_train.parallel.float8 import convert_to_float8
from titan_train.parallel.head_loss import LossHead, fuse_head_loss
from titan_train.parallel.layout.batch import BatchPlan, tokens_at_once
from titan_train.parallel.layout.degrees import Mode, wrapped_over
from titan_train.parallel.layout.run import plan_run
from titan_train.parallel.stages import layers_of, stage_layers, take_stage, takes_tokens
from titan_train.parallel.structure import blocks_of, freeze, hold_weights
from titan_train.parallel.tensor.apply import apply_tensor_parallel
from titan_train.parallel.tensor.styles import merge_tables, table_for
from titan_train.parallel.tied import meaning_all_copies
from titan_train.planner.memory.closed import RankEstimate, closed_form
from titan_train.planner.memory.peak import WORKSPACE, MemoryPeak, rank_peak
from titan_train.planner.memory.rehearsed import (
    BalancedDispatch,
    attend_between_pieces,
    count_beside_rows,
    counting_backend,
    cut_experts,
    fuse_norms_beside,
    keep_blocks,
    kinds_of,
    loss_like,
    norms_of_a_gpu,
    pretended_groups,
    rehearse_activation_checkpointing,
)
from titan_train.planner.setup import Setup
from titan_train.planner.translate import setup_of_config
from titan_train.task import load_task, task_name


def rehearse(
    config: Config,
    devices: int,
    counted: dict[str, tuple[int, str]] | None = None,
    folder: ModelShape | None = None,
    vocab_size: int | None = None,
) -> list[RankEstimate]:
    """Build each pipeline rank's program as it will run, run a micro-batch of it on fake tensors, and count.

    Args:
        config: The run's configuration.
        devices: Ranks.
        counted: What earlier calls counted, by program: setups that differ in data parallelism alone share it. Filled.
        folder: The shape of a Hugging Face folder's model (`titan_train.planner.memory.folder.shape_of_folder`): what blocks and
            the loss work in. Without it they are left out.
        vocab_size: The tokenizer's; None keeps the model's own.

    Raises:
        ValueError: The layout, the batch or the model cannot run on so many devices: what a run refuses.
    """
    plan = plan_run(config, devices)
    model = build_model(config.model, vocab_size=vocab_size)
    freeze(model, config.train.freeze)
    hold_weights(model, config.optimizer.weights)
    check_model(config, plan.layout, plan.batch, model)
    return estimate_ranks(
        meaning_all_copies(config, model), model, layout=plan.layout, mode=plan.mode, batch=plan.batch, schedule=plan.schedule,
        closed_form=False, counted=counted, folder=folder,
    )  # fmt: skip


def estimate_ranks(
    config: Config,
    whole: nn.Module,
    *,
    layout: Layout,
    mode: Mode,
    batch: BatchPlan,
    schedule: Schedule | None,
    closed_form: bool = True,
    counted: dict[str, tuple[int, str]] | None = None,
    folder: ModelShape | None = None,
) -> list[RankEstimate]:
    """Estimate one rank of each pipeline rank; those that differ in other axes hold as much.

    Args:
        config: The run's configuration.
        whole: Its model on the meta device, with what is to be frozen; it is copied, not changed.
        layout: The degrees.
        mode: The data-parallel wrapper.
        batch: How a step is cut.
        schedule: The pipeline's; None without one.
        closed_form: Count activations by formula where there is one; False always runs a micro-batch on fake tensors.
        counted: As for `rehearse`.
        folder: Likewise.
    """
    counted = {} if counted is None else counted
    with pretended_groups(layout.spec.tp, layout.spec.ep) as (group, experts):
        rank = RankProgram(config, layout, mode, batch, whole, group, experts, closed_form, counted, folder)
        if schedule is None:
            whole_of_it = rank.measure(functools.partial(copy.deepcopy, whole), None, last=True)
            return [rank.add_up([whole_of_it], 1.0, pipeline_rank=0)]
        layers = stage_layers(config, whole, schedule)
        last = schedule.num_stages - 1
        peaks = verify(schedule).peak  # in the unit of one rank's share of one micro-batch
        measured: dict[Any, _Stage] = {}  # stages of equal layers hold equal amounts
        kinds = rank.kinds(layers)
        for stage, (here, kind) in enumerate(zip(layers, kinds, strict=True)):
            if kind not in measured:
                take = functools.partial(take_stage, whole, here, first=stage == 0, last=stage == last)
                measured[kind] = rank.measure(take, here, last=stage == last)
        return [
            rank.add_up(
                [measured[kinds[s]] for s in schedule.stages_of(number)],
                peaks[number],
                pipeline_rank=number,
                first=0 in schedule.stages_of(number),
                head=last in schedule.stages_of(number),
            )
            for number in range(schedule.num_ranks)
        ]


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one part of the model holds."""

    num_parameters: int
    held: fsdp.Estimate
    activations: int
    """Of one micro-batch."""
    ends: float
    """Share of the parameters that lie in no block."""
    wrapper: dict[str | None, fsdp.Collectives]
    """Collectives of data parallelism in one step, by mesh."""
    stays: int = 0
    """Bytes of whole parameters, and of whole gradients of earlier micro-batches, that a pipeline keeps through its schedule."""
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class RankProgram:
    """A rank's program, in parts: what all ranks of a run share, and what each part of the model needs."""

    config: Config
    layout: Layout
    mode: Mode
    batch: BatchPlan
    whole: nn.Module
    group: dist.ProcessGroup | None
    """Of tensor parallelism."""
    experts_group: dist.ProcessGroup | None
    closed_form: bool
    counted: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    """Bytes that parts leave for backward, and what was left out of them, by all that decides it."""
    folder: ModelShape | None = None
    """The shape of a Hugging Face folder's model: what blocks and the loss work in."""
    compiled: list[bool] = field(default_factory=list[bool])
    """Not empty once a part has been compiled."""

    def kinds(self, layers: Sequence[range]) -> list[Any]:
        """For each stage of ``layers``, equal for two that hold the same: layers are alike, and no setting names one."""
        parallel, last = self.config.parallel, len(layers) - 1
        if parallel.tp_plan or parallel.reshard_overrides or parallel.keep_fp32:
            return list(range(len(layers)))
        kinds = kinds_of(self.whole, layers_of(self.whole), self.config.float8)
        return [(n == 0, n == last, tuple(kinds[here.start : here.stop])) for n, here in enumerate(layers)]

    def measure(self, make: Callable[[], nn.Module], layers: range | None, *, last: bool) -> _Stage:
        """What the part of the model that ``make`` builds holds; the ``last`` one ends in the loss."""
        spec, config = self.layout.spec, self.config
        sizes = wrapped_over(self.layout, self.mode)
        activations, left_out = self._closed_form(layers), ""
        if activations is None:
            key = f"{self._program()} {layers} {last}"
            if key not in self.counted:
                (total, _), left_out = self._rehearsed(make, sizes, last=last)
                self.counted[key] = total, left_out
            activations, left_out = self.counted[key]
        held, plan = self._planned(make)
        # a pipeline keeps whole gradients until its schedule ends, and whole parameters unless it gathers for each pass
        again = config.parallel.reshard == "always"
        keep = "unsharded" if spec.pp > 1 else config.parallel.accumulate
        # published peaks of runs with one micro-batch hold the sharded gradients too, so that they count from the start
        estimate = plan.estimate(microbatches=max(self.batch.accumulation, 2 if keep == "sharded" else 1), keep=keep)
        count = count_parameters(held)
        ends = 1 - sum(p.numel() for block in blocks_of(held) for p in block.parameters()) / count
        stays = 0
        if spec.pp > 1:
            added_up = self.batch.accumulation > 1
            stays = sum(
                u.gather_bytes * (not again) + u.reduce_numel * u.reduce_dtype.itemsize * added_up for u in plan.units
            )
        once: fsdp.Accumulate = config.parallel.accumulate if spec.pp == 1 else "unsharded" if again else "zero1"
        meshes = {unit.mesh for unit in plan.units} if self.mode != "none" else ()
        wrapper = {m: plan.collectives(self.batch.accumulation, once, mesh=m) or fsdp.Collectives() for m in meshes}
        return _Stage(count, estimate, activations, ends, wrapper, stays, left_out)

    def _rehearsed(
        self, make: Callable[[], nn.Module], sizes: dict[str, int], *, last: bool, most: bool = False
    ) -> tuple[tuple[int, int], str]:
        """As `_count`, of the program as it will run; and what of it could not be built."""
        config = self.config
        # with all its experts: as many rows meet them, whoever holds them
        try:
            with self._compiling() if config.compile.enabled else nullcontext():
                return self._count(make, sizes, last=last, most=most), ""
        except Exception as err:  # torch.compile may fail on any model, as it may in the run
            if not config.compile.enabled:
                raise
            eager = replace(self, config=replace(config, compile=replace(config.compile, enabled=False)))
            left_out = f"torch.compile, which keeps less: {type(err).__name__} while it was rehearsed"
            return eager._count(make, sizes, last=last, most=most), left_out

    @contextmanager
    def _compiling(self) -> Generator[None]:
        """Stages share what is compiled of equal blocks; none stays eager because it was compiled too often, here or before."""
        if not self.compiled:
            torch._dynamo.reset()
            self.compiled.append(True)
        with torch._dynamo.config.patch(recompile_limit=1024):
            yield

    def _program(self) -> str:
        """All of a configuration that may change what a micro-batch leaves; not over how many ranks parameters are sharded."""
        config, spec = self.config, self.layout.spec
        parallel = replace(config.parallel, dp_replicate=1, dp_shard=1, reshard="default")
        mode = "fsdp" if self.mode == "hsdp" else self.mode
        layout = (mode, self.batch.microbatch, spec.tp, spec.cp, spec.ep)
        return repr((replace(config, parallel=parallel), layout))

    def record(self, make: Callable[[], nn.Module], *, last: bool) -> "fsdp.MemoryTrace":
        """Every allocation of one micro-batch, forward and backward, in order; of the program as it will run."""
        config, (_, plan) = self.config, self._planned(make)
        running = self._cut(make(), running=True)
        if config.compile.enabled:
            self._compile(running)
        else:
            apply_activation_checkpointing(running, blocks_of(running), replace(config.activations, offload=False))
        return plan.record_memory(
            running,
            self._inputs(running),
            loss=loss_like if last else None,
            gathers=self.layout.spec.pp == 1,
            compiled=config.compile.enabled,
        )

    def _planned(self, make: Callable[[], nn.Module]) -> tuple[nn.Module, fsdp.WrapPlan]:
        """The part as the rank holds it, with its own experts, and its units."""
        spec = self.layout.spec
        held = self._cut(make())
        experts = [stack.fqn for stack in expert_stacks(held)] if spec.ep > 1 else []
        cut_experts(held, spec.ep)
        policy = fsdp_policy(self.config, self.mode, held, experts=experts)
        sizes = {"shard": max(1, spec.dp_shard * spec.cp * spec.tp // spec.ep), "replicate": spec.dp_replicate}
        meshes = {"experts": sizes} if experts else None
        return held, fsdp.plan(held, wrapped_over(self.layout, self.mode), policy, meshes=meshes)

    def add_up(
        self, stages: Sequence[_Stage], under_way: float, *, pipeline_rank: int, first: bool = True, head: bool = True
    ) -> RankEstimate:
        """A rank that holds ``stages``, with ``under_way`` micro-batches in memory at once."""
        activations = sum(int(stage.activations * under_way) for stage in stages)
        held = [stage.held for stage in stages]
        on_host = self.config.parallel.offload != "none"
        counted = {
            "parameters": 0.0 if on_host else float(sum(h.params for h in held)),
            "gradients": 0.0 if on_host else float(sum(h.grads for h in held)),
            "optimizer": 0.0 if on_host else sum(self._state(stage) for stage in stages),
            "activations": float(activations),
        }
        # of a pipeline's stages one works at a time, and what the others have gathered stays
        beyond = [0 if on_host else h.params + h.optimizer for h in held]
        stays, reduced = sum(stage.stays for stage in stages), sum(h.grads for h in held) * (not on_host)

        def most(peaks: list[int]) -> float:
            each = (peak - states - stage.stays for peak, states, stage in zip(peaks, beyond, stages, strict=True))
            return max(0.0, float(stays + max(each) - reduced))

        at_end = most([h.peak for h in held])
        # units of a pipeline stay gathered
        gathered = at_end if self.layout.spec.pp > 1 else most([h.peak_before_end for h in held])
        if self.mode == "none":  # no wrapper gathers anything, and gradients are added in place
            gathered = at_end = 0.0
        shape = self._shape() if self._is_known() else self.folder
        if shape is not None:
            counted |= {"gathered": gathered, "gathered at end": at_end}
            memory = rank_peak(shape, self._setup(), first=first, head=head, counted=counted)
        else:
            ends = at_end > gathered + activations
            parts = counted | {"workspace": WORKSPACE, "gathered": at_end if ends else gathered}
            parts["activations"] *= not ends
            instant = "the end of backward" if ends else "backward of a block"
            memory = MemoryPeak(parts, instant, 1.01 * sum(parts.values()))
        wrapper: dict[str | None, fsdp.Collectives] = {}
        for mesh, found in (item for stage in stages for item in stage.wrapper.items()):
            wrapper[mesh] = wrapper.get(mesh, fsdp.Collectives()) + found
        return RankEstimate(
            pipeline_rank, sum(s.num_parameters for s in stages), activations, memory, stages[0].left_out, wrapper
        )

    def _state(self, stage: _Stage) -> float:
        """Bytes of optimizer state of one stage's shards."""
        of_blocks, of_ends = self.config.state_bytes
        elements = stage.held.grads / self.config.optimizer.weight_bytes
        return of_blocks * elements + (of_ends - of_blocks) * elements * stage.ends

    def _closed_form(self, layers: range | None) -> int | None:
        """Bytes that these blocks (None: all) leave for backward; None where only a run can tell."""
        config = self.config
        frozen = not all(parameter.requires_grad for parameter in self.whole.parameters())
        only_run = config.float8.recipe != "none" or task_name(config) != "text"  # eager casts: the model knows which
        if not self._is_known() or not self.closed_form or frozen or config.parallel.tp_plan or self._shape().mtp:
            return None
        if (only_run and not config.compile.enabled) or config.float8.skip:
            return None
        if config.float8.recipe not in ("none", self._setup().precision):  # a variant, which may keep other bytes
            return None
        shape = self._shape()
        layers = range(shape.num_layers) if layers is None else layers
        return closed_form(config, shape, self._setup(), layers, rows=self.batch.microbatch)

    def _is_known(self) -> bool:
        """Whether the planner's formulas hold: a shipped decoder of text, or a FLUX whose tokens are not cut."""
        task = task_name(self.config)
        return is_shipped(self.whole) and (task == "text" or (task == "diffusion" and self.layout.spec.tp == 1))

    def _shape(self) -> ModelShape:
        name = self.config.model.name
        return find_model(name)[0].shape(self.whole.args, name)

    def _setup(self) -> Setup:
        spec = self.layout.spec
        setup = setup_of_config(self.config, spec.pp * spec.dp_replicate * spec.dp_shard * spec.cp * spec.tp)
        return setup if traits_of(self.whole).loss_head is not None else setup.changed(loss="eager")

    def of_blocks(self, *, most: bool = False) -> int:
        """Bytes that a micro-batch of the whole model leaves in its blocks; with ``most`` in those of two most frequent sorts."""
        whole = functools.partial(copy.deepcopy, self.whole)
        (_, of_blocks), _ = self._rehearsed(whole, wrapped_over(self.layout, self.mode), last=True, most=most)
        return of_blocks

    def _count(
        self, make: Callable[[], nn.Module], sizes: dict[str, int], *, last: bool, most: bool = False
    ) -> tuple[int, int]:
        """Bytes that a micro-batch leaves for backward, and those of its blocks. Of blocks that are alike two are run, the others
        count as the second. With ``most`` only those of the two most frequent sorts are there.
        """
        part = make()
        blocks = blocks_of(part)
        alike: dict[Any, list[int]] = {}
        config, shipped = self.config, is_shipped(self.whole)
        named = (
            config.activations.checkpoint in ("every", "pattern")
            or config.parallel.tp_plan
            or config.parallel.keep_fp32
        )
        kinds = kinds_of(part, blocks, config.float8, first=takes_tokens(part))
        for number, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
            # of other people's blocks, equal parameters do not mean equal programs: windows alternate
            kind = number if named else (kind, None if shipped else sort_of(block))
            alike.setdefault(kind, []).append(number)
        if most:
            largest = sorted(alike.values(), key=len)[-2:]
            alike = {kind: same for kind, same in alike.items() if same in largest}
        run = [same[:2] for same in alike.values()]
        running = self._cut(part, running=True)  # while blocks have their own numbers
        keep_blocks(running, sorted(number for same in run for number in same))
        # the first of them also keeps what all blocks share
        total, each = self._trace(running, [blocks[same[-1]] for same in run], sizes, last=last)
        counts = [len(same) for same in alike.values()]
        more = sum((count - len(same)) * size for count, same, size in zip(counts, run, each, strict=True))
        return total + more, sum(count * size for count, size in zip(counts, each, strict=True))

    def _compile(self, running: nn.Module) -> None:
        """Apply recomputation, and compile as the trainer does, as far as torch's partitioner; in place."""
        blocks = blocks_of(running)
        compiling = replace(self.config.compile, backend=counting_backend(), mode="default")
        activations = replace(self.config.activations, offload=False)
        alone = self.experts_group is None and self.layout.spec.cp == 1
        if alone and has_whole_graphs(running, self.config.parallel):
            compile_blocks(blocks, compiling, activations, whole_graph=False)
        else:
            activations = compile_pieces(running, blocks, compiling, activations)
        apply_activation_checkpointing(running, blocks, activations)

    def _trace(
        self, running: nn.Module, watched: Sequence[nn.Module], sizes: dict[str, int], *, last: bool
    ) -> tuple[int, tuple[int, ...]]:
        """The same, counted while a micro-batch runs on fake tensors; compiled blocks go through torch's own partitioner.

        Beside it, what each of the ``watched`` blocks leaves.
        """
        blocks, config = blocks_of(running), self.config
        if config.compile.enabled:
            self._compile(running)
        else:
            rehearse_activation_checkpointing(running, blocks, config.activations)
        plan = fsdp.plan(running, sizes, fsdp_policy(config, self.mode, running))
        loss = loss_like if last else None
        on_gpu = config.launch.device != "cpu"
        if on_gpu and config.compile.enabled:  # the last norm lies in no compiled block
            fuse_norms_beside(running, blocks)
        with norms_of_a_gpu() if on_gpu and not config.compile.enabled else nullcontext():
            found = plan.estimate(running, self._inputs(running), loss=loss, in_place=True, watched=watched)
        return found.activations, found.watched

    def _cut(self, part: nn.Module, *, running: bool = False) -> nn.Module:
        """Tensor parallelism's cut, as the first of its ranks has it. One that runs has its float8 layers, and the loss in the
        head where it is computed there.
        """
        config, head = self.config, None
        if running and config.float8.recipe != "none":
            tokens = tokens_at_once(self.batch, config, self.layout)
            whole = self.layout.spec.tp == 1 and self.layout.spec.pp == 1
            convert_to_float8(part, config.float8, tokens=tokens, fuse_norms=whole, eager=not config.compile.enabled)
        if running and config.train.fused_loss and not has_own_loss(load_task(config), config, None):
            head = fuse_head_loss(part, z_loss=0.0, vocab_size=1)
        if head is not None:  # one chunk leaves what many do, and is a hundredth of their operators
            cast(LossHead, part.get_submodule(head)).chunk_tokens = 2**62
        if self.group is not None:
            parallel = self.config.parallel
            apply_tensor_parallel(
                part,
                self.group,
                table=merge_tables(self.whole, table_for(self.whole), parallel.tp_plan),
                sequence_parallel=parallel.sequence_parallel,
                replicate_kv=parallel.replicate_kv,
            )
        if running and self.experts_group is not None:
            apply_expert_parallel(part, self.experts_group)
            for stack in expert_stacks(part):
                stack.holder.dispatch = BalancedDispatch(self.experts_group)
        if running and self.layout.spec.cp > 1:
            attend_between_pieces(part, copies=self._setup().cp_method == "ulysses")
        if running:
            part.register_forward_pre_hook(count_beside_rows)
        if head is not None:
            depth = len(mtp_of(part) or ())
            rows, seq_len = self.batch.microbatch, self.config.model.seq_len // self.layout.spec.cp

            def with_labels(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
                labels = torch.zeros(rows, seq_len, dtype=torch.int64, device=args[0].device)
                kwargs = {**kwargs, "labels": labels}
                if depth:
                    kwargs |= dict.fromkeys(AHEAD, labels.unsqueeze(-1).expand(-1, -1, depth))
                return args, kwargs

            part.register_forward_pre_hook(with_labels, with_kwargs=True)
        return part

    def _inputs(self, part: nn.Module) -> tuple[Tensor, ...]:
        """One micro-batch of this rank: tokens for the first stage, hidden states for the others."""
        spec, rows = self.layout.spec, self.batch.microbatch
        example = load_task(self.config).example(self.config, part, rows)
        if example is not None:
            args, named = example
            part.register_forward_pre_hook(lambda _, given, kwargs: (given, {**kwargs, **named}), with_kwargs=True)
            return tuple(tensor.to("meta").requires_grad_(tensor.requires_grad) for tensor in args)
        seq_len = self.config.model.seq_len // spec.cp
        if takes_tokens(part):
            return (torch.zeros(rows, seq_len, dtype=torch.int64, device="meta"),)
        traits = traits_of(self.whole)

        def with_rows(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            """A stage in the middle learns the length of its rows from their positions."""
            positions = torch.arange(seq_len, device=args[0].device).unsqueeze(0)
            ids = {"token_ids": positions.expand(rows, -1)} if traits.stages_read_tokens else {}
            return args, {**kwargs, "positions": positions, **ids}

        if accepted_inputs(part, ("positions",)):
            part.register_forward_pre_hook(with_rows, with_kwargs=True)
        width = next(module.embedding_dim for module in self.whole.modules() if isinstance(module, nn.Embedding))
        cut = spec.tp if self.config.parallel.sequence_parallel else 1
        streams = (traits.streams,) if traits.streams > 1 else ()
        return (torch.zeros(rows, seq_len // cut, *streams, width, device="meta", requires_grad=True),)
