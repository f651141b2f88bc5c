"""The whole of tuning on a tiny model: what it keeps to, what it refuses, and that it says what it did."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from narrowgauge.data.loader import BatchStream
from narrowgauge.data.prepare import prepare_data
from narrowgauge.errors import CheckpointError, ConfigError, DataError
from narrowgauge.recipes.files import read_recipe, recipe_text
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.loop import run
from narrowgauge.tune.options import Options, Progress
from narrowgauge.tune.picture import kinds_and_depths, picture
from narrowgauge.tune.result import HAND, TUNED, Tuned
from narrowgauge.tune.tuner import Start, tune
from narrowgauge.tune.verify import model_with, short_run

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = Options(choices=("fp8_current", "nvfp4"), batches=2, probe_batch_size=1, steps=2)
MakeConfig = Callable[..., TrainConfig]


def quick(**changes) -> Options:
    return dataclasses.replace(QUICK, **changes)


@pytest.fixture(scope="module")
def tuned(make_config: MakeConfig) -> Tuned:
    return tune(make_config(), QUICK)


def test_it_keeps_to_the_hand_rules_bytes_and_loses_less_by_its_own_count(tuned: Tuned) -> None:
    hand, best = tuned.contenders[HAND], tuned.tuned
    assert list(tuned.contenders) == ["all bf16", "all nvfp4", HAND, TUNED]
    assert [name for name, chosen in hand.assignment.items() if chosen == "bf16"] == [tuned.layers[0], tuned.layers[-1]]
    assert best.bytes_per_token <= hand.bytes_per_token and best.cost <= hand.cost
    for each in tuned.contenders.values():
        costs = [tuned.cost(layer, chosen).value for layer, chosen in each.assignment.items()]
        assert each.cost == pytest.approx(math.fsum(costs))
        assert len(each.runs) == 1 and len(each.runs[0].losses) == 2 and math.isfinite(each.held_out)
    assert tuned.contenders["all bf16"].time_share == 1 and tuned.contenders["all nvfp4"].time_share == 0.25
    for layer, chosen in best.assignment.items():
        own = tuned.recipe.for_layer(layer)
        assert own.quantizes_gemms == (chosen != "bf16")


def test_the_same_again_is_the_same(make_config: MakeConfig, tuned: Tuned) -> None:
    again, first = tune(make_config(), QUICK).to_dict(), tuned.to_dict()
    del again["seconds"], first["seconds"]
    assert json.dumps(again, sort_keys=True) == json.dumps(first, sort_keys=True)


def test_the_file_holds_the_recipe_and_a_short_run_by_it_is_the_tuned_one(
    make_config: MakeConfig, tuned: Tuned, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(recipe_text(tuned.recipe, "two\nlines"))
    assert path.read_text().startswith("# two\n# lines\nname: tuned\n")
    assert read_recipe(path) == tuned.recipe
    config = make_config(recipe=str(path), steps=2, schedule={"warmup_steps": 1})
    dataset = prepare_data(config.data.build(), config.cache_dir)
    found, _ = short_run(config, dataset, config.build_recipe().resolve("cpu"))
    assert found == tuned.tuned.runs[0]


def test_pictures_name_every_layers_choice(tuned: Tuned) -> None:
    drawn = picture(tuned, "Title & more")
    assert drawn.startswith("<svg") and "Title &amp; more" in drawn
    for layer, chosen in tuned.tuned.assignment.items():
        assert f"{layer}: " in drawn and chosen in drawn
    kinds, depths, places = kinds_and_depths([*tuned.layers, "lm_head"])
    assert kinds == ["attention.qkv", "attention.out", "mlp.gate_up", "mlp.down", "lm_head"]
    assert depths == ["0", "1", ""] and places["blocks.1.mlp.down"] == ("mlp.down", "1")


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({"bytes_share": 0.8}, lambda t, best, wide: best.bytes_per_token <= 0.8 * wide.bytes_per_token),
        ({"time_share": 0.4}, lambda t, best, wide: best.time_share <= 0.4),
        ({"wide_layers": 2}, lambda t, best, wide: list(best.assignment.values()).count("bf16") == 2),
        ({"bytes_per_token": 1e9}, lambda t, best, wide: best.cost == 0),
    ],
)
def test_budgets_are_kept(changes, met, make_config: MakeConfig) -> None:
    found = tune(make_config(), quick(**changes))
    wide, hand = found.contenders["all bf16"], found.contenders[HAND]
    assert met(found, found.tuned, wide)
    assert (
        met(found, hand, wide) or list(hand.assignment.values()).count("bf16") == 0 or changes.get("wide_layers") == 2
    )


def test_the_hand_rule_by_blocks_takes_the_bytes_of_whole_blocks(make_config: MakeConfig) -> None:
    config = make_config(model={"layers": 3, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64, "context": 32})
    found = tune(config, quick(hand_rule="blocks"))
    hand = found.contenders[HAND].assignment
    assert [name.split(".")[1] for name, chosen in hand.items() if chosen == "bf16"] == ["0"] * 4 + ["2"] * 4
    assert found.tuned.bytes_per_token <= found.contenders[HAND].bytes_per_token


def test_a_budget_that_nothing_meets_says_the_nearest_and_that_one_can_be_met(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match=r"1 bytes a token: .* the nearest is [\d.]+, with 8 in nvfp4") as caught:
        tune(make_config(), quick(bytes_per_token=1.0))
    least = float(str(caught.value).split("the nearest is ")[1].split(",")[0])
    found = tune(make_config(), quick(bytes_per_token=least * (1 + 1e-5)))
    assert set(found.tuned.assignment.values()) == {"nvfp4"}
    with pytest.raises(ConfigError, match=r"0.2 of the time .* the nearest is 0.25"):
        tune(make_config(), quick(time_share=0.2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes_per_token": 0}, "bytes_per_token=0: expected a finite number above 0"),
        ({"bytes_share": -0.5}, "bytes_share=-0.5"),
        ({"time_share": math.nan}, "time_share=nan"),
        ({"bytes_per_token": math.inf}, "bytes_per_token=inf"),
        ({"bytes_per_token": 5, "bytes_share": 0.5}, "found both"),
        ({"wide_layers": -1}, "wide_layers=-1"),
        ({"hand_rule": "block"}, "did you mean 'blocks'"),
        ({"batches": 1}, "batches=1: expected at least 2"),
        ({"probe_batch_size": 0}, "probe_batch_size=0"),
        ({"steps": -1}, "steps=-1"),
        ({"seeds": 0}, "seeds=0"),
    ],
)
def test_options_out_of_range(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        quick(**changes)


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"steps": 1}, ConfigError, "steps=1: expected at least 2 without a start"),
        ({"recipe_fields": {"min_size": 4096}}, {}, ConfigError, "layers to choose for, found none"),
        ({"parallel": {"data": 2}}, {}, ConfigError, "parallel: expected one process .* set its sizes to 1"),
        ({"switches": [{"after_step": 1, "recipe": "bf16"}]}, {}, ConfigError, r"switches: .* set it to \[\]"),
        ({}, {"batches": 10**6}, ConfigError, "1000000 batches of 1 sequences: expected at most"),
        ({"data": {"corpus": "nothing/*.txt"}}, {}, DataError, "nothing"),
    ],
)
def test_what_cannot_be_tuned_says_why(changes, options, error, message, make_config: MakeConfig) -> None:
    with pytest.raises(error, match=message):
        tune(make_config(**changes), quick(**options))


def test_a_run_gives_its_weights_and_without_steps_it_is_only_read(make_config: MakeConfig) -> None:
    config = make_config(name="base", recipe="bf16", steps=4, eval_every=0, sample_tokens=0)
    result = run(config)
    start = Start.of_run(result.run_dir)
    told: list[Progress] = []
    found = tune(make_config(recipe="bf16"), quick(steps=0), told.append, start)
    assert result.evaluation is not None
    reference = found.contenders["all bf16"]
    assert reference.held_out == result.evaluation.loss and reference.runs[0].losses == ()
    assert found.slope == start.slope and found.worth == 0
    for each in found.contenders.values():  # what is read is the loss change alone
        changes = [found.measured.effects[key].loss_change for key in each.assignment.items() if key[1] != "bf16"]
        if len(changes) in (0, len(found.layers)):
            assert found.expected(each.assignment).value == pytest.approx(math.fsum(changes), abs=1e-12)
    assert [each.text for each in told if "training" in each.text] == []
    with pytest.raises(CheckpointError, match="expected weights of the configured model"):
        tune(make_config(model={"layers": 1, "width": 32, "heads": 2, "context": 32}), quick(steps=0), start=start)


def test_a_short_run_that_goes_on_is_expected_to_lose_of_its_own_gain(make_config: MakeConfig) -> None:
    config = make_config(recipe="bf16")
    dataset = prepare_data(config.data.build(), config.cache_dir)
    _, weights = short_run(dataclasses.replace(config, steps=10), dataset, config.build_recipe().resolve("cpu"))
    start = Start(weights, 5.0)
    read, gone_on = (tune(config, quick(steps=steps), start=start).contenders["all bf16"].held_out for steps in (0, 4))
    found = tune(config, quick(steps=4), start=start)
    assert found.worth == pytest.approx(read - gone_on) and 0 < found.worth < 5.0 == found.slope
    assert tune(make_config(), QUICK).worth == pytest.approx(tune(make_config(), QUICK).slope)


def test_float32_has_layers_to_tune_too(make_config: MakeConfig) -> None:
    config = make_config(recipe="fp32")
    dataset = prepare_data(config.data.build(), config.cache_dir)
    plain = config.build_recipe().resolve("cpu")
    _, weights = short_run(dataclasses.replace(config, steps=4), dataset, plain)
    found = tune(config, quick(steps=0, time_share=0.2), start=Start(weights, 1.0))
    assert found.wide == "fp32" and found.tuned.time_share <= 0.2 < found.contenders["all fp32"].time_share == 1
    assert found.contenders["all nvfp4"].time_share == 0.125
    model = model_with(config, dataset, weights)
    length = model.config.context
    stream = BatchStream(dataset.train, 1, length, config.seed + 7919)
    losses = [float(model(*stream.next())[1].detach()) for _ in range(2)]
    assert found.measured.losses == losses  # ours, all wide, are bitwise torch's


def test_each_seed_gives_every_contender_a_run(make_config: MakeConfig) -> None:
    found = tune(make_config(), quick(seeds=2))
    reference = found.contenders["all bf16"]
    for each in found.contenders.values():
        first, second = each.runs
        assert first.losses != second.losses
        above, error = each.above(reference)
        differences = [a.held_out - b.held_out for a, b in zip(each.runs, reference.runs, strict=True)]
        assert above == pytest.approx(sum(differences) / 2)
        assert error == pytest.approx(abs(differences[0] - differences[1]) / 2)


def test_progress_ends_where_it_says(make_config: MakeConfig) -> None:
    told: list[Progress] = []
    tune(make_config(), QUICK, told.append)
    last = {each.text: each for each in told}
    measuring = next(each for text, each in last.items() if text.startswith("measuring 8 layers x 2 choices"))
    assert measuring.done == measuring.total == 2 * (1 + 8 * 2 + 2)
    assert all(each.done == each.total == 2 for text, each in last.items() if text.startswith("training 2 steps"))


def test_an_interrupt_comes_through(make_config: MakeConfig) -> None:
    def interrupt(told: Progress) -> None:
        if told.text.startswith("measuring"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(make_config(), QUICK, interrupt)


def test_a_layer_that_a_cast_ruins_is_kept_wide_where_the_hand_rule_casts_it(make_config: MakeConfig) -> None:
    config = make_config(recipe="bf16")
    dataset = prepare_data(config.data.build(), config.cache_dir)
    settled = dataclasses.replace(config, steps=20)
    _, weights = short_run(settled, dataset, config.build_recipe().resolve("cpu"))
    planted = {name: value.clone() for name, value in weights.items()}
    planted["blocks.0.mlp_norm.weight"][::16] *= 2.0**17
    planted["blocks.0.mlp.gate_up.weight"][:, ::16] /= 2.0**17
    found = tune(config, quick(steps=0), start=Start(planted, 0.3))
    assert found.tuned.assignment["blocks.0.mlp.gate_up"] == "bf16"
    reference = found.contenders["all bf16"]
    assert found.contenders[HAND].above(reference)[0] > 5 * abs(found.tuned.above(reference)[0])
    assert torch.equal(weights["lm_head.weight"], planted["lm_head.weight"])
