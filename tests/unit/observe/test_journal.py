"""The journal reads back the same bits, survives a torn last line and a full disk, and can be cut back."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from narrowgauge.errors import CheckpointError
from narrowgauge.observe import journal
from narrowgauge.observe.journal_rows import SCHEMA, decode, encode, lines, number
from narrowgauge.observe.journal_writer import JournalWriter


def write(path: Path, steps: int) -> None:
    with_header = JournalWriter.create(path, {"recipe": "fp16"})
    for step in range(1, steps + 1):
        with_header.write("step", step=step, loss=1 / (3 * step))
    with_header.close()


def test_numbers_read_back_with_the_same_bits(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    values = [0.1, 1e-45, 2**-1074, 1.7976931348623157e308, math.inf, -math.inf, math.nan]
    log = JournalWriter.create(path, {})
    log.write("step", step=1, values=values, nested={"loss": math.nan})
    log.close()
    row = journal.read(path).rows[0]
    assert [v.hex() for v in row["values"][:-1]] == [v.hex() for v in values[:-1]]
    assert math.isnan(row["values"][-1]) and math.isnan(row["nested"]["loss"])
    assert b"NaN," not in path.read_bytes().replace(b'"NaN"', b"")  # strict JSON


def test_what_only_looks_like_no_number_is_text() -> None:
    """Values are read back from their texts; what a text holds or a key is called is not touched."""
    row = {"kind": "warning", "step": 1, "message": 'x: "NaN", "Infinity"', "NaN": 1, "a": {"Infinity": {"NaN": 2.5}}}
    assert decode(encode(row)) == row
    row = {"kind": "step", "step": 1, "a": math.inf, "b": [{"c": -math.inf}, math.inf], "NaN": {"d": math.inf}}
    assert decode(encode(row)) == row
    assert decode(b'{"kind":"step","step":1,"loss":"Infinity"}') == {"kind": "step", "step": 1, "loss": math.inf}


def test_a_torn_last_line_is_left_out_and_removed_by_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "step", "st')
    assert [row["step"] for row in journal.read(path).rows] == [1, 2, 3]
    journal.cut(path, 3)
    assert path.read_bytes() == whole


def test_cut_keeps_everything_up_to_the_step_and_appending_goes_on_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 5)
    contents = journal.cut(path, 2)
    assert [row["step"] for row in contents.rows] == [1, 2]
    log = JournalWriter(path)
    log.write("step", step=3, loss=0.0)
    log.close()
    assert [row["step"] for row in journal.read(path).of_kind("step")] == [1, 2, 3]
    journal.cut(path, 0)
    assert journal.read(path).rows == [] and journal.read(path).header["recipe"] == "fp16"


@pytest.mark.parametrize("damage", [b"not json\n", b"[1, 2]\n", b'{"step": 1}\n'])
def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 1)
    path.write_bytes(path.read_bytes() + damage + b'{"kind": "step", "step": 2}\n')
    with pytest.raises(CheckpointError, match="line 3"):
        journal.read(path)


@pytest.mark.parametrize("content", [b"", b'{"kind": "step", "step": 1}\n'])
def test_a_file_without_a_header_is_no_journal(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="header"):
        journal.read(path)


def test_a_missing_journal_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="journal.jsonl"):
        journal.read(tmp_path / "journal.jsonl")


def test_a_row_that_a_full_disk_tears_is_taken_back_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    log = JournalWriter.create(path, {})
    real = os.write

    def half_then_full(descriptor: int, data: bytes) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(OSError, match="No space"):
        log.write("step", step=1)
    assert journal.read(path).rows == []
    monkeypatch.undo()
    log.write("step", step=2)
    log.close()
    assert [row["step"] for row in journal.read(path).rows] == [1, 2]


def test_cut_reads_no_further_than_the_first_row_that_goes(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 3)
    path.write_bytes(path.read_bytes() + b"damaged\n")  # after what stays
    contents = journal.cut(path, 2, ("evaluation",))
    assert contents.rows == [] and contents.header["recipe"] == "fp16"
    assert [row["step"] for row in journal.read(path).rows] == [1, 2]


def test_rows_that_a_full_disk_refused_are_all_written_in_order_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    log = JournalWriter.create(path, {})

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for last, end in ((3, log.flush), (6, log.sync)):
        monkeypatch.setattr(os, "write", full)
        for step in range(last - 2, last + 1):
            with pytest.raises(OSError, match="No space"):
                log.write("step", step=step)
        monkeypatch.undo()
        end()
        assert [row["step"] for row in journal.read(path).rows] == list(range(1, last + 1))
    log.close()
    with pytest.raises(ValueError, match="is closed"):
        log.write("step", step=7)


def test_a_header_is_completed_in_place_where_no_row_has_followed_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    log = JournalWriter.create(path, {"recipe": "fp16", "device": "cpu"})
    log.complete_header({"recipe": "narrow8", "threads": 2})
    log.write("step", step=1)
    wanted = {"kind": "header", "schema": SCHEMA, "recipe": "narrow8", "device": "cpu", "threads": 2}
    assert journal.read(path).header == wanted
    log.complete_header({"recipe": "bf16"})  # too late
    log.close()
    found = journal.read(path)
    assert found.header == wanted and [row["step"] for row in found.rows] == [1]
    assert [row["step"] for row in journal.read(path, kinds=()).rows] == []


def test_what_is_no_float64_is_no_number() -> None:
    assert [number(value) for value in (3, 0.5, -math.inf)] == [3.0, 0.5, -math.inf]
    assert all(math.isnan(number(value)) for value in (10**400, -(10**400), "3", None, [1], math.nan))


def test_reading_goes_on_behind_a_line_with_its_number_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowgauge.observe.journal_rows.LONGEST_LINE", 100)
    path = tmp_path / "journal.jsonl"
    write(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "step", "x": "' + b"x" * 500 + b'"}\n' + whole.splitlines(keepends=True)[-1])
    every = list(lines(path))
    assert [line.number for line in every] == [1, 2, 3, 4, 5, 6]
    assert every[4].row is None and every[5].row == every[3].row and every[5].end == path.stat().st_size
    for at, line in enumerate(every):
        assert list(lines(path, after=line)) == every[at + 1 :]


def test_a_row_that_the_system_takes_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real = tmp_path / "journal.jsonl", os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:5]))
    write(path, 3)
    monkeypatch.undo()
    assert [row["loss"] for row in journal.read(path).rows] == [1 / 3, 1 / 6, 1 / 9]
