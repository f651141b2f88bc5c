"""The journal of a run: `journal.jsonl`, one JSON object a line.

The first line is the header (versions, recipe); after it come rows in order of `step`, each with a `kind`: "step",
"evaluation", "recipe", "warning" or "resumed". Numbers are written so that they read back as the same bits. A last line
that a crash cut short is ignored on reading and removed on `cut`.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import CheckpointError

Row = dict[str, Any]
# JSON has no such numbers; Python's bare NaN would be refused by other readers
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Contents:
    """What a journal holds: its header, and all rows in order."""

    header: Row
    rows: list[Row]

    def of_kind(self, kind: str) -> list[Row]:
        """The rows of one kind, in order."""
        return [row for row in self.rows if row["kind"] == kind]


class Journal:
    """Appends rows. A row that the disk refuses is kept and written before the next one, so none is lost or torn."""

    def __init__(self, path: Path) -> None:
        """Open for appending. Raises OSError."""
        self.path = path
        self._descriptor: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pending: list[bytes] = []

    @classmethod
    def create(cls, path: Path, header: Row) -> Journal:
        """Start a new journal with its header, replacing one that is there."""
        path.unlink(missing_ok=True)
        journal = cls(path)
        journal.write("header", **header)
        return journal

    def write(self, kind: str, **fields: Any) -> None:
        """Append one row. Raises OSError where the disk is full; the row is then tried again with the next one."""
        self._pending.append(_encode({"kind": kind, **fields}))
        self.flush()

    def flush(self) -> None:
        """Write rows that are still waiting. Raises OSError where the disk refuses them."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        while self._pending:
            start = os.fstat(self._descriptor).st_size
            try:
                _write_all(self._descriptor, self._pending[0])
            except OSError:
                os.ftruncate(self._descriptor, start)  # half a line in the middle would make the file unreadable
                raise
            del self._pending[0]

    def sync(self) -> None:
        """Flush, and have the operating system put everything on the disk. Raises OSError."""
        self.flush()
        assert self._descriptor is not None  # flush checked it
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; a second call does nothing. Rows that are still waiting are lost."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read(path: Path) -> Contents:
    """Read a journal; a last line without its end is left out. Raises CheckpointError where another line is damaged."""
    rows = [row for row, _ in _lines(path)]
    if not rows or rows[0].get("kind") != "header":
        raise CheckpointError(
            f"{path}: expected a header in the first line, found none: remove the file, and resuming starts a new one"
        )
    return Contents(rows[0], rows[1:])


def cut(path: Path, step: int) -> Contents:
    """Remove every row after `step`, so that a run can be continued from there, and return what is left."""
    contents = read(path)
    end = 0
    for row, line_end in _lines(path):
        if row["kind"] != "header" and row["step"] > step:
            break
        end = line_end
    with path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())
    return Contents(contents.header, [row for row in contents.rows if row["step"] <= step])


def _lines(path: Path) -> list[tuple[Row, int]]:
    """Every whole line as (row, offset of its end in bytes)."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a run's journal, found {error.strerror}: is this a run folder?"
        ) from None
    lines: list[tuple[Row, int]] = []
    start = 0
    while (newline := data.find(b"\n", start)) >= 0:
        try:
            row = json.loads(data[start:newline])
            if row["kind"] != "header" and not isinstance(row["step"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(
                f"{path} line {len(lines) + 1}: expected a JSON row, found {data[start:newline][:60]!r}: "
                "remove the line, or restore the file"
            ) from None
        lines.append((_decode(row), newline + 1))
        start = newline + 1
    return lines


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _encode(row: Row) -> bytes:
    return json.dumps(_finite(row), allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
