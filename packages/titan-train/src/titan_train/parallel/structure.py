"""What parallelism must know about a model's structure: its repeated blocks, and its tied parameters."""

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: children of the containers that hold several modules of one class, outermost first."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for container in model.modules():
        blocks = list(container.children())
        repeats = isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if repeats and blocks and len({type(b) for b in blocks}) == 1 and id(container) not in inside:
            found += blocks
            inside |= {id(m) for block in blocks for m in block.modules()}
    return found


def tied_to_first(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, to the first."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            names[name] = first[id(parameter)]
    return names
