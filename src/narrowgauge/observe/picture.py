"""Pictures as SVG of their own, in light and dark, without a library: line charts, maps, bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# light, dark: hues that differ in lightness, too; series beyond them begin anew
COLOURS = (
    ("#1d63b8", "#6cb0ff"), ("#b8500a", "#ff9d57"), ("#0b7357", "#4fd1a5"), ("#8a3ba8", "#d193ee"),
    ("#5f6772", "#a3adb9"), ("#a3155c", "#ff85b8"), ("#6b8e23", "#b5d16b"), ("#30b0c7", "#6fdcf0"),
)  # fmt: skip
# ten colours from the worst to the best, which recedes: (fill, ink) in light and in dark
RAMP = (
    (("#6d1f04", "#ffffff"), ("#ffe3c0", "#1c1206")), (("#92310a", "#ffffff"), ("#ffc88c", "#1c1206")),
    (("#b44712", "#ffffff"), ("#fda757", "#1c1206")), (("#d3712e", "#1c1206"), ("#e3812f", "#1c1206")),
    (("#e59c62", "#1c1206"), ("#b3601f", "#ffffff")), (("#f0c198", "#1c1206"), ("#84491f", "#ffffff")),
    (("#f5ddc4", "#1c2430"), ("#5c3924", "#f2f5f8")), (("#efe9e2", "#1c2430"), ("#3a3230", "#f2f5f8")),
    (("#dfe8f0", "#1c2430"), ("#27333f", "#f2f5f8")), (("#cbdcec", "#1c2430"), ("#1f3347", "#f2f5f8")),
)  # fmt: skip
STYLE = """
svg { background: #ffffff; font-family: system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif }
text { fill: #1f2328; font-size: 15px }
.title { font-size: 21px; font-weight: 600 }
.note { fill: #57606a; font-size: 14px }
.small { font-size: 12px }
.grid { stroke: #d8dee4; stroke-width: 1 }
.band { fill: #f6f8fa }
.range { fill: #dfe9f3 }
"""
DARK = """
svg { background: #0d1117 }
text { fill: #e6edf3 }
.note { fill: #9aa4af }
.grid { stroke: #30363d }
.band { fill: #161b22 }
.range { fill: #22303e }
"""
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1000, 90, 24, 112, 54
QUOTES = {'"': "&quot;"}
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """points: (x, y) in order; a y that is not finite parts the line. low, high: around it, or nothing."""

    name: str
    points: Points
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Chart:
    """Lines over x. dots: (series, points). range: (x, low, high) of what a format holds. is_log: the y axis."""

    title: str
    note: str
    x: str
    y: str
    lines: Sequence[Line]
    dots: Sequence[tuple[int, Points]] = ()
    range: Sequence[tuple[float, float, float]] = ()
    range_name: str = ""
    is_log: bool = False
    height: int = 420
    marks: Sequence[float] = field(default_factory=tuple)


def opening(title: str, note: str, width: int, height: int, series: int, ramp: bool = False) -> list[str]:
    """The first lines of a picture: its style, title and note. series: how many colours it takes."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title, QUOTES)}">',
        f"<style>{_styles(series, ramp)}</style>",
        f'<text class="title" x="6" y="30">{escape(title)}</text>',
        f'<text class="note" x="6" y="54">{escape(note)}</text>',
    ]


def _styles(series: int, ramp: bool) -> str:
    def colours(theme: int) -> str:
        pairs = [COLOURS[at % len(COLOURS)][theme] for at in range(series)]
        lines = [f".c{at} {{ fill: {colour}; stroke: {colour} }}" for at, colour in enumerate(pairs)]
        for at, both in enumerate(RAMP if ramp else ()):
            fill, ink = both[theme]
            lines += [f".l{at} {{ fill: {fill} }}", f".t{at} {{ fill: {ink} }}"]
        return "\n".join(lines)

    # what does not know the query must still see the light colours
    return f"{STYLE}{colours(0)}\n@media (prefers-color-scheme: dark) {{{DARK}{colours(1)}\n}}"


def legend(names: Iterable[str], x: float, y: float = 82) -> list[str]:
    """A dot in its colour and a name for each series, in a row."""
    lines = []
    for at, name in enumerate(names):
        lines.append(f'<circle class="c{at}" cx="{x:.0f}" cy="{y}" r="6"/>')
        lines.append(f'<text x="{x + 13:.0f}" y="{y + 5}">{escape(name)}</text>')
        x += 40 + 9 * len(name)
    return lines


def ticks(low: float, high: float, is_log: bool = False, wanted: int = 5, is_whole: bool = False) -> list[float]:
    """Round numbers between two, integers where is_whole; powers of ten where is_log and there are two."""
    if is_log:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        step = max(1, math.ceil((last - first) / wanted))
        found = [10.0**exponent for exponent in range(first, last + 1, step)]
        if len(found) > 1:
            return found
    rough = (high - low) / wanted
    if not 1e-300 < rough < math.inf:
        return [low]
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(size * unit for size in (1, 2, 5, 10) if size * unit >= rough * 0.999)
    step = max(step, 1.0) if is_whole else step
    count = math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1
    return [(math.ceil(low / step - 1e-9) + at) * step for at in range(count)]


def line_chart(chart: Chart) -> str:
    """SVG of a chart."""
    height = chart.height
    xs = [x for line in chart.lines for x, _ in line.points] + [x for _, points in chart.dots for x, _ in points]
    ys = [y for line in chart.lines for y in (*(y for _, y in line.points), *line.low, *line.high)]
    ys += [y for _, points in chart.dots for _, y in points] + [y for _, *both in chart.range for y in both]
    x0, x1 = (min(xs), max(xs)) if xs else (0.0, 1.0)
    y0, y1 = extent(ys, chart.is_log)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x0) / (x1 - x0) if x1 > x0 else 0.5
        up = math.log(max(y, 1e-300) / y0) / math.log(y1 / y0) if chart.is_log else (y - y0) / (y1 - y0)
        up = min(1.0, max(0.0, up))
        return LEFT + (WIDTH - LEFT - RIGHT) * across, height - BOTTOM - (height - TOP - BOTTOM) * up

    lines = opening(chart.title, chart.note, WIDTH, height, max(len(chart.lines), 1))
    lines += legend([line.name for line in chart.lines], LEFT)
    if chart.range:
        lines.append(f'<path class="range" d="{_band(chart.range, place)}"/>')
        words = escape(chart.range_name)
        lines.append(f'<text class="note" x="{WIDTH - RIGHT}" y="87" text-anchor="end">{words}</text>')
    lines += _axes(chart, place, (x0, x1), (y0, y1))
    for at, line in enumerate(chart.lines):
        if line.low:
            area = [(x, low, high) for (x, _), low, high in zip(line.points, line.low, line.high, strict=True)]
            lines.append(f'<path class="c{at}" stroke="none" stroke-width="0" opacity="0.2" d="{_band(area, place)}"/>')
        lines.append(f'<path class="c{at}" style="fill: none" stroke-width="1.8" d="{_trace(line.points, place)}"/>')
    for at, points in chart.dots:
        for x, y in points:
            if math.isfinite(y):
                across, up = place(x, y)
                lines.append(f'<circle class="c{at}" cx="{across:.1f}" cy="{up:.1f}" r="4"/>')
    for x in chart.marks:
        lines.append(f'<path class="c1" d="M{place(x, y0)[0]:.1f} {height - BOTTOM}v-9"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def extent(values: Iterable[float], is_log: bool) -> tuple[float, float]:
    """A little more than the least and the greatest of the values that can be drawn."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not is_log)]
    if not known:
        return (0.1, 10.0) if is_log else (0.0, 1.0)
    low, high = min(known), max(known)
    if is_log:
        room = (high / low) ** 0.04 if high > low else 2.0
        return low / room, high * room
    room = 0.04 * (high - low) if high > low else max(abs(high) * 0.1, 1e-9)
    return low - room, high + room


def number(value: float) -> str:
    """Short, for an axis."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:,.4g}" if abs(value) < 1e3 else f"{value:,.0f}"


def numbers(values: Sequence[float]) -> list[str]:
    """Of the ticks of an axis: short, with so many digits that no two are the same."""
    texts = [number(value) for value in values]
    for digits in range(5, 18):
        if len(set(texts)) == len(values):
            break
        texts = [f"{value:,.{digits}g}" for value in values]
    return texts


def _axes(chart: Chart, place, xs: tuple[float, float], ys: tuple[float, float]) -> list[str]:
    bottom, lines = chart.height - BOTTOM, []
    marks = ticks(*ys, chart.is_log)
    for tick, text in zip(marks, numbers(marks), strict=True):
        _, y = place(xs[0], tick)
        lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        lines.append(f'<text class="note" x="{LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{text}</text>')
    marks = ticks(*xs, wanted=8, is_whole=True)
    for tick, text in zip(marks, numbers(marks), strict=True):
        x, _ = place(tick, ys[0])
        lines.append(f'<text class="note" x="{x:.1f}" y="{bottom + 21}" text-anchor="middle">{text}</text>')
    middle = (TOP + bottom) / 2
    lines.append(
        f'<text class="note" text-anchor="middle" transform="translate(16 {middle:.0f}) rotate(-90)">'
        f"{escape(chart.y)}</text>"
    )
    end = WIDTH - RIGHT
    lines.append(f'<text class="note" x="{end}" y="{chart.height - 8}" text-anchor="end">{escape(chart.x)}</text>')
    return lines


def _trace(points: Points, place) -> str:
    parts, is_open = [], False
    for x, y in points:
        if not math.isfinite(y):
            is_open = False
            continue
        across, up = place(x, y)
        parts.append(f"{'L' if is_open else 'M'}{across:.1f} {up:.1f}")
        is_open = True
    return "".join(parts)


def _band(area: Sequence[tuple[float, float, float]], place) -> str:
    known = [each for each in area if math.isfinite(each[1]) and math.isfinite(each[2])]
    if not known:
        return ""
    up = ["{:.1f} {:.1f}".format(*place(x, high)) for x, _, high in known]
    down = ["{:.1f} {:.1f}".format(*place(x, low)) for x, low, _ in reversed(known)]
    return f"M{'L'.join([*up, *down])}Z"
