"""The page and the picture of a card."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from titan_train.card.proofs import Proof
from titan_train.card.subject import Small, Subject

_COLOURS = {"equal": "#2e7d4f", "differs": "#b3261e", "refused": "#8a8d91", "fails": "#b3261e"}
_TILE, _GAP, _LEFT, _ACROSS = (168, 46), 8, 120, 6


@dataclass(frozen=True, slots=True)
class Card:
    """Everything that a card says."""

    subject: Subject
    small: Small
    transformers: Sequence[Proof]
    layouts: Sequence[Proof]
    prediction: tuple[str, str]
    """The command, and what it printed."""
    made: str
    """Date, machine and versions."""
    command: str
    """What made the card."""
    config: str
    """The configuration of the runs."""

    @property
    def proofs(self) -> list[Proof]:
        """All rows."""
        return [*self.transformers, *self.layouts]


def verdict(proofs: Sequence[Proof]) -> str:
    """How many rows ended how."""
    counts = {word: sum(proof.result == word for proof in proofs) for word in _COLOURS}
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def page(card: Card, picture: str) -> str:
    """Markdown.

    Args:
        card: What was found.
        picture: File name of `draw`'s picture beside the page.
    """
    subject, small = card.subject, card.small
    return f"""# {subject.name}: {verdict(card.proofs)}

What was proven for the family `{subject.kind}`, on a small model of its kind: {small.layers} layers,
{small.parameters:,} parameters, random weights that transformers wrote.

Made by `{card.command}`: {card.made}.

![{verdict(card.proofs)}]({picture})

## Beside transformers, in one process

{_table(card.transformers, "difference")}

Logits differ relative to their spread, a gradient relative to its largest entry. Files and text are of a run of six steps.

## Under every layout

Losses of three steps against those of one process, float32 on the CPU; *resume* goes on from that process's third step.

{_table(card.layouts, "largest difference")}

```text
{_commands(card.layouts)}
```

## Predicted for the whole model

```text
$ {card.prediction[0]}
{card.prediction[1]}
```

## The configuration

```toml
{card.config.strip()}
```
"""


def _commands(proofs: Sequence[Proof]) -> str:
    return "\n".join(f"$ {proof.command}" for proof in proofs if proof.command)


def _table(proofs: Sequence[Proof], figure: str) -> str:
    rows = [
        f"| {proof.name} | {proof.result} | {proof.figure.replace('|', chr(92) + '|')} | {proof.seconds:.0f} |"
        for proof in proofs
    ]
    return "\n".join([f"| | result | {figure} | seconds |", "| --- | --- | --- | --- |", *rows])


def draw(card: Card) -> str:
    """An SVG: a tile a row, green where it is equal, grey where it is refused, red where it differs."""
    width = _LEFT + _ACROSS * (_TILE[0] + _GAP)
    parts: list[str] = []
    top = 0
    for title, proofs in (("transformers", card.transformers), ("layouts", card.layouts)):
        parts.append(f'<text x="0" y="{top + 28}" class="title">{title}</text>')
        for number, proof in enumerate(proofs):
            x = _LEFT + number % _ACROSS * (_TILE[0] + _GAP)
            y = top + number // _ACROSS * (_TILE[1] + _GAP)
            shown = proof.figure if proof.result in ("equal", "differs") and len(proof.figure) < 24 else proof.result
            parts.append(
                f"<g><title>{escape(f'{proof.name}: {proof.result}, {proof.figure}')}</title>"
                f'<rect x="{x}" y="{y}" width="{_TILE[0]}" height="{_TILE[1]}" rx="5" fill="{_COLOURS[proof.result]}"/>'
                f'<text x="{x + 10}" y="{y + 19}" class="name">{escape(proof.name)}</text>'
                f'<text x="{x + 10}" y="{y + 37}">{escape(shown)}</text></g>'
            )
        top += -(-len(proofs) // _ACROSS) * (_TILE[1] + _GAP) + _GAP
    style = "text{font:12px system-ui,sans-serif;fill:#fff}.name{font-weight:600}.title{fill:#6b7075;font-size:13px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" role="img">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )
