"""Which parameters Muon takes by default, what it must not take, and the parts of fused matrices.

Muon is for matrices that map hidden features to hidden features. An embedding is a table of rows of which a step sees few; a head
is a table too, of the vocabulary; a router's rows compete; norms and biases are vectors; adapters are factors of a matrix.
AdamW has these. A three-dimensional parameter is a stack of matrices where it holds experts, and unknown elsewhere.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from titan_fsdp import clean_fqn
from torch import nn

from titan_train.config.optimizer import MuonConfig
from titan_train.models.common.moe.routed import expert_stacks
from titan_train.models.traits import traits_of
from titan_train.parallel.param_shard import ParamShards
from titan_train.values import did_you_mean

# biases of any number of dimensions, and Mamba's rates
UNDECAYED = re.compile(r"(?:^|[._])bias(?:es)?$|(?:^|\.)(?:A_log|D|dt_bias)$")
_EMBEDDING = re.compile(r"emb|(?:^|\.)w[tp]e\.|(?:^|\.)(?:cls|mask|pos|register)_?(?:token|tokens)?$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|unembed\w*|head|output)\.weight$")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class MatrixKind(NamedTuple):
    """What Muon makes of a parameter."""

    takes: bool
    """By default."""
    never: str
    """Why it cannot take it at all; empty where a pattern may say that it shall."""
    shape: tuple[int, ...]
    """Of the whole parameter."""


def matrix_kinds(part: nn.Module, cuts: ParamShards) -> dict[str, MatrixKind]:
    """What Muon makes of each parameter, by its clean name.

    Args:
        part: A model without outer wrappers, or a pipeline stage; sharded or not.
        cuts: What tensor and expert parallelism cut of it.
    """
    stacks = {id(p) for stack in expert_stacks(part) for p in stack.experts.parameters() if p.ndim == 3}
    routed = {id(module) for module in part.modules() if hasattr(module, "experts")}
    heads = {f"{traits_of(part).loss_head}.weight"}
    kinds: dict[str, MatrixKind] = {}
    for path, module in part.named_modules():
        prefix = clean_fqn(path)
        parent = part.get_submodule(path.rpartition(".")[0]) if path else part
        for leaf, parameter in module.named_parameters(recurse=False):
            name = clean_fqn(f"{path}.{leaf}" if path else leaf)
            never = _never(name, module, parameter)
            gate = "router" in name.lower() or (prefix.endswith("gate") and id(parent) in routed)
            table = name in heads or _HEAD.search(name) is not None
            table = table or (_EMBEDDING.search(name) is not None and not isinstance(module, nn.Linear))
            shape = tuple(parameter.shape) if name not in cuts else cuts[name].global_shape
            plain = len(shape) == 2 and min(shape) > 1
            takes = not never and (plain or id(parameter) in stacks) and not (gate or table or "lora_" in name)
            kinds[name] = MatrixKind(takes, never, shape)
    return kinds


def _never(name: str, module: nn.Module, parameter: nn.Parameter) -> str:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "an embedding"
    if isinstance(module, _CONVOLUTIONS) or parameter.ndim > 3:
        return "no matrix but a convolution's or other weight of more dimensions"
    if "norm" in type(module).__name__.lower() or UNDECAYED.search(name):
        return "of a norm, a bias or a rate"
    return "" if parameter.ndim > 1 else "a vector"


def muon_names(kinds: Mapping[str, MatrixKind], config: MuonConfig, names: Mapping[str, Sequence[str]]) -> list[str]:
    """The parameters that Muon takes, in the model's order.

    Args:
        kinds: From `matrix_kinds`, of all parameters that are here, and of those that are elsewhere as far as they are known.
        config: Exceptions by pattern.
        names: Each name to all names of that parameter.

    Raises:
        ValueError: A pattern gives Muon what it must not take.
    """
    taken: list[str] = []
    for name, kind in kinds.items():
        said = next(_found(config.groups, names[name]), None)
        if said is None:
            if kind.takes and all(kinds[other].takes for other in names[name] if other in kinds):
                taken.append(name)
            continue
        if config.groups[said] == "adamw" or len(kind.shape) < 2:
            continue
        never = next((kinds[other].never for other in names[name] if other in kinds and kinds[other].never), "")
        if never:
            raise ValueError(
                f"optimizer.muon.groups has {said!r} = 'muon', which is found in {name}: it is {never}. Muon is for "
                "matrices of hidden layers. Write a pattern that leaves it out, or put one for it with 'adamw' in front."
            )
        taken.append(name)
    return taken


def parts_of_rows(config: MuonConfig, names: Sequence[str], rows: int) -> tuple[int, ...]:
    """Rows of each part that is a matrix of its own.

    Args:
        config: Its ``splits`` and ``heads``.
        names: All names of the parameter.
        rows: Of the whole matrix.

    Raises:
        ValueError: The rows cannot be cut so.
    """
    split = next(_found(config.splits, names), None)
    heads = next(_found(config.heads, names), None)
    if split is not None and heads is not None:
        raise ValueError(
            f"optimizer.muon.splits has {split!r} and optimizer.muon.heads has {heads!r}, and both are found in {names[0]}. Keep "
            "one of them: with as many heads in all, `heads` cuts at the borders of fused parts too."
        )
    proportions = (
        config.splits[split] if split is not None else (1,) * (config.heads[heads] if heads is not None else 1)
    )
    whole = sum(proportions)
    if rows % whole:
        key = f"splits.{split}={list(proportions)}" if split is not None else f"heads.{heads}={whole}"
        raise ValueError(
            f"optimizer.muon.{key}: {names[0]} has {rows} rows, which {whole} does not divide. Give numbers whose sum does."
        )
    return tuple(rows // whole * part for part in proportions)


def check_parts(config: MuonConfig, shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, Sequence[str]]) -> None:
    """Refuse patterns of ``splits`` and ``heads`` that are found in no matrix of Muon's, or do not fit one.

    Args:
        config: Has the tables.
        shapes: Of all that Muon takes of the whole model.
        names: Each name to all names of that parameter.

    Raises:
        ValueError: Names the pattern.
    """
    for table in ("splits", "heads"):
        for pattern in getattr(config, table):
            if not any(re.search(pattern, name) for taken in shapes for name in names[taken]):
                distinct = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name in shapes))
                raise ValueError(
                    f"optimizer.muon.{table} has the pattern {pattern!r}, which is found in no matrix that Muon takes: it would "
                    f"do nothing. {did_you_mean(pattern, distinct)}Muon takes {len(shapes)}, such as {distinct[:3]}."
                )
    for name, shape in shapes.items():
        parts_of_rows(config, names[name], shape[-2])


def _found(table: Mapping[str, object], names: Sequence[str]) -> Iterator[str]:
    return (pattern for pattern in table if any(re.search(pattern, name) for name in names))
