"""Casts equal torchao's in every bit where torchao follows its own formula, and the places where it does not."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from block_cases import FLOATS
from torch import Tensor

from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, ScaleRule

logging.disable(logging.WARNING)  # torchao logs which of its compiled extensions do not load
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
    from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
logging.disable(logging.NOTSET)

ELEMENTS = {
    E4M3FN: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E2M1FN: torch.float4_e2m1fn_x2,
    E3M2FN: DTYPE_FP6_E3M2,
    E2M3FN: DTYPE_FP6_E2M3,
}
MODES = {E8M0_UP: ScaleCalculationMode.RCEIL, E8M0_FLOOR: ScaleCalculationMode.FLOOR}
RULES = [CURRENT, CURRENT_POW2]


def values(rows: int = 512, columns: int = 96, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    return (x * torch.exp2(8 * torch.randn(rows, 1, generator=generator))).to(dtype)


def torchao_mx(x: Tensor, fmt: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Scale bytes and codes, one a byte."""
    scale, codes = to_mx(x, ELEMENTS[fmt], 32, MODES[rule])
    codes = codes.view(torch.uint8)
    if fmt is E2M1FN:
        codes = torch.stack([codes & 0xF, codes >> 4], -1)
    return scale.view(torch.uint8), codes.reshape(x.shape)


def our_mx(x: Tensor, fmt: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    found = kernels.quantize_blocks(x, fmt, Block(1, 32), rule)
    assert found.codes is not None
    return found.dequant_scale.view(torch.uint8), found.codes.view(torch.uint8)


# ---- FP8 by row, by column and per tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=repr)
@pytest.mark.parametrize(("block", "axis"), [(PER_ROW, 1), (PER_COLUMN, 0), (PER_TENSOR, None)], ids=repr)
def test_fp8_casts_equal_torchao(block: Block, axis: int | None, fmt: Format, rule: ScaleRule, dtype) -> None:
    x = values(dtype=dtype)
    how = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE
    scale = tensor_to_scale(
        x, fmt.dtype, scaling_granularity=how, axiswise_dim=axis, round_scales_to_power_of_2=rule is CURRENT_POW2
    )
    found = kernels.quantize_blocks(x, fmt, block, rule)
    assert found.codes is not None
    assert torch.equal(found.codes.view(torch.uint8), to_fp8_saturated(x.float() * scale, fmt.dtype).view(torch.uint8))
    assert torch.equal(found.dequant_scale, scaling.dequant_scale_of(scale).reshape(found.dequant_scale.shape))


def test_torchao_clamps_amax_to_1e_12_and_has_no_scale_for_infinity() -> None:
    amax = torch.tensor([0.0, 1e-13, 1e-12, float("inf"), float("nan")])
    theirs = torch.stack([tensor_to_scale(a[None], E4M3FN.dtype) for a in amax])
    ours = scaling.quant_scale_of(amax, E4M3FN, CURRENT)
    assert theirs[:2].tolist() == [torch.tensor(448e12).item()] * 2  # our 1, and 4.48e15
    assert ours[:2].tolist() == [1.0, (torch.tensor([448.0]) / torch.tensor([1e-13])).item()]
    assert ours[2] == theirs[2]
    assert theirs[3] == 0 and theirs[4].isnan()  # so that codes are NaN or 0; ours are cast unscaled, and counted
    assert ours[3:].tolist() == [1.0, 1.0]


# ---- MX


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", MODES, ids=repr)
@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_mx_casts_equal_torchao(fmt: Format, rule: ScaleRule, dtype: torch.dtype) -> None:
    x = values(dtype=dtype)
    for ours, theirs in zip(our_mx(x, fmt, rule), torchao_mx(x, fmt, rule), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_mx_casts_of_ties_equal_torchao(fmt: Format, float32_classes) -> None:
    x = float32_classes(fmt)
    x = x[x.isfinite() & (x.abs() <= fmt.max)]
    x = torch.cat([x, torch.zeros(-len(x) % 31)]).view(-1, 31)
    x = torch.cat([x, torch.full((len(x), 1), fmt.max)], 1)  # a scale of 1 in every block
    scale, codes = our_mx(x, fmt, E8M0_UP)
    theirs = torchao_mx(x, fmt, E8M0_UP)
    assert (scale == 127).all() and torch.equal(scale, theirs[0])
    assert torch.equal(codes, theirs[1])


@pytest.mark.parametrize("exponent", [20, 60, -60])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=repr)
def test_torchao_rounds_a_scale_up_too_little_where_its_float32_logarithm_is_a_whole_number(
    fmt: Format, exponent: int
) -> None:
    # the amax just above max * 2^exponent: its ratio to max is above 2^exponent, but log2 of it rounds to exponent
    start = (torch.tensor(fmt.max) * 2.0**exponent).view(torch.int32).item()
    amax = torch.arange(start + 1, start + 65, dtype=torch.int32).view(torch.float32)
    x = amax[:, None].expand(-1, 32).contiguous()
    (ours, codes), (theirs, their_codes) = our_mx(x, fmt, E8M0_UP), torchao_mx(x, fmt, E8M0_UP)
    smallest_that_fits = 127 + exponent + 1
    assert (ours == smallest_that_fits).all()
    wrong = theirs[:, 0] != smallest_that_fits
    assert 1 <= wrong.sum() <= 63
    assert (theirs[wrong] == smallest_that_fits - 1).all()  # the maximum saturates, by a hair
    assert torch.equal(codes[~wrong], their_codes[~wrong])


def test_torchao_loses_blocks_whose_scale_byte_is_0() -> None:
    # byte 0 means 2^-127: torchao multiplies such blocks by 1 (RCEIL) or by 2^126 (FLOOR) instead of 2^127
    x = torch.full((1, 32), 2.0**-127 * 448)
    for rule, theirs in ((E8M0_UP, 0), (E8M0_FLOOR, 224)):
        byte, codes = torchao_mx(x, E4M3FN, rule)
        assert byte.item() == 0
        assert codes[0].view(E4M3FN.dtype).float().tolist() == [float(theirs)] * 32
        byte, codes = our_mx(x, E4M3FN, rule)
        assert byte.item() == 0
        assert codes[0].view(E4M3FN.dtype).float().tolist() == [448.0] * 32


def test_torchao_takes_infinity_for_a_power_of_two_when_it_rounds_down() -> None:
    x = torch.tensor([[float("inf")] + [1.0] * 31])
    assert [our_mx(x, E4M3FN, rule)[0].item() for rule in MODES] == [254, 254]
    assert [torchao_mx(x, E4M3FN, rule)[0].item() for rule in MODES] == [254, 247]
