"""`ng.observe.Journal` streams a journal of any size, and says what is wrong with one instead of guessing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.observe import journal_rows
from narrowgauge.observe.journal_rows import SCHEMA
from narrowgauge.observe.journal_writer import JournalWriter


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with three steps, one of them sampled."""
    log = JournalWriter.create(tmp_path / "journal.jsonl", {"recipe": "fp16"})
    for step in (1, 2, 3):
        log.write("step", step=step, loss=1 / step, grad_norm=math.inf, lr=0.1, skipped=step == 2, tokens_per_s=5)
        if step == 2:
            log.write("precision", step=step, layers={"a": {"weight": {"amax": 2.0, "sqnr_db": math.inf}}})
    log.close()
    return tmp_path


def append(run: Path, text: bytes) -> None:
    with (run / "journal.jsonl").open("ab") as file:
        file.write(text)


def test_a_run_folder_and_its_file_read_alike(run: Path) -> None:
    for path in (run, str(run), run / "journal.jsonl"):
        journal = ng.observe.Journal(path)
        assert journal.header == {"kind": "header", "schema": SCHEMA, "recipe": "fp16"}
        (row,) = journal.of_kind("precision")
        assert row["layers"]["a"]["weight"] == {"amax": 2.0, "sqnr_db": math.inf}
        assert [row["kind"] for row in journal.of_kind("step", "precision")] == ["step", "step", "precision", "step"]
        assert journal.problems == []


def test_steps_are_columns_and_what_a_row_lacks_is_nan(run: Path) -> None:
    steps = ng.observe.Journal(run).steps
    assert steps["step"].dtype == np.int64 and steps["step"].tolist() == [1, 2, 3]
    assert steps["loss"].tolist() == [1.0, 0.5, 1 / 3] and np.isinf(steps["grad_norm"]).all()
    assert steps["skipped"].tolist() == [False, True, False]
    assert np.isnan(steps["loss_scale"]).all() and steps["tokens_per_s"].tolist() == [5.0] * 3


def test_a_last_line_cut_off_is_left_out_and_said(run: Path) -> None:
    append(run, b'{"kind": "step", "step": 4, "lo')
    journal = ng.observe.Journal(run)
    assert journal.steps["step"].tolist() == [1, 2, 3]
    (problem,) = journal.problems
    assert "cut off" in problem


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\x00", b'{"kind": "step", "loss": 1}', b'{"kind": "step", 5}', b"[" * 9999]
)
def test_damaged_lines_are_passed_over_and_said_once(run: Path, damage: bytes) -> None:
    append(run, damage + b'\n{"kind": "step", "step": 4, "loss": 0.25}\n')
    journal = ng.observe.Journal(run)
    for _ in range(2):
        assert [row["step"] for row in journal.of_kind("step")] == [1, 2, 3, 4]
    (problem,) = journal.problems
    assert "line 6" in problem


def test_a_line_too_long_to_be_a_row_is_passed_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_rows, "LONGEST_LINE", 1000)
    append(run, b'{"kind": "step", "x": "' + b"x" * 5000 + b'"}\n{"kind": "step", "step": 4, "loss": 0.25}\n')
    journal = ng.observe.Journal(run)
    assert [row["step"] for row in journal.of_kind("step")] == [1, 2, 3, 4]
    assert len(journal.problems) == 1 and "line 6" in journal.problems[0]


def test_the_newest_runs_of_a_folder_that_is_none_are_named(tmp_path: Path) -> None:
    for at in range(6):
        (tmp_path / f"run{at}").mkdir()
        path = tmp_path / f"run{at}" / "journal.jsonl"
        path.write_bytes(b"")
        os.utime(path, (1000 - at % 3 * 10 - at, 1000 - at % 3 * 10 - at))  # the newest first: 0 3 1 4 2 5
        if at == 4:
            with pytest.raises(ConfigError) as five:
                ng.observe.Journal(tmp_path)
    with pytest.raises(ConfigError) as six:
        ng.observe.Journal(tmp_path)
    named = [", ".join(str(tmp_path / f"run{at}") for at in order) for order in ((0, 3, 1, 4, 2), (0, 3, 1, 4, 2))]
    assert str(five.value).endswith(f"give one of the runs in it: {named[0]}")
    assert str(six.value).endswith(f"give one of the runs in it: {named[1]}, ...")


def test_rows_are_found_by_their_kind_however_they_are_written(run: Path) -> None:
    append(
        run, b'{"step": 4, "kind": "step"}\n{"kind":"warning", "step":4}\n{"kind": "step", "step": 5, "skipped": 1}\n'
    )
    journal = ng.observe.Journal(run)
    assert [row["step"] for row in journal.of_kind("step")] == [1, 2, 3, 4, 5]
    assert [row["kind"] for row in journal.of_kind("warning")] == ["warning"]
    assert list(journal.of_kind("ste")) == []
    assert journal.steps["skipped"].tolist() == [False, True, False, False, False]  # 1 is no true


@pytest.mark.parametrize("step", [b"true", b"-1", b"1.0", b'"1"', b"4294967296", b"null"])
def test_a_step_that_is_no_count_is_damage(run: Path, step: bytes) -> None:
    append(run, b'{"kind": "step", "step": %s}\n' % step)
    journal = ng.observe.Journal(run)
    assert journal.steps["step"].tolist() == [1, 2, 3] and "line 6" in journal.problems[0]


def test_a_newer_schema_is_refused_and_both_are_named(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b'{"kind": "header", "schema": 9}\n')
    with pytest.raises(CheckpointError, match=rf"schema {SCHEMA} .*found schema 9"):
        ng.observe.Journal(tmp_path)


def test_the_first_schema_had_no_number(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_bytes(b'{"kind": "header", "recipe": {}}\n{"kind": "step", "step": 1}\n')
    assert ng.observe.Journal(tmp_path).steps["step"].tolist() == [1]


def test_a_folder_that_is_no_run_is_a_wrong_argument(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent.jsonl"):
        with pytest.raises(ConfigError, match="expected a run folder"):
            ng.observe.Journal(path)


@pytest.mark.parametrize("content", [b"", b"\x00\x01\n", b'{"kind": "step", "step": 1}\n', b'{"kind": "header"'])
def test_a_file_without_a_header_is_no_journal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal.jsonl").write_bytes(content)
    with pytest.raises(CheckpointError, match="header.*remove the file"):
        ng.observe.Journal(tmp_path)
    other = tmp_path / "model.safetensors"
    other.write_bytes(content)
    with pytest.raises(CheckpointError, match="header.*give the folder of a run"):  # and keep that file
        ng.observe.Journal(other)


def test_a_large_journal_is_streamed(run: Path) -> None:
    row = b'{"kind": "precision", "step": 4, "layers": {"a": {"weight": {"amax": "%s"}}}}\n' % (b"1" * 100_000)
    append(run, row * 200)  # 20 MB
    journal = ng.observe.Journal(run)
    tracemalloc.start()
    count = sum(1 for _ in journal.of_kind("precision"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 201 and 100_000 < peak < 2_000_000


def test_the_package_loads_the_reader_on_first_use_only() -> None:
    code = (
        "import sys, narrowgauge as ng; before = 'narrowgauge.observe' in sys.modules; ng.observe.Journal;"
        "sys.exit(before or 'narrowgauge.layers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
