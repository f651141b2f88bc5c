"""The integer program against every choice there is, and what it says where nothing meets the budget."""

from __future__ import annotations

import builtins
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.tune.program import Budget, Problem, check, front, point, solve


def random_problem(seed: int, layers: int, choices: int) -> Problem:
    """Losses that rise and bytes and times that fall from choice to choice, all integers / 64: exact in any order."""
    random = np.random.default_rng(seed)
    loss = np.cumsum(random.integers(0, 40, (layers, choices)), axis=1) / 64
    loss[:, 0] = 0
    size = np.cumsum(random.integers(0, 50, (layers, choices)), axis=1)[:, ::-1]
    time = np.cumsum(random.integers(1, 9, (layers, choices)), axis=1)[:, ::-1] / 64
    return Problem(loss.tolist(), size.tolist(), time.tolist())


def every_choice(problem: Problem, budget: Budget) -> list[tuple[float, float, float]]:
    """(loss, bytes, time) of all choices within the budget, by looking at each."""
    found = []
    for chosen in itertools.product(range(problem.choices), repeat=problem.layers):
        sums = point(problem, chosen)
        is_within = (
            (budget.bytes is None or sums.bytes <= budget.bytes)
            and (budget.time is None or sums.time <= budget.time)
            and (budget.wide_layers is None or chosen.count(problem.wide) <= budget.wide_layers)
            and math.isfinite(sums.loss)
        )
        if is_within:
            found.append((sums.loss, sums.bytes, sums.time))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_choices_and_of_equals_the_smallest(seed: int) -> None:
    problem = random_problem(seed, layers=5, choices=3)
    sizes = [sum(column) for column in zip(*problem.bytes, strict=True)]
    low, high = min(sizes), max(sizes)
    times = sorted({point(problem, [at] * 5).time for at in range(3)})
    for budget in (
        Budget(bytes=low + (high - low) * 0.3),
        Budget(bytes=low + (high - low) * 0.7, wide_layers=1),
        Budget(time=times[0] + 0.4 * (times[-1] - times[0])),
        Budget(bytes=low + (high - low) * 0.6, time=times[0] + 0.8 * (times[-1] - times[0])),
        Budget(wide_layers=2),
    ):
        possible = every_choice(problem, budget)
        if not possible:
            with pytest.raises(ConfigError):
                solve(problem, budget)
            continue
        found = solve(problem, budget)
        best = min(possible)
        assert (found.loss, found.bytes) == best[:2]
        assert point(problem, found.chosen) == found


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_beats_a_point_of_the_front_in_loss_and_bytes(seed: int) -> None:
    problem = random_problem(seed, layers=4, choices=3)
    possible = every_choice(problem, Budget())
    points = front(problem, Budget(), "bytes")
    for each in points:
        assert not any(
            loss <= each.loss and size <= each.bytes and (loss, size) != (each.loss, each.bytes)
            for loss, size, _ in possible
        )
    assert [p.bytes for p in points] == sorted(p.bytes for p in points)
    assert all(later.loss < earlier.loss for earlier, later in itertools.pairwise(points))
    times = front(problem, Budget(), "time")
    assert [p.time for p in times] == sorted(p.time for p in times)
    assert all(later.loss < earlier.loss for earlier, later in itertools.pairwise(times))
    assert points[0].bytes == min(size for _, size, _ in possible) and points[-1].loss == 0


@pytest.mark.parametrize("along", ["bytes", "time"])
def test_every_point_of_the_front_keeps_to_the_other_limits(along: str) -> None:
    problem = random_problem(5, layers=4, choices=3)
    wide = point(problem, [0] * 4)
    other = Budget(time=0.6 * wide.time) if along == "bytes" else Budget(bytes=0.6 * wide.bytes)
    for budget in (Budget(wide_layers=1), other):
        possible, points = every_choice(problem, budget), front(problem, budget, along)
        assert points and all((each.loss, each.bytes, each.time) in possible for each in points)
        assert points[-1].loss == min(possible)[0] > 0


def test_a_choice_whose_loss_is_not_finite_is_never_taken() -> None:
    problem = Problem([[0.0, math.inf], [0.0, 1.0], [0.0, math.nan]], [[10, 1]] * 3, [[1, 0.5]] * 3)
    assert solve(problem, Budget(bytes=21)).chosen == (0, 1, 0)
    with pytest.raises(ConfigError, match="budget of 20 bytes a token: .* the nearest is 21: raise it"):
        solve(problem, Budget(bytes=20))


def test_a_budget_that_nothing_meets_names_the_nearest() -> None:
    problem = Problem([[0.0, 1.0]] * 3, [[10, 4]] * 3, [[1.0, 0.25]] * 3)
    with pytest.raises(
        ConfigError, match=r"a budget of 11 bytes a token: expected one that can be met; the nearest is 12"
    ):
        solve(problem, Budget(bytes=11))
    with pytest.raises(
        ConfigError, match=r"0.5 of the time .* the nearest is 0.75: raise it, or add a narrower choice"
    ):
        solve(problem, Budget(time=0.5))
    named = Problem([[0.0, 1.0]] * 3, [[10, 4]] * 3, [[1.0, 0.25]] * 3, names=("bf16", "nvfp4"))
    with pytest.raises(ConfigError, match="the nearest is 12, with 3 in nvfp4"):
        check(named, Budget(bytes=11, wide_layers=2))
    check(named, Budget(bytes=12))
    forced = Problem([[0.0, math.inf]] * 2, [[10, 4]] * 2, [[1.0, 0.5]] * 2)
    with pytest.raises(ConfigError, match="a budget of 1 wide layers: .* the nearest is 2: raise it"):
        solve(forced, Budget(wide_layers=1))


def test_budgets_that_no_single_one_makes_impossible_name_the_nearest_to_each() -> None:
    problem = Problem([[0.0, 1.0, 1.0]] * 3, [[10, 4, 9]] * 3, [[1.0, 0.9, 0.25]] * 3)
    with pytest.raises(ConfigError) as caught:
        solve(problem, Budget(bytes=1, time=0.5))
    assert str(caught.value).startswith(
        "budgets of 1 bytes a token and 0.5 of the time of all layers wide: expected some that can be met together; "
        "the nearest to each, without the others, are 12 bytes a token and 0.75 of the time of all layers wide: raise "
    )
    with pytest.raises(ConfigError, match="a budget of 12 bytes a token: .* the nearest is 27"):
        solve(problem, Budget(bytes=12, time=0.75))  # the time can be met by itself
    solve(problem, Budget(bytes=27, time=0.75))


@pytest.mark.parametrize("size", [4037.644123, 4037.644, 4037.649999, 1 / 3, 12.0, 0.1 + 0.2, 987654.4, 98765432.1])
def test_the_nearest_that_is_named_can_be_met(size: float) -> None:
    problem = Problem([[0.0, 1.0]], [[2e9, size]], [[1.0, 1.0]])
    with pytest.raises(ConfigError) as caught:
        solve(problem, Budget(bytes=size / 2))
    told = str(caught.value).split("the nearest is ")[1].split(":")[0]
    assert solve(problem, Budget(bytes=float(told))).chosen == (1,)
    assert told == {0.1 + 0.2: "0.3", 12.0: "12", 4037.644: "4037.65", 1 / 3: "0.333334"}.get(size, told)
    assert float(told) <= size * (1 + 1e-5) and len(told.replace(".", "").split("e")[0].lstrip("0")) <= 6


def random_instance(seed: int) -> tuple[Problem, Budget]:
    """Any numbers, also equal and zero ones, any wide choice, some not finite; budgets of one, two or three limits."""
    random = np.random.default_rng(seed)
    layers, choices = int(random.integers(1, 6)), int(random.integers(1, 5))
    loss = random.integers(-2, 12, (layers, choices)) / 8
    loss[random.random((layers, choices)) < 0.1] = math.inf
    size = random.integers(0, 20, (layers, choices))
    time = random.integers(1, 9, (layers, choices)) / 64
    problem = Problem(loss.tolist(), size.tolist(), time.tolist(), wide=int(random.integers(choices)))
    has_bytes, has_time, has_wide = random.random(3) < 0.6
    budget = Budget(
        bytes=float(random.integers(0, 12 * layers)) if has_bytes else None,
        time=float(random.integers(1, 6 * layers)) / 64 if has_time else None,
        wide_layers=int(random.integers(0, layers + 1)) if has_wide else None,
    )
    return problem, budget


@pytest.mark.parametrize("block", range(8))
def test_any_instance_is_solved_as_by_looking_at_every_choice(block: int) -> None:
    is_solved = []
    for seed in range(block * 25, block * 25 + 25):
        problem, budget = random_instance(seed)
        possible = every_choice(problem, budget)
        is_solved.append(bool(possible))
        if possible:
            found = solve(problem, budget)
            assert (found.loss, found.bytes) == min(possible)[:2] and found == point(problem, found.chosen)
            check(problem, budget)
        else:
            for ask in (solve, check):
                with pytest.raises(ConfigError):
                    ask(problem, budget)
    assert 0 < sum(is_solved) < 25


def test_a_budget_is_kept_to_a_millionth() -> None:
    problem = Problem([[0.0, 1.0, 9.0]] * 2, [[60, 50, 10]] * 2, [[1.0, 0.5, 0.4]] * 2)
    assert solve(problem, Budget(bytes=100)).bytes == 100
    assert solve(problem, Budget(bytes=100 * (1 - 1e-5))).bytes == 70


@pytest.mark.parametrize("seed", range(3))
def test_the_smallest_losses_are_told_apart(seed: int) -> None:
    problem = random_problem(seed, layers=5, choices=3)
    small = replace(problem, loss=[[value * 2.0**-40 for value in row] for row in problem.loss])
    for share in (0.3, 0.5, 0.7):
        budget = Budget(bytes=share * point(problem, [0] * 5).bytes + (1 - share) * point(problem, [2] * 5).bytes)
        assert solve(small, budget).loss == solve(problem, budget).loss * 2.0**-40


def test_numbers_of_any_size_are_solved() -> None:
    losses = [[0.0, 1e-9 * at] for at in (3, 1, 2)]
    problem = Problem(losses, [[2e12, 1e12]] * 3, [[1.0, 0.5]] * 3)
    assert solve(problem, Budget(bytes=4e12)).chosen == (0, 1, 1)


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args, **options):
        if name.partition(".")[0] == "scipy":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"scipy is not installed.*pip install 'narrowgauge\[tune\]'"):
        solve(Problem([[0.0, 1.0]], [[2, 1]], [[1, 0.5]]), Budget())
