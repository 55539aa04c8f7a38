"""The coordinate check: does every activation move as far in a few steps, whatever the width?

Models of the same family that differ in width alone are trained for some steps on one batch, and the root mean square of what
each activation has changed since the start is compared (Tensor Programs V, arXiv:2203.03466, appendix D.1). Under muP it does not
depend on the width; with the usual parametrization it grows, and the best learning rate falls. The slope of its logarithm over
that of the width is the figure: 0 is flat, 0.5 doubles the change from one width to its fourfold.

Heads are 16 channels wide, and there are at most four layers and 256 tokens, so that it takes seconds on a CPU.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_train.config import Config, OptimizerConfig
from titan_train.models import init_for
from titan_train.models.arguments import model_args
from titan_train.models.parametrization import parametrize
from titan_train.models.registry import find_model
from titan_train.optim import build_optimizer

WIDTHS = (64, 128, 256, 512)
FLAT = 0.2
"""The largest slope that is called flat. Chance of the draws gives up to 0.1, the usual parametrization 0.6 and more."""
_STEPS, _SEEDS, _ROWS, _TOKENS, _VOCABULARY, _HEAD = 4, 2, 2, 8, 256, 16  # more tokens than the width blur the head


@dataclass(frozen=True, slots=True)
class Coordinates:
    """What the widths of one family showed."""

    widths: tuple[int, ...]
    changes: dict[str, list[float]]
    """By activation: root mean square of its change, for each width."""

    @property
    def slopes(self) -> dict[str, float]:
        """By activation: the exponent of the width by which its change grows."""
        return {name: _slope(self.widths, values) for name, values in self.changes.items()}

    @property
    def flat(self) -> bool:
        """No change grows or shrinks with the width."""
        return all(abs(slope) <= FLAT for slope in self.slopes.values())


def check_coordinates(config: Config, widths: tuple[int, ...] = WIDTHS) -> Coordinates:
    """Train narrow models of the configured family and measure how far their activations move.

    Args:
        config: Its model's family, parametrization and optimizer are used.
        widths: Of the residual stream, multiples of 32.

    Raises:
        ValueError: The model is not a shipped decoder of text.
    """
    if ":" in config.model.name or not hasattr(find_model(config.model.name)[1], "num_heads"):
        raise ValueError(
            f"--coordinates trains a decoder at several widths, and how model.name={config.model.name!r} would be widened is not "
            "known. Name a shipped decoder of text, such as llama3_debug."
        )
    changes: dict[str, list[float]] = {}
    for width in widths:
        found = [_changes(config, width, widths[0], seed) for seed in range(_SEEDS)]
        for name in found[0]:
            changes.setdefault(name, []).append(sum(one[name] for one in found) / _SEEDS)
    return Coordinates(widths, changes)


def coordinates_text(found: Coordinates, parametrization: str) -> str:
    """A table with a verdict."""
    lines = [f"{'change of':<12}" + "".join(f"{width:>11}" for width in found.widths) + f"{'slope':>9}"]
    for name, values in found.changes.items():
        lines.append(f"{name:<12}" + "".join(f"{v:>11.4g}" for v in values) + f"{found.slopes[name]:>9.2f}")
    worst = max(found.slopes, key=lambda name: abs(found.slopes[name]))
    if found.flat:
        verdict = (
            f"flat: no change depends on the width (slopes within {FLAT}); settings of a narrow model serve a wide one"
        )
    else:
        advice = "; model.parametrization='mup' scales them" if parametrization == "standard" else ""
        verdict = f"not flat: {worst} changes by the power {found.slopes[worst]:.2f} of the width{advice}"
    return "\n".join([*lines, "", verdict])


def coordinates_svg(found: Coordinates) -> str:
    """The changes over the widths on logarithmic axes."""
    wide, high, left, top = 640, 360, 70, 40
    every = [math.log(v) for values in found.changes.values() for v in values]
    low, most = min(every) - 0.2, max(every) + 0.2
    span = math.log(found.widths[-1] / found.widths[0])

    def place(width: int, value: float) -> str:
        x = left + (wide - left - 130) * math.log(width / found.widths[0]) / span
        return f"{x:.1f},{top + (high - top - 50) * (most - math.log(value)) / (most - low):.1f}"

    parts = [
        f'<text x="{left}" y="22">RMS of the change of activations over width: {"flat" if found.flat else "not flat"}</text>'
    ]
    for number, (name, values) in enumerate(found.changes.items()):
        colour = f"hsl({360 * number // len(found.changes)} 60% 40%)"
        points = [place(w, v) for w, v in zip(found.widths, values, strict=True)]
        x, y = points[-1].split(",")
        parts.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{float(x) + 6:.1f}" y="{y}" fill="{colour}">{name} {found.slopes[name]:+.2f}</text>')
    for width in found.widths:
        x = place(width, math.exp(low)).split(",")[0]
        parts.append(f'<text x="{x}" y="{high - 20}" text-anchor="middle">{width}</text>')
    style = 'font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" {style}>' + "".join(parts) + "</svg>\n"


def _changes(config: Config, width: int, base: int, seed: int) -> dict[str, float]:
    """The RMS change of each activation after some steps."""
    family, shipped = find_model(config.model.name)
    args = _narrow(shipped, width)
    model = family.build(args)
    assert isinstance(model, nn.Module)
    if config.model.parametrization == "mup":
        parametrize(model, base_dim=base, base_layers=args.num_layers if config.model.base_layers else 0)
    fill = init_for(model)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            fill(name, parameter, torch.Generator().manual_seed(1000 * seed + number))
    tokens = torch.randint(_VOCABULARY, (_ROWS, _TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    optimizer = build_optimizer(model, _settings(config, args, names))
    before = _activations(model, tokens[:, :-1])
    for _ in range(_STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    after = _activations(model, tokens[:, :-1])
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


def _settings(config: Config, args: Any, names: Sequence[str]) -> OptimizerConfig:
    """The optimizer's settings, which are those of the configured model, as a narrow one with these arguments has them: its own
    numbers of heads, and no pattern for layers that it lacks.
    """
    whole = model_args(config.model, vocab_size=None)
    counts = ("delta_key_heads", "delta_heads", "num_kv_heads", "num_heads")  # of equal ones the last counts
    heads = {getattr(whole, name): getattr(args, name) for name in counts if hasattr(whole, name)}

    def kept(table: Mapping[str, Any]) -> dict[str, Any]:
        return {pattern: value for pattern, value in table.items() if any(re.search(pattern, name) for name in names)}

    optimizer, muon = config.optimizer, config.optimizer.muon
    muon = dataclasses.replace(
        muon,
        groups=kept(muon.groups),
        splits=kept(muon.splits),
        heads={pattern: heads.get(count, count) for pattern, count in kept(muon.heads).items()},
    )
    tables = {name: kept(getattr(optimizer, name)) for name in ("lr_scales", "weight_decays", "frozen_steps")}
    return dataclasses.replace(optimizer, muon=muon, **tables)


@torch.no_grad()
def _activations(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """The output of each block, and the logits."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, output: found.__setitem__(name, output)

    layers = model.get_submodule("layers")
    hooks = [layer.register_forward_hook(keep(f"layer {n}")) for n, layer in layers.named_children()]
    found["logits"] = model(tokens)
    for hook in hooks:
        hook.remove()
    return {**{name: x for name, x in found.items() if name != "logits"}, "logits": found["logits"]}


def _narrow(args: Any, width: int) -> Any:
    """The family's arguments at another width: all widths in proportion, heads of one width."""
    ratio, heads = width / args.dim, width // _HEAD
    wanted: dict[str, Any] = {
        "dim": width,
        "num_heads": heads,
        "vocab_size": _VOCABULARY,
        "num_layers": min(args.num_layers, 4),
        "qk_nope_head_dim": _HEAD,
        "qk_rope_head_dim": _HEAD // 2,
        "v_head_dim": _HEAD,
    }
    fields = {field.name for field in dataclasses.fields(args)}
    if "num_kv_heads" in fields:
        groups = max(1, args.num_heads // args.num_kv_heads)
        wanted["num_kv_heads"] = heads // max(g for g in (1, 2, 4) if g <= groups)
    if getattr(args, "head_dim", 0):
        wanted["head_dim"] = _HEAD
    for name in ("ffn_dim", "expert_ffn_dim", "q_lora_rank", "kv_lora_rank"):
        if value := getattr(args, name, 0):
            wanted[name] = max(8, 8 * round(value * ratio / 8))
    if getattr(args, "num_experts", 0):
        wanted |= {"num_experts": min(args.num_experts, 8), "experts_per_token": min(args.experts_per_token, 2)}
        wanted |= {"num_groups": 1, "top_groups": 1, "num_dense_layers": min(getattr(args, "num_dense_layers", 0), 1)}
    return dataclasses.replace(args, **{name: value for name, value in wanted.items() if name in fields})


def _slope(widths: tuple[int, ...], values: list[float]) -> float:
    """Of the line of least squares through the logarithms."""
    x = [math.log(width) for width in widths]
    y = [math.log(max(value, 1e-30)) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
