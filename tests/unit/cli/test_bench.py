"""`bench --all`: every script once, whatever becomes of the others; what they found as a page and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import narrowgauge.cli.bench as command
from narrowgauge.cli.bench_all import Suite, run_limited
from narrowgauge.cli.bench_page import STYLE, page
from narrowgauge.cli.bench_suite import SUITE, Benchmark
from narrowgauge.cli.main import main

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NO_BENCHMARKS = {"common", "loopback", "namespaces", "reference", "tables", "numerics_page"}
SCRIPT = """
import json, os, pathlib, sys, time
figures, code, seconds, words = {figures!r}, {code}, {seconds}, sys.argv[1:]
print("words", words, flush=True)
time.sleep(seconds)
if figures is not None:
    bars = [{{"title": "a cast", "unit": "ms", "lower_is_better": True, "rows": [
        {{"name": "ours", "value": 1.5, "ours": True}},
        {{"name": "torchao", "value": 20.0, "ours": False, "at_least": True}},
        {{"name": "bitsandbytes", "value": None, "ours": False, "absent": "not installed"}}]}}]
    folder = pathlib.Path(os.environ["NARROWGAUGE_RESULTS"])
    (folder / "2026-01-01-cpu-x.json").write_text(json.dumps({{"figures": figures, "bars": bars}}))
sys.exit(code)
"""
MET = {"ratio <b>": {"measured": 0.5, "at_most": 1.0}}
MISSED = {"gap": {"measured": float("nan"), "at_most": 1.0}}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with scripts of its own: checkout(name, figures, code, seconds) makes one, and its benchmark."""
    folder = tmp_path / "checkout"
    (folder / "benchmarks").mkdir(parents=True)

    def make(name, figures=None, code=0, seconds=0.0, **more):
        text = SCRIPT.format(figures=figures, code=code, seconds=seconds).replace("nan", "float('nan')")
        (folder / "benchmarks" / f"{name}.py").write_text(text)
        return Benchmark(name, name, f"what {name} is", **{"quick": ("--small",), **more})

    make.folder = folder
    return make


def suite(checkout, output, **more) -> Suite:
    return Suite(checkout.folder, output, **{"quick": False, "say": lambda message: None, **more})


def statuses(record) -> dict[str, str]:
    return {run["name"]: run["status"] for run in record["runs"]}


def test_all_run_whatever_becomes_of_the_others(checkout, tmp_path):
    benchmarks = [
        checkout("good", MET, words=("--size", "3")),
        checkout("far", MISSED, code=1),
        checkout("broken", None, code=3),
        checkout("silent", None),
        checkout("slow", MET, seconds=60, limit_s=1),
        checkout("odd", MET, code=1),  # nothing is missed, and it fails
        Benchmark("gone", "gone", "a script that is not there"),
        checkout("gpu", MET, needs_gpu=True),
    ]
    record = suite(checkout, tmp_path / "out").run(benchmarks)
    assert statuses(record) == {
        "good": "met", "far": "missed", "broken": "failed", "silent": "failed", "slow": "timed out", "odd": "failed",
        "gone": "left out", "gpu": "left out",
    }  # fmt: skip
    runs = {run["name"]: run for run in record["runs"]}
    assert runs["good"]["command"] == "python benchmarks/good.py --size 3"
    assert (tmp_path / "out" / runs["good"]["log"]).read_text().startswith("words ['--size', '3', '--json']")
    assert runs["slow"]["seconds"] < 20
    assert (runs["broken"]["why"], runs["silent"]["why"]) == ("exit code 3", "it wrote no result file")
    written = json.loads((tmp_path / "out" / "bench.json").read_text(), parse_constant=pytest.fail)
    assert statuses(written) == statuses(record)
    assert written["runs"][1]["figures"]["gap"]["measured"] == "NaN"  # JSON has no digits for it


def test_what_has_ended_is_not_run_again_and_what_failed_is(checkout, tmp_path):
    benchmarks = [checkout("good", MET), checkout("far", MISSED, code=1), checkout("broken", None, code=3)]
    suite(checkout, tmp_path / "out").run(benchmarks)
    ends = {run["name"]: run["ended"] for run in json.loads((tmp_path / "out" / "bench.json").read_text())["runs"]}
    for name in ("good", "far"):
        checkout(name, None, code=9)  # would fail now
    checkout("broken", MET)
    said = []
    record = suite(checkout, tmp_path / "out", say=said.append).run([*benchmarks, checkout("more", MET)])
    assert statuses(record) == {"good": "met", "far": "missed", "broken": "met", "more": "met"}
    assert [run["name"] for run in record["runs"]] == ["good", "far", "broken", "more"]
    assert {run["name"]: run["ended"] for run in record["runs"][:2]} == {name: ends[name] for name in ("good", "far")}
    assert "1/4 good: met before" in said


def test_an_interrupted_script_ends_and_is_run_again(checkout, tmp_path, default_interruption):
    benchmarks = [checkout("good", MET), checkout("long", MET)]
    script = checkout.folder / "benchmarks" / "long.py"
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)\n")
    with pytest.raises(KeyboardInterrupt):
        suite(checkout, tmp_path / "out").run(benchmarks)
    assert not _commands_with(str(script))
    assert statuses(json.loads((tmp_path / "out" / "bench.json").read_text())) == {"good": "met"}
    checkout("long", MET)
    assert statuses(suite(checkout, tmp_path / "out").run(benchmarks)) == {"good": "met", "long": "met"}


@pytest.fixture
def default_interruption():
    """SIGINT raises KeyboardInterrupt, whatever the test's own process does with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _commands_with(text: str) -> list[str]:
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if text in line and " ps " not in line]


def test_a_quick_run_takes_small_sizes_and_holds_no_goal_against_them(checkout, tmp_path):
    benchmarks = [
        checkout("far", MISSED, code=1), checkout("day", MET, quick=None, why_not="it takes a day"),
        checkout("broken", None, code=3),
    ]  # fmt: skip
    record = suite(checkout, tmp_path / "out", quick=True).run(benchmarks)
    assert statuses(record) == {"far": "done", "day": "left out", "broken": "failed"}
    assert record["runs"][0]["command"] == "python benchmarks/far.py --small"
    assert record["runs"][1]["why"] == "it has no quick form: it takes a day"
    shown = (tmp_path / "out" / "index.html").read_text()
    assert "A quick run" in shown and "it has no quick form: it takes a day" in shown
    assert "MISSED" not in shown and ">1</b>scripts work" in shown and "figures, not judged" in shown


def test_what_has_no_quick_form_says_why():
    assert all(bool(each.why_not) is (each.quick is None) for each in SUITE)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"schema": 1, "quick": true, "commit": "unknown", "runs": []}', "no JSON"]
)
def test_another_runs_folder_is_refused_and_left_alone(checkout, tmp_path, text):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bench.json").write_text(text)
    with pytest.raises(command.ConfigError, match="choose another --output"):
        suite(checkout, tmp_path / "out").run([checkout("good", MET)])
    assert (tmp_path / "out" / "bench.json").read_text() == text


class Links(HTMLParser):
    """What a page loads, links to, and says."""

    def __init__(self) -> None:
        super().__init__()
        self.loads, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.loads += [found["src"]] if "src" in found else []
        self.links += [found["href"]] if tag == "a" else []
        assert tag not in ("script", "link", "img", "iframe")

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_needs_no_network_and_says_what_was_met_and_what_was_missed(checkout, tmp_path):
    benchmarks = [checkout("good", MET), checkout("far", MISSED, code=1), checkout("broken", None, code=3)]
    suite(checkout, tmp_path / "out").run(benchmarks)
    text = (tmp_path / "out" / "index.html").read_text()
    parser = Links()
    parser.feed(text)
    assert parser.loads == [] and "http" not in text.replace("http-equiv", "")
    assert parser.links and all((tmp_path / "out" / link).is_file() for link in parser.links)
    said = " ".join(" ".join(parser.text).split())
    assert "ratio <b> <= 1 0.5 met" in said  # escaped in the source
    assert "gap <= 1 no number MISSED" in said
    assert "1.5" in said and "more than 20" in said and "bitsandbytes not installed" in said
    assert "exit code 3" in said


def test_bars_are_as_long_as_what_they_stand_for():
    rows = [{"name": name, "value": value, "ours": name == "a"} for name, value in (("a", 1.0), ("b", 4.0))]
    rows.append({"name": "c", "value": 9.0, "ours": False, "at_least": True})
    bars = {"title": "t", "unit": "ms", "lower_is_better": True, "rows": rows}
    run = {"name": "n", "what": "w", "status": "met", "figures": {}, "bars": [bars]}
    text = page({"quick": False, "commit": "c", "begun": "b", "environment": {}, "runs": [run]})
    widths = [float(width) for width in re.findall(r'style="width: ([\d.]+)%', text)]
    assert widths[0] / widths[1] == pytest.approx(1 / 4)
    assert widths[2] == widths[1]  # stopped: longer than can be said


@pytest.mark.parametrize("theme", [0, 1])
def test_text_has_contrast_in_light_and_dark(theme):
    light, dark = ({}, {})
    for found, block in zip((light, dark), re.findall(r":root \{([^}]*)\}", STYLE), strict=True):
        found |= dict(re.findall(r"--(\w+): (#\w{6})", block))
    colours = (light, dark)[theme]
    for ink in ("ink", "soft", "met", "missed", "other", "ours"):
        for paper in ("paper", "card"):
            low, high = sorted((_luminance(colours[ink]), _luminance(colours[paper])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, paper)


def _luminance(colour: str) -> float:
    """WCAG 2.1, relative luminance."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_command_runs_all_of_a_checkout(checkout, tmp_path, monkeypatch, capsys):
    made = (checkout("good", MET), checkout("far", MISSED, code=1))
    monkeypatch.setattr(command, "SUITE", made)
    monkeypatch.setattr(command, "_checkout", lambda: checkout.folder)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--all", "--only", "good", "--json"]) == 0
    captured = capsys.readouterr()
    assert statuses(json.loads(captured.out)) == {"good": "met"}
    assert "runs/bench-unknown/index.html" in captured.err
    assert main(["bench", "--all"]) == 1
    assert main(["bench", "--all", "--quick", "--output", "small", "--limit-s", "30"]) == 0
    assert (tmp_path / "small" / "index.html").is_file()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "or --all"),
        (["casts", "--all"], "or --all"),
        (["cast"], "did you mean 'casts'?"),
        (["--all", "--only", "cast"], "did you mean 'casts'?"),
        (["--all", "--limit-s", "0"], "more than 0"),
        (["casts", "--output", "x"], "--output is for --all"),
        (["sft", "--quick"], "no quick form, since it trains a model that is downloaded: leave it out"),
    ],
)
def test_wrong_words(words, expected, capsys):
    assert main(["bench", *words]) == 2
    assert expected in capsys.readouterr().err


def test_every_script_that_writes_a_result_is_in_the_suite():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py")} - NO_BENCHMARKS
    assert scripts <= {benchmark.script for benchmark in SUITE}
    assert len({benchmark.name for benchmark in SUITE}) == len(SUITE)


def test_a_stopped_script_takes_its_children_with_it(tmp_path):
    program = "import subprocess, sys, time; subprocess.Popen(['sleep', '613']); print(1, flush=True); time.sleep(600)"
    with (tmp_path / "log").open("wb") as log:
        assert run_limited([sys.executable, "-c", program], tmp_path, dict(os.environ), log, 1.0) is None
    assert not _commands_with("sleep 613")


WRITES_TWO = """
import json, os, pathlib
folder = pathlib.Path(os.environ["NARROWGAUGE_RESULTS"])
for name in "ab":
    figures = {name: {"measured": 0.5, "at_most": 1.0}}
    bars = [{"title": name, "unit": "ms", "lower_is_better": True, "rows": []}]
    (folder / f"{name}.json").write_text(json.dumps({"figures": figures, "bars": bars}))
"""


def test_all_results_of_a_script_are_taken_and_those_of_an_earlier_try_are_not(checkout, tmp_path):
    benchmark = checkout("two")
    (checkout.folder / "benchmarks" / "two.py").write_text(WRITES_TWO)
    (tmp_path / "out" / "results" / "two").mkdir(parents=True)
    (tmp_path / "out" / "results" / "two" / "stale.json").write_text(
        '{"figures": {"old": {"measured": 9, "at_most": 1}}}'
    )
    (run,) = suite(checkout, tmp_path / "out").run([benchmark])["runs"]
    assert run["status"] == "met" and set(run["figures"]) == {"a", "b"}
    assert [bars["title"] for bars in run["bars"]] == ["a", "b"]
    assert run["results"] == ["results/two/a.json", "results/two/b.json"]


def test_the_end_of_the_log_says_why_and_one_limit_is_for_all(checkout, tmp_path):
    long, slow = checkout("long"), checkout("slow", seconds=60, limit_s=100)
    (checkout.folder / "benchmarks" / "long.py").write_text("for n in range(40): print(n)\nraise SystemExit(3)")
    (first,) = suite(checkout, tmp_path / "long").run([long])["runs"]
    (second,) = suite(checkout, tmp_path / "slow", limit_s=1.5).run([slow])["runs"]
    assert (first["status"], first["tail"].split()) == ("failed", [str(n) for n in range(10, 40)])
    assert (second["status"], second["why"]) == ("timed out", "it was stopped after 1.5 s") and second["seconds"] < 20
