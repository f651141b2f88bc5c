"""A linear layer whose operands are parted over the processes of a tensor-parallel group.

Scales are those that the whole operands would have on one process: `PartedOperand`. In sequence-parallel training one
operand is parted along the sequence, and what moves between processes is its codes: `ops.ranked`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from narrowgauge.ops.reduce import SINGLE_PROCESS, Reducer
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.parted_amax import amax_of_part

NOTHING_KNOWN: Mapping[CastSpec, Tensor] = {}


class PartedOperand(NamedTuple):
    """How the matrix of one role is parted. dim: 0 along its rows, 1 along its columns. reducer: over its processes.

    known: what `amax` would give for some casts, reduced before, all layers' in one collective.
    """

    dim: int
    reducer: Reducer
    known: Mapping[CastSpec, Tensor] = NOTHING_KNOWN

    def amax(self, x: Tensor, spec: CastSpec) -> Tensor | None:
        """The largest magnitudes that decide the scales of the whole matrix, see `tensors.parted_amax`; None: x's."""
        known = self.known.get(spec)
        if known is not None:
            return known
        amax = amax_of_part(x, spec, self.dim)
        return None if amax is None else self.reducer.max_(amax)


class Exchange(Protocol):
    """Moves rows between the processes of a group."""

    @property
    def ranks(self) -> int:
        """Processes of the group."""
        ...

    def gather_bytes(self, sent: Tensor) -> Tensor:
        """Bytes as they are: uint8 [n], the same n on every process, give [ranks, n]."""
        ...

    def gather_values(self, rows: Tensor) -> Tensor:
        """Values [m, n] by the recipe's cast for communication: the ranked rows [ranks * m, n] in the same dtype."""
        ...

    def sum_scattered(self, ranked: Tensor) -> Tensor:
        """This process's rows of the sum over processes: ranked rows [ranks * m, n] give float32 [m, n]."""
        ...


class Parting(NamedTuple):
    """How one call of a linear layer is parted. operands: by role, those that are.

    exchange: in sequence-parallel training. gathers: the role whose rows every process has a part of, and needs all:
    "input", where the output has all rows, or "grad_output", where the output is summed over processes and parted.
    """

    operands: Mapping[str, PartedOperand]
    exchange: Exchange | None = None
    gathers: str = ""

    def for_role(self, role: str) -> Exchange | None:
        """What gathers the rows of that role; None: this process has all that it needs."""
        return self.exchange if role == self.gathers else None

    def over_rows(self, role: str) -> Reducer:
        """The reducer over processes that have other rows of the role's matrix."""
        operand = self.operands.get(role)
        return SINGLE_PROCESS if operand is None or operand.dim else operand.reducer

    def smoothed(self) -> Mapping[str, PartedOperand]:
        """The operands of a layer whose weight changes with every input: nothing is known of it before."""
        return {role: operand._replace(known=NOTHING_KNOWN) for role, operand in self.operands.items()}


NOTHING_PARTED: Mapping[str, PartedOperand] = {}
WHOLE = Parting(NOTHING_PARTED)
