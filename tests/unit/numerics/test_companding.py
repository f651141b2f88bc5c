"""Casts through a curve, and casts that make no zeros: against the scalar twin, closed formulas and each other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from block_cases import BLOCKS, NARROW, assert_equals_scalar_twin, from_bits, matrices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from narrowgauge.numerics import code_book, companding, kernels, reference
from narrowgauge.numerics.companding import DYNAMIC, LINEAR, RANGE_EXPANSION, SQUARE_ROOT, Companding
from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E5M2, FP16, INT4, INT8, UINT4, UINT8, Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.measure import sqnr_db
from narrowgauge.numerics.scaling import CURRENT, E8M0_UP, NVFP4, ScaleRule

BENT = [*itertools.product(NARROW, (SQUARE_ROOT,)), (INT8, DYNAMIC), (UINT8, DYNAMIC)]
# and with no curve, the casts that may make no zeros
NONZERO_CASTS = [*((f, c, CURRENT) for f, c in BENT), (E4M3FN, LINEAR, E8M0_UP), (E2M1FN, LINEAR, NVFP4),
                 (FP16, LINEAR, CURRENT), (UINT4, LINEAR, CURRENT)]  # fmt: skip
EVERY = (*BENT, (E4M3FN, RANGE_EXPANSION))


def moments(rows: int, columns: int, signed: bool, seed: int = 0) -> Tensor:
    """Values like those of optimizer states: many powers of two in every row, some exact zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.randn(rows, columns, generator=generator).mul(3).exp()
    x[torch.rand(rows, columns, generator=generator) < 0.05] = 0.0
    return x if signed else x.square()


@pytest.mark.parametrize(("fmt", "curve"), [*BENT, *((fmt, LINEAR) for fmt in NARROW)], ids=repr)
def test_the_range_of_a_curve_is_that_of_its_codes(fmt: Format, curve: Companding) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype) if fmt.bits == 8 else None
    x = torch.linspace(-1, 1, 4097) ** 9 * companding.limit_of(fmt, curve)
    if not fmt.signed:
        x = x.abs()
    codes = companding.encode(x, fmt, curve) if codes is None else codes
    values = companding.decode(codes, fmt, curve).abs()
    values = values[values.isfinite() & (values > 0)]
    if (
        not fmt.is_integer or curve is DYNAMIC or not fmt.signed
    ):  # two's complement has one code more, which no cast gives
        assert float(values.max()) == companding.limit_of(fmt, curve)
    assert float(values.min()) == pytest.approx(companding.smallest_of(fmt, curve), rel=1e-6)


@pytest.mark.parametrize(("fmt", "curve"), BENT, ids=repr)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_matrix_is_bent_and_cast_as_the_scalar_twin_says(
    data: st.DataObject, fmt: Format, curve: Companding
) -> None:
    block, nonzero = data.draw(st.sampled_from(BLOCKS)), data.draw(st.booleans())
    x = from_bits(data.draw(matrices(fmt)))
    assert_equals_scalar_twin(x, fmt, block, CURRENT, companding=curve, nonzero=nonzero)


@pytest.mark.parametrize(("fmt", "curve", "rule"), NONZERO_CASTS, ids=repr)
def test_nothing_but_zero_has_a_code_of_zero(fmt: Format, curve: Companding, rule: ScaleRule) -> None:
    # case 27: v that rounds to 0 under an m that did not makes a step of m / eps
    x = moments(6, 300, fmt.signed)
    x[0, :2] = torch.tensor([2.0**-149, 2.0**120])  # x * quant_scale underflows
    assert_equals_scalar_twin(x, fmt, Block(1, 32), rule, companding=curve, nonzero=True)
    arguments = dict(companding=curve, count=True)
    plain = kernels.quantize_blocks(x, fmt, Block(1, 32), rule, **arguments)
    lifted = kernels.quantize_blocks(x, fmt, Block(1, 32), rule, **arguments, nonzero=True)
    assert plain.codes is not None and lifted.codes is not None and plain.flushed is not None
    values, before = (companding.decode(codes, fmt, curve) for codes in (lifted.codes, plain.codes))
    assert ((values == 0) == (x == 0)).all() and plain.flushed > 0 and lifted.flushed == 0
    assert (values.sign() == x.sign()).all()
    moved = values != before
    least = code_book.smallest(fmt.signed) if curve is DYNAMIC else fmt.smallest_subnormal
    assert moved.sum() == plain.flushed
    assert (values[moved].abs() == (least * least if curve is SQUARE_ROOT else least)).all()


def test_nonzero_in_casts_with_one_scale() -> None:
    x = moments(3, 50, signed=True)
    x[0, 0] = 2.0**-149
    for fmt, scale in itertools.product((FP16, E4M3FN, E5M2), (None, torch.tensor(2.0**-10))):
        q = kernels.quantize(x, scale, fmt, saturating=True, nonzero=True, count=True, carrier=torch.float32)
        plain = kernels.quantize(x, scale, fmt, saturating=True, count=True, carrier=torch.float32)
        assert q.carrier is not None and plain.carrier is not None and plain.flushed is not None
        assert plain.flushed > 0 and q.flushed == 0
        lifted = torch.full_like(x, fmt.smallest_subnormal).copysign(x)
        assert q.carrier.equal(torch.where((plain.carrier == 0) & (x != 0), lifted, plain.carrier))


def test_nonzero_leaves_nan_and_what_has_no_sign_to_take() -> None:
    x = torch.tensor([[torch.nan, -1.0, 4.0, 1e-9]])
    q = kernels.quantize_blocks(x, UINT8, Block(1, 2), CURRENT, companding=SQUARE_ROOT, nonzero=True)
    assert q.codes is not None and q.codes.tolist() == [[0, 0, 255, 1]]
    assert q.dequant_scale.isnan().tolist() == [[True, False]]
    e4m3 = kernels.quantize_blocks(x, E4M3FN, Block(1, 2), CURRENT, companding=SQUARE_ROOT, nonzero=True)
    assert e4m3.codes is not None and e4m3.codes.float().isnan().tolist() == [[True, False, False, False]]


def test_square_root_by_hand() -> None:
    # amax 4 -> 255^2: quant_scale 16256.25; 1 -> sqrt(16256.25) = 127.5, whose tie goes to 128
    x = torch.tensor([[4.0, 1.0, 0.0, 4 / 65025, 1e-5, 1e-6]])
    q = kernels.quantize_blocks(x, UINT8, Block(1, 128), CURRENT, companding=SQUARE_ROOT)
    assert q.codes is not None and q.codes.tolist() == [[255, 128, 0, 1, 0, 0]]
    assert q.dequant_scale.item() == np.float32(1) / np.float32(16256.25)
    values = kernels.dequantize_blocks(q.codes, q.dequant_scale, UINT8, Block(1, 128), companding=SQUARE_ROOT)
    scale = q.dequant_scale.item()
    assert values.tolist() == [[np.float32(c * c * scale) for c in (255, 128, 0, 1, 0, 0)]]
    signed = kernels.quantize_blocks(-x, INT8, Block(1, 128), CURRENT, companding=SQUARE_ROOT)
    assert signed.codes is not None and signed.codes.tolist() == [[-127, -64, 0, 0, 0, 0]]


@pytest.mark.parametrize("fmt", [INT8, UINT8, INT4, UINT4, E4M3FN], ids=repr)
def test_ties_on_the_root_and_their_neighbours(fmt: Format) -> None:
    # (c + 1/2)^2 is a float32, and its root a tie. So is, rounded to float32, the root of some of its neighbours: the
    # twin knows which, and a root that is an ulp off does not
    limit = fmt.max**2
    middles = (torch.arange(int(min(fmt.max, 255))) + 0.5).double().square().float()
    around = [middles.nextafter(torch.tensor(0.0)), middles, middles.nextafter(torch.tensor(torch.inf))]
    x = torch.cat([torch.tensor([limit]), *around])[None]  # amax is the limit: the scale is 1
    assert_equals_scalar_twin(x, fmt, Block(1, 4096), CURRENT, companding=SQUARE_ROOT)
    if fmt.is_integer:
        q = kernels.quantize_blocks(x, fmt, Block(1, 4096), CURRENT, companding=SQUARE_ROOT)
        c = torch.arange(len(middles))
        assert q.codes is not None and q.codes[0, 1:].view(3, -1)[1].tolist() == (c + c % 2).tolist()


def test_scalar_square_root_is_that_of_ieee_754() -> None:
    bits = np.random.default_rng(0).integers(0, 0x7F800001, 3000).tolist()
    bits += [0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000]
    expected = np.sqrt(np.array(bits, np.uint32).view(np.float32)).view(np.uint32).tolist()
    assert [reference.square_root(b) for b in bits] == expected


def test_range_expansion_by_its_formula() -> None:
    # COAT: k = floor(16 log2(448^2 / 2) / log2(max / min)) / 16, y = sign(x) (|x| / c)^k with c = sqrt(max min),
    # code = E4M3(y / s) with s = (max / c)^k / 448
    x = moments(4, 128, signed=True)
    q = kernels.quantize_blocks(x, E4M3FN, Block(1, 128), CURRENT, companding=RANGE_EXPANSION)
    assert q.codes is not None and q.dequant_scale.shape == (4, 1, 2)
    magnitudes = x.abs().double()
    largest = magnitudes.amax(1, keepdim=True)
    least = magnitudes.where(x != 0, torch.inf).amin(1, keepdim=True)
    k = (16 * math.log2(448**2 / 2) / (largest / least).log2()).floor() / 16
    assert q.dequant_scale[..., 1].equal(k.float()) and (k < 1).all()
    center = (largest * least).sqrt()
    y = (magnitudes / center) ** k * x.sign()
    codes = (y / ((largest / center) ** k / 448)).float().to(torch.float8_e4m3fn)
    assert (codes.float() == q.codes.float()).double().mean() > 0.99  # the rest lie on a tie's edge
    values = kernels.dequantize_blocks(q.codes, q.dequant_scale, E4M3FN, Block(1, 128), companding=RANGE_EXPANSION)
    inverse = (q.codes.double().abs() / 448) ** (1 / k) * largest * q.codes.double().sign()
    assert torch.allclose(values.double(), inverse, rtol=3e-5, atol=0)


@pytest.mark.parametrize(
    "row", [[0.0, 0.0, 0.0], [2.5, 0.0, 0.0], [2.5, -2.5, 2.5], [torch.inf, 1.0, 0.1], [torch.nan, 1.0, 0.1]], ids=str
)
def test_tiles_without_a_range_are_scaled_plainly(row: list[float]) -> None:
    x = torch.tensor([row])
    bent = kernels.quantize_blocks(x, E4M3FN, Block(1, 4), CURRENT, companding=RANGE_EXPANSION)
    plain = kernels.quantize_blocks(x, E4M3FN, Block(1, 4), CURRENT)
    assert bent.codes is not None and plain.codes is not None
    assert bent.codes.view(torch.uint8).equal(plain.codes.view(torch.uint8))
    assert bent.dequant_scale.tolist() == [[[plain.dequant_scale.item(), 1.0]]]


@pytest.mark.parametrize(("fmt", "curve"), EVERY, ids=repr)
def test_the_largest_code_is_the_largest_value_and_zero_is_zero(fmt: Format, curve: Companding) -> None:
    x = moments(8, 300, fmt.signed)
    block = Block(1, 128)
    q = kernels.quantize_blocks(x, fmt, block, CURRENT, companding=curve, count=True)
    assert q.codes is not None and int(q.saturated) <= 24  # a scale's own rounding, once a tile
    values = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, block, companding=curve)
    assert (values[x == 0] == 0).all()
    at = x.abs().argmax()
    assert values.flatten()[at].item() == pytest.approx(x.flatten()[at].item(), rel=0.008)  # -1 is not in the book


@pytest.mark.parametrize(("fmt", "curve"), EVERY, ids=repr)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0), (1, 1)], ids=str)
def test_empty_and_single_values_are_bent(shape: tuple[int, int], fmt: Format, curve: Companding) -> None:
    for block in (Block(1, 128), Block(None, 1)):
        q = kernels.quantize_blocks(torch.full(shape, 2.0), fmt, block, CURRENT, companding=curve)
        assert q.codes is not None and q.codes.shape == shape
        assert tuple(q.dequant_scale.shape[:2]) == block.grid_of(*shape)
        values = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, block, companding=curve)
        assert values.tolist() == torch.full(shape, 2.0).tolist()


@pytest.mark.parametrize("fmt", [INT8, UINT8, INT4, UINT4], ids=repr)
def test_noise_of_the_square_root_is_that_of_its_formula(fmt: Format) -> None:
    # x = y^2 / max^2 with an error of y uniform in +-1/2: noise 4 y^2 / 12 over signal y^4 in the mean of x uniform in
    # [0, 1] is 1 / (2 max^2); of few levels the error's own square, 1 / 80 of y's fourth power, counts too
    x = torch.rand(256, 4096, generator=torch.Generator().manual_seed(0))
    x[:, 0] = 1.0
    q = kernels.quantize_blocks(x, fmt, Block(1, 4096), CURRENT, companding=SQUARE_ROOT)
    assert q.codes is not None
    values = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, Block(1, 4096), companding=SQUARE_ROOT)
    noise = 1 / (2 * fmt.max**2) + 3 / (80 * fmt.max**4)
    assert sqnr_db(x, values) == pytest.approx(-10 * math.log10(noise), abs=0.1)


@pytest.mark.parametrize(("fmt", "curve"), [*EVERY, (INT4, SQUARE_ROOT)], ids=repr)
def test_operators_of_bent_casts_pass_torchs_own_check(fmt: Format, curve: Companding) -> None:
    x, checks = moments(30, 50, fmt.signed), ("test_faketensor",)
    arguments = (x, fmt.name, 1, 16, "CURRENT", True, torch.bfloat16, True, None, 0, curve.name, True)
    torch.library.opcheck(torch.ops.narrowgauge.quantize_blocks.default, arguments, test_utils=checks)
    q = kernels.quantize_blocks(x, fmt, Block(1, 16), CURRENT, companding=curve)
    arguments = (q.codes, q.dequant_scale, fmt.name, 1, 16, torch.float32, None, curve.name)
    torch.library.opcheck(torch.ops.narrowgauge.dequantize_blocks.default, arguments, test_utils=checks)
    assert q.codes is not None
    for carrier in (torch.float32, torch.bfloat16):
        carried = kernels.quantize_blocks(x, fmt, Block(1, 16), CURRENT, carrier=carrier, companding=curve).carrier
        values = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, Block(1, 16), carrier, companding=curve)
        assert carried is not None and carried.equal(values)
