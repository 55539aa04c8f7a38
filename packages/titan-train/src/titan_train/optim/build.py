"""Build the optimizer of a run, and check what a checkpoint restored into it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from titan_ckpt import LocalShard
from titan_ckpt.load.reader import StepReader
from titan_ckpt.state.dtypes import DTYPES
from titan_fsdp import clean_fqn, is_dtensor, unwrap
from torch import nn

from titan_train.config.optimizer import OptimizerConfig
from titan_train.exchange import gather_values
from titan_train.optim.average import Z
from titan_train.optim.compact_adamw import CompactAdamW
from titan_train.optim.compact_states import block_length
from titan_train.optim.groups import ParameterGroup, plan_groups
from titan_train.optim.matrices import MatrixKind, parts_of_rows
from titan_train.optim.muon import Muon
from titan_train.optim.muon_step import MuonMatrix
from titan_train.optim.newton_schulz import Rule
from titan_train.optim.ownership import Stack
from titan_train.optim.schedule_free import ScheduleFreeAdamW
from titan_train.parallel.param_shard import ParamShards
from titan_train.parallel.tied import ParameterNames

# fused AdamW and SGD exist for these; only AdamW's takes DTensors (checked on torch 2.11 and 2.15 by a test)
_FUSED_DEVICES = ("cuda", "cpu")
_KINDS = {
    Z: "schedule_free",
    "exp_avg": "adamw",
    "exp_avg_bf16": "adamw with states='bf16'",
    "exp_avg_codes": "adamw with states='int8'",
    "momentum_buffer": "sgd",
    "muon_momentum": "muon",
}


def build_optimizer(
    model: nn.Module | Sequence[nn.Module],
    config: OptimizerConfig,
    *,
    names: ParameterNames | None = None,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    cuts: ParamShards | None = None,
    kinds: Mapping[str, MatrixKind] | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer over a model's trainable parameters. Collective over all ranks for Muon on CPUs.

    Args:
        model: Already sharded and materialized: the optimizer holds the parameters it is given. Or the parts of one
            that this rank has (pipeline stages).
        config: Kind, hyperparameters, and exceptions by pattern.
        names: The whole model's, where ``model`` is part of one: a pattern may be for a parameter that another rank has.
        make: Builds an optimizer of yours from the groups; None builds ``config.name``.
        cuts: What tensor and expert parallelism cut of this rank's parameters.
        kinds: What Muon makes of the whole model's parameters, where ``model`` is part of one with tied weights.
        group: The ranks that together hold each matrix that Muon takes; None if this one does.
        device: Where Muon computes; None is where the parameters are.

    Returns:
        An optimizer whose groups carry ``lr`` (already scaled), ``weight_decay`` and ``param_names``, the clean names
        of their parameters.

    Raises:
        ValueError: A pattern is found in no parameter's name, patterns contradict each other for a tied weight, or the
            model has nothing to train.
    """
    groups = plan_groups(model, config, names=names, cuts=cuts, kinds=kinds)
    if not groups:
        kind = type(model).__name__ if isinstance(model, nn.Module) else "this rank's part of the model"
        raise ValueError(f"{kind} has no parameter with requires_grad: there is nothing to train.")
    param_groups: list[dict[str, Any]] = [
        {
            "params": list(zip(found.fqns, found.parameters, strict=True)),
            "lr": config.lr * found.lr_scale,
            "weight_decay": found.weight_decay,
            **({"frozen_steps": found.frozen_steps} if config.frozen_steps else {}),
        }
        for found in groups
    ]
    if make is not None:
        return make(param_groups)
    betas = config.beta1, config.beta2
    if config.name == "schedule_free":
        return ScheduleFreeAdamW(param_groups, betas=betas, eps=config.eps)
    if config.states != "fp32" or config.weights != "fp32":
        return CompactAdamW(
            param_groups,
            states=config.states,
            names={name: every[0] for name, every in (names or {}).items()},
            shards={
                name: LocalShard(cut.global_shape, cut.offset) for name, cut in (cuts or {}).items() if cut.pieces > 1
            },
            betas=betas,
            eps=config.eps,
            cautious=config.cautious,
        )
    parameters = [p for found in groups for p in found.parameters]
    takes = all(p.device.type in _FUSED_DEVICES for p in parameters)
    takes = takes and (config.name != "sgd" or not any(is_dtensor(p) for p in parameters))
    fused = True if config.fused == "auto" and takes else None
    if config.name == "sgd":
        sgd = torch.optim.SGD(param_groups, lr=config.lr, momentum=config.beta1, fused=fused)
        sgd.register_step_pre_hook(_begin_momentum)
        return sgd
    if config.name == "muon" or config.cautious:
        return _muon(groups, param_groups, config, names, cuts or {}, group, device, fused)
    return torch.optim.AdamW(param_groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Zeros for parameters that were thawed at a resume, beside others with momentum: torch's fused SGD takes all or none."""
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None] if group["momentum"] else []
        new = [p for p in trained if optimizer.state[p].get("momentum_buffer") is None]
        for parameter in new if len(new) < len(trained) else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _muon(
    groups: Sequence[ParameterGroup],
    param_groups: Sequence[dict[str, Any]],
    config: OptimizerConfig,
    names: ParameterNames | None,
    cuts: ParamShards,
    group: dist.ProcessGroup | None,
    device: torch.device | None,
    fused: bool | None,
) -> Muon:
    muon = config.muon
    matrices: list[MuonMatrix] = []
    for found, settings in zip(groups, param_groups, strict=True):
        settings |= {
            "kind": found.kind,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "cautious": config.cautious,
        }
        if found.kind == "adamw":
            continue
        settings["lr"] *= muon.lr_scale
        for name, parameter in zip(found.fqns, found.parameters, strict=True):
            cut = cuts.get(name)
            shape = tuple(parameter.shape) if cut is None else cut.global_shape
            parts = parts_of_rows(muon, names[name] if names else (name,), shape[-2])
            stack = Stack((shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1]), parts)
            shard = None if cut is None or cut.pieces == 1 else LocalShard(cut.global_shape, cut.offset)
            matrices.append(MuonMatrix(name, parameter, stack, shard))
    where = device or groups[0].parameters[0].device
    rule = Rule(
        muon.coefficients,
        muon.scale,
        _newton_schulz_dtype(muon.dtype, where) if config.name == "muon" else torch.float32,
        muon.normuon_beta2 if muon.normuon else None,
    )
    return Muon(
        param_groups, matrices, rule=rule, momentum=muon.momentum, nesterov=muon.nesterov, group=group, device=device,
        fused=fused,
    )  # fmt: skip


def _newton_schulz_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """What Newton-Schulz computes in. For "auto" on a CPU, collective: ranks exchange matrices in it, so all take the same."""
    if dtype == "auto" and device.type == "cpu":
        units = torch.cpu.get_capabilities()
        has = bool(units.get("avx512_bf16") or units.get("amx_bf16"))
        return torch.bfloat16 if all(gather_values(has) if dist.is_initialized() else [has]) else torch.float32
    return torch.float32 if dtype == "fp32" else torch.bfloat16


def check_restored(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse the restored state of another kind of optimizer than ``name``, a value of ``optimizer.name``.

    Settings are the configuration's: a checkpoint is restored with ``TrainState(own_settings=True)``. So weight decay and betas
    may change at a resume, parameters may be frozen or thawed, and tables of patterns may come and go. The kind must stay.

    Raises:
        ValueError: The checkpoint was saved with it.
    """
    own: dict[str, str] = {}
    saved: dict[str, set[str]] = {}
    for group in optimizer.param_groups:
        for parameter, fqn in zip(group["params"], group["param_names"], strict=True):
            own[fqn] = group.get("kind", name)
            if isinstance(optimizer, CompactAdamW):
                own[fqn] = _KINDS[optimizer.first_state(parameter)]
            saved[fqn] = {kind for key in optimizer.state.get(parameter, {}) for kind in saved_kind(key)}
    check_kinds(name, own, saved)


def check_saved_weights(reader: StepReader, part: nn.Module, where: str) -> None:
    """Refuse to continue with weights that a checkpoint has in another format: a resume would not be exact.

    Args:
        reader: The checkpoint's index.
        part: The model, or a part of it, on any device, in the format of ``optimizer.weights``.
        where: What the checkpoint is called.

    Raises:
        ValueError: A weight differs.
    """
    formats = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    saved = reader.index.tensors["model"]
    for name, parameter in unwrap(part).named_parameters():
        stored = saved.get(clean_fqn(name))
        there = None if stored is None else DTYPES[stored.dtype]
        if there is not None and there != parameter.dtype and {there, parameter.dtype} <= formats.keys():
            raise ValueError(
                f"optimizer.weights={formats[parameter.dtype]!r}, and {where} has weights in {formats[there]!r}, such as {name}: "
                f"a resume would not be exact. Set optimizer.weights={formats[there]!r}, or start another run from its weights: "
                "model.init='run:DIR'."
            )


def saved_kind(entry: str) -> set[str]:
    """The kind of optimizer that has this entry in a parameter's state; empty for one that several have."""
    return {_KINDS[entry]} if entry in _KINDS else set()


def kind_of(config: OptimizerConfig, group: ParameterGroup, parameter: nn.Parameter) -> str:
    """The kind of optimizer that updates a parameter of a whole model, as `saved_kind` names it."""
    if group.kind != "adamw" or config.name == "muon":
        return group.kind
    if config.name == "schedule_free":
        return config.name
    small = config.states == "bf16" or (config.states == "int8" and block_length(parameter.shape) > 0)
    return _KINDS[{"bf16": "exp_avg_bf16", "int8": "exp_avg_codes"}[config.states]] if small else "adamw"


def check_kinds(name: str, own: Mapping[str, str], saved: Mapping[str, Collection[str]]) -> None:
    """Refuse a checkpoint's state of another kind of optimizer than the one that updates a parameter now.

    Args:
        name: ``optimizer.name``.
        own: What updates each parameter, by name.
        saved: The kinds whose state of it was saved.

    Raises:
        ValueError: They differ.
    """
    for fqn, kind in own.items():
        if others := {*saved.get(fqn, ())} - {kind}:
            raise ValueError(
                f"optimizer.name={name!r}, which updates {fqn} by {kind!r}, and the checkpoint holds the state of "
                f"{min(others)!r}, which {kind!r} cannot use. Resume with the optimizer.name, states and muon.groups of the "
                "checkpoint, or start another run from its weights: model.init='run:DIR'."
            )
