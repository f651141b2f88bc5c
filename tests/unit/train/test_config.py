"""The configuration: round trip, unknown keys, values that do not fit together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from narrowgauge.data import prepare
from narrowgauge.errors import ConfigError, NarrowgaugeError
from narrowgauge.models.config import GPTConfig
from narrowgauge.recipes.library import recipe
from narrowgauge.train.config import DataConfig, ModelConfig, ScheduleConfig, SwitchConfig, TrainConfig


def test_yaml_round_trip_keeps_every_value() -> None:
    config = TrainConfig(
        model=ModelConfig(preset="tiny", layers=2, tied_embeddings=True),
        schedule=ScheduleConfig(warmup_steps=3),
        recipe="fp8_delayed",
        recipe_fields={"tf32": True, "exclude": ["*.down"], "amax_history_len": 16},
        switches=[SwitchConfig(5, "bf16"), SwitchConfig(3, "fp8_current", {"fp8_format": "E4M3"})],
        name="x: y",
        clip=0.25,
    )
    assert TrainConfig.from_yaml(config.to_yaml()) == config
    assert TrainConfig.from_yaml("") == TrainConfig()


def test_the_default_configuration_holds_together() -> None:
    assert TrainConfig().recipe == "narrow8"
    TrainConfig().check()


def test_numbers_are_read_as_people_write_them() -> None:
    config = TrainConfig.from_yaml("optimizer: {lr: 1e-3, eps: 1}\nclip: 1")
    assert config.optimizer.lr == 1e-3 and isinstance(config.optimizer.eps, float) and config.clip == 1.0


def test_switches_are_the_schedule_of_the_recipe() -> None:
    text = "recipe: fp8_current\nswitches:\n- {after_step: 5, recipe: bf16}\n- {after_step: 3, recipe: fp8_delayed"
    config = TrainConfig.from_yaml(text + ", recipe_fields: {margin: 1}}\n")
    config.check()
    built = config.build_recipe()
    assert built.phases == (
        (0, recipe("fp8_current")),
        (3, recipe("fp8_delayed", margin=1)),
        (5, recipe("bf16")),
    )
    assert TrainConfig().build_recipe().schedule == ()


def test_model_and_data_sections_have_the_fields_of_what_they_build() -> None:
    names = {field.name for field in dataclasses.fields(ModelConfig)}
    assert names == {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab_size"} | {"preset"}
    ours, theirs = ({f.name: f.default for f in dataclasses.fields(c)} for c in (DataConfig, prepare.DataConfig))
    assert ours == theirs


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stpes": 3}, "'stpes'; did you mean 'steps'"),
        ({"model": {"with": 3}}, "'model.with'; did you mean 'model.width'"),
        ({"optimizer": {"learning": 1}}, "'optimizer.learning'"),
        ({"steps": "many"}, "steps='many': expected int, found str"),
        ({"steps": 2.5}, "steps=2.5: expected int"),
        ({"steps": True}, "steps=True: expected int"),
        ({"compile": 1}, "compile=1: expected bool"),
        ({"clip": "x"}, "clip='x': expected float"),
        ({"model": 3}, "model: expected keys and values"),
        ({"recipe_fields": []}, r"recipe_fields=\[\]: expected dict"),
        ({"switches": {"after_step": 1, "recipe": "bf16"}}, "switches=.*: expected list, found dict"),
        ({"switches": ["bf16"]}, "switches.0: expected keys and values, found 'bf16'"),
        ({"switches": [{"after_step": 1}]}, "switches.0: expected recipe, found only after_step: add it"),
        (
            {"switches": [{"after_step": 1, "recipes": "bf16"}]},
            "did you mean 'switches.0.recipe'",
        ),
        ({"switches": [{"after_step": "1e", "recipe": "bf16"}]}, "switches.0.after_step='1e': expected int, found str"),
    ],
)
def test_unknown_keys_and_wrong_types_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize("text", ["- a\n- b", "steps: [", "just words"])
def test_what_is_no_configuration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="configuration: expected"):
        TrainConfig.from_yaml(text)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 0}, "steps=0: expected at least 1"),
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
        ({"accumulation": -1}, "accumulation=-1"),
        ({"clip": -1.0}, "clip=-1.0: expected 0 or more"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"optimizer": {"lr": 0.0}}, "optimizer.lr=0.0: expected more than 0"),
        ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2=1.0"),
        ({"schedule": {"final_fraction": 2.0}}, "schedule.final_fraction=2.0"),
        ({"divergence": {"patience": 0}}, "divergence.patience=0"),
        ({"sequence_length": 300}, "sequence_length=300: expected at most the model's context, 256"),
        ({"model": {"context": 64}, "sequence_length": 65}, "at most the model's context, 64"),
        ({"model": {"preset": "gpt-125"}}, "unknown model 'gpt-125'; did you mean 'gpt-125m'"),
        ({"model": {"heads": 3}}, "multiple of heads=3"),
        ({"recipe": "fp8_delaid"}, "unknown recipe 'fp8_delaid'; did you mean 'fp8_delayed'"),
        ({"recipe_fields": {"margn": 1}}, "margn"),
        (
            {"switches": [{"after_step": 0, "recipe": "bf16"}]},
            "switches.0.after_step=0: expected a step .* 199",
        ),
        ({"switches": [{"after_step": 200, "recipe": "bf16"}]}, "switches.0.after_step=200: expected a step between"),
        ({"switches": [{"after_step": 2, "recipe": "bf61"}]}, "unknown recipe 'bf61'; did you mean 'bf16'"),
        ({"switches": [{"after_step": 2, "recipe": "bf16", "recipe_fields": {"x": 1}}]}, "unknown recipe field 'x'"),
        (
            {"recipe": "fp8_delayed", "switches": [{"after_step": 2, "recipe": "bf16"}] * 2},
            "one recipe after step 2, found two",
        ),
        ({"switches": [{"after_step": 2, "recipe": "fp16_pure"}]}, "'fp16_pure' after step 2 of 'narrow8': param="),
        ({"optimizer": {"offload": "disk"}}, "optimizer.offload='disk': expected cpu or null"),
        ({"optimizer": {"release_gradients": True}, "accumulation": 2}, "release_gradients=True with accumulation=2"),
        ({"optimizer": {"release_gradients": True}, "recipe": "fp16"}, "'fp16': expected .* without loss scaling"),
        ({"optimizer": {"release_gradients": True}, "recipe": "bf16"}, "'bf16', whose step torch takes .* use narrow8"),
        ({"data": {"validation_fraction": 1.0}}, "validation_fraction"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": ".."}, "name='..'"),
    ],
)
def test_values_out_of_range_say_what_was_expected(values: dict[str, Any], words: str) -> None:
    with pytest.raises(NarrowgaugeError, match=words):
        TrainConfig.from_dict(values).check()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 3\nseed: 1\nsteps: 4", "the key 'steps' twice"),
        ("model: {layers: 1}\nmodel: {width: 32}", "the key 'model' twice"),
        ("name: 2020-13-45", "month must be"),
        ("steps: " + "9" * 5000, "4300 digits"),
        ("a: " + "[" * 5000, "too deep"),
        ("a: [1", "expected ',' or ']'"),
        ("- 1", "found list"),
        ("recipe_fields: {1: 2}", "expected names as its keys, found 1"),
        ("clip: 1" + "0" * 400, "expected float"),
        ("model: null", "give model.KEY"),
    ],
)
def test_yaml_that_says_something_else_than_it_seems_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        TrainConfig.from_yaml(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values", [{"seed": 2**63}, {"seed": 2**64}, {"eval_every": -(10**400)}])
def test_integers_beyond_the_machine_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        TrainConfig.from_dict(values).check()
