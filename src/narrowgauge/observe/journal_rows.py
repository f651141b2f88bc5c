"""Lines of a journal: one JSON object each, whose numbers read back as the same bits, streamed from the disk."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from narrowgauge.errors import CheckpointError
from narrowgauge.observe import strict_json

Row = dict[str, Any]
FILE_NAME = "journal.jsonl"
SCHEMA = 2  # what this version writes; a header without one is schema 1's
MOST_STEPS = 1 << 32
_BUFFER = 1 << 20  # bytes read at once
LONGEST_LINE = 1 << 28  # bytes; a row of 10,000 layers has a few megabytes, and what is longer is no row
_NON_FINITE_ENDS = (b'NaN"', b'Infinity"')
# of values in a dict as `encode` writes them, which Python's json takes bare; an escaped quote makes another text
_BARE = tuple((f': "{name}"'.encode(), f": {name}".encode()) for name in strict_json.NON_FINITE)
_START = b'{"kind": "'  # of every line as `encode` writes it: other kinds are passed over without being parsed


@dataclass(frozen=True)
class Line:
    """A whole line: its row, or what is wrong with it; its number from 1, and where it ends, in bytes."""

    number: int
    end: int
    row: Row | None
    problem: str = ""


def encode(row: Row) -> bytes:
    """The line of `row`, with its end."""
    return strict_json.dumps(row, separators=(", ", ": ")).encode() + b"\n"


def decode(line: bytes) -> Row:
    """The row of a line. Raises ValueError where it holds none."""
    for written, plain in _BARE:
        line = line.replace(written, plain)
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise ValueError("no kind")
    step = row.get("step")
    if row["kind"] != "header" and not (type(step) is int and 0 <= step < MOST_STEPS):
        raise ValueError("no step")
    # to look at all values takes longer than at the bytes
    return strict_json.restored(row) if any(word in line for word in _NON_FINITE_ENDS) else row


def number(value: Any) -> float:
    """The value as float64; NaN where it is no number, or an integer that float64 does not reach."""
    try:
        return float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan


class Text(NamedTuple):
    """A whole line as it stands: its number from 1, where it ends, in bytes, and its bytes, or those it begins with."""

    number: int
    end: int
    data: bytes

    @property
    def is_too_long(self) -> bool:
        return len(self.data) == LONGEST_LINE and not self.data.endswith(b"\n")

    def may_be_of(self, starts: tuple[bytes, ...]) -> bool:
        """False where it is a row of another kind than those whose lines have such `starts`."""
        return self.data.startswith(starts) or not self.data.startswith(_START) or self.is_too_long

    def parsed(self, path: Path) -> Line:
        """Its row, or what is wrong with it."""
        try:
            if not self.is_too_long:
                return Line(self.number, self.end, decode(self.data))
        except ValueError:
            pass
        return Line(self.number, self.end, None, _problem(path, self.number, self.data))


def start_of(kind: str) -> bytes:
    """How every line of a kind begins, as `encode` writes it."""
    return _START + kind.encode() + b'"'


def texts(path: Path, after: Line | None = None) -> Iterator[Text]:
    """Every whole line of a journal, without holding more than one; an unended one is left out.

    after: begin behind this line. Raises OSError.
    """
    with path.open("rb", buffering=_BUFFER) as file:
        number, end = (after.number, after.end) if after else (0, 0)
        file.seek(end)
        while data := file.readline(LONGEST_LINE):
            number += 1
            end += len(data)
            text = Text(number, end, data)
            if text.is_too_long:
                end += _skip_line(file)
                text = Text(number, end, data)
            elif not data.endswith(b"\n"):
                return
            yield text


def lines(path: Path, kinds: Collection[str] | None = None, after: Line | None = None) -> Iterator[Line]:
    """Every whole line of a journal, or only those of `kinds`; see `texts`. Raises OSError."""
    starts = None if kinds is None else tuple(map(start_of, kinds))
    for text in texts(path, after):
        if starts is None or text.may_be_of(starts):
            line = text.parsed(path)
            if kinds is None or line.row is None or line.row["kind"] in kinds:
                yield line


def ends_whole(path: Path) -> bool:
    """Whether the last line has its end; an empty file has. Raises OSError."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def check_header(path: Path, line: Line | None) -> Row:
    """The header, which is a journal's first line. Raises CheckpointError where it is none, or of a newer schema."""
    if line is None or line.row is None or line.row["kind"] != "header":
        is_journal = path.name == FILE_NAME  # of another file nobody shall be told to remove it
        advice = "remove the file, and resuming starts a new one" if is_journal else "give the folder of a run"
        raise CheckpointError(f"{path}: expected a header in the first line, found none: {advice}")
    schema = line.row.get("schema", 1)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise CheckpointError(
            f"{path}: expected a journal of schema {SCHEMA} or before, found schema {schema}, from a newer version: "
            "update narrowgauge"
        )
    return line.row


def _problem(path: Path, number: int, data: bytes) -> str:
    return (
        f"{path} line {number}: expected a JSON row, found {data[:60].rstrip()!r}: remove the line, or restore the file"
    )


def _skip_line(file: IO[bytes]) -> int:
    """Read on to the end of the line; how many bytes that were."""
    skipped = 0
    while data := file.readline(1 << 20):
        skipped += len(data)
        if data.endswith(b"\n"):
            break
    return skipped
