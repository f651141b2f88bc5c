"""What the kernels of a step are told of a parameter: a row of integers, in columns of these names."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Self

from narrowgauge.numerics.formats import E4M3FN, E5M2, FP16, Format
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, TENSOR_POW2, ScaleRule
from narrowgauge.optim.rules import Hyper, Muon, Rule

# values of a run, and most columns of a tile: six float32 arrays of them lie in the first-level cache together
RUN = 1024


NUMBERS = 9  # most that a rule has


def numbers_of(hyper: Hyper) -> tuple[float, ...]:
    """The numbers of a step as the kernels take them, at most NUMBERS."""
    # of Muon the lr, both shares, whether it is Nesterov's, and the decay; the rest is for the iteration
    return hyper[:5] if isinstance(hyper, Muon) else tuple(hyper)


class Column(IntEnum):
    """Columns of the table. Addresses are of the first element; kinds are those below.

    CODE columns hold a `Coding.number`, of what has one scale for the whole tensor.
    """

    PARAM_KIND = 0
    PARAM = 1
    MASTER = 2
    GRAD_KIND = 3
    GRAD = 4
    GRAD_SCALE = 5
    FIRST_KIND = 6
    FIRST = 7
    FIRST_SCALE = 8
    FIRST_AMAX = 9
    SECOND_KIND = 10
    SECOND = 11
    SECOND_SCALE = 12
    SECOND_AMAX = 13
    VALUES = 14  # of the parameter
    COLUMNS = 15  # of a row of tiles
    WIDTH = 16  # columns of a tile
    STREAM = 17
    PARAM_CODE = 18
    PARAM_SCALE = 19
    PARAM_AMAX = 20
    MASTER_CODE = 21
    MASTER_SCALE = 22
    MASTER_AMAX = 23
    FIRST_CODE = 24
    SECOND_CODE = 25


class Coding(NamedTuple):
    """How values with one scale for the whole tensor are stored. nonzero: nothing but zero goes to zero."""

    format: Format
    rule: ScaleRule
    nonzero: bool

    @property
    def number(self) -> int:
        """What the kernels know it by; from it they read format and rounding, the scales are computed outside."""
        return CODED_FORMATS.index(self.format) + 3 * self.nonzero + 6 * CODED_RULES.index(self.rule)

    @classmethod
    def of(cls, number: int) -> Self:
        """The coding of a number."""
        return cls(CODED_FORMATS[number % 3], CODED_RULES[number // 6], number // 3 % 2 == 1)


CODED_FORMATS = (E4M3FN, E5M2, FP16)
CODED_RULES = (TENSOR_POW2, CURRENT, CURRENT_POW2)


class ParamKind(IntEnum):
    """How a parameter is stored, together with its master.

    SCALED: with one scale for the whole tensor. COPIED: as SCALED, and so is its master, a copy with more digits.
    """

    FLOAT = 0
    BFLOAT = 1
    STOCHASTIC = 2
    RESIDUAL = 3
    REMAINDER = 4
    SCALED = 5
    COPIED = 6


class GradKind(IntEnum):
    """How a gradient is stored."""

    FLOAT = 0
    BFLOAT = 1
    E4M3 = 2
    E5M2 = 3
    HALF = 4


class MomentKind(IntEnum):
    """How a moment is stored.

    SIGNED, UNSIGNED: square-root codes INT8, and UINT8 that keep what is not zero. SCALED: as for a parameter.
    """

    NONE = 0
    FLOAT = 1
    BFLOAT = 2
    SIGNED = 3
    UNSIGNED = 4
    SCALED = 5


class RuleCode(IntEnum):
    """Which loop of `numba_rules` to run."""

    ADAM = 0
    SGD = 1
    LION = 2
    MUON = 3  # its momentum
    DESCEND = 4  # the rest of its step

    @classmethod
    def of(cls, rule: Rule) -> Self:
        """The loop of a rule; Muon's step has a second one."""
        return cls[rule.name]
