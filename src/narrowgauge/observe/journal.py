"""The journal of a run: `journal.jsonl`, one JSON object a line.

The first line is the header (versions, recipe, formats); after it come rows in order of `step`, each with a `kind`;
docs/journal.md describes them all. Numbers read back as the same bits. A last line that a crash cut short is left out
on reading and removed on `cut`.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.observe.journal_rows import FILE_NAME, Row, check_header, ends_whole, lines, number

_COLUMNS = ("loss", "grad_norm", "lr", "tokens_per_s", "loss_scale")


MOST_RUNS_NAMED = 5


class Journal:
    """Reads a run's journal, which may be of any size and may still be written: one line at a time is in memory.

        journal = narrowgauge.observe.Journal("runs/mine")
        journal.steps["loss"]                       # a numpy column, one value a step
        for row in journal.of_kind("precision"): ...

    problems: what is wrong with the file, in words: a last line cut off, known from the start; damaged lines, which are
    passed over, as reading meets them.
    """

    def __init__(self, path: Path | str) -> None:
        """Read the header of the journal `path`, or of the run folder `path`.

        Raises ConfigError where there is no journal, CheckpointError where the file has no header or a newer schema.
        """
        given = Path(path)
        self.path = given / FILE_NAME if given.is_dir() else given
        if given.is_dir() and not self.path.exists():
            raise ConfigError(_no_run(given))
        self.problems: list[str] = []
        try:
            is_whole = ends_whole(self.path)
            self.header: Row = check_header(self.path, next(iter(lines(self.path)), None))
        except OSError as error:
            raise ConfigError(
                f"{path}: expected a run folder or its {FILE_NAME}, found: {error.strerror}: give the folder of a run"
            ) from None
        if not is_whole:
            self.problems.append(
                f"{self.path}: the last line is cut off and left out: the run was stopped in the middle of writing it, "
                "or still writes"
            )
        self._damaged: set[int] = set()
        self._steps: dict[str, Any] | None = None

    def of_kind(self, *kinds: str) -> Iterator[Row]:
        """The rows of one kind or several, in order, streamed from the disk."""
        for line in lines(self.path, kinds):
            if line.row is not None:
                yield line.row
            elif line.number not in self._damaged:
                self._damaged.add(line.number)
                self.problems.append(line.problem)

    @property
    def steps(self) -> dict[str, Any]:
        """Columns of all "step" rows, read once: step int64; loss, grad_norm, lr, tokens_per_s, loss_scale float64;
        skipped bool. What a row does not have is NaN, or False.
        """
        if self._steps is None:
            steps, skipped = array("q"), array("b")
            columns = {name: array("d") for name in _COLUMNS}
            for row in self.of_kind("step"):
                steps.append(row["step"])
                skipped.append(row.get("skipped") is True)
                for name, column in columns.items():
                    column.append(number(row.get(name)))
            self._steps = {"step": np.array(steps, np.int64), "skipped": np.array(skipped, bool)}
            self._steps |= {name: np.array(column, np.float64) for name, column in columns.items()}
        return self._steps


def _no_run(folder: Path) -> str:
    """What to say of a folder without a journal, with the runs that lie in it, the newest first."""
    said = f"{folder}: expected a run folder, found one without a {FILE_NAME}, which is no run"
    try:
        found = [path for path in folder.glob(f"*/{FILE_NAME}") if path.is_file()]
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        found = []
    if not found:
        return f"{said}: give the folder of a run"
    names = ", ".join(str(path.parent) for path in found[:MOST_RUNS_NAMED])
    return f"{said}: give one of the runs in it: {names}{', ...' if len(found) > MOST_RUNS_NAMED else ''}"


@dataclass(frozen=True)
class Contents:
    """A journal in memory: its header, and rows in order."""

    header: Row
    rows: list[Row]

    def of_kind(self, kind: str) -> list[Row]:
        """The rows of one kind, in order."""
        return [row for row in self.rows if row["kind"] == kind]


def read(path: Path, kinds: Collection[str] | None = None) -> Contents:
    """Read all rows of a journal, or those of `kinds`. A last line without its end is left out.

    Raises CheckpointError where another line is damaged, or the journal is of a newer schema.
    """
    rows = [row for row, _ in _rows(path) if kinds is None or row["kind"] in ("header", *kinds)]
    return Contents(rows[0], rows[1:])


def cut(path: Path, step: int, kinds: Collection[str] | None = None) -> Contents:
    """Remove every row after `step`, so that a run can be continued from there; return what `read` then would."""
    rows, end = [], 0
    for row, line_end in _rows(path):
        if row["kind"] != "header" and row["step"] > step:
            break
        end = line_end
        if kinds is None or row["kind"] in ("header", *kinds):
            rows.append(row)
    with path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())
    return Contents(rows[0], rows[1:])


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """Every row and where its line ends, the header first. Raises CheckpointError."""
    is_first = True
    try:
        for line in lines(path):
            if is_first:
                check_header(path, line)
            if line.row is None:
                raise CheckpointError(line.problem)
            is_first = False
            yield line.row, line.end
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a run's journal, found {error.strerror}: is this a run folder?"
        ) from None
    if is_first:
        check_header(path, None)
