"""Two ways in which low precision fails, made for real: the report of their journals names them in plain words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.errors import DivergenceError
from narrowgauge.observe.journal_writer import JournalWriter
from narrowgauge.observe.report_attention import attention
from narrowgauge.observe.report_run import RunReader
from narrowgauge.observe.run_header import header
from narrowgauge.recipes.serialize import to_dict
from narrowgauge.train import loop
from narrowgauge.train.assemble import Parts, assemble


@pytest.mark.slow
def test_an_input_that_grows_100_times_is_cut_off_by_its_stale_scale(tmp_path: Path) -> None:
    """Delayed scaling knows the amax of three steps before: 448 x scale is about the old amax, so most is beyond it."""
    torch.manual_seed(0)
    recipe = ng.recipe("fp8_delayed")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5), recipe)
    assert optimizer is not None
    observation = ng.observe.Observation(model, optimizer, every=1)
    writer = JournalWriter.create(tmp_path / "journal.jsonl", header(model, optimizer, to_dict(recipe)))
    batches = [torch.randn(128, 64) * (100 if step == 4 else 1) for step in range(1, 8)]
    for step, batch in enumerate(batches, 1):
        with observation.step(step):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found = observation.read()
        assert found is not None
        writer.write("precision", step=step, layers=found.layers)
    writer.close()

    known = float(torch.stack([batch.abs().max() for batch in batches[:3]]).max())
    share = float((batches[3].abs() > known).float().mean())  # of the values cast, those beyond what the scale covers
    run = RunReader(tmp_path)
    (found,) = [each for each in attention(run) if each.rule == "saturation" and each.role == "input"]
    assert found.severity == "look" and found.step == 4 and found.layer == "0"  # it was over at the next step
    measured = run.precision.summary()["0"]["input"]["saturated"]
    assert measured["worst_step"] == 4 and measured["worst"] == pytest.approx(share, abs=0.02) and share > 0.9
    assert f"{100 * measured['worst']:.0f} % of its values were cut off at the largest that" in found.text
    assert "E4M3FN" in found.text and "first at step 4, in 1 of 7 sampled steps, not since step 4" in found.text
    assert "The scale is a delayed one" in found.remedy


@pytest.mark.parametrize("recipe", ["fp16", "fp8_delayed"])
def test_gradients_that_are_never_finite_are_named_with_count_and_scale(recipe: str, make_config, monkeypatch) -> None:
    def poisoned(*args: Any) -> Parts:
        parts = assemble(*args)
        parts.model.embedding.register_forward_hook(lambda module, inputs, output: output * math.nan)
        return parts

    monkeypatch.setattr(loop, "assemble", poisoned)
    config = make_config("stuck", recipe=recipe, steps=40, save_every=0, eval_every=0, max_skips=24)
    with pytest.raises(DivergenceError):
        loop.run(config)
    run = RunReader(config.path)
    found = next(each for each in attention(run) if each.rule == "skipped steps")
    scale = run.steps["loss_scale"]
    assert found.severity == "serious" and (scale >= 1.0).all() and len(scale) == 24
    stuck = int((scale == scale.min()).sum())
    assert found.title == f"{stuck} steps in a row were skipped at the smallest loss scale"
    assert f"{'the loss scale at its smallest, 1,' if recipe == 'fp16' else 'a loss scale of 1,'}" in found.text
    assert "a gradient that was not finite was embedding.weight, at step 1 (24 times)" in found.text
    assert "embedding.weight" in found.remedy and "step 1" in found.remedy
