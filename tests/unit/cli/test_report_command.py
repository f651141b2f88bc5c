"""`narrowgauge report` writes the page and its pictures, prints what needs attention, and refuses what is no run."""

from __future__ import annotations

import json

import pytest

from narrowgauge.cli import pictures
from narrowgauge.cli.main import main
from synthetic_run import write_run


def saturated(step, row):
    if row["kind"] == "precision":
        row["layers"]["blocks.0.mlp.up"]["input"].update(saturated=0.63, sqnr_db=3.1)
    return row


def test_the_page_lies_in_the_run_and_the_findings_are_printed(tmp_path, capsys):
    folder = write_run(tmp_path / "mine", change=saturated)
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "- serious: blocks.0.mlp.up: values of the input are cut off" in shown and "to do: " in shown
    assert (folder / "report.html").read_text().startswith("<!DOCTYPE html>") and f"wrote {folder}" in shown


def test_the_page_never_takes_the_place_of_the_journal(tmp_path, capsys):
    folder = write_run(tmp_path / "mine")
    before = (folder / "journal.jsonl").read_bytes()
    assert main(["report", str(folder), "--output", str(folder / "journal.jsonl")]) == 2
    assert "found the journal itself" in capsys.readouterr().err
    assert (folder / "journal.jsonl").read_bytes() == before


def test_a_clean_run_says_so_with_how_often_it_was_sampled(tmp_path, capsys):
    assert main(["report", str(write_run(tmp_path / "clean"))]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("nothing needs attention\n1 note more") and "in 20 steps, one in every 10" in shown


def test_json_holds_findings_and_figures_as_data(tmp_path, capsys):
    folders = [write_run(tmp_path / name, change=change) for name, change in (("a", saturated), ("b", lambda s, r: r))]
    words = ["report", *map(str, folders), "--output", str(tmp_path / "x.html"), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(tmp_path / "x.html") and found["attention"][0]["rule"] == "saturation"
    first, second = found["runs"]
    assert first["layers"]["blocks.0.mlp.up"]["input"]["saturated"] == {
        "first": 0.63, "worst": 0.63, "worst_step": 10, "last": 0.63,
    }  # fmt: skip
    assert second["difference"] is None and max(map(abs, first["difference"]["mean"])) == 0.0


def test_the_last_run_or_the_one_named_is_the_reference(tmp_path, capsys):
    a, b = (str(write_run(tmp_path / name, offset=offset)) for name, offset in (("a", 0.0), ("b", -0.2)))
    page = ["--output", str(tmp_path / "x.html"), "--json"]
    main(["report", a, b, *page])
    assert [run["difference"] is None for run in json.loads(capsys.readouterr().out)["runs"]] == [False, True]
    main(["report", a, b, "--reference", a, *page])
    assert [run["difference"] is None for run in json.loads(capsys.readouterr().out)["runs"]] == [True, False]
    main(["report", a, "--reference", b, *page])
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["a", "b"]


def test_pictures_of_both_kinds(tmp_path, capsys):
    from PIL import Image

    folder = write_run(tmp_path / "mine", layers=2)
    words = ["report", str(folder), "--figures", str(tmp_path / "pictures"), "--format", "svg", "png"]
    assert main(words) == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"loss.svg", "loss.png", "map-sqnr_db-mine.svg", "bytes.png"} <= names
    picture = Image.open(tmp_path / "pictures" / "loss.png").convert("L")
    assert picture.width == 2000
    title = picture.crop((0, 0, 200, 70)).histogram()  # "Loss", dark on white: words are drawn, not left out
    assert sum(title[:128]) > 200


def test_png_without_the_renderer_or_a_font_says_what_to_do(monkeypatch, tmp_path, capsys):
    folder = write_run(tmp_path / "mine", steps=20, layers=1)
    words = ["report", str(folder), "--figures", str(tmp_path / "pictures"), "--format", "png"]
    monkeypatch.setattr(pictures, "_fonts", lambda: iter(()))
    monkeypatch.setattr("sys.platform", "linux")
    assert main(words) == 2 and "fonts-dejavu-core" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    assert main(words) == 2 and "narrowgauge[report]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{here}/nothing"], 2, "expected a run folder"),
        (["{here}"], 2, "which is no run: give one of the runs in it: {here}/mine\n"),
        (["{here}/mine/empty"], 2, "without a journal.jsonl, which is no run: give the folder of a run"),
        (["{here}/mine", "--port", "80"], 2, "add --live"),
        (["{here}/mine", "--output", "{here}"], 2, "expected a file"),
        (["{here}/mine", "--output", "{here}/no/x.html"], 1, "No such file"),
        (["{here}/mine", "--format", "gif"], 2, "invalid choice"),
        (["{here}/mine", "--live", "--port", "70000"], 2, "1 to 65535"),
        ([], 2, "RUN"),
    ],
)
def test_what_does_not_hold_together_is_refused(tmp_path, capsys, words, code, said):
    (write_run(tmp_path / "mine", steps=10, layers=1) / "empty").mkdir()
    assert main(["report", *(word.format(here=tmp_path) for word in words)]) == code
    assert said.format(here=tmp_path) in capsys.readouterr().err
