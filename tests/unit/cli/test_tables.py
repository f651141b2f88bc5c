"""What `chart` and `doctor` print."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.cli.capabilities import status_of
from narrowgauge.cli.console import print_json, print_table
from narrowgauge.cli.main import main
from narrowgauge.numerics.formats import E4M3FN, E5M2, FP16, FP32, TF32
from narrowgauge.observe import strict_json
from narrowgauge.ops import backends
from narrowgauge.ops.cuda.routes import Machine
from narrowgauge.recipes.library import recipe_names


def test_the_chart_has_the_rows_of_the_accelerate_guide(capsys):
    assert main(["chart", "--markdown"]) == 0
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    columns = ["Optimization Level", "Computation(GEMM)", "Comm", "Weight", "Master Weight", "Weight Gradient"]
    assert lines[0][:7] == [*columns, "Optimizer States"]
    assert ["FP16 AMP", "FP16", "FP32", "FP32", "N/A", "FP32", "FP32+FP32"] in [line[:7] for line in lines]
    assert ["Nvidia TE", "FP8", "FP32", "FP32", "N/A", "FP32", "FP32+FP32"] in [line[:7] for line in lines]


def test_the_chart_of_named_recipes_has_those_only_in_every_form(capsys):
    assert main(["chart", "bf16", "fp8_current", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["bf16", "fp8_current"]
    assert main(["chart", "bf16"]) == 0
    table = capsys.readouterr().out
    assert "bf16" in table
    assert not any(name in table for name in set(recipe_names()) - {"bf16"})


def test_the_chart_is_drawn_of_named_recipes(tmp_path, capsys):
    path = tmp_path / "chart.svg"
    assert main(["chart", "bf16", "narrow8", "--picture", str(path)]) == 0
    assert capsys.readouterr().out == f"wrote {path}\n"
    assert path.read_text().count("stored: exp_avg_sq") == 2


def test_the_doctor_says_native_or_emulated_and_why_for_every_format(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    products = {row["operands"]: row for row in report["products"] if row["device"] == "cpu"}
    assert products[FP32.name]["runs"] == "native"
    for narrow in (TF32.name, FP16.name, E4M3FN.name, f"{E5M2.name} x {E4M3FN.name}"):
        assert products[narrow]["runs"] == "emulated"
    assert all(row["why"] for row in report["products"])
    assert report["machine"]["torch threads"] >= 1
    assert report["packages"]["torch"]


def test_the_doctor_says_which_gemms_which_kernels_and_which_collectives(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    gemms = {row["operands"]: row["gemms"] for row in report["products"] if row["device"] == "cpu"}
    assert gemms["E4M3FN 1x128 x E4M3FN 128x128"] == ["output", "grad_input"]
    assert gemms["E4M3FN 1x128"] == ["grad_weight"]
    on_cpu = {row["kernels"]: (row["used"], row["twin"]) for row in report["kernels"] if row["device"] == "cpu"}
    assert set(on_cpu.values()) == {("Numba", "torch operations")} and len(on_cpu) == 5
    gloo = next(row for row in report["collectives"] if row["backend"] == "gloo")
    assert (gloo["available"], gloo["used"]) == (True, "ranks on CPUs")
    assert report["packages"]["transformers"]["extra"] == "hf" and report["packages"]["torch"]["status"] == "ok"


def test_a_gpu_that_does_not_start_is_no_end_of_the_doctor(monkeypatch, capsys):
    def fails(*_args, **_kwargs):
        raise RuntimeError("CUDA driver version is insufficient\nand more")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fails)
    monkeypatch.setattr(backends, "machine_of", lambda device: Machine((9, 0), (12, 9)))
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["cuda:0"] == "does not start: CUDA driver version is insufficient"
    row = next(row for row in report["kernels"] if row["device"] == "cuda:0")
    assert row["used"] == "none" and row["why"].startswith("the device does not start")


@pytest.mark.parametrize(
    ("found", "needed", "expected"),
    [
        ("2.13.0+cpu", "<2.15,>=2.11", "ok"),
        ("2.10.1", "<2.15,>=2.11", "too old: 2.11 or newer is needed"),
        ("2.15.0", "<2.15,>=2.11", "too new: older than 2.15 is needed"),
        ("", ">=5.0", "not installed"),
        ("0.1", "", "ok"),
        ("1.16.0.dev0", ">=1.16", "ok"),
    ],
)
def test_packages_are_new_enough_or_not(found, needed, expected):
    assert status_of(found, needed) == expected


FP8 = ["fp8_current", "fp8_delayed", "fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3", "narrow8", "narrow8_sr"]


def test_the_doctor_has_every_recipe_on_every_device(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpu = SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(backends, "machine_of", lambda device: Machine((9, 0), (12, 9)))
    assert main(["doctor", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["products"]
    for device in ("cpu", "cuda:0"):
        assert {name for row in rows if row["device"] == device for name in row["recipes"]} == set(recipe_names())
    runs = {row["operands"]: (row["runs"], row["recipes"]) for row in rows if row["device"] == "cuda:0"}
    assert runs["E4M3FN 1x128 x E4M3FN 128x128"] == ("native", ["fp8_block"])
    assert runs["E5M2 x E4M3FN"] == ("native", FP8)
    assert runs["E4M3FN 1x32 E8M0"] == ("emulated", ["mxfp8"])
    assert runs["E2M1FN 1x16 NVFP4 x E2M1FN 16x16 NVFP4"] == ("emulated", ["nvfp4"])
    assert main(["doctor"]) == 0
    assert ", ".join(FP8) in capsys.readouterr().out


def test_a_table_in_a_pipe_is_not_cut_and_has_no_trailing_blanks(capsys):
    print_table("wide", ["name", "value"], [("a" * 300, 1), ("b", 23456)])
    lines = capsys.readouterr().out.splitlines()
    assert "a" * 300 + "       1" in lines
    assert "b" + " " * 299 + "  23,456" in lines
    assert all(line == line.rstrip() for line in lines)


def test_json_has_a_text_where_a_number_is_not_finite(capsys):
    value = {"loss": math.nan, "more": [math.inf, 1.5, {"x": -math.inf}], 7: "Infinite"}
    print_json(value)
    shown = capsys.readouterr().out
    found = json.loads(shown, parse_constant=pytest.fail)
    assert found == {"loss": "NaN", "more": ["Infinity", 1.5, {"x": "-Infinity"}], "7": "Infinite"}
    back = strict_json.loads(shown)
    assert math.isnan(back["loss"]) and back["more"] == value["more"]


def test_result_files_are_strict_and_a_figure_that_is_no_number_has_missed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    common, tables = importlib.import_module("common"), importlib.import_module("tables")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    gone = {"gap": {"measured": math.inf, "at_most": 1.0}, "speed": {"measured": math.nan, "at_least": 1.0}}
    path = common.write_result("guard", {"figures": gone})
    json.loads(path.read_text(), parse_constant=pytest.fail)
    (found,) = tables.newest_results(tmp_path).values()
    assert found["figures"]["gap"]["measured"] == math.inf and math.isnan(found["figures"]["speed"]["measured"])
    assert not any(map(tables.is_met, found["figures"].values()))
    assert "gap: inf, goal <= 1" in tables.summary({"cpu-guard": found | {"command": "python benchmarks/guard.py"}})


def on_a_terminal(monkeypatch, columns: int) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))


def without_styles(shown: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)


def test_on_a_narrow_terminal_no_word_is_broken_while_prose_could_give_way(monkeypatch, capsys):
    on_a_terminal(monkeypatch, 60)
    why = "this processor multiplies no such format: codes are carried in a wider one"
    print_table(
        "", ["name", "why", "bytes"], [["fp8_rowwise_gw_hp", why, "FP32+FP32"], ["narrow8_sr", why, "INT8+UINT8"]]
    )
    shown = without_styles(capsys.readouterr().out)
    assert all(len(line) <= 60 for line in shown.splitlines())
    assert {"fp8_rowwise_gw_hp", "narrow8_sr", "FP32+FP32", "INT8+UINT8", *why.split()} <= set(shown.split())


def test_a_terminal_that_is_too_narrow_for_words_breaks_headers_before_names(monkeypatch, capsys):
    on_a_terminal(monkeypatch, 80)
    assert main(["chart"]) == 0
    shown = without_styles(capsys.readouterr().out)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert {*recipe_names(), "FP32+FP32", "INT8+UINT8"} <= set(shown.split())
