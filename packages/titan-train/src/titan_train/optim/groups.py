"""Which parameters get which learning rate and weight decay: pure rules on names, tested without an optimizer.

Ordered tables of patterns, for learning-rate scales, weight decay and steps without training; in each, the first pattern found
in a parameter's name counts. A pattern may mean any name of a tied weight, which has one value whichever of
its copies a rank holds. A parameter that no decay pattern names gets the default: matrices decay, embeddings
too (GPT-3, Llama), while norms, biases and other vectors do not, as pulling those to zero serves nothing. Neither do rates
of a state space (Mamba's ``A_log``), whose zero is a value like any other.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from titan_fsdp import clean_fqn, is_dtensor, unwrap
from torch import nn

from titan_train.config.optimizer import MuonConfig, OptimizerConfig
from titan_train.models.parametrization import Update, kind_of
from titan_train.models.traits import traits_of
from titan_train.optim.matrices import UNDECAYED, MatrixKind, check_parts, matrix_kinds, muon_names
from titan_train.parallel.param_shard import ParamShards
from titan_train.parallel.tied import ParameterNames, parameter_names
from titan_train.values import did_you_mean


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share a learning-rate scale and a weight decay."""

    kind: Literal["adamw", "muon", "sgd"]
    """What updates them."""
    lr_scale: float
    """Multiplies the learning rate."""
    weight_decay: float
    """Weight decay of these parameters."""
    frozen_steps: int
    """Steps at the start in which they are not trained."""
    fqns: tuple[str, ...]
    """Clean names, in the model's order."""
    parameters: tuple[nn.Parameter, ...]
    """In the same order; all DTensors or all plain."""


def plan_groups(
    model: nn.Module | Sequence[nn.Module],
    config: OptimizerConfig,
    *,
    names: ParameterNames | None = None,
    cuts: ParamShards | None = None,
    kinds: Mapping[str, MatrixKind] | None = None,
) -> list[ParameterGroup]:
    """Sort a model's trainable parameters into groups.

    Args:
        model: With any wrappers; sharded or not. Or the parts of one that this rank has (pipeline stages).
        config: Patterns and defaults.
        names: The whole model's, where ``model`` is part of one: a pattern may be for a parameter that another rank has,
            or for the name that a tied one has there.
        cuts: What tensor and expert parallelism cut of this rank's.
        kinds: What Muon makes of the whole model's parameters, where ``model`` is part of one with tied weights.

    Returns:
        Groups in the order of their first parameter. DTensors and plain tensors never share a group, because fused
        and foreach kernels refuse the mix.

    Raises:
        ValueError: A pattern is found in no parameter's name (the message lists near names), or two patterns give the two
            names of a tied weight different values. Or a pattern of ``optimizer.muon`` gives Muon what it must not take.
    """
    parts = [unwrap(part) for part in ([model] if isinstance(model, nn.Module) else model)]
    named = [(clean_fqn(fqn), p) for part in parts for fqn, p in part.named_parameters() if p.requires_grad]
    whole = names is None
    names = names or {name: every for part in parts for name, every in parameter_names(part).items()}
    taken: dict[str, tuple[int, ...]] = {}
    if config.name == "muon":
        _require_matches("optimizer.muon.groups", config.muon.groups, list(names))
        here = {name: kind for part in parts for name, kind in matrix_kinds(part, cuts or {}).items()}
        kinds = {**(kinds or {}), **here}  # a copy is updated as the others are, on other ranks
        taken = {name: kinds[name].shape for name in muon_names(kinds, config.muon, names)}
        if whole:  # a stage need not have what a pattern is for
            check_parts(config.muon, taken, names)
    for table in ("lr_scales", "weight_decays", "frozen_steps"):
        _require_matches(f"optimizer.{table}", getattr(config, table), list(names))
        for every in dict.fromkeys(names.values()):
            _require_one_value(f"optimizer.{table}", getattr(config, table), every)

    other: Literal["adamw", "sgd"] = "sgd" if config.name == "sgd" else "adamw"
    scaled = next((p for part in parts if (p := traits_of(part).parametrization) is not None), None)
    if scaled is not None and config.name == "sgd":
        raise ValueError(
            "model.parametrization='mup' scales learning rates for adamw and muon, and optimizer.name='sgd' takes other steps. "
            "Set optimizer.name='adamw', or model.parametrization='standard'."
        )
    vectors = {key for part in parts for key in _undecayed(part)}
    groups: dict[tuple[Any, ...], list[tuple[str, nn.Parameter]]] = {}
    for fqn, parameter in named:
        every = names[fqn]
        scale = first_match(config.lr_scales, every, 1.0)
        decay = first_match(config.weight_decays, every, 0.0 if id(parameter) in vectors else config.weight_decay)
        frozen = int(first_match(config.frozen_steps, every, 0))
        kind = "muon" if fqn in taken else other
        if scaled is not None:
            by = muon_update(config.muon, every, taken[fqn]) if kind == "muon" else "adam"
            scale, decay = scale * scaled.rate_scale(every, by), decay * scaled.decay_scale(every, by)
        groups.setdefault((kind, scale, decay, frozen, is_dtensor(parameter)), []).append((fqn, parameter))
    return [
        ParameterGroup(kind, scale, decay, frozen, tuple(fqn for fqn, _ in members), tuple(p for _, p in members))
        for (kind, scale, decay, frozen, _), members in groups.items()
    ]


def muon_update(config: MuonConfig, names: Sequence[str], shape: Sequence[int]) -> Update:
    """How far Muon moves a decoder's matrix, for its rate under muP."""
    *_, rows, columns = shape
    heads = first_match(config.heads, names, 1)
    few = rows < heads * columns and (heads > 1 or kind_of(names[0]) in ("head", "router"))
    if config.scale == "moonlight":
        return "adam" if few else "rms"
    return "rms" if few else "spectral"


def first_match(table: Mapping[str, float], names: Sequence[str], default: float) -> float:
    """The value of the first pattern that is found in one of a parameter's names, or ``default``."""
    return next((value for pattern, value in table.items() if any(re.search(pattern, n) for n in names)), default)


def _undecayed(model: nn.Module) -> set[int]:
    """Ids of the parameters without default decay: vectors, scalars, all parameters of normalization layers, biases of stacked
    experts (one row each), and what state-space models keep as logarithms of rates.
    """
    found = {id(p) for name, p in model.named_parameters() if p.ndim < 2 or UNDECAYED.search(name)}
    norms = (m for m in model.modules() if "norm" in type(m).__name__.lower())
    return found | {id(p) for m in norms for p in m.parameters(recurse=False)}


def _require_one_value(key: str, table: Mapping[str, float], names: Sequence[str]) -> None:
    """Refuse patterns that each mean one name of a tied weight alone, with different values."""
    meant: dict[str, str] = {}  # name of the weight -> the pattern that decides for it
    for pattern in table if len(names) > 1 else ():
        found = [name for name in names if re.search(pattern, name)]
        new = [name for name in found if name not in meant]
        apart = next((name for name in meant if table[meant[name]] != table[pattern]), None)
        if apart is not None and new and len(new) == len(found):
            raise ValueError(
                f"{key} gives {apart} {table[meant[apart]]} (pattern {meant[apart]!r}) and {new[0]} {table[pattern]} (pattern "
                f"{pattern!r}), but they are two names of one tied weight, which has one value. Remove one of the patterns, "
                "give both the same value, or untie the weight."
            )
        meant |= dict.fromkeys(new, pattern)


def _require_matches(key: str, patterns: Iterable[str], fqns: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(re.search(pattern, fqn) for fqn in fqns):
            # names repeat from layer to layer: suggest each once
            distinct = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", fqn) for fqn in fqns))
            raise ValueError(
                f"{key} has the pattern {pattern!r}, which is found in none of the {len(fqns)} parameter names: it "
                f"would do nothing. {did_you_mean(pattern, distinct)}Names look like {distinct[0]!r}."
            )
