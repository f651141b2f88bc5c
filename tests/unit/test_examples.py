"""The examples run, and learn."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

import narrowgauge as ng

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed"])
def test_the_minimal_loop_tells_two_spirals_apart(recipe, capsys):
    assert runpy.run_path(str(EXAMPLES / "minimal_loop.py"))["train"](recipe, 200) > 0.9


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_schedule_that_is_stopped_and_continued_is_the_run_that_never_stopped(recipe, tmp_path, capsys):
    example = runpy.run_path(str(EXAMPLES / "precision_schedule.py"))
    losses = example["train"](recipe, "bf16", 40, tmp_path / "checkpoint")
    assert losses[-1] < 0.3 * losses[0]

    model, optimizer = example["make_run"](ng.recipe(recipe).switch_at(30, "bf16"))
    assert ng.report(model)["1.down"].status == "converted"
    assert example["learn"](model, optimizer, range(40)) == losses
    assert ng.report(model)["1.down"].status == "kept"


@pytest.mark.slow
def test_a_hugging_face_model_learns_in_fp8_and_saves_plain_weights(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    losses = runpy.run_path(str(EXAMPLES / "huggingface_model.py"))["train"]("fp8_current", 15, str(tmp_path))
    assert losses[-1] < 0.7 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_a_trainer_learns_in_8_bits_and_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    train = runpy.run_path(str(EXAMPLES / "huggingface_trainer.py"))["train"]
    trainer = train("narrow8", 30, str(tmp_path))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert trainer.ledger.per_parameter <= 6.2
    assert train("narrow8", 32, str(tmp_path), resume=True).state.global_step == 32


@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_one_loop_runs_every_recipe(recipe, capsys):
    example = runpy.run_path(str(EXAMPLES / "every_recipe.py"))
    losses, ledger = example["train"](recipe, 40)
    assert losses[-1] < 0.1 * losses[0]
    at_most = {"fp8_lm_o1": 11.1, "fp8_lm_o2": 6.1, "fp8_lm_o3": 7.1, "narrow8": 6.2, "narrow8_sr": 5.2}
    assert ledger.per_parameter <= at_most.get(recipe, 16.6)


def test_the_loop_that_runs_every_recipe_has_ten_lines():
    text = (EXAMPLES / "every_recipe.py").read_text()
    loop = text[text.index("    model = make_model()") : text.index("    return losses")]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 12
