"""What a model cannot do under a layout: refused with one error, before any rank starts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import titan_fp8
import titan_fsdp as fsdp
import torch
from titan_mesh import Layout
from torch import nn

from titan_train.config import Config
from titan_train.kernels.apply import check_kernels
from titan_train.models.call import accepted_inputs, active_dropout
from titan_train.models.common.moe.balance import moe_layers
from titan_train.models.traits import traits_of
from titan_train.parallel.activations.recompute import check_patterns
from titan_train.parallel.compiled import check_backend, check_cudagraphs
from titan_train.parallel.context import Heads, plan_rows
from titan_train.parallel.data_parallel import fsdp_policy
from titan_train.parallel.expert.apply import check_expert_parallel
from titan_train.parallel.float8 import check_skip
from titan_train.parallel.layout.batch import BatchPlan
from titan_train.parallel.layout.degrees import resolve_mode, wrapped_over
from titan_train.parallel.layout.run import plan_pipeline
from titan_train.parallel.stages import layers_of, stage_layers
from titan_train.parallel.tensor.checks import check_tensor_parallel
from titan_train.parallel.tensor.float8_linears import can_gather_float8
from titan_train.parallel.tensor.styles import merge_tables, table_for
from titan_train.parallel.tied import meaning_all_copies
from titan_train.task import Task, load_task


def check_model(config: Config, layout: Layout, batch: BatchPlan, model: nn.Module, task: Task | None = None) -> None:
    """Refuse what this model cannot do under this layout, before any rank starts.

    Args:
        config: The run's configuration.
        layout: The degrees.
        batch: How a step is cut.
        model: The whole model, on the meta device.
        task: What it is trained on; None takes the configuration's.

    Raises:
        ValueError: Heads, widths, experts, layers or lengths do not fit; the message names both numbers.
    """
    check_skip(model, config.float8)
    config = meaning_all_copies(config, model)
    spec = layout.spec
    parallel = config.parallel
    check_backend(config.compile.backend)
    check_cudagraphs(config, layout, model)
    check_patterns(model, config.activations)
    _check_wrapping_patterns(config, layout, model)
    check_kernels(config, model, tp=spec.tp)
    _check_plan(config, layout, model)
    if config.train.rerun_above and parallel.compress == "powersgd":
        raise ValueError(
            f"train.rerun_above={config.train.rerun_above} and parallel.compress='powersgd': what compression did not send is "
            "added to the next gradient, so a step that is computed again differs on sound hardware. Set train.rerun_above=0, or "
            "parallel.compress='bf16'."
        )
    task = task or load_task(config)
    task.check(config, model)
    _probe(config, layout, model, task)
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
    _check_layers_dropped(layout, model)
    check_expert_parallel(model, spec.ep, tp=spec.tp, sequence_parallel=parallel.sequence_parallel)
    if spec.cp > 1 and "cu_seqlens" in task.keywords:
        _check_inputs(config, model)
        plan_rows(
            config.context, spec.cp, 0, Heads.of(model, spec.tp), seq_len=config.model.seq_len, dtype=torch.float32,
            windowed=any(window < config.model.seq_len for window in traits_of(model).windows),
        )  # fmt: skip
        mixed_rows = config.data.document_mask and batch.microbatch > 1
        if mixed_rows and any(layer.args.balance_loss or layer.args.z_loss for _, layer in moe_layers(model)):
            raise ValueError(
                f"parallel.cp={spec.cp}, data.document_mask and train.microbatch={batch.microbatch} with a balance loss or "
                "z-loss: context parallelism joins the rows of a micro-batch, and both losses are means over one row. Set "
                "train.microbatch=1."
            )
    schedule = plan_pipeline(config, layout, batch)
    if schedule is not None:
        _check_stages(config, stage_layers(config, model, schedule), model)
    recipe = config.float8.recipe
    if recipe != "none" and config.float8.all_gather == "on" and not titan_fp8.Recipe.get(recipe).fsdp_all_gather:
        raise ValueError(
            f"float8.all_gather='on' and float8.recipe={recipe!r}: a scale of this recipe spans the shards of several "
            "ranks. Use recipe 'blockwise' or 'tensorwise', or all_gather='auto'."
        )
    if recipe != "none" and config.float8.tp_gather == "on" and not can_gather_float8(titan_fp8.Recipe.get(recipe)):
        raise ValueError(
            f"float8.tp_gather='on' and float8.recipe={recipe!r}: scales of this recipe span the tokens of all ranks in the "
            "weight gradient. Use recipe 'blockwise' or 'tensorwise', or tp_gather='auto'."
        )
    if config.activations.offload and config.compile.enabled:
        raise ValueError(
            "activations.offload=true and compile.enabled=true: a compiled block decides what it saves, and cannot be told "
            "to move it. Set activations.offload=false, or compile.enabled=false."
        )
    if config.activations.checkpoint == "budget" and not config.compile.enabled:
        raise ValueError(
            "activations.checkpoint='budget' is decided by torch.compile, which is disabled. Set compile.enabled=true, or "
            "use 'selective'."
        )


def _check_layers_dropped(layout: Layout, model: nn.Module) -> None:
    """Refuse to skip layers by chance on several ranks: each draws for itself, and layers hold collectives."""
    skipped = [rate for rate in active_dropout([model]) if "layerdrop" in rate.lower()]
    if skipped and layout.num_ranks > 1:
        raise ValueError(
            f"{type(model).__name__} skips whole layers by chance ({skipped[0]}), and each of the {layout.num_ranks} ranks draws "
            "for itself: a rank that computes a layer would wait for those that skip it. Set that rate to 0 in model.args."
        )


def _check_stages(config: Config, stages: Sequence[range], model: nn.Module) -> None:
    """Refuse a pipeline with a stage in which nothing is trained: no gradient would pass through it."""
    blocks = layers_of(model)
    for number, layers in enumerate(stages):
        if not any(p.requires_grad for layer in layers for p in blocks[layer].parameters()):
            raise ValueError(
                f"train.freeze={list(config.train.freeze)} leaves nothing to train in the layers {layers.start} to "
                f"{layers.stop - 1} of pipeline stage {number}. Train part of them, move pipeline.cuts, or set parallel.pp=1."
            )


def _check_wrapping_patterns(config: Config, layout: Layout, model: nn.Module) -> None:
    """Refuse patterns for titan-fsdp that name nothing of the whole model; its stages cannot tell."""
    if not config.parallel.keep_fp32 and not config.parallel.reshard_overrides:
        return
    mode = resolve_mode(config.parallel, layout, dtype=config.train.dtype)
    if mode != "none":
        fsdp.plan(model, wrapped_over(layout, mode), dataclasses.replace(fsdp_policy(config, mode), pp=False))


def _check_plan(config: Config, layout: Layout, model: nn.Module) -> None:
    """Refuse for a model of transformers what its family's plan does not say, and say what a plan would add."""
    traits = traits_of(model)
    if traits.published is None:
        return
    kind = traits.published.get("model_type")
    spec = layout.spec
    asked = [f"parallel.{name}={n}" for name in ("tp", "cp", "pp", "ep") if (n := getattr(spec, name)) > 1]
    if asked and traits.plan is None:
        raise ValueError(
            f"{', '.join(asked)}: the family {kind!r} of transformers has no plan, so it trains under fsdp, hsdp and ddp only. "
            "A plan (titan_train.models.hf.plans; a package of yours adds one by an entry point) would name the styles of its "
            "linears (tp), its attention (cp), its layers and ends (pp) and its experts (ep)."
        )
    if config.model.lora_rank and spec.tp > 1:
        _check_cut_adapters(config, model)


def _probe(config: Config, layout: Layout, model: nn.Module, task: Task) -> None:
    """Refuse a model of transformers that does not compute what this run needs, which a tiny one of its kind tells."""
    if traits_of(model).published is None:
        return
    from titan_train.models.hf.decoder import HFModel
    from titan_train.models.hf.probe import probe

    assert isinstance(model, HFModel)
    packed = config.data.document_mask and "cu_seqlens" in task.keywords
    probe(model, config.model.name, packed=packed, staged=layout.spec.pp > 1, drawn=not config.model.init)


def _check_cut_adapters(config: Config, model: nn.Module) -> None:
    """Refuse tensor parallelism of adapters where a linear is several in one, or its region is not entered as a whole."""
    asked = f"parallel.tp={config.parallel.tp} with model.lora_rank={config.model.lora_rank}"
    plan: Any = model.plan
    fused = sorted(plan.fused)
    if fused:
        raise ValueError(
            f"{asked}: {' and '.join(fused)} are several linears in one, and so is an adapter beside them. Set parallel.tp=1."
        )
    if config.parallel.async_tp:
        raise ValueError(f"{asked} and parallel.async_tp: adapters do not overlap. Set parallel.async_tp=false.")


def _check_inputs(config: Config, model: nn.Module) -> None:
    """Refuse context parallelism for a model that would not notice that its rows are cut."""
    needed = {"positions", "attention_plan"} | ({"cu_seqlens"} if config.data.document_mask else set())
    missing = sorted(needed - accepted_inputs(model))
    if missing:
        raise ValueError(
            f"parallel.cp={config.parallel.cp}: {type(model).__name__}.forward does not take {', '.join(missing)}. Each rank "
            "computes on part of a row, so the model must use the positions it is given and pass attention_plan to "
            "titan_train.models.CausalAttention. Accept these arguments, or set parallel.cp=1."
        )
