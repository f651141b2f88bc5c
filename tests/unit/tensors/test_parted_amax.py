"""Casts of a part of a matrix by the scales of the whole: the bits of the whole's cast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E5M2
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, Block
from narrowgauge.numerics.scaling import CURRENT_POW2, E8M0_UP, NVFP4, TENSOR_POW2, Delayed
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.cast import cast_operand
from narrowgauge.tensors.parted_amax import amax_of_part

SPECS = (
    CastSpec(E4M3FN), CastSpec(E5M2, scale=TENSOR_POW2), CastSpec(E4M3FN, PER_ROW), CastSpec(E4M3FN, PER_COLUMN),
    CastSpec(E4M3FN, PER_ROW, CURRENT_POW2), CastSpec(E4M3FN, Block(4, None)), CastSpec(E4M3FN, Block(None, 8)),
    CastSpec(E4M3FN, Block(1, 32), E8M0_UP), CastSpec(E4M3FN, Block(32, 32)),
    CastSpec(E2M1FN, Block(1, 16), NVFP4), CastSpec(E2M1FN, Block(16, 1), NVFP4),
    CastSpec(E2M1FN, Block(16, 16), NVFP4),
)  # fmt: skip


def _matrix(dtype: torch.dtype) -> Tensor:
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[:32] *= 30
    x[:, 64:] *= 100
    return x.to(dtype)


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def _check(x: Tensor, spec: CastSpec, dim: int) -> None:
    whole = cast_operand(x, spec, keep_codes=True, carrier=torch.float32)
    parts = x.chunk(2, dim=dim)
    found = [amax_of_part(part, spec, dim) for part in parts]
    amax = None if found[0] is None else torch.stack(found).amax(dim=0)  # type: ignore[arg-type]
    for at, part in enumerate(parts):
        cast = cast_operand(part, spec, keep_codes=True, carrier=torch.float32, amax=amax)
        for name in ("codes", "carrier", "block_scale", "dequant_scale"):
            mine, expected = getattr(cast, name), getattr(whole, name)
            if name != "dequant_scale" and expected is not None and expected.shape[dim] > 1:
                expected = expected.chunk(2, dim=dim)[at]
            assert (mine is None) == (expected is None), name
            if mine is not None:
                assert mine.shape == expected.shape and torch.equal(_bits(mine), _bits(expected)), (name, at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_parts_of_a_matrix_are_cast_as_the_whole_is(spec: CastSpec, dim: int, dtype: torch.dtype) -> None:
    _check(_matrix(dtype), spec, dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_is_not_finite_in_one_part_shows_in_the_other(spec: CastSpec, dim: int) -> None:
    x = _matrix(torch.float32)
    x[5, 7] = torch.nan
    _check(x, spec, dim)
    x[5, 7] = torch.inf
    _check(x, spec, dim)


def test_only_scales_that_span_the_parts_ask_for_the_others():
    x = _matrix(torch.float32)
    none = [
        (CastSpec(E4M3FN, PER_ROW), 0), (CastSpec(E4M3FN, PER_COLUMN), 1), (CastSpec(E4M3FN, Block(32, 32)), 0),
        (CastSpec(E4M3FN, scale=Delayed()), 1),
    ]  # fmt: skip
    assert [amax_of_part(x, spec, dim) for spec, dim in none] == [None] * len(none)
    shapes = {(CastSpec(E4M3FN, PER_ROW), 1): (64, 1), (CastSpec(E4M3FN, PER_COLUMN), 0): (1, 128)}
    shapes |= {(CastSpec(E4M3FN), 0): (), (CastSpec(E2M1FN, Block(1, 16), NVFP4), 0): ()}
    for (spec, dim), shape in shapes.items():
        amax = amax_of_part(x, spec, dim)
        assert amax is not None and amax.shape == shape and amax.dtype is torch.float32
