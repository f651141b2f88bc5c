"""Run as a program with TRITON_INTERPRET=1: holds the Triton step against `update.update` on the CPU."""

from __future__ import annotations

import copy
import itertools

from step_items import FIRST, GRADS, HYPERS, KEY, PARAMS, SECOND, SIGNED, UNSIGNED, make, same_bits

from narrowgauge.optim.kernels import cuda
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.update import Item, update


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


if __name__ == "__main__":
    check_everything()
