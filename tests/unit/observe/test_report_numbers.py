"""Every number that the page is given is the journal's: facts, series, bytes, histograms, formats, events."""

from __future__ import annotations

import math

import numpy as np
import pytest

from narrowgauge.observe.journal_rows import encode
from narrowgauge.observe.report_data import difference, report_data
from narrowgauge.observe.report_figures import decoded, figures, unpacked
from narrowgauge.observe.report_run import RunReader
from synthetic_run import header, write_run

LOSSES = [5.0, 4.0, math.nan, 3.0, 3.5, 2.0]
SPEEDS = [100.0, 400.0, 200.0, math.nan, 300.0, 1000.0]
NARROW = {"format": "E4M3FN", "granularity": "per tensor", "scale": "current", "max": 448.0, "min": 2.0**-9}
HALF = {"format": "FP16", "granularity": "per tensor", "scale": "current", "max": 65504.0, "min": 2.0**-24}
BYTES = {"step": 1, "parameters": 10**6, "activation": 7 * 10**6, "wire": 50,
         "roles": {"param": 2 * 10**6, "master": 0, "grad": 5 * 10**5}}  # fmt: skip


@pytest.fixture
def run(tmp_path) -> RunReader:
    """Six steps, three evaluations, two samples, one of them with a histogram."""
    head = header([]) | {
        "formats": {"up": {"input": NARROW, "exp_avg_sq": HALF}, "down": {"input": NARROW, "grad": HALF}},
        "conversion": [
            {"name": "up", "status": "converted", "reason": "E4M3FN", "backend": "emulated",
             "casts": {"input": "E4M3FN"}},
            {"name": "head", "status": "kept", "reason": "head", "backend": "torch"},
        ],
        "environment": {"python": "3.11", "cuda": None},
        "parameters": 1000,
    }  # fmt: skip
    rows = [head]
    for step, (loss, speed) in enumerate(zip(LOSSES, SPEEDS, strict=True), 1):
        rows.append({"kind": "step", "step": step, "loss": loss, "grad_norm": 1.0, "lr": 0.5, "tokens_per_s": speed,
                     "loss_scale": 8.0, "skipped": step in (3, 5)})  # fmt: skip
    for step, loss in ((2, 4.5), (4, 3.25), (6, 3.75)):
        rows.append({"kind": "evaluation", "step": step, "loss": loss, "perplexity": math.exp(loss)})
    layers = {
        "down": {"grad": {"amax": 16.0}, "input": {"amax": 2.0, "scale": 0.25, "sqnr_db": 30.0}},
        "up": {"exp_avg_sq": {"amax": 8.0, "scale": 0.5}, "input": {"amax": 4.0, "scale": 0.125, "sqnr_db": 20.0}},
    }
    rows += [{"kind": "precision", "step": step, "layers": layers} for step in (2, 4)]
    rows.append({"kind": "histograms", "step": 4, "layers": {
        "down": {"input": {"low": -3, "counts": [1, 0, 3], "zeros": 12}},
        "up": {"input": {"low": 5, "counts": [4], "zeros": 0}},
    }})  # fmt: skip
    rows += [{"kind": "bytes", **BYTES}, {"kind": "warning", "step": 5, "message": "look", "more": [1]}]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "journal.jsonl").write_bytes(b"".join(map(encode, rows)))
    return RunReader(tmp_path / "run")


def test_facts_are_the_last_the_best_and_the_median(run):
    shown = report_data([run])["runs"][0]
    facts = {key: shown["facts"][key] for key in shown["facts"] if key != "recipe"}
    assert facts == {
        "parameters": 1000, "last_step": 6, "planned_steps": None, "last_loss": 2.0, "validation_loss": 3.75,
        "best_validation_loss": 3.25, "skipped": 2, "tokens_per_s": 300.0,
    }  # fmt: skip
    assert shown["skips"] == [3, 5]
    assert shown["evaluations"] == [[step, loss, math.exp(loss)] for step, loss in ((2, 4.5), (4, 3.25), (6, 3.75))]
    assert shown["bytes"] == BYTES
    assert shown["events"] == [{"kind": "warning", "step": 5, "message": "look", "more": "[1]"}]
    environment = shown["environment"]
    assert environment["threads"] == "2" and environment["parameters"] == "1000" and environment["device"] == "cpu"
    assert environment["python"] == "3.11" and "cuda" not in environment
    assert shown["conversion"] == [
        {"name": "up", "status": "converted", "reason": "E4M3FN", "backend": "emulated", "casts": "input E4M3FN"},
        {"name": "head", "status": "kept", "reason": "head", "backend": "torch", "casts": ""},
    ]


def test_cells_have_their_own_format_and_series(run):
    precision = report_data([run])["runs"][0]["precision"]
    assert (precision["layers"], precision["roles"]) == (["down", "up"], ["input", "grad", "exp_avg_sq"])
    assert precision["cells"] == [[0, 0], [0, 1], [1, 0], [1, 2]]
    specs = [precision["specs"][number] for number in precision["spec_of"]]
    assert [(spec["format"], spec["max"]) for spec in specs] == [("E4M3FN", 448.0), ("FP16", 65504.0)] * 2
    assert len(precision["specs"]) == 2 and precision["samples"] == 2
    expected = {"amax": {0: 2, 1: 16, 2: 4, 3: 8}, "scale": {0: 0.25, 2: 0.125, 3: 0.5}, "sqnr_db": {0: 30, 2: 20}}
    for measure, of in expected.items():
        assert precision["measures"][measure]["log"] == (measure != "sqnr_db")
        found = decoded(precision["measures"][measure])
        assert {at: values[:, 0].tolist() for at, values in found.items()} == {at: [v] * 2 for at, v in of.items()}


def test_histograms_are_shares_of_all_values_by_layer(run):
    histograms = report_data([run])["runs"][0]["histograms"]
    (step,) = histograms["steps"]
    shares = (unpacked(histograms["roots"]).astype(float) / 65535) ** 2
    found = {(layer, role): (low, shares[at : at + n]) for layer, role, low, at, n in step["cells"]}
    assert step["step"] == 4 and set(found) == {("down", "input"), ("up", "input")}
    low, of = found["down", "input"]
    assert low == -3 and of == pytest.approx([1 / 16, 0, 3 / 16], abs=1e-5)
    low, of = found["up", "input"]
    assert low == 5 and of.tolist() == [1.0]


def test_what_is_not_finite_is_in_no_mean_and_a_band_is_the_widest_of_its_bin(tmp_path):
    def change(step, row):
        return row | {"loss": math.nan} if row["kind"] == "step" and step % 4 == 0 else row

    run = RunReader(write_run(tmp_path / "run", steps=2000, every=2000, layers=1, change=change))
    shown = report_data([run])["runs"][0]["steps"]
    loss, ends = run.steps["loss"], run.band_ends
    assert unpacked(shown["first"])[1] == 3 and unpacked(shown["last"])[1] == 4
    assert unpacked(shown["loss"]["mean"])[1] == np.float32(loss[2])  # the fourth is NaN
    assert np.array_equal(unpacked(shown["band"]), ends.reshape(1000, 2).max(axis=1).astype(np.float32))


def test_a_difference_is_this_run_less_the_reference_at_evaluations_too(tmp_path):
    reference = RunReader(write_run(tmp_path / "bf16", steps=40))
    change = lambda step, row: row | {"loss": math.nan} if (row["kind"], step) == ("step", 7) else row  # noqa: E731
    run = RunReader(write_run(tmp_path / "narrow", steps=40, offset=0.25, change=change))
    found = difference(run, reference)
    assert found is not None and found["evaluations"] == [[step, pytest.approx(0.25)] for step in range(5, 41, 5)]
    assert found["mean"] == found["low"] == found["high"] == pytest.approx([0.25] * len(found["mean"]))
    assert found["first"][0] == 1 and found["last"][-1] == 40
    data = report_data([run, reference], reference=1)
    assert [run["difference"] is None for run in data["runs"]] == [False, True]
    assert [(each["rule"], each["run"]) for each in data["attention"] if each["rule"] == "reference"] == [
        ("reference", 0)
    ]


def test_figures_say_the_bytes_of_the_state_and_of_activations_apart(run):
    picture = figures(report_data([run]))["bytes"]
    assert "2.5 MB, 2.50 a parameter, and 7.0 MB of activations" in picture
