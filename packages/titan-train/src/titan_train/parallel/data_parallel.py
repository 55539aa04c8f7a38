"""Data parallelism: FSDP2, HSDP or DDP around a part of the model, then its weights.

It comes last, because it shards what the other kinds of parallelism left of each parameter. The wrapping itself is
titan-fsdp's; here a configuration becomes its policy.
"""

import dataclasses
from collections.abc import Callable, Sequence

import titan_fp8
import titan_fsdp as fsdp
import torch
from titan_fsdp.names import expand, named_modules
from titan_fsdp.torch_private import has_method
from titan_mesh import Layout, Mesh
from torch import Tensor, nn

from titan_train.config import Config
from titan_train.models.common.moe.routed import expert_stacks
from titan_train.models.registry import is_shipped
from titan_train.models.traits import traits_of
from titan_train.parallel.float8 import gathers_float8_weights
from titan_train.parallel.layout.degrees import Mode, resolve_mode, wrapped_over


def fsdp_policy(
    config: Config, mode: Mode, part: nn.Module, *, experts: Sequence[str] = (), unused: bool = False
) -> fsdp.Policy:
    """The titan-fsdp policy that a configuration means.

    Args:
        config: The run's configuration.
        mode: The resolved mode.
        part: The model or a pipeline stage; its trait `fsdp_units` names modules that are gathered as one unit each.
        experts: Modules that expert parallelism has cut, to be sharded over the ranks that hold the same ones.
        unused: Some parameters may get no gradient, or not from every rank. A torch whose FSDP cannot be told is not.
    """
    parallel = config.parallel
    hook = parallel.compress if mode == "ddp" and parallel.compress != "none" else None  # of DistributedDataParallel
    units = traits_of(part).fsdp_units if mode != "ddp" else ()
    names = [name for name in named_modules(part) if name] if units else []
    whole = dict.fromkeys(name for unit in units for name in expand(unit, names))  # a pipeline stage may lack some
    return fsdp.Policy(
        mode="fsdp" if mode == "none" else mode,
        units=["auto", *whole, *(fsdp.Unit(name, mesh="experts", shard_dim="auto") for name in experts)],
        reshard=parallel.reshard,
        reshard_overrides=dict(reversed(parallel.reshard_overrides.items())),  # there the last that matches counts
        mp=fsdp.MixedPrecision(
            param=config.train.dtype, reduce=parallel.reduce_dtype, keep_fp32=list(parallel.keep_fp32)
        ),
        offload=None if parallel.offload == "none" else parallel.offload,
        # the loss is already divided by the step's tokens over all ranks
        grad_divide="sum",
        comm=fsdp.Comm(
            reduce_scatter="bf16" if parallel.compress == "bf16" and mode != "ddp" else "native",
            ddp_hook=hook,
            reduce_scatter_group=parallel.reduce_scatter_group,
            reduce_scatter_buffers=parallel.reduce_scatter_buffers,
            symmetric_memory=parallel.symmetric_memory,
        ),
        pp=parallel.pp > 1,
        unused_parameters=unused and (hook is not None or has_method("set_reduce_scatter_unused_params")),
    )


def apply_data_parallel(
    part: nn.Module,
    config: Config,
    layout: Layout,
    mode: Mode,
    mesh: Mesh | None,
    device: torch.device,
    init: Callable[[str, Tensor, torch.Generator], None],
    skip: Callable[[str], bool] | None = None,
) -> tuple[nn.Module, fsdp.WrapPlan | None]:
    """Wrap one part, put it on its device and fill its weights.

    Args:
        part: The model or a pipeline stage, on the meta device, after every other kind of parallelism.
        config: The run's configuration.
        layout: The degrees.
        mode: The resolved mode.
        mesh: The ranks; None only in mode "none".
        device: Where the weights live.
        init: Fills one parameter of this rank.
        skip: Parameters that are left as they are allocated: their values are read from files.

    Returns:
        The wrapped part, and how it was wrapped; None in mode "none".
    """
    if mode == "none":
        fsdp.materialize(part, device, init, seed=config.run.seed, skip=skip)
        return part, None
    assert mesh is not None
    # other people's models may choose among their parts by the data, and some of transformers train their indexers otherwise
    unused = not is_shipped(part)
    if mode == "ddp":  # DistributedDataParallel wraps real parameters
        ranks = mesh["dp_replicate"] if layout.spec.cp == 1 else mesh["loss"]
        plan = fsdp.plan(part, ranks, fsdp_policy(config, mode, part, unused=unused))
        fsdp.materialize(part, device, init, seed=config.run.seed, skip=skip)
        return plan.apply(part), plan
    experts = [stack.fqn for stack in expert_stacks(part)] if layout.spec.ep > 1 else []
    meshes = {"experts": mesh.fsdp_mesh(experts=True)} if experts else None
    if gathers_float8_weights(config):
        titan_fp8.apply_float8_all_gather(part)
    policy = fsdp_policy(config, mode, part, experts=experts, unused=unused)
    plan = fsdp.plan(part, mesh.fsdp_mesh(), policy, meshes=meshes)
    wrapped = plan.apply(part)
    home = device if config.parallel.offload == "none" else torch.device("cpu")
    fsdp.materialize(wrapped, home, init, seed=config.run.seed, skip=skip, buffer_device=device)
    return wrapped, plan


def check_wrapping(config: Config, layout: Layout, model: nn.Module) -> None:
    """Refuse patterns for titan-fsdp that name nothing of the whole model, as its stages cannot tell, and lossy repetition.

    Raises:
        ValueError: Names the key.
    """
    parallel = config.parallel
    if parallel.keep_fp32 or parallel.reshard_overrides:
        mode = resolve_mode(parallel, layout, dtype=config.train.dtype)
        if mode != "none":
            fsdp.plan(
                model, wrapped_over(layout, mode), dataclasses.replace(fsdp_policy(config, mode, model), pp=False)
            )
    if config.train.rerun_above and parallel.compress == "powersgd":
        raise ValueError(
            f"train.rerun_above={config.train.rerun_above} and parallel.compress='powersgd': what compression did not send is "
            "added to the next gradient, so a step that is computed again differs on sound hardware. Set train.rerun_above=0, or "
            "parallel.compress='bf16'."
        )
