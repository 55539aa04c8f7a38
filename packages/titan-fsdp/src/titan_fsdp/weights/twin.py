"""A copy of a model's structure that initialisation code can run on, with meta tensors of full size in it.

Code such as ``reset_parameters()`` and ``_init_weights(module)`` writes into whatever tensors it finds. On the twin it
finds the plain classes (not FSDP's), full-size tensors (not shards), and no wrappers. Whoever wants one tensor filled
puts that one in its place and leaves the others on meta.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from titan_fsdp.names import unwrap
from titan_fsdp.torch_private import original_class


def build_twin(model: nn.Module) -> nn.Module:
    """The modules of ``model`` without wrappers; parameters and buffers on meta, none of them shared."""
    return _copy(model, {})


def _copy(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    module = unwrap(module)
    if id(module) in made:  # a shared block is one module under two names
        return made[id(module)]
    twin: Any = object.__new__(original_class(module))
    made[id(module)] = twin
    twin.__dict__.update(module.__dict__)
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is module:
            twin.__dict__[name] = MethodType(value.__func__, twin)
    twin.__dict__["_parameters"] = {name: _on_meta(p) for name, p in module._parameters.items()}
    twin.__dict__["_buffers"] = {name: _on_meta(b) for name, b in module._buffers.items()}
    twin.__dict__["_modules"] = {
        name: None if child is None else _copy(child, made) for name, child in module._modules.items()
    }
    return twin


def _on_meta(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")  # the global shape, for a DTensor
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
