"""The choice for each layer as an integer program: the least sum of sensitivities within a budget.

One variable, 0 or 1, for each layer and choice; those of a layer sum to 1; budgets are linear. HiGHS solves it exactly,
through `scipy.optimize.milp`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any

import numpy as np

from narrowgauge.errors import ConfigError, NarrowgaugeError

INSTALL = "narrowgauge[tune]"
POINTS = 24  # of a front
_ROUNDING = 1e-9  # of a budget: sums in another order must not break it
_INFEASIBLE = 2  # scipy's status
# of a budget's limits
_WORDS = {"bytes": "bytes a token", "time": "of the time of all layers wide", "wide_layers": "wide layers"}


@dataclass(frozen=True)
class Problem:
    """loss, bytes, time: [layers][choices], what each layer costs by each choice: nats, bytes a token, and time as a
    share of all layers wide. wide: which choice is the wide one. names: of the choices, for errors.

    A loss that is infinite or NaN forbids its choice.
    """

    loss: Sequence[Sequence[float]]
    bytes: Sequence[Sequence[float]]
    time: Sequence[Sequence[float]]
    wide: int = 0
    names: Sequence[str] = ()

    @property
    def layers(self) -> int:
        return len(self.loss)

    @property
    def choices(self) -> int:
        return len(self.loss[0])

    def table(self, name: str) -> Sequence[Sequence[float]]:
        """What a limit of a budget counts: "bytes", "time" or "wide_layers"."""
        if name != "wide_layers":
            return getattr(self, name)
        return [[float(at == self.wide) for at in range(self.choices)]] * self.layers

    def total(self, values: Sequence[Sequence[float]], chosen: Sequence[int]) -> float:
        """The sum of a table over the layers."""
        return math.fsum(row[at] for row, at in zip(values, chosen, strict=True))


@dataclass(frozen=True)
class Budget:
    """At most so much of each; None: no limit. wide_layers: how many layers may stay wide."""

    bytes: float | None = None
    time: float | None = None
    wide_layers: int | None = None


@dataclass(frozen=True)
class Point:
    """A solution: the choice of each layer by number, and the sums."""

    chosen: tuple[int, ...]
    loss: float
    bytes: float
    time: float


def solve(problem: Problem, budget: Budget) -> Point:
    """The choices with the least loss within the budget; of several with that loss one with the fewest bytes.

    Raises ConfigError where nothing meets the budget, naming the nearest that can be met, and where SciPy is missing.
    """
    best = _minimum(problem, problem.loss, budget)
    if best is None:
        raise ConfigError(_nearest(problem, budget))
    # with the loss held, the bytes next: a tie must not cost any
    loss = problem.total(problem.loss, best)
    fewest = _minimum(problem, problem.bytes, budget, most_loss=loss * (1 + _ROUNDING) + 1e-15)
    if fewest is not None and problem.total(problem.loss, fewest) <= loss * (1 + 2 * _ROUNDING) + 1e-15:
        best = fewest
    return point(problem, best)


def point(problem: Problem, chosen: Sequence[int]) -> Point:
    """The sums of a choice."""
    sums = (problem.total(values, chosen) for values in (problem.loss, problem.bytes, problem.time))
    return Point(tuple(chosen), *sums)


def front(problem: Problem, budget: Budget, along: str, points: int = POINTS) -> list[Point]:
    """The least loss for budgets of "bytes" or "time" from the least possible to what nobody exceeds: no point is
    beaten by another in both. The other limits of `budget` hold throughout."""
    table = getattr(problem, along)
    others = replace(budget, **{along: None})
    least = _minimum(problem, table, others)
    if least is None:
        raise ConfigError(_nearest(problem, others))
    low, high = problem.total(table, least), math.fsum(max(row) for row in table)
    found: list[Point] = []
    for at in range(points + 1):
        limit = low + (high - low) * at / points
        found.append(solve(problem, replace(others, **{along: limit})))
    found.sort(key=lambda each: (getattr(each, along), each.loss))
    kept: list[Point] = []
    for each in found:
        if not kept or each.loss < kept[-1].loss:
            kept.append(each)
    return kept


def check(problem: Problem, budget: Budget) -> None:
    """Raise ConfigError where nothing meets the budget, whatever is lost: before anything has been measured."""
    if _minimum(problem, [[0.0] * problem.choices] * problem.layers, budget) is None:
        raise ConfigError(_nearest(problem, budget))


def _minimum(
    problem: Problem, objective: Sequence[Sequence[float]], budget: Budget, most_loss: float | None = None
) -> list[int] | None:
    """The choices with the least sum of `objective`; None where nothing meets the limits."""
    milp = _scipy_optimize()
    layers, choices = problem.layers, problem.choices
    losses = np.asarray(problem.loss, dtype=float)
    allowed = np.isfinite(losses)
    rows = [np.kron(np.eye(layers), np.ones(choices))]
    lower, upper = [np.ones(layers)], [np.ones(layers)]
    limits = [(np.asarray(problem.table(name), dtype=float), getattr(budget, name)) for name in _WORDS]
    for values, limit in limits:
        if limit is not None:  # what is too much by itself: HiGHS's tolerances are no share of a limit, but of a size
            allowed &= values <= limit + _ROUNDING * abs(limit)
    for values, limit in [*limits, (losses, most_loss)]:
        if limit is None:
            continue
        row = np.where(allowed, values, 0.0).ravel()
        unit = max(float(np.abs(row).max()), 1e-30)
        rows.append(row[None] / unit)
        lower.append(np.array([-np.inf]))
        upper.append(np.array([(limit + _ROUNDING * abs(limit)) / unit]))
    costs = np.where(allowed, np.asarray(objective, dtype=float), 0.0).ravel()
    scale = max(float(np.abs(costs).max()), 1e-30)
    answer = milp.milp(
        costs / scale,
        integrality=np.ones(layers * choices),
        bounds=milp.Bounds(0, allowed.ravel().astype(float)),
        constraints=milp.LinearConstraint(np.vstack(rows), np.concatenate(lower), np.concatenate(upper)),
        options={"mip_rel_gap": 0.0},
    )
    if answer.status == _INFEASIBLE:
        return None
    if answer.x is None:
        raise NarrowgaugeError(f"the integer program was not solved: {answer.message}: try another budget")
    return [int(at) for at in answer.x.reshape(layers, choices).argmax(axis=1)]


def _nearest(problem: Problem, budget: Budget) -> str:
    """What of the budget cannot be met, and how near one can come to it: by one limit, or by each of them alone."""
    limits = {name: getattr(budget, name) for name in _WORDS if getattr(budget, name) is not None}
    for name, limit in limits.items():
        least = _minimum(problem, problem.table(name), replace(budget, **{name: None}))
        if least is not None:
            return (
                f"a budget of {limit:.6g} {_WORDS[name]}: expected one that can be met; the nearest is "
                f"{_up(problem.total(problem.table(name), least))}{_in_words(problem, least)}: raise it, or add a "
                "narrower choice"
            )
    asked, alone = [], []
    for name, limit in limits.items():
        least = _minimum(problem, problem.table(name), Budget())
        asked.append(f"{limit:.6g} {_WORDS[name]}")
        if least is not None:
            alone.append(f"{_up(problem.total(problem.table(name), least))} {_WORDS[name]}")
    return (
        f"budgets of {' and '.join(asked)}: expected some that can be met together; the nearest to each, without the "
        f"others, are {' and '.join(alone)}: raise all of them, or add a narrower choice"
    )


def _up(value: float) -> str:
    """Six digits, rounded up, so that what is told can be asked for."""
    if value == 0:
        return "0"
    unit = Decimal(1).scaleb(math.floor(math.log10(abs(value))) - 5)
    # a sum that is a rounding above a short number is that number
    return f"{float((Decimal(value) * (1 - Decimal(_ROUNDING))).quantize(unit, ROUND_CEILING)):.6g}"


def _in_words(problem: Problem, chosen: Sequence[int]) -> str:
    counts = {name: sum(at == number for at in chosen) for number, name in enumerate(problem.names)}
    told = [f"{count} in {name}" for name, count in counts.items() if count]
    return f", with {', '.join(told)}" if told else ""


def _scipy_optimize() -> Any:
    try:
        from scipy import optimize
    except ImportError as error:
        raise ConfigError(f"scipy is not installed, which solves for the layers: pip install '{INSTALL}'") from error
    return optimize


def require() -> None:
    """Raise ConfigError where SciPy is missing: before anything has been measured."""
    _scipy_optimize()
