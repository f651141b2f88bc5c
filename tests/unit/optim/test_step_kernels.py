"""The fused step against its slow twin, `update.update`: the same bits in every format that it takes."""

from __future__ import annotations

import copy
import itertools

import pytest
from step_items import ADAM, FIRST, GRADS, HYPERS, KEY, PARAMS, SECOND, SIGNED, UNSIGNED, make, same_bits

from narrowgauge.optim import kernels
from narrowgauge.optim.kernels import Plan
from narrowgauge.optim.rules import Hyper, Rule
from narrowgauge.optim.update import Item, update
from narrowgauge.recipes.cast_spec import CastSpec


def check(rule: Rule, items: list[Item], steps: int = 1) -> None:
    twins, plan = copy.deepcopy(items), Plan(rule)
    for _ in range(steps):
        assert all(kernels.takes(rule, item) for item in items)
        assert plan.run(items, KEY) == []
        for item, twin in zip(items, twins, strict=True):
            update(rule, twin, KEY)
            assert same_bits(item.param, twin.param), item
            assert same_bits(item.master, twin.master), item
            assert all(map(same_bits, item.moments, twin.moments)), item


@pytest.mark.parametrize(("param", "grad"), [*itertools.product(PARAMS, GRADS)])
def test_every_storage_of_parameter_and_gradient(param: str, grad: str) -> None:
    check(Rule.ADAM, [make(param, grad, (SIGNED, UNSIGNED), ADAM, (33, 256), 0)], steps=3)


@pytest.mark.parametrize(("first", "second"), [*itertools.product(FIRST, SECOND)], ids=str)
def test_every_storage_of_the_moments(first: CastSpec, second: CastSpec) -> None:
    check(Rule.ADAM, [make("residual", "e4m3", (first, second), ADAM, (5, 333), 1)], steps=3)


@pytest.mark.parametrize("first", FIRST, ids=str)
@pytest.mark.parametrize(("rule", "hyper", "moments"), HYPERS)
def test_every_rule(rule: Rule, hyper: Hyper, moments: int, first: CastSpec) -> None:
    for param in PARAMS:
        check(rule, [make(param, "e4m3", (first, UNSIGNED)[:moments], hyper, (12, 200), 2)], steps=2)
