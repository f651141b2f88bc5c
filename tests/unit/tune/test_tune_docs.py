"""The page about tuning: its commands are understood, and its examples are what the code says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from narrowgauge.cli.config import parse_arguments
from narrowgauge.cli.tune import _divided, _options, _parser
from narrowgauge.errors import ConfigError
from narrowgauge.tune.program import Budget, Problem, check

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "tune.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^narrowgauge tune .*$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command: str) -> None:
    parser = _parser()
    own, others = _divided(shlex.split(command)[2:], parser)
    _options(parser.parse(own))
    if "--data.corpus" not in others:  # whose text is not here
        parse_arguments(others).config.check()
    assert len(COMMANDS) == 3


def test_every_budget_is_explained() -> None:
    parser = _parser()
    for option in ("--bytes-per-token", "--bytes-share", "--time-share", "--wide-layers", "--hand-rule"):
        assert option in parser._option_string_actions and f"`{option}" in PAGE


def test_the_error_is_what_is_said() -> None:
    (shown,) = re.findall(r"^error: (a budget .*)$", PAGE, re.MULTILINE)
    layers = 16
    problem = Problem(
        [[0.0, 0.0]] * layers, [[1000.0, 3674.84375 / layers]] * layers, [[1, 0.25]] * layers, names=("bf16", "nvfp4")
    )
    with pytest.raises(ConfigError) as caught:
        check(problem, Budget(bytes=3000))
    assert str(caught.value) == shown


def test_the_example_runs(make_config, tmp_path: Path) -> None:
    from narrowgauge.train.loop import run

    (code,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    done = run(
        make_config(name="base", recipe="bf16", steps=2, eval_every=0, sample_tokens=0, schedule={"warmup_steps": 1})
    )
    imports, rest = code.split("\n\n", 1)
    known: dict = {}
    exec(imports, known)  # noqa: S102 (the page's own)
    first, *_ = rest.splitlines()
    first = (
        first.replace('"runs/NAME"', repr(str(done.run_dir)))
        .replace("steps=100", "steps=0, batches=2")
        .replace("=0.5", "=0.9")
    )
    known["TrainConfig"] = lambda: make_config(recipe="bf16")
    exec(first, known)  # noqa: S102
    assert set(known["found"].tuned.assignment) == set(known["found"].layers)
