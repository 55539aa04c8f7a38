"""Draw `docs/concepts/float8_outliers.svg`: what a large channel costs the others, by recipe, as titan-fp8 computes it.

python docs/figures/float8_outliers.py
"""

import math
from pathlib import Path

import titan_fp8
import torch

RECIPES = {"blockwise": "#1f6feb", "mxfp8": "#8250df", "tensorwise": "#cf222e", "rowwise": "#1a7f37"}
OUTLIERS = [10**exponent for exponent in range(7)]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 340, 64, 120, 24, 52
HIGHEST = 40.0  # decibels at the top of the picture


def signal_to_noise(recipe: str, outlier: float) -> float:
    """Decibels of a product of 512 channels, one of which is ``outlier`` in every row and has no weight.

    That channel adds nothing to the product, so all noise is what its size did to the codes of the other 511.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 512, generator=generator).bfloat16()
    w = (torch.randn(256, 512, generator=generator) * 512**-0.5).bfloat16()
    x[:, 300], w[:, 300] = outlier, 0
    want = x.double() @ w.double().t()
    with torch.no_grad():
        got = titan_fp8.linear(x, w, recipe=recipe).double()
    return 10 * math.log10(want.square().mean() / (got - want).square().mean())


def draw(curves: dict[str, list[float]]) -> str:
    """The picture, with its own axes and labels, on any background."""

    def place(outlier: float, decibels: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * math.log10(outlier) / math.log10(OUTLIERS[-1])
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - decibels / HIGHEST)

    size = f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" font-size="13"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {size} fill="#57606a">']
    for decibels in range(0, int(HIGHEST) + 1, 10):
        _, y = place(1, decibels)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#8c959f" stroke-opacity=".35"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{decibels}</text>')
    for exponent, outlier in enumerate(OUTLIERS):
        x, y = place(outlier, 0)
        parts.append(
            f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">10<tspan dy="-5" font-size="9">{exponent}</tspan></text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
        "size of one channel; the others are normal</text>"
    )
    parts.append(
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        "signal to noise, dB</text>"
    )
    labels = sorted(((values[-1], recipe) for recipe, values in curves.items()))
    last = math.inf
    for value, recipe in labels:
        points = [place(outlier, decibels) for outlier, decibels in zip(OUTLIERS, curves[recipe], strict=True)]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{line}" fill="none" stroke="{RECIPES[recipe]}" stroke-width="2"/>')
        last = min(place(1, value)[1] + 4, last - 16)  # labels of close lines one above the other
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{last:.1f}" fill="{RECIPES[recipe]}">{recipe}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Compute, draw, write."""
    curves = {recipe: [max(0.0, signal_to_noise(recipe, size)) for size in OUTLIERS] for recipe in RECIPES}
    for recipe, values in curves.items():
        print(f"{recipe:12}", *(f"{value:6.1f}" for value in values))
    out = Path(__file__).parents[1] / "concepts/float8_outliers.svg"
    out.write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
