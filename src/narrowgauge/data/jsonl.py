"""JSON Lines, read one line at a time: one object a line, every problem with its line.

UTF-8, with or without a byte order mark at the beginning of the file; lines end in LF or CRLF; blank lines are passed
over. What Python reads and training data must not have is a problem here: a key that stands twice in an object, of
which the last would be kept, and NaN or infinity, which JSON has not.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from narrowgauge.data.files import document_text
from narrowgauge.errors import DataError

Record = dict[str, Any]
SHOWN = 10  # problems that an error names; the others are counted


class Kind(StrEnum):
    """What can be wrong with a line."""

    JSON = "broken JSON"
    ENCODING = "not UTF-8"
    BYTE_ORDER_MARK = "byte order mark"
    DUPLICATE = "duplicate key"
    NOT_FINITE = "not a finite number"
    TYPE = "wrong type"
    MISSING = "missing key"
    EMPTY = "empty"
    ROLE = "unknown role"
    MIXED = "mixed formats"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, on one line, counted from 1."""

    line: int
    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.kind}: {self.text}"


@dataclass
class Problems:
    """What is wrong with a file: the first `SHOWN` problems, and how many there are."""

    path: Path
    first: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, line: int, kind: Kind, text: str) -> None:
        """Note one problem."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(Problem(line, kind, text))

    def raise_any(self) -> None:
        """Raise DataError with all that was noted; nothing where there was none."""
        if not self.count:
            return
        if self.count == 1:
            raise DataError(f"{self.path}, {self.first[0]}")
        rest = "" if self.count <= SHOWN else f"\n  and {self.count - SHOWN} more"
        lines = "".join(f"\n  {problem}" for problem in self.first)
        raise DataError(f"{self.path}: {self.count} problems; mend these lines, or leave them out:{lines}{rest}")


class _Refused(ValueError):
    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def read_jsonl(path: Path, problems: Problems) -> Iterator[tuple[int, Record]]:
    """(line, object) of each line that holds one; what is wrong with the others goes to `problems`.

    Raises DataError where the file is missing, no file, in UTF-16 or UTF-32, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if number == 1:
                    _refuse_wide(path, data)
                    data = data.removeprefix(codecs.BOM_UTF8)
                if not data.strip():
                    continue
                try:
                    yield number, _object(data)
                except _Refused as refused:
                    problems.add(number, refused.kind, str(refused))
    except OSError as error:
        raise DataError(f"{path}: expected a file of JSON Lines, found: {error.strerror}: look at the path") from None


def _refuse_wide(path: Path, data: bytes) -> None:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise DataError(f"{path}: expected UTF-8, found UTF-16 or UTF-32: convert it (iconv -f UTF-16 -t UTF-8)")


def _object(data: bytes) -> Record:
    if data.startswith(codecs.BOM_UTF8):  # as `cat a.jsonl b.jsonl` leaves it
        raise _Refused(Kind.BYTE_ORDER_MARK, "one within the file, where another file was appended: remove it")
    try:
        text = data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise _Refused(Kind.ENCODING, f"byte 0x{data[error.start]:02X} at {error.start}: convert the file") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_not_finite, parse_float=_float)
    except json.JSONDecodeError as error:
        raise _Refused(Kind.JSON, f"{error.msg} at column {error.colno}") from None
    except _Refused:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets as deep
        raise _Refused(Kind.JSON, str(error)) from None
    if not isinstance(value, dict):
        raise _Refused(Kind.TYPE, f"expected an object, found {type_name(value)}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> Record:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # add returns None
        raise _Refused(Kind.DUPLICATE, f"'{twice}' stands twice in an object: keep one")
    return found


def _not_finite(word: str) -> None:
    raise _Refused(Kind.NOT_FINITE, f"{word} is no JSON: give a number, or null")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _Refused(Kind.NOT_FINITE, f"{digits[:20]} is beyond a float: give a smaller number, or null")
    return value


def type_name(value: Any) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return {str: "text", list: "a list", dict: "an object"}[type(value)]


def text_problem(value: Any, key: str) -> tuple[Kind, str] | None:
    """Why `value` is no text that a tokenizer takes; None where it is one, be it empty."""
    if not isinstance(value, str):
        return Kind.TYPE, f"'{key}': expected text, found {type_name(value)}"
    try:
        document_text(value, key, "")
    except DataError as error:  # NUL, lone surrogates
        return Kind.ENCODING, str(error).removeprefix(": ")
    return None
