"""The model under its parallelism, in the one order that works.

Built on the meta device (no memory) → compile per block → FSDP2 / HSDP / DDP → materialize and initialise, one
parameter at a time, identically for any number of ranks. The optimizer comes after, because it must hold the sharded
parameters.
"""

import titan_fsdp as fsdp
import torch
from titan_mesh import Layout, Mesh
from torch import nn

from titan_train.config import Config
from titan_train.layout import Mode
from titan_train.models import build_model, init_for


def build_parallel_model(
    config: Config, *, mode: Mode, mesh: Mesh | None, vocab_size: int, device: torch.device
) -> tuple[nn.Module, fsdp.Plan | None]:
    """Build, wrap and initialise the model of a run.

    Args:
        config: The run's configuration.
        mode: The wrapping, from `titan_train.layout.resolve_mode`.
        mesh: The ranks; None without a process group.
        vocab_size: The tokenizer's, which sizes the embedding and the head.
        device: Where the weights live.

    Returns:
        The model, ready to train, and the wrapping plan (None in mode "none").
    """
    model = build_model(config.model, vocab_size=vocab_size, device="meta")
    init = init_for(model)
    if config.train.compile:
        compile_blocks(model)
    plan = None
    if mode != "none":
        assert mesh is not None
        plan = fsdp.plan(model, mesh.fsdp_mesh() if mode != "ddp" else mesh["dp_replicate"], fsdp_policy(config, mode))
        if mode == "ddp":  # DistributedDataParallel wraps real parameters
            fsdp.materialize(model, device, init, seed=config.run.seed)
            return plan.apply(model), plan
        model = plan.apply(model)
    fsdp.materialize(model, device, init, seed=config.run.seed)
    return model, plan


def fsdp_policy(config: Config, mode: Mode) -> fsdp.Policy:
    """The titan-fsdp policy that a configuration means."""
    parallel = config.parallel
    return fsdp.Policy(
        mode="fsdp" if mode == "none" else mode,
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
    )


def compile_blocks(model: nn.Module) -> None:
    """torch.compile every repeated block in place: compile time does not grow with depth, and FSDP's hooks stay eager."""
    for container in model.modules():
        blocks = list(container.children())
        if isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len({type(b) for b in blocks}) == 1:
            for block in blocks:
                block.compile(fullgraph=True)


def describe_layout(layout: Layout, plan: fsdp.Plan | None) -> str:
    """The text of ``layout.txt``: the rank table, then what each wrapped unit does."""
    parts = [layout.explain()]
    if plan is not None:
        parts.append(plan.explain())
    return "\n\n".join(parts)
