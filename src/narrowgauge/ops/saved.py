"""How an operand waits for backward: as packed codes and scales, or as the tensor itself, to be cast again."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from narrowgauge.numerics import packing
from narrowgauge.ops.operands import Cast
from narrowgauge.recipes.spec import CastSpec


class Saved(NamedTuple):
    """Where an operand's three tensors are among those that autograd keeps, and what they mean.

    spec: of the saved codes; None: the tensor itself was saved, and is cast again. columns: of the matrix of codes.
    """

    at: int
    spec: CastSpec | None
    columns: int


def save(cast: Cast, at: int, again: Tensor | None = None) -> tuple[Saved, list[Tensor | None]]:
    """What to keep of `cast`, from place `at` on. again: the tensor to keep in its stead, as it costs no memory."""
    if again is not None:
        return Saved(at, None, 0), [again, None, None]
    assert cast.codes is not None
    codes = cast.codes
    if cast.spec.format.bits < 8:
        codes = packing.pack(codes, cast.spec.format.bits)
    return Saved(at, cast.spec, cast.codes.shape[1]), [codes, cast.dequant_scale, cast.block_scale]


def restore(saved: Saved, tensors: tuple[Tensor, ...]) -> Cast:
    """The cast that `save` kept; `tensors` are all that autograd has kept."""
    assert saved.spec is not None
    codes, dequant_scale, block_scale = tensors[saved.at : saved.at + 3]
    if saved.spec.format.bits < 8:
        codes = packing.unpack(codes, saved.spec.format.bits, saved.columns)
    return Cast(codes, None, dequant_scale, saved.spec, block_scale=block_scale)
