"""What a conversion did: every linear layer, converted or not, and why."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_ITSELF = "(the model itself)"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a name


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
        return self._text(self._rows())

    def summary(self) -> str:
        """The report with one line for layers that differ only in the numbers of their names, such as ``layers.*.wq``."""
        kinds = Counter((sign, _NUMBER.sub("*", fqn), rest) for sign, fqn, rest in self._rows())
        return self._text((sign, f"{count} x {fqn}", rest) for (sign, fqn, rest), count in kinds.items())

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """Converted or not (``+`` or ``-``), name, and what there is to say."""
        for layer in self.converted:
            shape = f"[{layer.out_features}, {layer.in_features}]"
            yield "+", layer.fqn or _ITSELF, f"{shape}  predicted {layer.predicted_speedup:.2f}x"
        for fqn, reason in self.skipped.items():
            yield "-", fqn or _ITSELF, reason

    def _text(self, rows: Iterable[tuple[str, str, str]]) -> str:
        total = len(self.converted) + len(self.skipped)
        lines = [f"{self.recipe}: {len(self.converted)} of {total} linear layers converted to float8"]
        lines += [f"  {sign} {name}  {rest}" for sign, name, rest in rows]
        if self.all_gather:
            lines.append(f"FSDP2 all-gather: {self.all_gather}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()
