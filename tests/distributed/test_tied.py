"""An embedding on the first stage and its tied head on the last (case 95), and norms over stages (case 94)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import tiny_gpt
from pipelines import batches, gradients, one_process_step, prepared, run, split
from torch import Tensor

import narrowgauge as ng
from narrowgauge.distributed import wire

pytestmark = pytest.mark.multiproc
STEPS = 5
TABLE = {"tied_embeddings": True, "vocab_size": 64}


def _parts(value: Any) -> list[Tensor]:
    """Codes, scales and values of a tensor, or of what an optimizer keeps for a parameter."""
    if isinstance(value, ng.QuantizedTensor):
        return [value.codes.view(torch.uint8), value.dequant_scale, value.amax]
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        return [part for key in sorted(value) for part in _parts(value[key])]
    return [part for each in value for part in _parts(each)] if isinstance(value, (list, tuple)) else []


def _trained(schedule: str, recipe: Any) -> tuple[list[list[Tensor]], Tensor | None, list[Any], int]:
    """After each step the copy's values and state; its first gradient; what travelled."""
    pipeline = split(schedule, **TABLE)
    optimizer = prepared(pipeline.model, recipe)
    copy = pipeline.model.tied_copy
    after, first = [], None
    with wire.counted() as counted:
        for step in range(STEPS):
            pipeline.step(batches())
            first = gradients(pipeline.model).get("embedding.weight") if step == 0 else first
            optimizer.step()
            optimizer.zero_grad()
            if copy is not None:
                held = pipeline.model.tied_copy
                after.append([part.clone() for part in _parts(held.data) + _parts(optimizer.state[held])])
    return after, first, counted.rows, len(after)


def _one_process(recipe: Any) -> Tensor:
    model = tiny_gpt(layers=4, **TABLE)
    prepared(model, recipe)
    one_process_step(model, batches())
    return gradients(model)["embedding.weight"]


def _equal(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    return all(
        len(x) == len(y) and all(p.dtype is q.dtype and torch.equal(p, q) for p, q in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(("schedule", "recipe"), [("1f1b", "bf16"), ("interleaved", "narrow8"), ("1f1b", "fp8_lm_o2")])
def test_copies_stay_equal_in_values_and_in_the_optimizers_codes_and_scales(schedule: str, recipe: str) -> None:
    first, last = run(2, _trained, schedule, recipe)
    assert first[3] == last[3] == STEPS
    assert _equal(first[0], last[0])
    assert not torch.equal(first[0][0][0], first[0][-1][0])  # it has moved
    assert torch.equal(first[1], last[1])
    expected = _one_process(recipe)
    assert float(first[1].norm()) == pytest.approx(float(expected.norm()), rel=0.01)


def test_the_gradient_is_that_of_one_process() -> None:
    fp32 = ng.CastSpec(ng.formats.FP32)
    for recipe, bound in (("fp32", 1e-5), (ng.recipe("bf16").replace(pipeline_comm=fp32), 0.01)):
        (_, first, _, _), (_, last, _, _) = run(2, _trained, "1f1b", recipe)
        expected = _one_process(recipe)
        assert torch.equal(first, last)
        assert float((first - expected).norm() / expected.norm()) < bound


def _two_calls(recipe: ng.Recipe) -> Tensor:
    """The gradient of two calls of `step`, before the optimizer's."""
    pipeline = split("1f1b", **TABLE)
    prepared(pipeline.model, recipe)
    for half in (batches()[:2], batches()[2:]):
        pipeline.step(half)
    return gradients(pipeline.model)["embedding.weight"]


def test_what_earlier_calls_have_summed_over_the_copies_is_not_summed_again() -> None:
    wide = ng.recipe("fp32")
    # the first sum is kept in E4M3, and so is the second: 2^-4 of each value at most
    for recipe, bound in ((wide, 1e-5), (wide.replace(grad=ng.CastSpec(ng.formats.E4M3FN)), 2 * 2.0**-4)):
        first, last = run(2, _two_calls, recipe)
        expected = 2 * _one_process("fp32")  # the mean of four micro-batches is half the sum of two means
        assert torch.equal(first, last)
        assert float((first - expected).norm() / expected.norm()) < bound


def test_four_stages_have_two_copies() -> None:
    found = run(4, _trained, "1f1b", "narrow8")
    assert [each[3] for each in found] == [STEPS, 0, 0, STEPS]
    assert _equal(found[0][0], found[3][0])


def test_the_sum_travels_in_8_bits() -> None:
    values = 64 * 64
    for found in run(2, _trained, "1f1b", "narrow8"):
        (row, *others) = [row for row in found[2] if row.role == "grad_comm" and row.collective == "all_to_all"]
        assert not others and row.dtype is torch.uint8 and row.calls == STEPS
        assert row.bytes == STEPS * (values + values // 128) // 2


def test_first_and_last_stage_on_one_rank_share_one_table() -> None:
    first, last = run(2, _trained, "zbv", "fp32")
    assert (first[3], last[3]) == (STEPS, 0)
    expected = _one_process("fp32")
    assert float((first[1] - expected).norm() / expected.norm()) < 1e-5
    assert not [row for row in first[2] if row.role == "grad_comm"]


def _norm(recipe: Any, tied: bool) -> tuple[float, dict[str, Tensor]]:
    pipeline = split("1f1b", **{**TABLE, "tied_embeddings": tied})
    prepared(pipeline.model, recipe)
    pipeline.step(batches())
    norm = ng.clip_grad_norm_(list(pipeline.model.parameters()), 0.1)
    return float(norm), gradients(pipeline.model)


@pytest.mark.parametrize(("recipe", "bound"), [("fp32", 1e-5), ("narrow8", 0.01)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_norm_counts_every_stage_and_the_table_once(recipe: str, bound: float, tied: bool) -> None:
    model = tiny_gpt(layers=4, **{**TABLE, "tied_embeddings": tied})
    prepared(model, recipe)
    one_process_step(model, batches())
    expected = float(ng.clip_grad_norm_(list(model.parameters()), 0.1))
    (first, mine), (last, theirs) = run(2, _norm, recipe, tied)
    assert first == last == pytest.approx(expected, rel=bound)
    clipped = math.sqrt(sum(float(grad.square().sum()) for grad in (mine | theirs).values()))
    assert clipped == pytest.approx(0.1, rel=max(bound, 1e-4))


def _drifted() -> bool:
    pipeline = split("1f1b", **TABLE)
    if pipeline.places.rank:
        pipeline.model.tied_copy.data.mul_(2)
    prepared(pipeline.model, "narrow8")
    return bool(
        torch.equal(pipeline.model.tied_copy.float(), tiny_gpt(layers=4, **TABLE).embedding.weight.bfloat16().float())
    )


def test_preparing_makes_the_copies_equal() -> None:
    assert run(2, _drifted) == [True, True]
