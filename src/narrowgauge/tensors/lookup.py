"""Rows of a QuantizedTensor, as an embedding looks them up: they are decoded alone, and not the whole table."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from torch import Tensor

from narrowgauge.numerics.granularity import Block
from narrowgauge.tensors.values import as_bytes, is_readable, values_of

if TYPE_CHECKING:
    from narrowgauge.tensors.quantized import QuantizedTensor


def rows_of(q: QuantizedTensor, index: Tensor) -> Tensor | None:
    """The values of rows `index` (int64 or int32, [n]) of the matrix `q`: [n, columns], bit for bit those of the whole.

    None where they cannot be told from the rows alone: which value was infinite depends on all tiles.
    """
    if q.spec.in_blocks and is_readable(q.amax) and math.isinf(q.amax.item()):
        return None
    scales, spec = q.dequant_scale, q.spec
    if spec.in_blocks:
        height, _ = spec.granularity.size_in(*q.shape)
        scales = _select(scales, index.div(height, rounding_mode="floor"))
        spec = dataclasses.replace(spec, granularity=Block(1, spec.granularity.columns))
    return values_of(type(q)(_select(q.codes, index), scales, spec, q.dtype, q.amax))


def _select(x: Tensor, index: Tensor) -> Tensor:
    return as_bytes(x).index_select(0, index).view(x.dtype)
