"""Run as a program with TRITON_INTERPRET=1: holds the Triton step against `update.update` on the CPU."""

from __future__ import annotations

import copy
import itertools

import torch
from step_items import (
    FIRST,
    GRADS,
    HALF_NONZERO,
    HYPERS,
    KEY,
    PARAMS,
    SCALED_PARAMS,
    SECOND,
    SIGNED,
    UNSIGNED,
    WHOLE_E4M3,
    make,
    same_bits,
)

from narrowgauge.numerics.formats import E4M3FN, E5M2, FP16
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.numerics.scaling import CURRENT
from narrowgauge.optim import storage
from narrowgauge.optim.kernels import cuda
from narrowgauge.optim.rules import Adam, Rule
from narrowgauge.optim.update import Item, update
from narrowgauge.recipes.cast_spec import CastSpec


def check(rule: Rule, item: Item) -> None:
    twin = copy.deepcopy(item)
    cuda.step(rule, item, KEY)
    update(rule, twin, KEY)
    assert same_bits(item.param, twin.param), (rule, item)
    assert same_bits(item.master, twin.master), (rule, item)
    assert all(map(same_bits, item.moments, twin.moments)), (rule, item)


def check_everything() -> None:
    (_, adam, _), *_ = HYPERS
    for param, grad in itertools.product(PARAMS, GRADS):
        check(Rule.ADAM, make(param, grad, (SIGNED, UNSIGNED), adam, (3, 333), 0))
    for first, second in itertools.product(FIRST, SECOND):
        check(Rule.ADAM, make("residual", "e4m3", (first, second), adam, (5, 100), 1))
    for rule, hyper, moments in HYPERS:
        check(rule, make("residual", "fp32", (SIGNED, UNSIGNED)[:moments], hyper, (9, 384), 2))
    check_scaled()


def check_scaled() -> None:
    """One scale for the whole tensor, in two launches."""
    adam, whole = HYPERS[0][1], (WHOLE_E4M3, HALF_NONZERO)
    other = (CastSpec(E5M2), CastSpec(E4M3FN, rounding=NONZERO))
    for param, grad, specs in itertools.product(SCALED_PARAMS, ("e4m3", "fp16"), (whole, other, FIRST[:1] * 2)):
        check(Rule.ADAM, make(param, grad, specs, adam, (3, 700), 0))
    check(Rule.ADAM, make("residual", "e4m3", (CastSpec(FP16, scale=CURRENT), UNSIGNED), adam, (3, 333), 1))
    for rule, hyper, moments in HYPERS[2:6]:
        check(rule, make("copied", "fp32", whole[:moments], hyper, (9, 384), 2))
    for spec in (*(CastSpec(fmt, rounding=NONZERO) for fmt in (E4M3FN, E5M2)), HALF_NONZERO):
        # second moments that begin with this step, far below the least value of their format
        item = make("scaled", "fp32", FIRST[:1] * 2, adam, (4, 300), 4)
        second = torch.zeros_like(item.grad)
        second[0, 0] = 1e4
        check(Rule.ADAM, item._replace(moments=(item.moments[0], storage.encode(second, spec))))
    # beyond the last value of a tile there is 0 / 0, which is no amax
    item = make("scaled", "fp32", whole, Adam.at(3, 1e-3, (0.9, 0.99), 0.0, 0.1, decoupled=True), (3, 333), 5)
    check(Rule.ADAM, item._replace(grad=torch.full_like(item.grad, 1e-2)))
    for value in (0.0, torch.inf, torch.nan):
        item = make("copied", "fp32", whole, adam._replace(decay=1.0), (4, 300), 3)
        grad = torch.zeros_like(item.grad) if value == 0.0 else item.grad.clone()
        grad[1, 1] = value
        moments = item.moments if value else tuple(storage.encode(grad, spec) for spec in whole)
        check(Rule.ADAM, item._replace(grad=grad, moments=moments))


if __name__ == "__main__":
    check_everything()
