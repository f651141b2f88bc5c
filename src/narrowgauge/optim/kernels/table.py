"""What the kernels of a step are told of a parameter: a row of integers, in columns of these names."""

from __future__ import annotations

from enum import IntEnum
from typing import Self

from narrowgauge.optim.rules import Hyper, Muon, Rule

# values of a run, and most columns of a tile: six float32 arrays of them lie in the first-level cache together
RUN = 1024


NUMBERS = 9  # most that a rule has


def numbers_of(hyper: Hyper) -> tuple[float, ...]:
    """The numbers of a step as the kernels take them, at most NUMBERS."""
    # of Muon the lr, both shares, whether it is Nesterov's, and the decay; the rest is for the iteration
    return hyper[:5] if isinstance(hyper, Muon) else tuple(hyper)


class Column(IntEnum):
    """Columns of the table. Addresses are of the first element; kinds are those below."""

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


class ParamKind(IntEnum):
    """How a parameter is stored, together with its master."""

    FLOAT = 0
    BFLOAT = 1
    STOCHASTIC = 2
    RESIDUAL = 3
    REMAINDER = 4


class GradKind(IntEnum):
    """How a gradient is stored."""

    FLOAT = 0
    BFLOAT = 1
    E4M3 = 2
    E5M2 = 3


class MomentKind(IntEnum):
    """How a moment is stored. SIGNED, UNSIGNED: square-root codes INT8, and UINT8 that keep what is not zero."""

    NONE = 0
    FLOAT = 1
    BFLOAT = 2
    SIGNED = 3
    UNSIGNED = 4


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
