"""Histories of delayed scales where the guard changes casts: some go on, others begin with what was last seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.numerics.rounding import NEAREST_EVEN, NONZERO
from narrowgauge.recipes.casts import MOMENTS
from narrowgauge.train.guard_apply import Moments, take_up_casts

CURRENT = ng.CastSpec(ng.formats.E4M3FN)


def delayed_input(length: int) -> ng.Recipe:
    spec = ng.CastSpec(ng.formats.E4M3FN, scale=ng.Delayed(history_length=length))
    return ng.recipe("fp8_delayed", first_last=0).resolve("cpu").for_layers("0", input=spec)


@pytest.mark.parametrize("length", [1, 4])
def test_a_role_that_comes_to_have_a_history_begins_with_one_finished_step(length: int) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    recipe = delayed_input(length)
    ng.convert(model, recipe.for_layers("0", input=CURRENT))
    layer = model[0]
    known = {"weight_amax_history": 7.0, "weight_quant_scale": 0.5, "amax_rolls": 5, "amax_pending": True}
    for name, value in known.items():
        layer.get_buffer(name).fill_(value)
    take_up_casts(model, recipe, {("0", "input"): 3.0}, at_step=True)
    # slot 0 is live, and the last one the newest finished; of a history of one step there is only the live one
    assert layer.get_buffer("input_amax_history").tolist() == ([0.0] if length == 1 else [0.0, 0.0, 0.0, 3.0])
    assert layer.get_buffer("input_quant_scale").item() == torch.tensor(448.0).div(3.0).item()
    for name, value in known.items():
        assert bool((layer.get_buffer(name) == value).all()), name
    assert all(each.rolls_at_step for each in model)
    assert not model[1].get_buffer("input_amax_history").any()  # it has not changed


def test_without_a_seed_a_history_begins_empty() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    recipe = delayed_input(4)
    ng.convert(model, recipe.for_layers("0", input=CURRENT))
    take_up_casts(model, recipe, {("0", "weight"): 3.0}, at_step=False)
    assert not model[0].get_buffer("input_amax_history").any() and model[0].get_buffer("input_quant_scale") == 1.0
    assert not model[0].rolls_at_step


def test_a_second_moment_that_is_kept_otherwise_keeps_what_is_not_zero() -> None:
    p = nn.Parameter(torch.randn(32, 128))
    optimizer = ng.optim.AdamW(
        [("p", p)], exp_avg_sq=ng.CastSpec(ng.formats.UINT8), keep_nonzero=False, min_state_size=0
    )
    p.grad = torch.randn(32, 128)
    optimizer.step()
    moments = Moments(optimizer, nn.Module())

    def rounding() -> object:
        spec = moments.spec(p, "exp_avg_sq")
        return None if spec is None else spec.rounding

    assert rounding() == NEAREST_EVEN
    moments.keep(p, "exp_avg", MOMENTS[8][0])  # the first is none of that
    assert rounding() == NEAREST_EVEN
    moments.keep(p, "exp_avg_sq", ng.CastSpec(ng.formats.UINT8, ng.Block(1, 128)))
    assert rounding() == NONZERO


@pytest.mark.parametrize(("betas", "is_bounded"), [((0.9, 0.95), True), ((0.95, 0.93), True), ((0.99, 0.9), False)])
def test_zeros_of_second_moments_become_the_bound_where_the_first_is_none(betas, is_bounded) -> None:
    p = nn.Parameter(torch.ones(1, 4))
    optimizer = ng.optim.AdamW([("p", p)], betas=betas)
    p.grad = torch.ones(1, 4)
    optimizer.step()
    state, moments = optimizer.state[p], Moments(optimizer, nn.Module())
    state["exp_avg"].copy_(torch.tensor([[2.0, 0.0, -2.0, 1.0]]))
    state["exp_avg_sq"].copy_(torch.tensor([[0.0, 0.0, 5.0, 7.0]]))
    assert moments.lost(p) == pytest.approx(1 / 3)  # of three whose first moment is not zero
    moments.refill(p)
    beta1, beta2 = betas
    bound = 4 * (1 - beta2) * (1 - beta1**2 / beta2) / (1 - beta1) ** 2 if is_bounded else 0.0
    assert state["exp_avg_sq"].tolist() == [[pytest.approx(bound, rel=1e-6), 0.0, 5.0, 7.0]]
