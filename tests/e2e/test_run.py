"""What a run leaves: events in order, a journal, validation figures, bytes per role, TensorBoard, compiled steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import narrowgauge as ng
from narrowgauge.data.prepare import prepare_data
from narrowgauge.observe import journal
from narrowgauge.train import events
from narrowgauge.train.evaluate import evaluate
from narrowgauge.train.loop import run
from narrowgauge.train.trained import Trained


def record(config: Any) -> tuple[events.Result, list[events.Event]]:
    seen: list[events.Event] = []
    return run(config, seen.append), seen


def test_events_come_in_order_and_say_what_the_journal_says(make_config) -> None:
    result, seen = record(make_config("a", steps=6, eval_every=3, save_every=3, recipe="fp8_delayed"))
    kinds = [type(event).__name__ for event in seen if not isinstance(event, events.Preparing)]
    third = ["StepDone"] * 3 + ["Evaluated", "CheckpointSaved"]
    assert kinds == ["RunStarted", *third, *third, "Sampled", "Finished"]
    rows = journal.read(result.run_dir / "journal.jsonl")
    steps = [event for event in seen if isinstance(event, events.StepDone)]
    for row, event in zip(rows.of_kind("step"), steps, strict=True):
        for key in ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "skipped", "loss_scale"):
            assert row[key] == getattr(event, key), key
        assert row.get("statistics") == event.statistics
    assert rows.header["recipe"]["name"] == "fp8_delayed" and rows.header["versions"]["torch"] == torch.__version__
    finished = seen[-1]
    assert isinstance(finished, events.Finished) and finished.tokens == 6 * 2 * 32
    assert finished.evaluation is not None and finished.evaluation.step == 6
    assert result.evaluation == finished.evaluation and result.last_loss == steps[-1].loss


def test_sampled_steps_have_the_share_saturated_and_flushed_of_each_role(make_config) -> None:
    _, seen = record(make_config("a", steps=6, statistics_every=3, recipe="fp8_delayed"))
    found = {event.step: event.statistics for event in seen if isinstance(event, events.StepDone)}
    assert [step for step, statistics in found.items() if statistics] == [3, 6]
    statistics = found[6]
    assert statistics is not None and set(statistics) == {"input", "weight", "grad_output"}
    for measures in statistics.values():
        assert set(measures) == {"saturated", "flushed"} and all(0 <= share < 0.5 for share in measures.values())


def test_counting_does_not_change_the_run(make_config, ending) -> None:
    counted, plain = (run(make_config(name, statistics_every=n)).run_dir for name, n in (("a", 1), ("b", 0)))
    assert ending(counted).files == ending(plain).files


def test_the_ledger_has_float32_adamw_and_narrow_activations(make_config) -> None:
    ledgers = {}
    for recipe in ("fp32", "fp8_current"):
        result, _ = record(make_config(recipe, recipe=recipe, steps=1, eval_every=0))
        assert result.ledger is not None
        ledgers[recipe] = result.ledger
    found = ledgers["fp8_current"]
    for role in ("param", "grad", "exp_avg", "exp_avg_sq"):
        assert found.roles[role] == 4 * found.parameters
    assert found.activation is not None and 0 < found.activation < ledgers["fp32"].activation


def test_training_learns_text_with_structure(make_config) -> None:
    changes = {"steps": 60, "batch_size": 8, "eval_every": 0, "optimizer": {"lr": 1e-2}, "recipe": "fp8_delayed"}
    result, seen = record(make_config("a", **changes))
    first = next(event for event in seen if isinstance(event, events.StepDone))
    assert first.loss == pytest.approx(math.log(257), abs=0.3)
    assert result.evaluation is not None and result.evaluation.loss < 2.5


def test_validation_figures_follow_from_the_loss(make_config, cache: Path) -> None:
    config = make_config("a")
    dataset = prepare_data(config.data.build(), cache)

    class Uniform(torch.nn.Module):
        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[None, torch.Tensor]:
            return None, torch.tensor(math.log(257))

    found = evaluate(Uniform(), dataset, batch_size=2, sequence_length=16, batches=3)
    assert found.tokens == 3 * 2 * 16
    assert found.perplexity == pytest.approx(257)
    assert found.bits_per_byte == pytest.approx(math.log2(257) * found.tokens / found.text_bytes)
    assert found.tokens - 6 <= found.text_bytes <= found.tokens  # a byte a token, none for the end of a document
    everything = (len(dataset.validation.tokens) - 1) // 16 * 16
    for batch_size, batches in ((2, None), (7, None), (7, 10**6), (10**6, 1)):  # the last batch may be smaller
        whole = evaluate(Uniform(), dataset, batch_size=batch_size, sequence_length=16, batches=batches)
        assert whole.tokens == everything and whole.loss == pytest.approx(math.log(257))


def test_a_loaded_run_evaluates_to_the_same_loss(make_config) -> None:
    result, _ = record(make_config("a", recipe="fp8_delayed"))
    trained = Trained.open(result.run_dir)
    assert trained.step == 8 and not trained.model.training
    found = trained.evaluate(trained.dataset(), batches=2)
    assert result.evaluation is not None and found.loss == result.evaluation.loss


@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_validation_leaves_the_run_as_it_was(recipe: str, make_config, ending) -> None:  # case 13
    often, never = (
        run(make_config(name, recipe=recipe, steps=4, eval_every=n)).run_dir for name, n in (("a", 1), ("b", 0))
    )
    assert ending(often).steps == ending(never).steps
    assert ending(often).files == ending(never).files


def test_tensorboard_files_are_written_beside_the_journal(make_config) -> None:
    result, seen = record(make_config("a", tensorboard=True, recipe="fp8_delayed"))
    read = EventAccumulator(str(result.run_dir / "tensorboard")).Reload()
    steps = {event.step: event for event in seen if isinstance(event, events.StepDone)}
    for name in ("loss", "grad_norm", "lr", "tokens_per_s", "loss_scale"):
        found = {scalar.step: scalar.value for scalar in read.Scalars(f"train/{name}")}
        assert found == pytest.approx({step: getattr(event, name) for step, event in steps.items()}, rel=1e-6), name
    assert [scalar.step for scalar in read.Scalars("validation/loss")] == [4, 8]
    for role in ("input", "weight", "grad_output"):
        for measure in ("saturated", "flushed"):
            assert [scalar.step for scalar in read.Scalars(f"casts/{role}/{measure}")] == [3, 6]


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports torch.jit
@pytest.mark.parametrize("recipe", ["fp8_delayed"])
def test_compiled_steps_agree_with_eager_ones(recipe: str, make_config) -> None:
    losses = []
    for compiled in (False, True):
        result, seen = record(make_config(f"c{compiled}", recipe=recipe, steps=4, eval_every=0, compile=compiled))
        losses.append([event.loss for event in seen if isinstance(event, events.StepDone)])
        assert Trained.open(result.run_dir).step == 4
    assert losses[0] == pytest.approx(losses[1], abs=2e-2)
