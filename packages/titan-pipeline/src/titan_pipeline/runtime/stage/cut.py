"""Make stage modules out of a model that is a list of layers."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from titan_pipeline.analysis.balance import balanced_cut


def split_layers(
    layers: nn.Sequential | Sequence[nn.Module],
    num_stages: int,
    *,
    costs: Sequence[float] | None = None,
    starts: Sequence[str] | None = None,
) -> list[nn.Sequential]:
    """Stages of consecutive layers: balanced by cost, or cut where you say.

    Any model that is a chain of layers: a CNN as well as a Transformer's embedding, blocks and head.

    Args:
        layers: The chain. Children of an ``nn.Sequential`` keep their names, so state dicts keep their keys.
        num_stages: How many stages.
        costs: Cost of each layer; by default its number of parameters (at least 1).
        starts: Instead of balancing: the name of the first layer of each stage but the first.

    Raises:
        ValueError: If there are fewer layers than stages, or ``starts`` names an unknown layer or is out of order.
    """
    named = list(layers.named_children()) if isinstance(layers, nn.Sequential) else [
        (str(i), layer) for i, layer in enumerate(layers)
    ]  # fmt: skip
    if starts is not None:
        cuts = _named_cuts([name for name, _ in named], starts, num_stages)
    else:
        if costs is None:
            costs = [max(1, sum(p.numel() for p in layer.parameters())) for _, layer in named]
        if len(costs) != len(named):
            raise ValueError(f"{len(costs)} costs for {len(named)} layers. Give one per layer.")
        cuts = balanced_cut(costs, num_stages)
    stages: list[nn.Sequential] = []
    for cut in cuts:
        stage = nn.Sequential()
        for i in cut:
            stage.add_module(*named[i])
        stages.append(stage)
    return stages


def _named_cuts(names: list[str], starts: Sequence[str], num_stages: int) -> list[range]:
    if len(starts) != num_stages - 1:
        raise ValueError(f"{len(starts)} starts make {len(starts) + 1} stages, not num_stages={num_stages}.")
    unknown = [s for s in starts if s not in names]
    if unknown:
        raise ValueError(f"starts {unknown} are not layers. The layers are {names}.")
    bounds = [0, *(names.index(s) for s in starts), len(names)]
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(f"starts={list(starts)} are not in the order of the layers {names}, or leave a stage empty.")
    return [range(a, b) for a, b in pairwise(bounds)]
