"""What delayed scaling asks of a group of data-parallel processes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Reducer(Protocol):
    """Combines amax values over the data-parallel group, so that every rank takes the same scale."""

    def max_(self, amax: Tensor) -> Tensor:
        """Replace `amax` (float32, any shape, the same on every rank) by its maximum over the group, and return it.

        A NaN on any rank must arrive on all of them: a maximum that drops NaN lets the ranks disagree about a step.
        """
        ...


class SingleProcess:
    """The group of one: the maximum over it is the value itself."""

    def max_(self, amax: Tensor) -> Tensor:
        """Return `amax` as it is."""
        return amax


SINGLE_PROCESS = SingleProcess()
