"""What context parallelism cannot do with a model or a batch, refused before any rank starts."""

import torch
from titan_mesh import Layout
from torch import nn

from titan_train.config import Config
from titan_train.models import accepted_inputs
from titan_train.models.common.delta import has_states
from titan_train.models.common.moe.balance import moe_layers
from titan_train.models.traits import traits_of
from titan_train.parallel.context import Heads, plan_rows
from titan_train.parallel.layout.batch import BatchPlan


def check_context_parallel(config: Config, layout: Layout, batch: BatchPlan, model: nn.Module) -> None:
    """Refuse lengths and heads that do not fit, and a model that would not notice that its rows are cut.

    Args:
        config: The run's configuration.
        layout: The degrees.
        batch: How a step is cut.
        model: A whole model of text.

    Raises:
        ValueError: Names what does not fit, and what would.
    """
    cp, seq_len = layout.spec.cp, config.model.seq_len
    if cp == 1:
        if config.context.dynamic:
            raise ValueError(
                "context.dynamic=true and parallel.cp=1: no attention is replaced that could reach other ranks. Set "
                "parallel.cp=2 or more; with as many times train.microbatch, a rank holds as many tokens."
            )
        return
    needed = {"positions", "attention_plan"} | ({"cu_seqlens"} if config.data.document_mask else set())
    missing = sorted(needed - accepted_inputs(model))
    if missing:
        raise ValueError(
            f"parallel.cp={config.parallel.cp}: {type(model).__name__}.forward does not take {', '.join(missing)}. Each rank "
            "computes on part of a row, so the model must use the positions it is given and pass attention_plan to "
            "titan_train.models.CausalAttention. Accept these arguments, or set parallel.cp=1."
        )
    losses_of_rows = any(layer.args.balance_loss or layer.args.z_loss for _, layer in moe_layers(model))
    if config.context.dynamic:
        Heads.of(model, layout.spec.tp)
        _check_dynamic(config, layout, batch, losses_of_rows=losses_of_rows)
        return
    plan_rows(
        config.context, cp, 0, Heads.of(model, layout.spec.tp), seq_len=seq_len, dtype=torch.float32,
        windowed=any(window < seq_len for window in traits_of(model).windows), states=has_states(model),
    )  # fmt: skip
    if config.data.document_mask and batch.microbatch > 1 and losses_of_rows:
        raise ValueError(
            f"parallel.cp={cp}, data.document_mask and train.microbatch={batch.microbatch} with a balance loss or "
            "z-loss: context parallelism joins the rows of a micro-batch, and both losses are means over one row. Set "
            "train.microbatch=1."
        )


def _check_dynamic(config: Config, layout: Layout, batch: BatchPlan, *, losses_of_rows: bool) -> None:
    """Refuse what a step whose documents are shared by all ranks cannot do.

    Raises:
        ValueError: Names the setting, and what would work.
    """
    cp, tokens = layout.spec.cp, batch.microbatch * config.model.seq_len
    if not config.data.document_mask:
        raise ValueError(
            "context.dynamic=true and data.document_mask=false: documents are shared among ranks, and without the mask a row is "
            "one. Set data.document_mask=true, or context.dynamic=false."
        )
    if tokens % cp:
        raise ValueError(
            f"parallel.cp={cp} does not divide the {tokens} tokens of a micro-batch (train.microbatch={batch.microbatch} x "
            f"model.seq_len={config.model.seq_len}): ranks would hold different numbers of them. Use model.seq_len="
            f"{max(1, config.model.seq_len // cp) * cp}."
        )
    if losses_of_rows and batch.dp_size * batch.microbatch > 1:
        raise ValueError(
            "context.dynamic=true with a balance loss or z-loss: it joins the rows of all data-parallel ranks, and both losses "
            "are means over one row. Set model.args.balance_loss=0 and model.args.z_loss=0, "
            "or context.dynamic=false."
        )
    if config.train.rerun_above:
        raise ValueError(
            f"context.dynamic=true and train.rerun_above={config.train.rerun_above}: a suspect step is computed again on the "
            "next rank's batch, and here all ranks share one batch. Set train.rerun_above=0, or context.dynamic=false."
        )
