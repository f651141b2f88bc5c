"""Documents out of files: plain text, JSON lines, Parquet. Every fault is reported with its file and line."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

from narrowgauge.errors import DataError, closest

NamedTexts = Iterator[tuple[str, str]]


def text_documents(path: str) -> NamedTexts:
    """One document: the whole file, which must be UTF-8 text without NUL bytes."""
    with open(path, "rb") as file:
        yield decode(file.read(), path, first_line=1), path


def jsonl_documents(path: str, text_field: str) -> NamedTexts:
    """One document a line, the value of `text_field`; blank lines are passed over."""
    with open(path, "rb") as file:
        for number, data in enumerate(file, start=1):
            line = decode(data, path, first_line=number)
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where}: no JSON ({error.msg} at column {error.colno}): one object a line") from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets as deep
                raise DataError(f"{where}: no JSON that can be read ({error}): leave this line out") from None
            if not isinstance(record, dict):
                raise DataError(f"{where}: a JSON {type(record).__name__}, expected an object with '{text_field}'")
            if text_field not in record:
                raise DataError(
                    f"{where}: no field '{text_field}'{closest(text_field, record)} (text_field says which to read)"
                )
            yield document_text(record[text_field], text_field, where), where


def parquet_documents(path: str, text_field: str) -> NamedTexts:
    """One document a row, the value of column `text_field`. Needs pyarrow."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet needs the package pyarrow ({error}): pip install 'narrowgauge[hf]'"
        ) from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{path}: no readable Parquet file ({str(error).splitlines()[0]})") from None
    with file:
        columns = file.schema_arrow.names
        if text_field not in columns:
            raise DataError(f"{path}: no column '{text_field}'{closest(text_field, columns)}")
        row = 0
        for batch in _batches(file, text_field, path):
            for text in batch.column(0).to_pylist():
                row += 1
                yield document_text(text, text_field, f"{path}, row {row}"), f"{path}, row {row}"


def _batches(file: Any, text_field: str, path: str) -> Iterator[Any]:
    """Record batches of one column. Raises DataError where the file is damaged behind its footer."""
    try:
        yield from file.iter_batches(columns=[text_field])
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: a damaged Parquet file ({str(error).splitlines()[0]}): leave this file out") from None


def decode(data: bytes, path: str, first_line: int) -> str:
    """UTF-8 text of a file, or of one line of it. Raises DataError with file and line for anything else."""
    if b"\0" in data:
        line = first_line + data.count(b"\n", 0, data.index(b"\0"))
        raise DataError(f"{path}:{line}: binary data (a NUL byte), expected UTF-8 text: leave this file out")
    try:
        return data.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}:{line}: byte 0x{data[error.start]:02X} is not UTF-8 text: convert the file, or leave it out"
        ) from None


def document_text(value: Any, text_field: str, where: str) -> str:
    """The text of one record; a missing value is an empty text. Raises DataError where it is no text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: '{text_field}' is a {type(value).__name__}, expected text")
    if "\0" in value:
        raise DataError(f"{where}: '{text_field}' holds a NUL character, expected text: leave this record out")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
        raise DataError(f"{where}: '{text_field}' holds a lone surrogate at character {error.start}") from None
    return value
