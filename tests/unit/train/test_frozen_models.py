"""Which models count as frozen, and numbers that tell equal models from others."""

from __future__ import annotations

import copy

import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.train.frozen_models import fingerprint, first_of, is_frozen


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))


def test_a_frozen_model_is_stored_in_8_bits_and_trains_nothing() -> None:
    plain = model().requires_grad_(False)
    frozen = ng.freeze(model(), ng.recipe("narrow8", first_last=0))
    assert is_frozen(frozen) and not is_frozen(plain) and not is_frozen(model())
    frozen.add_module("adapter", nn.Linear(32, 4))  # which trains
    assert not is_frozen(frozen)


def test_equal_models_have_one_number_and_others_another() -> None:
    for made in (model(), ng.freeze(model(), ng.recipe("narrow8", first_last=0))):
        assert fingerprint(made) == fingerprint(copy.deepcopy(made))
    one, other = model(), model()
    with torch.no_grad():
        other[1].bias[3] = 1e-3
    assert fingerprint(one) != fingerprint(other)
    swapped = nn.Sequential(one[2], one[1], one[0])
    assert fingerprint(swapped) != fingerprint(one)


def test_a_frozen_model_takes_the_first_recipe_of_a_schedule() -> None:
    recipe = ng.recipe("fp8_current")
    assert first_of(recipe.switch_at(3, "bf16")) == recipe == first_of(recipe)
