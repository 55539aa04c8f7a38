"""The few places where torch's public API does not serve, in one module. Checked on torch 2.11 to 2.15.

`replicate` is the FSDP2 engine without sharding; torch does not export it yet, under the same private path in every
version checked. Methods that a torch version lacks are asked for with hasattr, and named in the error.
"""

import functools
from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from titan_fsdp.loaded import is_fsdp_class, is_fsdp_module

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "check_has",
    "ddp_ignore",
    "drop_unreduced",
    "fake_tensors",
    "fsdp_modules",
    "fsdp_roots",
    "has_method",
    "note_reached",
    "original_class",
    "replicate_engine",
    "shard_groups",
    "share_streams",
    "split_factor",
    "surround",
]

_STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream")


def replicate_engine() -> Callable[..., nn.Module]:
    """FSDP2's `replicate`."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate  # pyright: ignore[reportReturnType]


def ddp_ignore(model: nn.Module, parameters: Set[nn.Parameter]) -> None:
    """Let DistributedDataParallel, when it wraps ``model``, neither broadcast these nor reduce their gradients."""
    from torch.nn.parallel import DistributedDataParallel

    names: list[str] = []
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter in parameters:
                # DistributedDataParallel writes the names of the root's own parameters both ways.
                names += [f"{path}.{leaf}"] if path else [leaf, f".{leaf}"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def fsdp_modules(model: nn.Module) -> "list[FSDPModule]":
    """Every module of ``model`` that FSDP2 (sharded or replicated) wraps, outermost first."""
    return [module for module in model.modules() if is_fsdp_module(module)]


def fsdp_roots(model: nn.Module) -> "list[FSDPModule]":
    """The modules that FSDP2 wraps and that lie in no other one: ``model`` itself if it is wrapped."""
    wrapped: list[Any] = fsdp_modules(model)
    inside = {id(inner) for module in wrapped for inner in module.modules() if inner is not module}
    return [module for module in wrapped if id(module) not in inside]


def drop_unreduced(modules: "Iterable[FSDPModule]") -> None:
    """Drop the gradients that FSDP2 keeps beside its parameters until they are reduced; ``zero_grad`` does not see them."""
    for group in _param_groups(modules):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if "unsharded_accumulated_grad" in vars(parameter):  # torch 2.15 sums in the gradient itself
                parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def note_reached(modules: "Iterable[FSDPModule]", reached: set[nn.Parameter]) -> None:
    """Before each reduction, add to ``reached`` the sharded parameters of which this rank has a gradient.

    Where unused parameters are reduced too, every gradient is there afterwards.
    """
    for group in _param_groups(modules):
        post_backward: Callable[..., None] = group.post_backward

        def noting(*unused: Any, group: Any = group, post_backward: Callable[..., None] = post_backward) -> None:
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                summed = getattr(parameter, "unsharded_accumulated_grad", None)  # before torch 2.15
                if summed is not None or (whole is not None and whole.grad is not None):
                    reached.add(parameter.sharded_param)
            post_backward(*unused)

        group.post_backward = noting


def _param_groups(modules: "Iterable[FSDPModule]") -> list[Any]:
    """FSDP's parameter groups; one or several a module, by release."""
    states: list[Any] = [module._get_fsdp_state() for module in modules]  # pyright: ignore[reportPrivateUsage]
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for found in groups for group in found if group is not None]


def shard_groups(modules: "Iterable[FSDPModule]") -> "list[ProcessGroup]":
    """The groups in which FSDP2 gathers and reduce-scatters, each once, in the order of the modules, the same on all ranks."""
    groups: dict[str, ProcessGroup] = {}
    for found in _param_groups(modules):
        # a number as ``reshard`` gathers over a mesh of its own in backward
        for info in filter(None, (found.mesh_info, found.post_forward_mesh_info)):
            own = getattr(info, "reduce_scatter_process_group", None)  # since torch 2.15
            groups |= {group.group_name: group for group in (info.shard_process_group, own) if group is not None}
    return list(groups.values())


def share_streams(models: Iterable[nn.Module]) -> None:
    """Let several FSDP2 models of one process, such as the stages of a pipeline, communicate on the same streams.

    CUDA's allocator keeps free memory by stream, so what the streams of one stage freed serves no other stage. torch has
    ``share_comm_ctx`` for this, but that also shares the order of forwards, by which a backward finds what to gather next:
    where the backwards of two stages alternate, the first one's end clears the other's (IndexError on torch 2.15). Here
    only the streams are shared. Call it after `WrapPlan.apply` and before the first forward.
    """
    shared: dict[str, Any] = {}
    for root in (root for model in models for root in fsdp_roots(model)):
        context: Any = root._get_fsdp_state()._comm_ctx  # pyright: ignore[reportPrivateUsage]
        make: Callable[[torch.device], None] = context.lazy_init

        def with_shared(device: torch.device, context: Any = context, make: Callable[..., None] = make) -> None:
            make(device)
            for name in _STREAMS:
                setattr(context, name, shared.setdefault(name, getattr(context, name)))

        context.lazy_init = with_shared


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class ``module`` had before FSDP2 swapped it."""
    for cls in type(module).__mro__:
        if issubclass(cls, nn.Module) and not is_fsdp_class(cls):
            return cls
    raise AssertionError(f"{type(module)} has no nn.Module in its bases")


def has_method(method: str) -> bool:
    """Whether this torch's FSDPModule has ``method``."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, method)


def check_has(method: str, *, since: str, why: str) -> None:
    """Refuse, before any collective, what needs an FSDPModule method that not every supported torch has.

    Raises:
        ValueError: This torch lacks it; names the version that has it.
    """
    if not has_method(method):
        raise ValueError(
            f"{why} needs torch {since} or newer, which added {method}; this is torch {torch.__version__}."
        )


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which new tensors have shape, dtype and device but no memory, and operators no kernels."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # half a second, and only an estimate needs it

    return FakeTensorMode(allow_non_fake_inputs=True)


def surround(module: nn.Module, around: Callable[..., Any]) -> None:
    """Let ``around(call, *args, **kwargs)`` make every call of ``module``, outside what is compiled of it and its hooks."""
    module._compiled_call_impl = functools.partial(around, module._compiled_call_impl or module._call_impl)


def split_factor(placement: Any) -> int:
    """How often a placement's dimension was already split by axes to its right (FSDP over tensor parallelism), else 1.

    torch names such placements ``_StridedShard`` and keeps the class private; the attribute is what tells it apart.
    """
    return int(getattr(placement, "split_factor", 1))
