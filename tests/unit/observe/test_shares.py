"""From layers to one figure a role: means of shares over the operands of products, and the worst of every measure."""

from __future__ import annotations

import math

from narrowgauge.observe.shares import shares_by_role, worse, worst_by_role

LAYERS = {
    "up": {
        "input": {"saturated": 0.5, "flushed": 0.0, "sqnr_db": 31.0, "amax": 2.0},
        "weight": {"saturated": 0.0, "flushed": 0.25},
        "exp_avg": {"sqnr_db": math.inf},
        "param": {"lost": 0.5},
    },
    "down": {
        "input": {"saturated": 0.25, "flushed": 0.125, "sqnr_db": 12.0, "amax": 1.0},
        "grad": {"zero": 0.75},
        "exp_avg": {"sqnr_db": 20.0, "flushed": 0.5},
    },
    "head": {"input": {"saturated": 0.0, "flushed": 1.0}, "param": {"lost": 0.75}},
}


def test_shares_are_means_over_the_layers_that_cast_an_operand() -> None:
    assert shares_by_role(LAYERS) == {
        "input": {"saturated": 0.25, "flushed": 0.375}, "weight": {"saturated": 0.0, "flushed": 0.25},
    }  # fmt: skip
    assert shares_by_role({}) == {}


def test_the_worst_is_the_lowest_ratio_and_the_largest_of_all_else_whichever_layer_comes_first() -> None:
    for layers in (LAYERS, dict(reversed(LAYERS.items()))):
        assert worst_by_role(layers) == {
            "input": {"saturated": 0.5, "flushed": 1.0, "sqnr_db": 12.0, "amax": 2.0},
            "weight": {"saturated": 0.0, "flushed": 0.25},
            "exp_avg": {"sqnr_db": 20.0, "flushed": 0.5},
            "param": {"lost": 0.75},
            "grad": {"zero": 0.75},
        }
    assert worse("sqnr_db", 3.0, 30.0) == 3.0 and worse("lost", 0.1, 0.2) == 0.2
