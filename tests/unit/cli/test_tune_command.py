"""`narrowgauge tune` refuses what cannot be tuned before anything is measured, and leaves no file behind."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from narrowgauge.cli.main import main
from narrowgauge.cli.tune import Reporter, _divided, _parser, _stdout_to_stderr
from narrowgauge.tune.options import Progress


def test_words_are_divided_between_tune_and_train() -> None:
    words = ["runs/a", "--steps", "3", "--model.layers", "2", "--choices", "mxfp8", "nvfp4", "--recipe=bf16", "--json"]
    own, others = _divided(words, _parser())
    assert own == ["runs/a", "--steps", "3", "--choices", "mxfp8", "nvfp4", "--json"]
    assert others == ["--model.layers", "2", "--recipe=bf16"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--bytes-per-token", "0"], "bytes_per_token=0.0: expected a finite number above 0"),
        (["--bytes-per-token", "-3"], "bytes_per_token=-3.0"),
        (["--time-share", "nan"], "time_share=nan"),
        (["--batches", "1"], "batches=1: expected at least 2"),
        (["--steps", "0"], "expected at least 2 without a start"),
        (["--choices", "fp8_curent"], "did you mean 'fp8_current'?"),
        (["--choices", "bf16"], "casts no operand"),
        (["--model.widht", "32"], "did you mean 'model.width'?"),
        (["--model.layers", "0"], "layers=0: expected a whole number, at least 1"),
        (["--output", "tuned.txt"], "ends in .yaml, .yml, .json"),
        (["--output", "nowhere/tuned.yaml"], "expected a folder to write into, found none"),
        (["--picture", "tuned.png"], "--picture tuned.png: expected a name that ends in .svg"),
        (["--picture", "nowhere/tuned.svg"], "expected a folder to write into, found none"),
        (["--name", "mine"], "--name: an option of train that tune has no use for"),
        (["nothing"], "nothing: expected a run folder"),
        (["--seeds", "two"], "invalid int value"),
    ],
)
def test_wrong_words_exit_with_2(words, error, capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and error in captured.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_not_replaced(capsys, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("precious")
    assert main(["tune", "--output", str(path)]) == 2
    assert "expected no such file yet, found one: choose another name, or give --force" in capsys.readouterr().err
    assert path.read_text() == "precious"


def test_the_help_names_every_budget(capsys) -> None:
    assert main(["tune", "--help"]) == 0
    shown = capsys.readouterr().out
    for option in ("--bytes-per-token", "--bytes-share", "--time-share", "--wide-layers", "--choices", "--picture"):
        assert option in shown


def test_a_terminal_has_one_live_line_and_a_pipe_a_line_for_each_stage() -> None:
    told = [
        Progress("encoding", 0, 1),
        Progress("training", 0, 3),
        Progress("training", 3, 3),
        Progress("reading", 0, 0),
    ]
    shown = {}
    for is_terminal in (True, False):
        file = io.StringIO()
        with Reporter(as_json=False, console=Console(file=file, force_terminal=is_terminal, width=100)) as reporter:
            for each in told:
                reporter(each)
        shown[is_terminal] = file.getvalue()
    assert shown[False] == "encoding ...\ntraining ...\nreading ...\n"
    assert "training: done" in shown[True] and "reading" in shown[True]  # what was shown between depends on the clock


def test_a_run_of_several_processes_is_tuned_in_one(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "par"
    run.mkdir()
    (run / "config.yaml").write_text("parallel: {data: 2, tensor: 2}\ndata: {corpus: nothing/*.txt}\n")
    seen = []
    monkeypatch.setattr("narrowgauge.tune.tuner.Start.of_run", lambda run: seen.append(run))
    assert main(["tune", str(run)]) == 2  # there is no text
    assert "nothing/*.txt" in capsys.readouterr().err and seen == [str(run)]
    assert main(["tune", str(run), "--parallel.data", "2"]) == 2
    assert "parallel: expected one process" in capsys.readouterr().err


def test_what_libraries_print_goes_to_standard_error(capfd) -> None:
    with _stdout_to_stderr():
        os.write(1, b"from C")
    os.write(1, b"after")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("after", "from C")


PRINTING = """
import ctypes
from narrowgauge.cli.tune import _stdout_to_stderr
with _stdout_to_stderr():
    ctypes.CDLL(None).printf(b"from C, ")
    print("from Python")
print("after")
"""


def test_what_libraries_keep_for_later_goes_to_standard_error_too() -> None:
    """To a pipe, C and Python write once their buffers are full, or at the end."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", PRINTING], env=buffered, capture_output=True, text=True, check=True)
    assert done.stdout == "after\n" and "from C, " in done.stderr and "from Python" in done.stderr
