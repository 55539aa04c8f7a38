"""Keep experts equally busy without a loss that fights the language model's, and report how busy they are.

Each expert has a bias that only the choice of experts sees. Once in an optimizer step it moves by ``bias_rate`` up where
the expert got fewer tokens than the mean and down where it got more (arXiv:2408.15664). The load is counted over all
micro-batches and all ranks that saw different tokens, so the bias is the same for every layout and on every rank.

Shapes: E experts, L layers.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from titan_fsdp import clean_fqn, unwrap
from torch import nn

from titan_train.models.common.moe.layer import MoE


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """How one layer's tokens were routed in one optimizer step, over all ranks."""

    load: tuple[int, ...]
    """Tokens of each expert."""
    balance_loss: float
    """Mean over rows, without its coefficient; 1 is perfect balance, E / K all tokens to the same K experts."""
    z_loss: float
    """Mean over rows, without its coefficient."""

    @property
    def max_over_mean(self) -> float:
        """Load of the busiest expert over the mean: the slow-down of expert parallelism at one expert a rank."""
        return max(self.load) * len(self.load) / max(1, sum(self.load))

    @property
    def min_over_mean(self) -> float:
        """Load of the idlest expert over the mean."""
        return min(self.load) * len(self.load) / max(1, sum(self.load))

    @property
    def entropy(self) -> float:
        """Entropy of the load over that of an equal one: 1 is perfect balance."""
        total = max(1, sum(self.load))
        shares = [n / total for n in self.load if n > 0]
        return -sum(p * math.log(p) for p in shares) / math.log(len(self.load)) if len(self.load) > 1 else 1.0


def moe_layers(model: nn.Module) -> Iterator[tuple[str, MoE]]:
    """Every mixture-of-experts layer, by its name without wrappers."""
    for fqn, module in unwrap(model).named_modules():
        if isinstance(module, MoE):
            yield clean_fqn(fqn), module


def set_aux_scale(model: nn.Module, scale: float) -> None:
    """Set what the gradient of the auxiliary losses is multiplied by in training mode; 0 turns it off.

    Without this call a model learns from its language-model loss alone.

    Args:
        model: The model or pipeline stage.
        scale: One over the rows of the whole optimizer step, over all ranks and micro-batches, where gradients are
            summed over ranks; times what else the loss is multiplied by, such as a gradient scaler's scale.
    """
    for _, layer in moe_layers(model):
        layer.aux_scale = scale


def set_sequence_group(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Name the ranks that hold parts of the same rows (cp, tp under sequence parallelism, or both); None: whole rows."""
    if group is not None and group.size() == 1:
        group = None
    for _, layer in moe_layers(model):
        layer.sequence_group = group


@torch.no_grad()
def forget_routing(model: nn.Module) -> None:
    """Reset the counts of the load, for a step that is executed again."""
    for _, layer in moe_layers(model):
        layer.load.zero_()
        layer.losses.zero_()


@torch.no_grad()
def update_expert_bias(
    model: nn.Module, group: dist.ProcessGroup | None, *, skip: bool = False
) -> dict[str, LayerRouting]:
    """End an optimizer step: sum the load over ranks, move the biases, reset the counts.

    Call it once in a step, after the last backward; every rank of ``group`` alike. One all-reduce and one host sync for
    all layers.

    Args:
        model: The model or pipeline stage.
        group: The ranks that saw different tokens (dp_replicate x dp_shard x cp, and tp under sequence parallelism);
            None for one rank.
        skip: The step is dropped: biases stay.

    Returns:
        How each layer's tokens were routed, by its name; empty for a model without experts.
    """
    total = summed_routing([model], group)
    return {} if total is None else end_routing([model], total, total.tolist(), skip=skip)


@torch.no_grad()
def summed_routing(models: Sequence[nn.Module], group: dist.ProcessGroup | None) -> torch.Tensor | None:
    """The step's load and losses of all layers, summed over the ranks of ``group``: for `end_routing`. Not on the host yet.

    Returns:
        ``[L * (E + 3)]`` float64, of layers with E experts each; None for models without experts.
    """
    layers = [layer for model in models for _, layer in moe_layers(model)]
    if not layers:
        return None
    # float64 holds counts up to 2**53 exactly, so one collective serves counts and losses
    total = torch.cat([part.double() for layer in layers for part in (layer.load, layer.losses)])
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


@torch.no_grad()
def end_routing(
    models: Sequence[nn.Module],
    total: torch.Tensor,
    host: Sequence[float],
    *,
    skip: bool = False,
    frozen: Iterable[nn.Parameter] = (),
) -> dict[str, LayerRouting]:
    """`update_expert_bias` without its collective and host sync. The biases of a router that is not trained stay.

    Args:
        models: As `summed_routing` was given.
        total: What it gave.
        host: Its values.
        skip: The step is dropped: biases stay.
        frozen: Parameters that are not trained in this step, beside those that no gradient is asked of.
    """
    held = {id(parameter) for parameter in frozen}
    found: dict[str, LayerRouting] = {}
    start = 0
    for fqn, layer in (named for model in models for named in moe_layers(model)):
        experts, gate = layer.args.num_experts, layer.router.gate.weight
        if layer.expert_bias is not None and not skip and gate.requires_grad and id(gate) not in held:
            load = total[start : start + experts]
            layer.expert_bias += layer.args.bias_rate * torch.sign(load.mean() - load).to(layer.expert_bias)
            # a common shift changes no choice: without this the biases would drift
            layer.expert_bias -= layer.expert_bias.mean()
        balance, z, rows = host[start + experts : start + experts + 3]
        load_of = tuple(round(n) for n in host[start : start + experts])
        found[fqn] = LayerRouting(load_of, balance / max(rows, 1e-9), z / max(rows, 1e-9))
        layer.load.zero_()
        layer.losses.zero_()
        start += experts + 3
    return found


def share_routing(
    routing: dict[str, LayerRouting], layers: Mapping[str, int], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, LayerRouting]:
    """Share every stage's routing with all pipeline stages; every rank of ``group`` calls it once a step.

    Args:
        routing: Of this rank's layers.
        layers: Experts of each mixture-of-experts layer of the whole model, by the layer's name.
        group: The ranks of the pipeline; None for a model that is not cut.
        device: Of the group's collectives.
    """
    if group is None or not layers:
        return routing
    figures = torch.zeros(len(layers), max(layers.values()) + 2, dtype=torch.float64)
    for row, name in zip(figures, layers, strict=True):
        if name in routing:
            mine = routing[name]
            row[: len(mine.load) + 2] = row.new_tensor([mine.balance_loss, mine.z_loss, *mine.load])
    figures = figures.to(device)
    dist.all_reduce(figures, group=group)
    return {
        name: LayerRouting(tuple(round(n) for n in load[:experts]), balance, z)
        for (name, experts), (balance, z, *load) in zip(layers.items(), figures.tolist(), strict=True)
    }


def routing_statistics(routing: dict[str, LayerRouting]) -> dict[str, float]:
    """The figures of a step for the log, over layers; empty for a model without experts.

    Returns:
        ``load_max`` and ``load_min``, of the busiest and the idlest expert anywhere over the mean of its layer;
        ``load_max_mean`` and ``load_entropy`` (1 is perfect balance), means over layers; ``idle_experts``, how many got
        no token; ``balance_loss`` and ``z_loss``, means over layers without their coefficients.
    """
    if not routing:
        return {}
    layers = list(routing.values())
    return {
        "load_max": max(r.max_over_mean for r in layers),
        "load_max_mean": sum(r.max_over_mean for r in layers) / len(layers),
        "load_min": min(r.min_over_mean for r in layers),
        "load_entropy": sum(r.entropy for r in layers) / len(layers),
        "idle_experts": float(sum(n == 0 for r in layers for n in r.load)),
        "balance_loss": sum(r.balance_loss for r in layers) / len(layers),
        "z_loss": sum(r.z_loss for r in layers) / len(layers),
    }
