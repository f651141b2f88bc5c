"""The program as a whole: help, exit codes, errors in one line, pipes and terminals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

from narrowgauge.cli.main import COMMANDS, main


def run_program(*words: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "narrowgauge", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(words, capsys):
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command, capsys):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "examples:" in shown
    assert f"narrowgauge {command}" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_prose_of_help_fits_a_narrow_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out.partition("examples:")[0]
    assert not [line for line in said.splitlines() if len(line) > 80 and not line.startswith(" ")]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["eval", "--help"]], ids=" ".join)
def test_help_answers_within_a_second_beyond_torch(words):
    # processor time: what other processes do meanwhile must not decide
    code = (
        "import torch, numpy, sys, time; start = time.process_time(); from narrowgauge.cli.main import main\n"
        f"main({words}); print(time.process_time() - start, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert float(done.stderr) < 1.0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tran"], "unknown command 'tran'; did you mean 'train'?"),
        (["--versio"], "unknown option '--versio'; did you mean '--version'?"),
        (["chart", "--jsn"], "unknown option '--jsn'; did you mean '--json'?"),
        (["chart", "fp8_curent"], "did you mean 'fp8_current'?"),
        (["train", "--recipe", "fp8_delay"], "did you mean 'fp8_delayed'?"),
        (["train", "--optimiser.lr", "1"], "optimizer"),
        (["train", "--stepps", "5"], "steps"),
        (["train", "--model.preset", "tinny"], "did you mean 'tiny'?"),
        (["bench", "liner"], "did you mean 'linear'?"),
        (["generate"], "required"),
        (["generate", "RUN", "--prompt", "-x"], "--OPTION=-VALUE"),
        (["train", "--data.corpus", "pythn"], "did you mean 'python'?"),
        (["train", "--data.corpus", "nowhere/*.txt"], "no file matches"),
        (["train", "--data.vocab_size", "100000000000000"], "at most"),
        (["train", "--seed", "99999999999999999999999"], "seed"),
        (["train", "--optimizer", "fast", "--optimizer.lr", "1"], "optimizer: expected keys and values"),
        (["train", "--recipe_fields", "{1: 2}"], "expected names"),
        (["chart", "--markdown", "--json"], "found --markdown and --json"),
        (["chart", "--picture", "chart.svg", "--json"], "found --picture and --json"),
        (["chart", "--picture", "chart.bmp"], "ends in .svg"),
        (["chart", "--picture", "nowhere/chart.svg"], "expected a file that can be written"),
    ],
)
def test_a_wrong_word_exits_with_2_and_names_the_closest(words, expected, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err


def test_options_are_not_abbreviated(capsys):
    assert main(["chart", "--mark"]) == 2
    assert "did you mean '--markdown'?" in capsys.readouterr().err


def test_debug_shows_the_traceback():
    done = run_program("chart", "fp8_curent", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


def test_a_missing_run_folder_is_a_bad_argument_told_in_one_line(tmp_path, capsys):
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_ran_out_is_told_in_one_line(error, monkeypatch, capsys):
    def allocates(argv):
        raise error

    monkeypatch.setattr("narrowgauge.cli.chart.chart", allocates)
    assert main(["chart"]) == 1
    assert "lower batch_size" in capsys.readouterr().err


def test_an_error_of_our_own_making_keeps_its_traceback(monkeypatch):
    def fails(argv):
        raise RuntimeError("a bug")

    monkeypatch.setattr("narrowgauge.cli.chart.chart", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["chart"])


def test_interruption_exits_with_130(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("narrowgauge.cli.chart.chart", interrupted)
    assert main(["chart"]) == 130


def test_a_reader_that_goes_away_leaves_no_traceback():
    script = f"{sys.executable} -m narrowgauge chart --json; echo code $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({script}) | true"], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    assert "code" in done.stderr


def test_a_standard_output_that_the_shell_closed_is_no_error():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m narrowgauge chart >&-"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_survives_a_terminal_that_is_not_utf8(encoding):
    done = run_program("doctor", env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    assert done.returncode == 0, done.stderr


def test_a_warning_is_one_line(monkeypatch, capsys):
    def warns(argv):
        warnings.warn("masters were made", stacklevel=1)
        return 0

    monkeypatch.setattr("narrowgauge.cli.chart.chart", warns)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["chart"]) == 0
    assert capsys.readouterr().err == "warning: masters were made\n"


def test_version(capsys):
    import narrowgauge

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"narrowgauge {narrowgauge.__version__}\n"


def test_json_of_chart_and_doctor_parses(capsys):
    for command in ("chart", "doctor"):
        assert main([command, "--json"]) == 0
        json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ["trian"],
        ["train", "--stepz", "3"],
        ["train", "--steps", "-2"],
        ["train", "--steps", "2"],  # for one process
        ["resume"],
        ["resume", "nowhere"],
        ["resume", "nowhere", "--guard.mode", "[1"],
        ["resume", "nowhere", "--checkpont", "last-good"],
        ["resume", "nowhere", "--live-port", "80"],
        ["sft", "--stepz", "3"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_on_all_processes_is_told_by_the_first(words: list[str], capsys, monkeypatch) -> None:
    for rank in ("0", "1"):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
            monkeypatch.setenv(name, value)
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("error: ") == (rank == "0")
