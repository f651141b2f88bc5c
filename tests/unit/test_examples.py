"""The examples run, and learn."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "fp8_delayed"])
def test_the_minimal_loop_tells_two_spirals_apart(recipe, capsys):
    assert runpy.run_path(str(EXAMPLES / "minimal_loop.py"))["train"](recipe, 200) > 0.9


@pytest.mark.slow
def test_a_hugging_face_model_learns_in_fp8_and_saves_plain_weights(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    losses = runpy.run_path(str(EXAMPLES / "huggingface_model.py"))["train"]("fp8_current", 15, str(tmp_path))
    assert losses[-1] < 0.7 * losses[0]
    AutoModelForCausalLM.from_pretrained(tmp_path)
