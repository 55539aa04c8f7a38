"""What a conversion did: every linear layer, converted or not, and why."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ConvertedLayer:
    """A layer that computes in float8 from now on."""

    fqn: str
    """Its name in the model; empty for a model that is one layer."""
    in_features: int
    """K."""
    out_features: int
    """N."""
    predicted_speedup: float
    """Forward and backward against bfloat16, from `titan_fp8.predict_speedup`."""


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The result of `titan_fp8.convert_to_float8`."""

    recipe: str
    """Name of the recipe."""
    converted: tuple[ConvertedLayer, ...]
    """Layers converted, in the model's order."""
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    """Name of each linear layer left alone → why."""
    all_gather: str = ""
    """How FSDP2 will gather the converted weights, and why."""

    def explain(self) -> str:
        """The whole report as text, one layer per line."""
        total = len(self.converted) + len(self.skipped)
        lines = [f"{self.recipe}: {len(self.converted)} of {total} linear layers converted to float8"]
        lines += [
            f"  + {layer.fqn or '(the model itself)'}  [{layer.out_features}, {layer.in_features}]  "
            f"predicted {layer.predicted_speedup:.2f}x"
            for layer in self.converted
        ]
        lines += [f"  - {fqn or '(the model itself)'}  {reason}" for fqn, reason in self.skipped.items()]
        if self.all_gather:
            lines.append(f"FSDP2 all-gather: {self.all_gather}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()
