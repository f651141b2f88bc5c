"""The precision chart as a picture: SVG of its own, in light and dark, without a library.

A row for each recipe, a column for each role; a cell says the format and how it is scaled, and its colour the bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from narrowgauge.numerics import formats
from narrowgauge.numerics.companding import LINEAR
from narrowgauge.numerics.formats import TF32
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW
from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.numerics.scaling import E8M0_RULES, NVFP4, ULP
from narrowgauge.observe.picture import DARK, QUOTES, STYLE
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.matmul import GEMMS
from narrowgauge.recipes.roles import COMM_ROLES, STATE_ROLES
from narrowgauge.recipes.spec import CastSpec, Recipe

# bits -> fill in light, fill in dark: the fewer, the warmer
COLOURS = {
    32: ("#e6e9ed", "#2c333b"), 19: ("#d3dbe6", "#36414e"), 16: ("#bdd7f7", "#1d4577"), 8: ("#a5deb5", "#185c3a"),
    6: ("#f5dc8c", "#6b5307"), 4: ("#f6b795", "#7d3714"),
}  # fmt: skip
CELL, LINE, GAP, TOP, MARGIN = 80, 38, 10, 128, 12  # of a cell; between groups of columns; above the rows; around
_SIZES = """
text { font-size: 13px }
.group { font-weight: 600 }
.small { font-size: 11px }
"""
_NOTHING = ".none {{ fill: none; stroke: {stroke}; stroke-dasharray: 3 3 }}"


@dataclass(frozen=True)
class Group:
    """Columns that belong together, under one heading."""

    title: str
    columns: tuple[str, ...]


GROUPS = (
    *(Group(gemm.name, (gemm.left, gemm.right)) for gemm in GEMMS),
    Group("saved", ("activation",)),
    Group("stored", STATE_ROLES),
    Group("sent", COMM_ROLES),
)


def picture(rows: Sequence[tuple[str, Recipe]], title: str = "The precision chart") -> str:
    """SVG of (title, recipe) rows, at least one, as `recipes.chart.titled` gives them.

    A compute dtype that the device decides is drawn as BF16.
    """
    left = MARGIN + 16 + max(int(7.3 * len(name)) for name, _ in rows)
    width = left + CELL * sum(len(group.columns) for group in GROUPS) + GAP * (len(GROUPS) - 1) + MARGIN
    height = TOP + LINE * len(rows) + 62
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, QUOTES)}">',
        f"<style>{_styles()}</style>",
        f'<text class="title" x="{MARGIN}" y="32">{escape(title)}</text>',
        *_legend(),
        *_headings(left),
    ]
    for at, (name, recipe) in enumerate(rows):
        lines += _row(name, recipe, left, TOP + LINE * at)
    lines += _notes(TOP + LINE * len(rows) + 22)
    return "\n".join([*lines, "</svg>"]) + "\n"


def cells(recipe: Recipe) -> dict[str, CastSpec | None]:
    """What each column holds, by "group role", e.g. "output weight": the cast; None: nothing is kept.

    Operands are matrices [outer dimension, dimension that is summed over], as products take them.
    """
    plain = recipe.resolve("cpu").at(0)
    casts = LinearCasts.of(plain, quantized=True)
    found: dict[str, CastSpec | None] = {}
    for gemm in GEMMS:
        left, right = casts.along_the_sum(gemm)
        found |= {f"{gemm.name} {gemm.left}": left, f"{gemm.name} {gemm.right}": right}
    found["saved activation"] = _kept(casts.spec(GEMMS[-1], "input"))
    found |= {f"stored {role}": getattr(plain, role) for role in STATE_ROLES}
    wide = CastSpec(plain.compute_format)
    unsent = {"grad_comm": plain.grad, "param_comm": plain.param, "activation_comm": wide, "pipeline_comm": wide}
    return found | {f"sent {role}": getattr(plain, role) or unsent[role] for role in COMM_ROLES}


def _kept(spec: CastSpec) -> CastSpec:
    """TF32 is how float32 is multiplied, not how it is kept."""
    return CastSpec(formats.of_dtype(spec.format.dtype)) if spec.format is TF32 else spec


def words(spec: CastSpec) -> tuple[str, str]:
    """The two lines of a cell: the format, and how it is scaled."""
    name = f"+{spec.format}" if spec.scale is ULP else str(spec.format)  # a residual completes the parameter
    marks = ("" if spec.companding is LINEAR else " √") + (" ~" if spec.rounding is STOCHASTIC else "")
    if not spec.is_scaled or spec.scale is ULP:
        return name + marks, ""
    if spec.is_delayed:
        return name + marks, "delayed"
    if not spec.in_blocks:
        return name + marks, "tensor"
    tile = {PER_ROW: "row", PER_COLUMN: "column"}.get(spec.granularity, spec.granularity.name)
    kind = " E8M0" if spec.scale in E8M0_RULES else " NVFP4" if spec.scale is NVFP4 else ""
    return name + marks, tile + kind


def _styles() -> str:
    def fills(at: int) -> str:
        nothing = _NOTHING.format(stroke=("#c4cbd3", "#434b55")[at])
        return "\n".join([nothing, *(f".b{bits} {{ fill: {pair[at]} }}" for bits, pair in COLOURS.items())])

    light = STYLE + _SIZES + fills(0)
    return f"{light}\n@media (prefers-color-scheme: dark) {{{DARK}{fills(1)}\n}}"


def _legend() -> Iterator[str]:
    x = MARGIN
    for bits in COLOURS:
        yield f'<rect class="b{bits}" x="{x}" y="50" width="26" height="18" rx="3"/>'
        yield f'<text x="{x + 33}" y="64">{bits} bits</text>'
        x += 100


def _headings(left: int) -> Iterator[str]:
    x = left
    for group in GROUPS:
        wide = CELL * len(group.columns)
        yield f'<text class="group" x="{x + wide / 2:g}" y="{TOP - 30}" text-anchor="middle">{group.title}</text>'
        for at, role in enumerate(group.columns):
            middle = x + CELL * (at + 0.5)
            text = role.removesuffix("_comm")
            yield f'<text class="small" x="{middle:g}" y="{TOP - 10}" text-anchor="middle">{text}</text>'
        x += wide + GAP


def _row(name: str, recipe: Recipe, left: int, top: int) -> Iterator[str]:
    yield f'<text x="{left - 10}" y="{top + LINE / 2 + 4:g}" text-anchor="end">{escape(name)}</text>'
    found = cells(recipe)
    x = left
    for group in GROUPS:
        for role in group.columns:
            yield from _cell(f"{name}, {group.title}: {role}", found[f"{group.title} {role}"], x, top)
            x += CELL
        x += GAP


def _cell(where: str, spec: CastSpec | None, x: int, top: int) -> Iterator[str]:
    middle = x + CELL / 2
    box = f'x="{x + 1}" y="{top + 1}" width="{CELL - 2}" height="{LINE - 2}" rx="4"'
    if spec is None:
        yield f'<rect class="none" {box}><title>{escape(where)}: none</title></rect>'
        return
    first, second = words(spec)
    yield f'<g><title>{escape(f"{where}: {spec}")}</title><rect class="b{spec.format.bits}" {box}/>'
    y = top + (16 if second else LINE / 2 + 4)
    yield f'<text x="{middle:g}" y="{y:g}" text-anchor="middle">{escape(first)}</text>'
    if second:
        yield f'<text class="small" x="{middle:g}" y="{top + 30}" text-anchor="middle">{escape(second)}</text>'
    yield "</g>"


def _notes(y: int) -> Iterator[str]:
    text = (
        "output, grad_input, grad_weight: products, whose operands are [outer, summed] matrices. "
        "Below the format: what one scale is for; 1x128: a tile of so many values.",
        "√ on a square-root curve. ~ rounded stochastically. +INT8: completes the parameter. Dashed: nothing is kept. "
        "Where a GPU has no BF16, FP16 takes its place.",
    )
    for at, line in enumerate(text):
        yield f'<text class="small" x="{MARGIN}" y="{y + 18 * at}">{escape(line)}</text>'
