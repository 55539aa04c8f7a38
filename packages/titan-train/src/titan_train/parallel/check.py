"""What a model cannot do under a layout: refused with one error, before any rank starts. Each feature has its own check."""

import copy
import re
from typing import Any

import titan_fp8
import torch
from titan_mesh import Layout
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.config.recipe import MTPConfig
from titan_train.kernels.apply import check_kernels
from titan_train.models.call import active_dropout, copy_to_try
from titan_train.models.common.loss import NextTokenLoss
from titan_train.models.common.mtp import mtp_of
from titan_train.models.traits import traits_of
from titan_train.parallel.activations.recompute import check_activations
from titan_train.parallel.compiled import check_backend, check_cudagraphs, check_recorded
from titan_train.parallel.context_checks import check_context_parallel
from titan_train.parallel.data_parallel import check_wrapping
from titan_train.parallel.expert.apply import check_expert_parallel
from titan_train.parallel.float8 import check_float8, convert_to_float8
from titan_train.parallel.head_loss import fuse_head_loss
from titan_train.parallel.layout.batch import BatchPlan, tokens_at_once
from titan_train.parallel.outside_reads import check_reads
from titan_train.parallel.qk_clip import check_qk_clip
from titan_train.parallel.stages import check_stages
from titan_train.parallel.tensor.checks import check_between, check_dropout, check_tensor_parallel
from titan_train.parallel.tensor.float8_linears import check_gather
from titan_train.parallel.tensor.styles import merge_tables, style_of, table_for
from titan_train.parallel.tied import meaning_all_copies, skip_patterns
from titan_train.task import Task, load_task
from titan_train.trust.owner import describe_error, raised_in

# what tensors without memory, device or process group make a forward say; weights are float32, and a run's are train.dtype
_TRIAL = re.compile(r"meta|cuda|device|memory|storage|process group|dtype|scalar type", re.IGNORECASE)


def check_model(
    config: Config,
    layout: Layout,
    batch: BatchPlan,
    model: nn.Module,
    task: Task | None = None,
    *,
    vocab_size: int | None = None,
) -> None:
    """Refuse what this model cannot do under this layout, before any rank starts.

    Args:
        config: The run's configuration.
        layout: The degrees.
        batch: How a step is cut.
        model: The whole model, on the meta device.
        task: What it is trained on; None takes the configuration's.
        vocab_size: The tokenizer's. A module of the user's must have logits for all of it; None does not look.

    Raises:
        ValueError: Heads, widths, experts, layers or lengths do not fit; the message names both numbers.
    """
    task = task or load_task(config)
    spec, parallel = layout.spec, config.parallel
    check_float8(config, model)
    config = meaning_all_copies(config, model)
    own_loss = has_own_loss(task, config, vocab_size)
    if own_loss:
        _check_own_loss(config, layout, model, task)
    else:
        _check_head(config, layout, batch, model)
    check_backend(config.compile.backend)
    check_recorded(config)
    check_cudagraphs(config, layout, model)
    check_activations(config, model)
    check_wrapping(config, layout, model)
    check_kernels(config, model, tp=spec.tp)
    _check_plan(config, layout, model)
    task.check(config, model)
    own_text = ":" in config.model.name and "cu_seqlens" in task.keywords
    if own_text:
        _try_own_forward(config, model, vocab_size, own_loss=own_loss)
        check_reads(config, layout, model)
    _probe(config, layout, model, task)
    if spec.tp > 1:
        table = merge_tables(model, table_for(model), parallel.tp_plan)
        check_tensor_parallel(
            model,
            spec.tp,
            table=table,
            seq_len_local=(batch.microbatch if config.context.dynamic else 1) * config.model.seq_len // spec.cp,
            sequence_parallel=parallel.sequence_parallel,
            replicate_kv=parallel.replicate_kv,
            async_tp=parallel.async_tp,
        )
        if own_text:
            check = check_dropout if parallel.sequence_parallel else check_between
            check(model, table, config.model.seq_len)
    if config.qk_clip.threshold:
        check_qk_clip(
            model, compiled=config.compile.enabled or config.compile.cudagraphs, replicate_kv=parallel.replicate_kv
        )
    _check_layers_dropped(layout, model)
    _check_mtp(config, model)
    check_expert_parallel(model, spec.ep, tp=spec.tp, sequence_parallel=parallel.sequence_parallel)
    if config.context.dynamic and not task.shares_documents:
        raise ValueError(
            f"context.dynamic=true: rows of {type(task).__name__} hold no packed documents that ranks could share. Set "
            "context.dynamic=false."
        )
    if "cu_seqlens" in task.keywords:
        check_context_parallel(config, layout, batch, model)
    check_stages(config, layout, batch, model)
    check_gather(config)


def has_own_loss(task: Task, config: Config, vocab_size: int | None) -> bool:
    """The task's loss needs the model's whole output: it is not the cross-entropy that a head can compute."""
    return task.loss_parts(config) is not None or not isinstance(task.loss(config, vocab_size), NextTokenLoss)


def _check_own_loss(config: Config, layout: Layout, model: nn.Module, task: Task) -> None:
    """Refuse what computes the cross-entropy in the place of a task's own loss."""
    table = merge_tables(model, table_for(model), config.parallel.tp_plan) if layout.spec.tp > 1 else {}
    cut = any(style_of(name, table) == "head" for name, _ in model.named_modules())
    for setting, given, why in (
        (f"parallel.tp={layout.spec.tp}", cut, "each rank has a part of the logits"),
        ("model.args.mtp_depth", mtp_of(model) is not None, "the modules compute the cross-entropy in the head"),
    ):
        if given:
            raise ValueError(
                f"{setting}: {type(task).__name__} has a loss of its own, and {why}. Leave {setting.partition('=')[0]} at its "
                "default, or let the method loss return titan_train.models.common.loss.whole_vocabulary_loss."
            )


def _check_head(config: Config, layout: Layout, batch: BatchPlan, model: nn.Module) -> None:
    """Refuse a float8 head that is to compute the loss, as the ranks that hold it would."""
    name, float8 = traits_of(model).loss_head, config.float8
    if float8.recipe == "none" or not config.train.fused_loss or name is None:
        return
    if titan_fp8.matching_pattern(name, skip_patterns(model, float8)) is not None:
        return
    tried = copy.deepcopy(model)
    tokens = tokens_at_once(batch, config, layout)
    convert_to_float8(tried, float8, tokens=tokens, fuse_norms=False, eager=not config.compile.enabled)
    fuse_head_loss(tried, z_loss=0.0, vocab_size=0)


def _try_own_forward(config: Config, model: nn.Module, vocab_size: int | None, *, own_loss: bool) -> None:
    """Refuse a user's module whose forward does not fit a row of tokens, or returns no logits; in one line, before ranks do.

    What it returns is between the model and the loss where that is the task's own.

    Only torch's refusal of shapes and Python's of arguments counts. Any other error may come from the trial itself, which has no
    memory, no device, no process group and float32 weights: it is left to the ranks, which report it if they meet it.
    """
    tokens = torch.zeros(1, config.model.seq_len, dtype=torch.int64, device="meta")
    tried = copy_to_try(model)
    try:
        with torch.no_grad():
            output: Any = tried(tokens)
    except Exception as err:  # the user's own code
        owner, file = raised_in(err)
        needs_ranks = owner == "library" or (owner == "torch" and "distributed" in file.parts)
        if needs_ranks or not isinstance(err, RuntimeError | TypeError) or _TRIAL.search(str(err)):
            return
        raise ValueError(
            f"model.name={config.model.name!r}: its forward failed on tokens [1, {config.model.seq_len}]: {describe_error(err)}"
        ) from err
    if own_loss:
        return
    if not isinstance(output, Tensor) or output.ndim != 3 or output.shape[:2] != tokens.shape:
        found = (
            f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        )
        raise ValueError(
            f"model.name={config.model.name!r}: its forward returned {found} for tokens [1, {config.model.seq_len}]. It must "
            "return logits [B, S, V]: as a tensor, in a tuple with a loss, as the key 'logits' of a dict, or as an attribute "
            ".logits."
        )
    if vocab_size is not None and output.shape[2] < vocab_size:
        raise ValueError(
            f"model.name={config.model.name!r}: its forward returned {output.shape[2]} logits a token, and the tokenizer has "
            f"{vocab_size} tokens. Make it as wide: an argument vocab_size of the factory is given that number."
        )


def _check_layers_dropped(layout: Layout, model: nn.Module) -> None:
    """Refuse to skip layers by chance on several ranks: each draws for itself, and layers hold collectives."""
    skipped = [rate for rate in active_dropout([model]) if "layerdrop" in rate.lower()]
    if skipped and layout.num_ranks > 1:
        raise ValueError(
            f"{type(model).__name__} skips whole layers by chance ({skipped[0]}), and each of the {layout.num_ranks} ranks draws "
            "for itself: a rank that computes a layer would wait for those that skip it. Set that rate to 0 in model.args."
        )


def _check_mtp(config: Config, model: nn.Module) -> None:
    """Refuse settings of multi-token prediction that would do nothing, and a loss that its modules cannot share."""
    modules = mtp_of(model)
    if modules is None and config.mtp != MTPConfig():
        raise ValueError(
            f"[mtp] sets weights of modules that predict tokens further ahead, and {config.model.name!r} has none. Set "
            "model.args.mtp_depth=1, which Llama, Qwen3, Qwen3-Next and DeepSeek of titan-train take, and families of "
            "transformers that have a plan; or leave [mtp] out."
        )
    if modules is not None and not config.train.fused_loss:
        raise ValueError(
            f"model.args.mtp_depth={len(modules)} with train.fused_loss=false: the modules' losses are computed in the head, "
            "which they share. Set train.fused_loss=true (a float8 head needs float8.skip), or mtp_depth=0."
        )


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
    for axis, reason in traits.plan.lacking(traits.published).items() if traits.plan is not None else ():
        if axis == "sp":
            if spec.tp > 1 and config.parallel.sequence_parallel:
                raise ValueError(
                    f"parallel.sequence_parallel=true: the family {kind!r} of transformers has no sequence parallelism here: "
                    f"{reason}. Set parallel.sequence_parallel=false."
                )
        elif getattr(spec, axis) > 1:
            raise ValueError(
                f"parallel.{axis}={getattr(spec, axis)}: the family {kind!r} of transformers has no {axis} here: {reason}. Set "
                f"parallel.{axis}=1."
            )
    if traits.plan is not None and traits.plan.own_attention and spec.tp > 1 and config.parallel.replicate_kv:
        raise ValueError(
            f"parallel.replicate_kv=true: attention of the family {kind!r} is left to transformers, which takes as many queries "
            "for each key-value head as in the whole model. Set parallel.replicate_kv=false, and a parallel.tp that divides the "
            "key-value heads."
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
    fused = sorted(name for name in plan.fused if any(key.endswith(f".{name}") for key, _ in model.named_modules()))
    if fused:
        raise ValueError(
            f"{asked}: {' and '.join(fused)} are several linears in one, and so is an adapter beside them. Set parallel.tp=1."
        )
    if config.parallel.async_tp:
        raise ValueError(f"{asked} and parallel.async_tp: adapters do not overlap. Set parallel.async_tp=false.")
