"""Casts shared by layers that read the same tensor: q, k and v, or gate and up.

Three FP8 copies of one input would cost more memory than the one bf16 tensor that autograd keeps without them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class SharedInputs(Generic[T]):
    """Casts made within one forward of one parent module; dropped with it.

    Invariants: an entry holds its source tensor, so that the source's identity cannot pass to another tensor; an entry
    is found only for the same tensor object at the same version, so that an in-place change hides it. A write through
    `.data` bumps no version: this is why nothing may live longer than one forward of the parent.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Hashable], tuple[Tensor, int, T]] = {}

    def get(self, x: Tensor, key: Hashable) -> T | None:
        """The cast of `x` stored under `key`, or None where there is none or `x` has changed since."""
        entry = self._entries.get((id(x), key))
        if entry is None or x.is_inference():
            return None
        source, version, value = entry
        return value if source is x and version == x._version else None

    def put(self, x: Tensor, key: Hashable, value: T) -> None:
        """Store the cast of `x`. Tensors of inference mode are not stored: they have no version to compare."""
        if not x.is_inference():
            self._entries[id(x), key] = (x, x._version, value)

    def clear(self) -> None:
        """Forget everything: the parent's forward has ended."""
        self._entries.clear()
