"""Journals of all kinds: streamed, followed while they grow, cut off, damaged, old, newer, empty."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.observe.journal_rows import encode
from narrowgauge.observe.report_attention import attention
from narrowgauge.observe.report_bins import Bins
from narrowgauge.observe.report_data import report_data
from narrowgauge.observe.report_figures import figures
from narrowgauge.observe.report_histograms import KEPT, HistogramReader
from narrowgauge.observe.report_page import page
from narrowgauge.observe.report_precision import ALL_LAYERS, Cell, PrecisionReader
from narrowgauge.observe.report_run import RunReader
from synthetic_run import header, layer_names, write_run


def test_every_kind_of_row_is_taken_in(tmp_path):
    run = RunReader(write_run(tmp_path / "mine", steps=100, every=10))
    assert run.name == "mine" and run.steps["step"].tolist() == list(range(1, 101))
    assert len(run.evaluations) == 8 and run.bytes is not None and run.precision.samples == 10
    assert run.histograms.rows == 2 and len(run.precision.cells) == 8 * 7
    assert run.format_of(Cell("blocks.0.mlp.up", "grad_output"))["format"] == "E5M2"


def test_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="expected a run folder"):
        RunReader(tmp_path)
    with pytest.raises(ConfigError, match="expected a run folder"):
        RunReader(tmp_path / "nowhere")


def test_a_newer_journal_is_refused_by_name(tmp_path):
    folder = write_run(tmp_path / "newer", schema=99)
    with pytest.raises(CheckpointError, match="schema 99"):
        RunReader(folder)


def test_an_empty_journal_and_one_without_steps(tmp_path):
    (tmp_path / "journal.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="expected a header"):
        RunReader(tmp_path)
    (tmp_path / "journal.jsonl").write_bytes(encode(header([])))
    run = RunReader(tmp_path)
    assert [each.title for each in attention(run)] == ["No step yet"]
    assert "No step yet" in page(report_data([run]))


def test_a_line_cut_off_and_damaged_lines_are_told_and_left_out(tmp_path):
    folder = write_run(tmp_path / "cut", steps=20)
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[5] = b"not json\n"
    journal.write_bytes(b"".join(lines)[:-30])
    run = RunReader(folder)
    assert run.damaged == 1 and len(run.all_problems) == 2
    assert str(tmp_path) not in " ".join(run.all_problems)  # a report is passed on: no private paths
    found = [each for each in attention(run) if each.rule == "journal"]
    assert found[0].title == "The journal has 1 damaged line" and "line 6" in found[0].text


def test_what_is_no_number_and_no_table_is_passed_over(tmp_path):
    folder = write_run(tmp_path / "odd", steps=10, every=5)
    with (folder / "journal.jsonl").open("a") as file:
        for layers in (None, [], {"a": None}, {"a": {"input": 3}}, {"a": {"input": {"amax": "x", "sqnr_db": True}}}):
            file.write(json.dumps({"kind": "precision", "step": 10, "layers": layers}) + "\n")
            file.write(json.dumps({"kind": "histograms", "step": 10, "layers": layers}) + "\n")
        file.write('{"kind": "step", "step": 11, "loss": "NaN", "skipped": 1}\n{"kind": "surprise", "step": 11}\n')
        file.write('{"kind": "evaluation", "step": 11}\n{"kind": "bytes", "step": 11, "roles": [1]}\n')
        file.write('{"kind": "guard", "step": 11}\n{"kind": "precision", "step": 12}\n')
    run = RunReader(folder)
    assert math.isnan(run.steps["loss"][-1])
    page(report_data([run]))


def test_rows_of_names_that_were_met_are_taken_by_their_own_values():
    """Names are looked up once; whatever stands in the place of a number later is still told from one."""
    reader = PrecisionReader({})
    rows = [
        {"amax": 1.0, "flushed": 0.5}, {"amax": 2.0, "flushed": 0.25}, {"amax": "x", "flushed": 0.125},
        {"amax": math.nan, "flushed": True}, {"amax": 3, "flushed": math.nan}, {"flushed": 0.75, "amax": 4.0},
        {"amax": 10**400, "flushed": None}, {"amax": 5.0},
    ]  # fmt: skip
    for step, measures in enumerate(rows, 1):
        reader.add(step, {"up": {"weight": {"amax": 8.0 * step}, "input": measures}, "down": None})
    at = reader.cells.index(Cell("up", "input"))
    nan, inf = math.nan, math.inf
    expected = {"amax": [1, 2, nan, inf, 3, 4, nan, 5], "flushed": [0.5, 0.25, 0.125, nan, nan, 0.75, nan, nan]}
    for measure, values in expected.items():
        assert np.array_equal(reader.bins.low(measure)[at], np.array(values, np.float32), equal_nan=True), measure
    assert reader.bins.low("amax")[1 - at].tolist() == [8.0 * step for step in range(1, 9)]


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 18, 33, 100])
def test_histograms_that_are_not_kept_are_passed_over_unread(tmp_path, rows, monkeypatch):
    folder = write_run(tmp_path, steps=0)
    read, every = [], HistogramReader()
    add = HistogramReader.add
    monkeypatch.setattr(HistogramReader, "add", lambda self, step, layers: (read.append(step), add(self, step, layers)))
    with (folder / "journal.jsonl").open("ab") as file:
        for step in range(1, rows + 1):
            layers = {"up": {"input": {"low": -2, "counts": [step, 0, 100 - step], "zeros": 100}}}
            add(every, step, layers)
            file.write(encode({"kind": "histograms", "step": step, "layers": layers}))
    run = RunReader(folder)
    assert run.histograms.rows == rows and len(read) <= min(rows, 2 * KEPT + 1 + KEPT * math.log2(rows))
    assert [step for step, _ in run.histograms.kept()] == [step for step, _ in every.kept()]
    assert read[-1] == rows


def test_a_histogram_cut_off_is_told_whether_it_would_be_kept_or_not(tmp_path):
    folder = write_run(tmp_path, steps=100, every=1, layers=1)
    journal = folder / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    places = [at for at, line in enumerate(lines) if line.startswith(b'{"kind": "histograms"')]
    for at in (places[0], places[-2], places[-1]):
        lines[at] = lines[at][:80] + b"\n"
    journal.write_bytes(b"".join(lines))
    run = RunReader(folder)
    assert run.damaged == 3 and run.histograms.rows == len(places) - 3


def test_what_is_sent_has_the_format_of_the_recipes_communication(tmp_path):
    spec = {"format": "E4M3FN", "granularity": "1x128", "scale": "E8M0_UP"}
    recipe = {"name": "mine", "grad_comm": spec, "param_comm": spec, "activation_comm": spec | {"format": "BF16"}}
    run = RunReader(write_run(tmp_path / "one", recipe=recipe))
    assert run.format_of(Cell("up", "collective")) == spec | {"max": 448.0, "min": 2.0**-9}
    assert run.format_of(Cell("activation_comm", "collective"))["format"] == "BF16"
    assert run.format_of(Cell("pipeline_comm", "collective")) == {}
    recipe["param_comm"] = spec | {"format": "E5M2"}  # which of both a parameter's name stands for is not known
    run = RunReader(write_run(tmp_path / "two", recipe=recipe))
    assert run.format_of(Cell("up", "collective")) == {}
    assert run.format_of(Cell("param_comm", "collective"))["max"] == 57344.0
    assert RunReader(write_run(tmp_path / "old", recipe="narrow8")).format_of(Cell("up", "collective")) == {}


def test_integers_beyond_every_type_and_headers_of_another_shape_are_no_traceback(tmp_path):
    folder = write_run(tmp_path / "huge", steps=10, every=5)
    huge, layers = 10**400, {"blocks.0.mlp.up": {"input": {"amax": 10**400, "scale": 1e300}}}
    before = RunReader(folder)
    with (folder / "journal.jsonl").open("a") as file:
        for row in (
            {"kind": "step", "step": huge, "loss": 1.0}, {"kind": "step", "step": -1, "loss": 1.0},
            {"kind": "step", "step": True, "loss": 1.0}, {"kind": "step", "step": 11, "loss": huge},
            {"kind": "evaluation", "step": 11, "loss": huge}, {"kind": "precision", "step": 11, "layers": layers},
            {"kind": "bytes", "step": 11, "roles": {"param": huge}, "parameters": "many", "activation": [1]},
        ):  # fmt: skip
            file.write(json.dumps(row) + "\n")
    run = RunReader(folder)
    assert run.damaged == 3 and len(run.steps["step"]) == 11 and math.isnan(run.steps["loss"][-1])
    assert math.isnan(run.journal.steps["loss"][-1])
    assert run.precision.samples == before.precision.samples + 1
    data = report_data([run])
    assert data["runs"][0]["bytes"] == {"step": 11, "parameters": None, "activation": None, "wire": None, "roles": {}}
    figures(data)
    (tmp_path / "journal.jsonl").write_bytes(encode(header([]) | {"conversion": 3, "formats": [1]}))
    page(report_data([RunReader(tmp_path)]))


def test_names_that_no_file_can_hold_are_written_with_a_sign_in_their_place(tmp_path):
    folder = write_run(tmp_path / "names", steps=10, every=5)
    layers = {"a\ud800\x00b": {"input": {"amax": 1.0, "saturated": 0.5}}}
    with (folder / "journal.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "precision", "step": 11, "layers": layers}) + "\n")
    data = report_data([RunReader(folder)])
    assert "a\ufffd\ufffdb" in data["runs"][0]["precision"]["layers"]
    assert any(each["layer"] == "a\ufffd\ufffdb" for each in data["attention"])
    page(data).encode()
    for picture in figures(data).values():
        ElementTree.fromstring(picture)


def test_schema_1_gives_what_there_is_and_says_what_is_missing(tmp_path):
    folder = tmp_path / "old"
    folder.mkdir()
    rows = [{"kind": "header", "versions": {"narrowgauge": "0.1.0"}, "recipe": {"name": "fp8_delayed"}}]
    for step in range(1, 31):
        rows.append({"kind": "step", "step": step, "loss": 3.0, "skipped": False, "loss_scale": 1.0})
        if step % 10 == 0:
            rows[-1]["statistics"] = {"input": {"saturated": 0.5, "flushed": 0.0}}
    (folder / "journal.jsonl").write_bytes(b"".join(map(encode, rows)))
    run = RunReader(folder)
    assert run.precision.cells == [Cell(ALL_LAYERS, "input")]
    found = attention(run)
    assert [(each.severity, each.rule, each.layer) for each in found] == [("serious", "saturation", ALL_LAYERS)]
    data = report_data([run])["runs"][0]
    assert "schema 1" in data["missing"][0] and "does not tell layers apart" in data["sampling"]


def test_a_run_under_way_is_followed_and_one_cut_back_is_read_anew(tmp_path):
    whole = (write_run(tmp_path / "whole", steps=60) / "journal.jsonl").read_bytes()
    folder = tmp_path / "live"
    folder.mkdir()
    journal = folder / "journal.jsonl"
    half = whole.index(b"\n", len(whole) // 2) + 1
    journal.write_bytes(whole[: half + 40])  # in the middle of a line
    run = RunReader(folder)
    tag = run.tag
    assert any("cut off" in problem for problem in run.all_problems)
    assert run.update() is False
    journal.write_bytes(whole)
    assert run.update() is True and run.tag != tag and run.all_problems == []
    again = RunReader(folder)
    assert run.steps["step"].tolist() == again.steps["step"].tolist() == list(range(1, 61))
    assert report_data([run]) == report_data([again])
    journal.write_bytes(whole[:half])  # as a resumed run does
    assert run.update() is True and run.steps["step"][-1] < 60
    other = (write_run(tmp_path / "other", steps=90, seed=5) / "journal.jsonl").read_bytes()
    journal.write_bytes(whole[: half // 2] + other[half // 2 :])  # longer, and another
    run.update()
    assert report_data([run])["runs"][0]["steps"] == report_data([RunReader(folder)])["runs"][0]["steps"]


def test_memory_does_not_grow_with_the_journal(tmp_path, monkeypatch):
    """Four times the samples: the same memory, but for 8 numbers a step and what an allocator rounds up."""
    monkeypatch.setattr(Bins.__init__, "__defaults__", (64, 1 << 28))
    peaks = []
    for samples in (150, 600):
        folder = write_run(tmp_path / str(samples), steps=samples, every=1, layers=3, roles=("input",))
        tracemalloc.start()
        RunReader(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 100_000, peaks  # 450 samples of 3 x 5 numbers in Python objects would be 500 kB


def test_two_runs_of_one_name_and_of_different_layers(tmp_path):
    one = RunReader(write_run(tmp_path / "a" / "same", layers=4))
    two = RunReader(write_run(Path(tmp_path / "b" / "same"), layers=layer_names(9)[4:], steps=50))
    data = report_data([one, two], reference=1)
    assert [run["name"] for run in data["runs"]] == ["same", "same (2)"]
    assert [len(run["precision"]["layers"]) for run in data["runs"]] == [4, 5]
    assert data["runs"][0]["difference"]["last"][-1] == 50
