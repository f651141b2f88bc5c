"""What a live view shows of precision: the worst layers of the last sample, and bytes by role."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from rich.console import RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

Layers = Mapping[str, Mapping[str, Mapping[str, float]]]
SHOWN = 3  # rows of each measure
# measure -> what its worst is called, whether that is the lowest, and from which value on it is shown
_MEASURES = (
    ("sqnr_db", "lowest SQNR", True, math.inf),
    ("saturated", "most saturated", False, 1e-3),
    ("flushed", "most flushed", False, 1e-3),
    ("lost", "most updates lost", False, 0.5),
)
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class LiveView(Progress):
    """A live line, and below it what `show` was given last."""

    below: RenderableType | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """The line, and what is below it."""
        yield from super().get_renderables()
        if self.below is not None:
            yield self.below

    def show(self, step: int, layers: Layers, roles: Mapping[str, int]) -> None:
        """Show a sample, and bytes by role."""
        self.below = view(step, layers, roles)
        self.refresh()


def view(step: int, layers: Layers, roles: Mapping[str, int]) -> Table:
    """The worst layers of the sample of `step`, and bytes by role, in lines that a narrow terminal cuts off."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True, justify="right")
    for what, layer, role, value in worst(layers):
        table.add_row(Text(what, "dim"), Text(layer or "(root)"), Text(role), Text(value))
    lines = Table.grid()
    lines.add_column(no_wrap=True, overflow="ellipsis")
    if roles:
        lines.add_row(Text(bytes_by_role(roles), "dim"))
    if table.row_count:
        lines.add_row(Text(f"worst layers at step {step}", "bold"))
        lines.add_row(table)
    return lines


def worst(layers: Layers) -> list[tuple[str, str, str, str]]:
    """(what, layer, role, value) of the worst layers by each measure, the worst first; small shares are left out.

    `what` is named in the first row of its kind only.
    """
    rows: list[tuple[str, str, str, str]] = []
    for measure, what, is_lowest, least in _MEASURES:
        found = [
            (measures[measure], layer, role)
            for layer, roles in layers.items()
            for role, measures in roles.items()
            if measure in measures and (measures[measure] < least if is_lowest else measures[measure] >= least)
        ]
        found.sort(key=lambda each: each[0] if is_lowest else -each[0])
        for at, (value, layer, role) in enumerate(found[:SHOWN]):
            shown = f"{value:.1f} dB" if is_lowest else f"{value:.2%}"
            rows.append(("" if at else what, layer, role, shown))
    return rows


def bytes_by_role(roles: Mapping[str, int]) -> str:
    """`bytes  total 18.4 MB  param 12.3 MB  grad 6.1 MB`: a narrow terminal cuts the end off."""
    sizes = {"total": sum(roles.values()), **roles}
    return "  ".join(["bytes", *(f"{role} {_size(size)}" for role, size in sizes.items())])


def _size(size: int) -> str:
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
