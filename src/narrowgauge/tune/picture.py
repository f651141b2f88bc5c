"""A picture of what tuning found: losses against bytes, and the sensitivity of every layer. SVG, in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from narrowgauge.observe.picture import RAMP, extent, number, opening, ticks
from narrowgauge.tune.result import Tuned

WIDTH, LEFT, RIGHT, TOP, PLOT = 1000, 84, 248, 92, 300
KEY, ROW, MOST_CELL = 70, 48, 110  # heights of an entry of the key and of a row of the grid; width of a cell
MILLI = 1e3


def picture(tuned: Tuned, title: str) -> str:
    """SVG: above, what short runs by the front are expected to lose, by bytes a token, and the contenders; below, layer
    by layer what the costliest choice costs, with the choice that was made."""
    grid, height = _grid(tuned, TOP + PLOT + 96)
    note = (
        "line and rings: expected of the short runs, by the sum over the layers; discs: what they lost of held-out text"
    )
    lines = opening(title, note, WIDTH, height, len(tuned.contenders), ramp=True)
    return "\n".join([*lines, *_front(tuned), *grid, "</svg>"]) + "\n"


def _front(tuned: Tuned) -> list[str]:
    """Axes, the line of the front, and for each contender two marks and an entry in the key."""
    reference = next(iter(tuned.contenders.values()))
    marks = [
        (
            each.name, each.bytes_per_token, MILLI * tuned.expected(each.assignment).value,
            MILLI * each.above(reference)[0],
        )
        for each in tuned.contenders.values()
    ]  # fmt: skip
    points = [(point.bytes, MILLI * tuned.expected(tuned.assignment_of(point)).value) for point in tuned.front]
    x0, x1 = extent([*(x for x, _ in points), *(x for _, x, *_ in marks)], is_log=False)
    y0, y1 = extent([*(y for _, y in points), *(y for _, _, *both in marks for y in both)], is_log=False)

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - x0) / (x1 - x0), TOP + PLOT * (y1 - y) / (y1 - y0)

    lines = []
    for tick in ticks(y0, y1):
        _, y = place(x0, tick)
        lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        lines.append(f'<text class="note" x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{number(tick)}</text>')
    for tick in ticks(x0, x1):
        x, _ = place(tick, y0)
        lines.append(f'<text class="note" x="{x:.1f}" y="{TOP + PLOT + 21}" text-anchor="middle">{number(tick)}</text>')
    lines += [
        f'<text class="note" x="{WIDTH - RIGHT}" y="{TOP + PLOT + 44}" text-anchor="end">bytes a token that these '
        "layers keep for backward</text>",
        f'<text class="note" text-anchor="middle" transform="translate(20 {TOP + PLOT / 2:.0f}) rotate(-90)">'
        "loss above all wide, 1/1000 nat</text>",
    ]
    trace = "L".join("{:.1f} {:.1f}".format(*place(x, y)) for x, y in points)
    lines.append(f'<path class="c0" style="fill: none" stroke-width="1.8" d="M{trace}"/>')
    for at, (name, size, expected, measured) in enumerate(marks):
        lines += _contender(at, name, expected, measured)
        for value, style in ((expected, ' style="fill: none" stroke-width="2"'), (measured, "")):
            if math.isfinite(value):
                x, y = place(size, value)
                lines.append(f'<circle class="c{at}" cx="{x:.1f}" cy="{y:.1f}" r="{6 if style else 5}"{style}/>')
    return lines


def _contender(at: int, name: str, expected: float, measured: float) -> list[str]:
    """An entry of the key."""
    x, y = WIDTH - RIGHT + 24, TOP + 14 + KEY * at
    told = [f"expected {_signed(expected)}"] + ([f"measured {_signed(measured)}"] if math.isfinite(measured) else [])
    return [
        f'<circle class="c{at}" cx="{x}" cy="{y}" r="6"/>',
        f'<text x="{x + 14}" y="{y + 5}">{escape(name)}</text>',
        *(f'<text class="note" x="{x + 14}" y="{y + 23 + 18 * n}">{line}</text>' for n, line in enumerate(told)),
    ]


def _signed(value: float) -> str:
    return f"{value:+.1f}" if math.isfinite(value) else "not finite"


def kinds_and_depths(layers: Sequence[str]) -> tuple[list[str], list[str], dict[str, tuple[str, str]]]:
    """(kinds, depths, {layer: its kind and depth}): "blocks.3.mlp.down" is an "mlp.down" at depth "3"."""
    places = {}
    for name in layers:
        parts = name.split(".")
        at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
        places[name] = (name, "") if at is None else (".".join(parts[at + 1 :]) or "layer", parts[at])
    kinds = list(dict.fromkeys(kind for kind, _ in places.values()))
    depths = list(dict.fromkeys(depth for _, depth in places.values()))
    return kinds, depths, places


def costliest(tuned: Tuned) -> str:
    """The choice that costs the layers the most."""
    sums = {
        choice: math.fsum(_finite(tuned.cost(layer, choice).value) for layer in tuned.layers)
        for choice in tuned.choices
    }
    return max(sums, key=sums.__getitem__)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1.0


def _grid(tuned: Tuned, top: int) -> tuple[list[str], int]:
    """(a cell for each layer: kinds down, depths across; the height of the picture)."""
    kinds, depths, places = kinds_and_depths(tuned.layers)
    choice = costliest(tuned)
    left = 24 + max(int(7.8 * len(kind)) for kind in kinds)
    cell = min(MOST_CELL, (WIDTH - left - 20) / len(depths))
    most = max(_finite(tuned.cost(layer, choice).value) for layer in tuned.layers) or 1.0
    chosen = tuned.tuned.assignment
    has_room = cell > 60
    lines = [
        f'<text x="6" y="{top}">What {escape(choice)} costs each layer, 1/1000 nat, and what tune chose for it</text>'
    ]
    for at, depth in enumerate(depths):
        name = f"block {depth}" if depth and has_room else depth
        x = left + cell * (at + 0.5)
        lines.append(f'<text class="note" x="{x:.1f}" y="{top + 26}" text-anchor="middle">{escape(name)}</text>')
    for layer, (kind, depth) in places.items():
        x, y = left + cell * depths.index(depth), top + 34 + ROW * kinds.index(kind)
        nats = tuned.cost(layer, choice).value
        colour = round((len(RAMP) - 1) * (1 - min(max(_finite(nats) / most, 0.0), 1.0)))
        told = f"{MILLI * nats:.1f}" if math.isfinite(nats) else "not finite"
        lines.append(
            f'<rect class="l{colour}" x="{x + 1:.1f}" y="{y + 1}" width="{cell - 2:.1f}" height="{ROW - 2}">'
            f"<title>{escape(layer)}: {told}, {escape(chosen[layer])}</title></rect>"
        )
        if has_room:
            at = f'class="t{colour}" x="{x + cell / 2:.1f}" text-anchor="middle"'
            lines.append(f'<text {at} y="{y + 20}">{told}</text>')
            lines.append(f'<text {at} y="{y + 38}" style="font-size: 12px">{escape(chosen[layer])}</text>')
    for at, kind in enumerate(kinds):
        lines.append(
            f'<text x="{left - 10}" y="{top + 39 + ROW * (at + 0.5):.1f}" text-anchor="end">{escape(kind)}</text>'
        )
    return lines, top + 34 + ROW * len(kinds) + 20
