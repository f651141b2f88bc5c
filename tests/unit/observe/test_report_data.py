"""What the page is given: right differences, nothing but JSON, names that stay text, a file that is not too large."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from narrowgauge.observe.report_data import difference, report_data
from narrowgauge.observe.report_figures import decoded, figures, unpacked
from narrowgauge.observe.report_histograms import KEPT, HistogramReader
from narrowgauge.observe.report_page import page
from narrowgauge.observe.report_run import RunReader
from synthetic_run import ROLES, write_run

EVIL = "<script>alert(1)</script>"


def test_the_difference_is_that_of_the_single_steps(tmp_path):
    one, two = (
        RunReader(write_run(tmp_path / "one", steps=1000)),
        RunReader(write_run(tmp_path / "two", steps=900, seed=3)),
    )
    found = difference(two, one)
    assert found is not None
    gap = two.steps["loss"] - one.steps["loss"][:900]
    assert len(found["mean"]) == 180 and found["first"][0] == 1 and found["last"][-1] == 900
    sizes = np.array(found["last"]) - np.array(found["first"]) + 1
    assert sum(np.array(found["mean"]) * sizes) == pytest.approx(gap.sum())
    inside = gap[found["first"][7] - 1 : found["last"][7]]
    assert found["low"][7] == pytest.approx(np.percentile(inside, 5))
    assert found["high"][7] == pytest.approx(np.percentile(inside, 95))


def test_runs_without_a_step_in_common_have_no_difference(tmp_path):
    one = RunReader(write_run(tmp_path / "one", steps=10))
    none = RunReader(
        write_run(tmp_path / "none", steps=10, change=lambda step, row: row if row["kind"] != "step" else {})
    )
    assert difference(one, none) is None


def test_series_of_steps_keep_extremes_and_means(tmp_path):
    run = RunReader(write_run(tmp_path / "long", steps=5000, every=5000, layers=1))
    shown = report_data([run])["runs"][0]["steps"]
    loss = run.steps["loss"]
    low, mean, high = (unpacked(shown["loss"][name]) for name in ("low", "mean", "high"))
    assert len(low) == 1000 and low.min() == np.float32(loss.min()) and high.max() == np.float32(loss.max())
    assert mean[3] == pytest.approx(loss[15:20].mean(), rel=1e-6)
    assert unpacked(shown["last"])[3] == 20


def test_names_with_markup_stay_text(tmp_path):
    folder = write_run(tmp_path / "run", layers=[EVIL, "</script><img src=x onerror=alert(2)>"], change=_saturated)
    html = page(report_data([RunReader(folder)]))

    class Tags(HTMLParser):
        seen: list[str] = []

        def handle_starttag(self, tag, attrs):
            self.seen.append(tag)

    Tags().feed(html)
    assert Tags.seen.count("script") == 2 and "img" not in Tags.seen
    block = html.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&") & set(block) and EVIL in json.loads(block)["runs"][0]["precision"]["layers"]
    assert EVIL not in html and "&lt;script&gt;alert(1)" in html  # the text without JavaScript
    for picture in figures(report_data([RunReader(folder)])).values():
        assert "<script" not in picture


def _saturated(step, row):
    if row["kind"] == "precision":
        row["layers"][EVIL]["input"]["saturated"] = 0.9
    return row


def test_the_page_needs_no_network_and_allows_none(tmp_path):
    html = page(report_data([RunReader(write_run(tmp_path / "run"))]))
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", html)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)
    assert policy and "default-src 'none'" in policy[1] and "connect-src 'none'" in policy[1]
    assert "connect-src 'self'" in page(report_data([RunReader(tmp_path / "run")]), live_every_s=5.0)


def test_everything_is_json_even_what_is_not_finite(tmp_path):
    def change(step, row):
        if row["kind"] == "step" and step > 3:
            row.update(loss=math.nan, grad_norm=math.inf, tokens_per_s=-math.inf)
        if row["kind"] == "evaluation":
            row["loss"] = math.nan
        if row["kind"] == "precision":
            row["layers"]["blocks.0.mlp.up"]["input"].update(amax=math.nan, sqnr_db=math.inf, scale=math.inf)
        return row

    data = report_data([RunReader(write_run(tmp_path / "run", steps=40, change=change))])
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    precision = data["runs"][0]["precision"]
    at = precision["cells"].index([precision["layers"].index("blocks.0.mlp.up"), precision["roles"].index("input")])
    assert (decoded(precision["measures"]["amax"])[at] == math.inf).all()  # a magnitude of NaN is as bad as infinite
    assert (decoded(precision["measures"]["sqnr_db"])[at] == math.inf).all()


def test_10_000_steps_of_200_layers_stay_below_20_mb(tmp_path):
    """Sampled at every 10th step, 200 layers x 7 roles x 5 measures, all of them noise."""
    run = RunReader(write_run(tmp_path / "large", steps=10, every=10, layers=200))
    rng = np.random.default_rng(0)
    columns = ("amax", "scale", "saturated", "flushed", "sqnr_db")
    for step in range(20, 10_001, 10):
        noise = rng.random((5, 200 * len(ROLES)), np.float32)
        run.precision.bins.add(step, dict(zip(columns, noise, strict=True)))
    data = report_data([run])
    precision = data["runs"][0]["precision"]
    assert precision["samples"] == 1000 and precision["last"][-1] == 10_000
    codes = sum(2 * unpacked(measure["codes"]).size for measure in precision["measures"].values())
    assert codes <= 9 << 20
    assert len(page(data)) < 20e6


def test_histograms_keep_the_first_and_the_last_and_few_between():
    reader = HistogramReader()
    for step in range(1, 101):
        reader.add(step, {"up": {"input": {"low": -2, "counts": [step, 0, 100 - step], "zeros": 100}}})
    kept = reader.kept()
    assert [kept[0][0], kept[-1][0]] == [1, 100] and len(kept) == KEPT
    low, shares = kept[-1][1]["up", "input"]
    assert low == -2 and shares.tolist() == [0.5, 0.0, 0.0]  # of all values, zeros among them


def test_figures_are_whole_pictures(tmp_path):
    import xml.etree.ElementTree as ElementTree

    one = RunReader(write_run(tmp_path / "one", layers=3, change=_grown))
    two = RunReader(write_run(tmp_path / "two", layers=3, seed=1))
    found = figures(report_data([one, two], reference=1))
    assert {"loss", "difference", "loss-scale", "bytes", "map-sqnr_db-one", "map-lost-two"} <= set(found)
    assert "cell-blocks.0.attention.q-input" in found
    for name, picture in found.items():
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img" and root.get("aria-label"), name
    assert ">63 %<" in found["map-saturated-one"]


def _grown(step, row):
    if row["kind"] == "precision":
        row["layers"]["blocks.0.attention.q"]["input"].update(saturated=0.63, sqnr_db=3.1)
    return row


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("histograms_every: 200", "exponent histograms (histograms_every is 200, and the run has 40 steps)"),
        ("histograms_every: 0", "exponent histograms (histograms_every is 0)"),
        ("histograms_every: 20", "exponent histograms"),
        ("", "exponent histograms"),
    ],
)
def test_why_there_is_no_histogram_is_said_where_it_is_known(tmp_path, config, said):
    folder = write_run(tmp_path / "run", steps=40, layers=1)
    (folder / "config.yaml").write_text(config)
    (shown,) = report_data([RunReader(folder)])["runs"]
    assert said in shown["missing"] and shown["why_no_histograms"] == said.removeprefix("exponent histograms")
