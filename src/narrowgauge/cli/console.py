"""What commands print with: tables that are readable on a terminal and in a file, and JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowgauge.observe import strict_json


def output() -> Console:
    """A console on standard output; colour and motion only on a terminal (and not where NO_COLOR is set)."""
    return Console(file=sys.stdout, highlight=False)


def messages() -> Console:
    """A console on standard error, for what people read where standard output is JSON."""
    return Console(file=sys.stderr, highlight=False)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; columns whose cells are all numbers are set flush right. Plain aligned text in a pipe or file."""
    numeric = [all(isinstance(row[index], int | float) for row in rows) for index in range(len(columns))]
    cells = [[_cell(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        print("\n".join(_plain_table(title, columns, cells, numeric)), end="\n\n")
        return
    console = output()
    blanks, widths = _terminal_widths(columns, cells, console.width)
    look = {"box": box.SIMPLE_HEAD, "title_justify": "left", "title_style": "bold", "pad_edge": False}
    padding = (0, int(blanks > 1), 0, int(blanks > 2))  # one more blank is the box's own
    table = Table(title=title or None, show_header=any(columns), padding=padding, **look)
    for column, is_number, width in zip(columns, numeric, widths, strict=True):
        table.add_column(column, justify="right" if is_number else "left", overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _terminal_widths(columns: Sequence[str], cells: Sequence[Sequence[str]], room: int) -> tuple[int, list[int]]:
    """How many blanks stand between two columns, and the columns' widths, for lines of `room` characters.

    Where the cells do not fit as they are, the widest columns give way: down to their longest word, then to the longest
    word below the header, and only then further. rich by itself halves names while a column of prose stays wide.
    """
    texts = [[column, *(row[index] for row in cells)] for index, column in enumerate(columns)]
    widths = [max(map(len, column)) for column in texts]
    words = [[max(map(len, text.split()), default=1) for text in column] for column in texts]
    columns_least = [max(column) for column in words]
    cells_least = [max(column[1:], default=1) for column in words]
    blanks = next((n for n in (3, 2) if 2 + sum(columns_least) + n * (len(columns) - 1) <= room), 1)
    excess = 2 + sum(widths) + blanks * (len(columns) - 1) - room  # 2: the table's edges
    for least in (columns_least, cells_least, [1] * len(words)):
        while excess > 0 and any(width > low for width, low in zip(widths, least, strict=True)):
            widest = max(range(len(widths)), key=lambda index: (widths[index] > least[index], widths[index]))
            widths[widest] -= 1
            excess -= 1
    return blanks, widths


def _plain_table(
    title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool]
) -> list[str]:
    lines = [columns, ["-" * len(column) for column in columns], *cells] if any(columns) else list(cells)
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    aligned = [
        [cell.rjust(w) if number else cell.ljust(w) for cell, w, number in zip(line, widths, numeric, strict=True)]
        for line in lines
    ]
    return ([title] if title else []) + ["  ".join(line).rstrip() for line in aligned]


def print_json(value: Any) -> None:
    """Print `value` as JSON; NaN and infinity, which JSON lacks, as in `observe.strict_json`."""
    print(json_text(value))


def json_text(value: Any) -> str:
    """`value` as JSON; NaN and infinity, which JSON lacks, as in `observe.strict_json`."""
    return strict_json.dumps(value, indent=2)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
