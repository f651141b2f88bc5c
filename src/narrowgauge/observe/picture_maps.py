"""Maps and stacked bars as SVG, in the look of `picture`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from narrowgauge.observe.picture import RAMP, RIGHT, WIDTH, legend, opening

ROW, NAME, TOP = 20, 250, 120
LONGEST_NAME = 36
MOST_NUMBERED = 60  # rows up to which the cells show their values
BAR = 34


def heat_map(
    title: str,
    note: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: Mapping[tuple[int, int], tuple[int, str]],
    edges: Sequence[str],
) -> str:
    """SVG of {(row, column): (colour 0 to 9 from the worst, text)}. edges: what lies between the colours, in words."""
    row = ROW if len(rows) <= MOST_NUMBERED else 8
    height = TOP + row * len(rows) + 66
    width = (WIDTH - NAME - RIGHT) / max(1, len(columns))
    lines = opening(title, note, WIDTH, height, 1, ramp=True)
    for at, name in enumerate(columns):
        lines.append(f'<text class="note" x="{NAME + (at + 0.5) * width:.1f}" y="{TOP - 10}" text-anchor="middle">'
                     f"{escape(_short(name))}</text>")  # fmt: skip
    every = 1 if row == ROW else 2
    for at, name in enumerate(rows):
        if at % every == 0:
            lines.append(f'<text class="small" x="{NAME - 10}" y="{TOP + (at + 0.5) * row + 4:.1f}" text-anchor="end">'
                         f"{escape(_short(name))}</text>")  # fmt: skip
    for (at, column), (level, text) in cells.items():
        x, y = NAME + column * width, TOP + at * row
        lines.append(f'<rect class="l{level}" x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{width - 1:.1f}" '
                     f'height="{row - 1}"/>')  # fmt: skip
        if row == ROW:
            lines.append(f'<text class="small t{level}" x="{x + width / 2:.1f}" y="{y + row / 2 + 4:.1f}" '
                         f'text-anchor="middle">{escape(text)}</text>')  # fmt: skip
    lines += _ramp(edges, height - 44)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _short(name: str) -> str:
    """A name's end is what tells it apart."""
    return name if len(name) <= LONGEST_NAME else "..." + name[3 - LONGEST_NAME :]


def _ramp(edges: Sequence[str], top: float) -> list[str]:
    size = (WIDTH - NAME - RIGHT) / len(RAMP)
    lines = [f'<text class="note" x="{NAME - 10}" y="{top + 12}" text-anchor="end">worse to better</text>']
    for level in range(len(RAMP)):
        lines.append(f'<rect class="l{level}" x="{NAME + level * size:.1f}" y="{top}" width="{size:.1f}" height="14"/>')
    for at, edge in enumerate(edges):
        x = NAME + (at + 1) * size
        lines.append(f'<text class="note" x="{x:.1f}" y="{top + 31}" text-anchor="middle">{escape(edge)}</text>')
    return lines


def stacked(
    title: str, note: str, bars: Sequence[tuple[str, Mapping[str, float]]], say: Mapping[str, str] | None = None
) -> str:
    """SVG of a horizontal bar for each (name, {part: size}), all to one scale. say: text at the end, by name."""
    parts = list(dict.fromkeys(part for _, sizes in bars for part in sizes))
    most = max((sum(sizes.values()) for _, sizes in bars), default=0) or 1
    height = TOP + (BAR + 26) * len(bars) + 10
    room = WIDTH - RIGHT - 6
    lines = [*opening(title, note, WIDTH, height, max(1, len(parts))), *legend(parts, 12)]
    for at, (name, sizes) in enumerate(bars):
        y, x = TOP + at * (BAR + 26), 6.0
        lines.append(f'<text x="6" y="{y + 4}">{escape(name)} {escape((say or {}).get(name, ""))}</text>')
        for part, size in sizes.items():
            width = room * size / most
            lines.append(f'<rect class="c{parts.index(part)}" stroke-width="0" x="{x:.1f}" y="{y + 12}" '
                         f'width="{width:.1f}" height="{BAR}"><title>{escape(part)}</title></rect>')  # fmt: skip
            x += width
    return "\n".join([*lines, "</svg>"]) + "\n"
