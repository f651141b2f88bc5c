"""JSON Lines: what is read, and every kind of problem with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.data.jsonl import SHOWN, Kind, Problems, read_jsonl
from narrowgauge.errors import DataError


def read(path: Path, data: bytes) -> tuple[list, Problems]:
    path.write_bytes(data)
    problems = Problems(path)
    return list(read_jsonl(path, problems)), problems


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 1}\n{"a": 2}\n',
        b'{"a": 1}\n{"a": 2}',  # no end of line
        b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n',  # as Windows writes it
        b'{"a": 1}\n{"a": 2}\n\n  \n\r\n',
    ],
)
def test_encodings_and_ends_of_lines_make_no_difference(data: bytes, path: Path) -> None:
    assert read(path, data) == ([(1, {"a": 1}), (2, {"a": 2})], Problems(path))


def test_lines_are_counted_as_an_editor_counts_them(path: Path) -> None:
    found, _ = read(
        path, b'\n{"a": "\xe2\x80\xa8"}\r\n\r\n{"a": "\\u2028\x85"}\n{"a": 3}\n'.replace(b"\x85", b"\xc2\x85")
    )
    assert [line for line, _ in found] == [2, 4, 5]  # U+2028 and U+0085 end no line


@pytest.mark.parametrize(
    ("line", "kind", "said"),
    [
        (b'{"a": 1', Kind.JSON, "column 8"),
        (b"{'a': 1}", Kind.JSON, "column 2"),
        (b'{"a": 1} {"b": 2}', Kind.JSON, "Extra data"),
        (b"[" * 100_000, Kind.JSON, "recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}", Kind.JSON, "digits"),
        (b"[1, 2]", Kind.TYPE, "an object, found a list"),
        (b'"text"', Kind.TYPE, "an object, found text"),
        (b"null", Kind.TYPE, "an object, found null"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', Kind.DUPLICATE, "'b'"),
        (b'{"a": [NaN]}', Kind.NOT_FINITE, "NaN"),
        (b'{"a": -Infinity}', Kind.NOT_FINITE, "-Infinity"),
        (b'{"a": 1e999}', Kind.NOT_FINITE, "1e999"),
        (b'{"a": "\xff"}', Kind.ENCODING, "0xFF at 7"),
        (b'\xef\xbb\xbf{"a": 1}', Kind.BYTE_ORDER_MARK, "within the file"),
    ],
)
def test_each_problem_has_its_line_and_kind_and_the_rest_is_read(line, kind, said, path: Path) -> None:
    found, problems = read(path, b'{"a": 1}\n\n' + line + b'\n{"a": 2}\n')
    assert [record for _, record in found] == [{"a": 1}, {"a": 2}]
    assert [(problem.line, problem.kind) for problem in problems.first] == [(3, kind)]
    assert said in problems.first[0].text
    with pytest.raises(DataError, match=f"line 3: {kind}"):
        problems.raise_any()


def test_an_error_names_the_first_ten_problems_and_their_number(path: Path) -> None:
    _, problems = read(path, b"{\n" * 25)
    with pytest.raises(DataError) as caught:
        problems.raise_any()
    lines = str(caught.value).splitlines()
    assert "25 problems" in lines[0] and lines[-1].strip() == "and 15 more"
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == [f"line {n}" for n in range(1, SHOWN + 1)]


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(DataError, match="expected a file"):
            list(read_jsonl(path, Problems(path)))
    wide = tmp_path / "wide.jsonl"
    wide.write_text('{"a": 1}\n', encoding="utf-16")
    with pytest.raises(DataError, match="UTF-16"):
        list(read_jsonl(wide, Problems(wide)))
