"""Counts what autograd keeps for backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(
    forward: Callable[[], object], uncounted: Iterable[Tensor] = (), uncounted_shapes: Iterable = ()
) -> int:
    """Bytes of the distinct storages that `forward` saves for backward.

    uncounted: tensors whose storages are left out (parameters). uncounted_shapes: shapes of saved tensors of one byte a
    value that are left out (codes of weights).
    """
    left_out = {t.untyped_storage().data_ptr() for t in uncounted}
    shapes = {torch.Size(shape) for shape in uncounted_shapes}
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        is_weight_code = t.element_size() == 1 and t.shape in shapes
        if t.untyped_storage().data_ptr() not in left_out and not is_weight_code:
            kept[t.untyped_storage().data_ptr()] = t  # held, so that no other storage takes its address
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = forward()
    del output
    return sum(t.untyped_storage().nbytes() for t in kept.values())
