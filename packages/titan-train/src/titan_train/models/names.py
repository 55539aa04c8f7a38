"""Names of parameters as the model's author wrote them, whatever has been wrapped around the model since."""

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# torch.compile and activation checkpointing put these into the names of parameters
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, torch.compile and activation-checkpoint wrappers.

    FSDP2 adds no wrapper: it changes the class of the module in place.
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
            continue
        inner = next((model._modules[name] for name in _WRAPPERS if model._modules.get(name) is not None), None)
        if inner is None:
            return model
        model = inner


def clean_fqn(fqn: str) -> str:
    """A parameter's or module's fully qualified name without the parts that wrappers put in.

    The leading ``module.`` of DistributedDataParallel is not removed, as it may be the author's own: `unwrap` first.
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter once, under its clean name; tied parameters under the first."""
    for fqn, parameter in unwrap(model).named_parameters():
        yield clean_fqn(fqn), parameter
