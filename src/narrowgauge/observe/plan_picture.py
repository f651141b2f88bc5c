"""A picture of the largest models that fit: SVG of its own, in light and dark, without a library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from narrowgauge.observe.picture import legend, opening

WIDTH, LEFT, RIGHT, TOP = 1000, 130, 90, 132
LANE, GAP, DOT = 22, 14, 6
BILLION = 1e9


def picture(found: Mapping[str, Mapping[int, float]], title: str, note: str) -> str:
    """SVG of {recipe: {GPUs: parameters of the largest model that fits}}: a row for each number of GPUs, a log axis.

    0 parameters: nothing fits, and the row says so. title, note: above the rows.
    """
    recipes = list(found)
    gpus = sorted({count for sizes in found.values() for count in sizes})
    positive = [size for sizes in found.values() for size in sizes.values() if size > 0]
    low, high = _decades(positive)
    row = LANE * len(recipes) + GAP
    height = TOP + row * len(gpus) + 58
    lines = [*opening(title, note, WIDTH, height, len(recipes)), *legend(recipes, LEFT)]
    for at in range(1, len(gpus), 2):
        lines.append(f'<rect class="band" x="0" y="{TOP + at * row}" width="{WIDTH}" height="{row}"/>')
    lines += _axis(low, high, TOP + row * len(gpus))
    for at, count in enumerate(gpus):
        sizes = [found[recipe].get(count) for recipe in recipes]
        lines += _row(count, sizes, TOP + at * row, low, high)
    return "\n".join([*lines, "</svg>"]) + "\n"


def billions(size: float) -> str:
    """Parameters in words: 125M, 6.7B, 175B, 2.5T."""
    for unit, name in ((1e12, "T"), (BILLION, "B"), (1e6, "M")):
        if size >= unit:
            value = size / unit
            return f"{value:.1f}".removesuffix(".0") + name if value < 10 else f"{value:.0f}{name}"
    return f"{size:.0f}"


def _decades(sizes: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around all sizes."""
    if not sizes:
        return 9, 12
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)))
    return low, max(high, low + 1)


def _x(size: float, low: int, high: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * (math.log10(size) - low) / (high - low)


def _axis(low: int, high: int, bottom: int) -> list[str]:
    lines = [f'<text class="note" x="{DOT}" y="{TOP - 10}">GPUs</text>']
    for decade in range(low, high + 1):
        x = _x(10.0**decade, low, high)
        lines.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom}"/>')
        lines.append(
            f'<text class="note" x="{x:.1f}" y="{bottom + 22}" text-anchor="middle">{billions(10.0**decade)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    text = "parameters of the largest model that fits (logarithmic)"
    lines.append(f'<text class="note" x="{middle}" y="{bottom + 46}" text-anchor="middle">{text}</text>')
    return lines


def _row(count: int, sizes: Sequence[float | None], top: int, low: int, high: int) -> list[str]:
    middle = top + (LANE * len(sizes) + GAP) / 2
    lines = [f'<text x="{LEFT - 40}" y="{middle + 5}" text-anchor="end">{count:,}</text>']
    for at, size in enumerate(sizes):
        y = top + GAP / 2 + LANE * (at + 0.5)
        if size is None:
            continue
        if size <= 0:
            lines.append(f'<text class="note" x="{LEFT}" y="{y + 5}">nothing fits</text>')
            continue
        x = _x(size, low, high)
        lines.append(
            f'<line class="c{at}" x1="{LEFT}" y1="{y}" x2="{x:.1f}" y2="{y}" stroke-width="2" opacity="0.45"/>'
        )
        lines.append(f'<circle class="c{at}" cx="{x:.1f}" cy="{y}" r="{DOT}"/>')
        lines.append(f'<text x="{x + 13:.1f}" y="{y + 5}">{billions(size)}</text>')
    return lines
