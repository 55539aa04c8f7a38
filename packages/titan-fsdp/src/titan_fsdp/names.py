"""Names as in the plain model, whatever wraps it.

Activation checkpointing, compile and DistributedDataParallel each add a segment to the names of what they wrap. All
of this package's matching, seeding and state dicts use the names without those segments.
"""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_WRAPPER_SEGMENTS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})


def clean_fqn(name: str) -> str:
    """``name`` without what checkpoint and compile wrappers add: ``layers.0._orig_mod.w`` → ``layers.0.w``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, torch.compile and activation-checkpoint wrappers.

    FSDP2 adds no wrapper: it changes the class of the module in place.
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
            continue
        inner = next((m for name in _WRAPPER_SEGMENTS if (m := model._modules.get(name)) is not None), None)
        if inner is None:
            return model
        model = inner


def named_parameters(model: nn.Module, *, duplicates: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter with its plain FQN, through checkpoint, compile and DistributedDataParallel wrappers.

    Args:
        model: The model, wrapped or not.
        duplicates: Also yield the further names of tied parameters.
    """
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=not duplicates):
        yield clean_fqn(name), parameter


def named_modules(model: nn.Module, *, duplicates: bool = False) -> dict[str, nn.Module]:
    """Plain FQN → the outermost module of that name (the wrapper, where there is one). The root's name is ``""``.

    Args:
        model: The model, wrapped or not.
        duplicates: Also the further names of modules that are registered more than once.
    """
    modules: dict[str, nn.Module] = {}
    for name, module in unwrap(model).named_modules(remove_duplicate=not duplicates):
        modules.setdefault(clean_fqn(name), module)
    return modules


def tied_groups(model: nn.Module, *, shared: bool = False) -> list[list[str]]:
    """Groups of FQNs that name one and the same parameter; each has at least two names.

    Args:
        model: The model, wrapped or not.
        shared: A module that is registered twice, such as a shared block, counts under each of its names. Otherwise under its
            first one alone.
    """
    names: dict[int, list[str]] = {}
    for path, module in unwrap(model).named_modules(remove_duplicate=not shared):
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(parameter), []).append(clean_fqn(f"{path}.{leaf}" if path else leaf))
    return [group for group in names.values() if len(group) > 1]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` equals or matches (shell style) one of ``patterns``."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def expand(pattern: str, names: Sequence[str]) -> list[str]:
    """Names that match ``pattern``; ``*`` stands for one segment, ``**`` for any number of them."""
    return [name for name in names if _match_segments(pattern.split("."), name.split("."))]


def _match_segments(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_match_segments(pattern[1:], name[i:]) for i in range(len(name) + 1))
    return bool(name) and fnmatch.fnmatchcase(name[0], pattern[0]) and _match_segments(pattern[1:], name[1:])


def is_meta(model: nn.Module) -> bool:
    """Whether any parameter or buffer still lives on the meta device."""
    return any(t.is_meta for t in _tensors(model))


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
