"""The configuration of `train` from YAML files and the command line."""

from __future__ import annotations

import subprocess
import sys
from operator import attrgetter
from typing import Any

import pytest

from narrowgauge.cli.config import parse_arguments
from narrowgauge.errors import ConfigError
from narrowgauge.train.config import SwitchConfig, TrainConfig


def test_nothing_given_is_the_default_configuration() -> None:
    assert parse_arguments([]) == (TrainConfig(), False, None)


def test_a_written_configuration_is_read_back(tmp_path) -> None:
    words = ["--model.layers", "2", "--recipe_fields.exclude", '["*.down"]', "--name", "2024-01-01", "--clip", ".5"]
    config = parse_arguments([*words, "--json"]).config
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert parse_arguments(["--config", f"{tmp_path}/config.yaml"]) == (config, False, None)


def test_the_live_report_and_its_port() -> None:
    assert parse_arguments(["--live"]).live_port == 0
    assert parse_arguments(["--live", "--live-port", "8080"]).live_port == 8080
    with pytest.raises(ConfigError, match="add --live"):
        parse_arguments(["--live_port", "8080"])


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--optimizer.lr", "1e-3"], "optimizer.lr", 1e-3),
        (["--optimizer.eps=1"], "optimizer.eps", 1.0),
        (["--batch-size", "3"], "batch_size", 3),
        (["--steps", "5", "--steps", "6"], "steps", 6),
        (["--compile"], "compile", True),
        (["--compile", "--seed", "3"], "compile", True),
        (["--optimizer.fused", "false"], "optimizer.fused", False),
        (["--model.layers", "2", "--model.layers", "null"], "model.layers", None),
        (["--model", "{layers: 2}", "--model.width", "64"], "model.layers", 2),
        (["--name", "null"], "name", None),
        (["--name", "2024-01-01"], "name", "2024-01-01"),
        (["--sample_prompt", "-x"], "sample_prompt", "-x"),
        (["--sample_prompt", "{a: 1} "], "sample_prompt", "{a: 1} "),
        (["--sample_prompt", "null"], "sample_prompt", "null"),
        (["--sample_prompt", ""], "sample_prompt", ""),
        (["--recipe_fields", "{tf32: true}"], "recipe_fields", {"tf32": True}),
        (
            ["--recipe_fields.tf32", "true", "--recipe_fields.min_size", "2"],
            "recipe_fields",
            {"tf32": True, "min_size": 2},
        ),
        (
            ["--recipe_fields", "{tf32: true}", "--recipe_fields", "{moment_bits: 4}"],
            "recipe_fields",
            {"moment_bits": 4},
        ),
        (["--recipe_fields.exclude", "*.down"], "recipe_fields", {"exclude": "*.down"}),
        (["--recipe", "mxfp8", "--switches", "[{after_step: 9, recipe: bf16}]"], "switches", [SwitchConfig(9, "bf16")]),
        (
            ["--switches", "[{after_step: 9, recipe: bf16, recipe_fields: {tf32: true}}]", "--switches", "[]"],
            "switches",
            [],
        ),
    ],
)
def test_values_are_read_as_their_key_wants_them(words: list[str], key: str, value: Any) -> None:
    found = attrgetter(key)(parse_arguments(words).config)
    assert found == value and type(found) is type(value)


def test_files_and_keys_win_in_the_order_given(tmp_path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("steps: 2\noptimizer: {lr: 1e-3, beta2: 0.9}\nrecipe_fields: {tf32: true}\n")
    two.write_text("# nothing but a comment\n")
    words = ["--steps", "9", "--config", str(one), "--config", str(two), "--optimizer.lr", "5e-4"]
    config = parse_arguments([*words, "--recipe_fields.min_size", "1"]).config
    assert (config.steps, config.optimizer.lr, config.optimizer.beta2) == (2, 5e-4, 0.9)
    assert config.recipe_fields == {"tf32": True, "min_size": 1}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--stepps", "5"], "'stepps'; did you mean 'steps'"),
        (["--step", "5"], "'step'; did you mean 'steps'"),
        (["--modl.layers", "1"], "'modl.layers'; did you mean 'model.layers'"),
        (["--optimizer", "{lrr: 1}"], "'optimizer.lrr'; did you mean 'optimizer.lr'"),
        (["--optimizer", "fast"], "optimizer: expected keys and values or a file of them, found: .*'fast'"),
        (["--steps"], "--steps: expected one argument"),
        (["--steps", "2.5"], "steps=2.5: expected int"),
        (["--steps", "null"], "steps=None: expected int"),
        (["--steps", ""], "steps=: expected int"),
        (["--compile", "1"], "compile=1: expected bool"),
        (["--model.layers", "x"], "model.layers=x: expected .*int"),
        (["--recipe_fields", "x"], "recipe_fields=x: expected dict"),
        (["--switches", "bf16"], "switches=bf16: expected list"),
        (["--switches", "[bf16]"], r"switches: expected \[{after_step: STEP, recipe: NAME}, ...\], found: .*bf16"),
        (["--switches", "[{after_step: 3}]"], "switches: expected recipe in every item, found none in one: add it"),
        (["--switches", "[{after: 3, recipe: bf16}]"], "'switches.after'; did you mean 'switches.after_step'"),
        (["--switches", "[{after_step: x, recipe: bf16}]"], "switches=x: expected int"),
        (["steps"], "expected --KEY VALUE, found 'steps'"),
        (["-x", "1"], "expected --KEY VALUE, found '-x'"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: expected .* a file of them, found: File does not exist"),
    ],
)
def test_what_the_command_line_cannot_mean_is_named_in_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as error:
        parse_arguments(words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"model:\n  widht: 3\n", "'model.widht'; did you mean 'model.width'"),
        (b"stpes: 3\n", "'stpes'; did you mean 'steps'"),
        (b"steps: 2.5\n", "x.yaml: steps=2.5: expected int"),
        (b"steps:\n", "steps=None: expected int"),
        (b"optimizer: 3\n", "x.yaml: optimizer: expected keys and values, found 3"),
        (b"steps: [", "x.yaml: expected YAML"),
        (b"steps: 3\nsteps: 4\n", "x.yaml: expected YAML, found: the key 'steps' twice"),
        (b"- a\n", "x.yaml: expected keys and values, found: - a"),
        (b"name: \xff\n", "x.yaml: expected YAML in UTF-8"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(text: bytes, expected: str, tmp_path) -> None:
    (tmp_path / "x.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=expected) as error:
        parse_arguments(["--config", f"{tmp_path}/x.yaml", "--optimizer.lr", "1e-3"])
    assert "\n" not in str(error.value)


def test_help_describes_every_key(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_arguments(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for words in (
        "--optimizer.lr LR peak learning rate. (type: float, default: 0.002)",
        "--switches [ITEM,...]",
        "after fp8_delayed [{after_step: 180, recipe: bf16}]",
        "--config FILE",
        "examples:",
    ):
        assert words in shown


def test_jsonargparse_loads_only_where_train_parses() -> None:
    code = "import sys, narrowgauge.cli.train, narrowgauge.train.loop; sys.exit('jsonargparse' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
