"""What commands print with: tables that are readable on a terminal and in a file, and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 1000  # a table in a file is as wide as it needs to be: nothing is cut


def output() -> Console:
    """A console on standard output; colour and motion only on a terminal (and not where NO_COLOR is set)."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(file=sys.stdout, highlight=False, soft_wrap=False, width=width)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; columns whose cells are all numbers are set flush right."""
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    output().print(table)


def print_json(value: Any) -> None:
    """Print `value` as JSON; NaN and infinity, which JSON lacks, as null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
