from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import scaling
from narrowgauge.numerics.formats import E4M3FN, E5M2, Format
from narrowgauge.numerics.scaling import Delayed

FORMATS = {448.0: E4M3FN, 57344.0: E5M2}


def from_hex(values: list[str]) -> torch.Tensor:
    return torch.from_numpy(np.array([int(v, 16) for v in values], np.uint32).view(np.float32))


def run(amax_per_step: torch.Tensor, rule: Delayed, fmt: Format) -> list[tuple[torch.Tensor, torch.Tensor]]:
    history, scale = torch.zeros(rule.history_length), torch.ones(())
    states = []
    for step, amax in enumerate(amax_per_step):
        history[0] = torch.maximum(history[0], amax)
        history, scale = scaling.roll(history, scale, fmt, rule, step)
        states.append((history.clone(), scale))
    return states


@pytest.mark.parametrize("case", range(15))
def test_history_and_scale_equal_the_golden_bits_after_every_step(case: int, golden) -> None:
    cases = golden("delayed")["cases"]
    assert len(cases) == 15
    expected = cases[case]
    rule = Delayed(expected["margin"], expected["interval"], expected["amax_history_len"], expected["algo"])
    states = run(from_hex(expected["amax_per_step_f32_hex"]), rule, FORMATS[expected["fp8_max"]])
    for (history, scale), after in zip(states, expected["after_step"], strict=True):
        assert torch.equal(scale, from_hex([after["scale_f32_hex"]])[0])
        assert torch.equal(history, from_hex(after["history_f32_hex"]))


def test_margin_divides_the_scale_by_a_power_of_two() -> None:
    amax = torch.tensor([s + 0.25 for s in range(5)])
    plain = run(amax, Delayed(history_length=3), E4M3FN)
    with_margin = run(amax, Delayed(margin=2, history_length=3), E4M3FN)
    for (_, scale), (_, smaller) in zip(plain, with_margin, strict=True):
        assert smaller == scale / 4


def test_a_function_of_the_history_sets_the_amax() -> None:
    seen = []

    def mean(history: torch.Tensor) -> torch.Tensor:
        seen.append(history.clone())
        return history.mean()

    states = run(torch.tensor([4.0, 8.0]), Delayed(history_length=2, algorithm=mean), E4M3FN)
    assert seen[1].tolist() == [8.0, 4.0]  # slot 0 holds the step just finished
    assert states[1][1] == 448.0 / 6.0


@pytest.mark.parametrize(
    "algorithm", ["max", "most_recent", lambda history: history.amax()], ids=["max", "recent", "own"]
)
def test_many_layers_roll_as_each_alone(algorithm) -> None:
    rule = Delayed(history_length=4, algorithm=algorithm)
    history = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    scale = torch.ones(2, 3)
    rolled, renewed = scaling.roll(history, scale, E4M3FN, rule, 0)
    for i in range(2):
        for j in range(3):
            alone = scaling.roll(history[i, j], scale[i, j], E4M3FN, rule, 0)
            assert torch.equal(rolled[i, j], alone[0])
            assert torch.equal(renewed[i, j], alone[1])


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_infinity_or_nan_never_enters_the_history(bad: float) -> None:
    # case 15
    amax = torch.tensor([2.0, 4.0, bad, 1.0, 1.0, 1.0, 1.0])
    states = run(amax, Delayed(history_length=4), E4M3FN)
    for history, scale in states:
        assert history.isfinite().all()
        assert 0 < scale.item() < float("inf")
    assert torch.equal(states[2][1], states[1][1])  # the bad step keeps the scale
    assert states[-1][1] == 448.0  # and the window forgets all that came before


def test_zero_amax_keeps_the_scale() -> None:
    states = run(torch.tensor([2.0, 0.0, 0.0]), Delayed(history_length=1), E4M3FN)
    assert [s.item() for _, s in states] == [224.0, 224.0, 224.0]


def test_tiny_amax_gives_the_largest_scale_not_infinity() -> None:
    ((_, scale),) = run(torch.tensor([1e-40]), Delayed(history_length=1), E4M3FN)
    assert scale.item() == scaling.FLT_MAX


@pytest.mark.parametrize(
    "fields",
    [{"interval": 0}, {"interval": 1.5}, {"history_length": 0}, {"algorithm": "mean"}],
    ids=["interval", "float", "history", "algorithm"],
)
def test_fields_out_of_range_are_refused(fields: dict) -> None:
    with pytest.raises(RecipeError, match="expected"):
        Delayed(**fields)


@pytest.mark.parametrize("algorithm", [lambda history: history, lambda history: float(history.max())])
def test_a_function_that_returns_no_amax_is_told_what_to_return(algorithm) -> None:
    with pytest.raises(RecipeError, match=r"amax_compute_algo: expected .* 0-dimensional tensor"):
        scaling.roll(torch.ones(2, 4), torch.ones(2), E4M3FN, Delayed(history_length=4, algorithm=algorithm), 0)
