"""QuantizedTensors whose codes stand for values on a curve: what keeps them, what they show, what is refused."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from quantized_tensors import assert_same, seeded

from narrowgauge import CURRENT, E8M0_UP, Block, CastSpec, RecipeError, quantize
from narrowgauge.numerics.companding import DYNAMIC, RANGE_EXPANSION, SQUARE_ROOT
from narrowgauge.numerics.formats import E4M3FN, E5M2, FP16, INT4, INT8, UINT8
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.numerics.scaling import TENSOR_POW2, ULP
from narrowgauge.tensors.quantized import QuantizedTensor

SPECS = [
    CastSpec(INT8, Block(1, 32), companding=SQUARE_ROOT),
    CastSpec(UINT8, Block(1, 32), CURRENT, NONZERO, SQUARE_ROOT),
    CastSpec(E4M3FN, Block(1, 32), companding=SQUARE_ROOT),
    CastSpec(INT4, Block(3, 8), companding=SQUARE_ROOT),
    CastSpec(INT8, Block(1, 32), companding=DYNAMIC),
    CastSpec(UINT8, Block(1, 32), CURRENT, NONZERO, DYNAMIC),
    CastSpec(E4M3FN, Block(1, 32), companding=RANGE_EXPANSION),
    CastSpec(E4M3FN, Block(4, 8), companding=RANGE_EXPANSION),
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


def source(spec: CastSpec, shape: tuple[int, ...] = (6, 70)) -> torch.Tensor:
    """Values over many powers of two, without a sign where the format has none."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) ** 3
    return x if spec.format.signed else x.abs()


def make(spec: CastSpec, shape: tuple[int, ...] = (6, 70)) -> QuantizedTensor:
    return quantize(source(spec, shape), spec)


@each_spec
@pytest.mark.parametrize("shape", [(6, 70), (70,), (2, 3, 5, 40), (0, 4), ()], ids=str)
def test_any_shape_is_cast_tile_by_tile(spec: CastSpec, shape: tuple[int, ...]) -> None:
    q = make(spec, shape)
    assert q.shape == q.dequantize().shape == shape
    assert q.dequant_scale.shape[-1:] == (2,) or spec.companding is not RANGE_EXPANSION
    if len(shape) > 2:
        assert q.dequantize()[1].equal(quantize(source(spec, shape)[1], spec).dequantize())


@each_spec
def test_copies_and_transposes_keep_codes_scales_and_values(spec: CastSpec) -> None:
    q = make(spec)
    buffer = io.BytesIO()
    torch.save(q, buffer)
    buffer.seek(0)
    for other in (q.clone(), copy.deepcopy(q), torch.load(buffer, weights_only=True), q.detach().view(6, 70)):
        assert_same(q, other)
    assert q.mT.dequantize().equal(q.dequantize().mT) and q.mT.spec == spec.transposed
    assert_same(q.mT.mT, q)
    assert torch.equal(q[2].clone(), q.dequantize()[2])


@each_spec
def test_writes_cast_by_the_same_curve(spec: CastSpec) -> None:
    q = make(spec)
    new = seeded(6, 70, seed=1).abs()
    q.copy_(new)
    assert_same(q, quantize(new, spec))
    held = q.dequantize()
    q.add_(0.0)
    assert q.dequantize().equal(held)
    q.mul_(2.0)
    doubled = held * 2 if spec.companding is not RANGE_EXPANSION else quantize(held * 2, spec).dequantize()
    assert q.dequantize().equal(doubled)
    q.zero_()
    assert (q.codes.view(torch.uint8) == 0).all() and (q.dequantize() == 0).all() and q.amax == 0
    q.copy_(new)
    assert_same(q, quantize(new, spec))


@each_spec
def test_zero_codes_are_zeros_under_any_scale(spec: CastSpec) -> None:
    # case 28: an exact zero, so that a value without gradient never moves a weight
    scales = quantize(torch.ones(6, 70), spec).dequant_scale
    codes = torch.zeros(6, 70, dtype=torch.uint8).view(spec.format.dtype)
    assert (QuantizedTensor(codes, scales, spec).dequantize() == 0).all()


@each_spec
def test_amax_follows_from_the_scales(spec: CastSpec) -> None:
    q = make(spec)
    found = QuantizedTensor(q.codes, q.dequant_scale, spec).amax
    assert found.item() == pytest.approx(q.amax.item(), rel=1e-6)
    assert q.amax == (seeded(6, 70) ** 3).abs().amax()


@each_spec
def test_infinities_are_seen_in_both_signs_and_nan_is_kept(spec: CastSpec) -> None:
    x = (seeded(6, 70) ** 3).abs() / 100  # where amax is infinite the scale is 1, the code book's largest value
    x[1, 3] = torch.inf
    if spec.format.signed:
        x[4, 5] = -torch.inf
    q = quantize(x, spec)
    seen = q * 1.0
    assert q.amax == torch.inf and seen.isinf().equal(x.isinf())
    assert (seen[seen.isinf()] == x[x.isinf()]).all() and q.dequantize().isfinite().all()
    x[1, 3] = x[4, 5] = torch.nan
    q = quantize(x, spec)
    assert q.amax.isnan() and q.dequantize().isnan()[1, 3] and q.dequantize().isnan()[4, 5]
    assert not q.dequantize()[0, 40:].isnan().any()


@each_spec
def test_compiled_code_gives_the_same_bits(spec: CastSpec) -> None:
    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        return quantize(x, spec).dequantize()

    torch._dynamo.reset()
    x = (seeded(6, 70) ** 3).abs()
    assert torch.compile(there_and_back, backend="aot_eager", fullgraph=True)(x).equal(there_and_back(x))


@pytest.mark.parametrize(("fmt", "scale"), [(FP16, TENSOR_POW2), (FP16, CURRENT), (E4M3FN, CURRENT), (E5M2, E8M0_UP)])
def test_nonzero_with_one_scale(fmt, scale) -> None:
    # case 27
    x = seeded(40, 50).abs() ** 40
    x[0, :3] = torch.tensor([0.0, 2.0**-149, 0.0])
    spec = CastSpec(fmt, scale=scale, rounding=NONZERO)
    plain, q = quantize(x, CastSpec(fmt, scale=scale)), quantize(x, spec)
    assert ((q.dequantize() == 0) == (x == 0)).all()
    lifted = (plain.dequantize() == 0) & (x != 0)
    least = fmt.smallest_subnormal * q.dequant_scale
    assert lifted.any() and (q.dequantize()[lifted] == least).all()
    assert q.dequantize()[~lifted].equal(plain.dequantize()[~lifted])


def test_a_scale_in_units_of_a_parameter_is_no_cast_of_its_own() -> None:
    with pytest.raises(RecipeError, match=r"numerics\.residual"):
        quantize(seeded(3), CastSpec(INT8, scale=ULP))


def test_nan_of_one_tile_does_not_reach_another() -> None:
    for spec, at in itertools.product(SPECS, (0, 69)):
        x = (seeded(6, 70) ** 3).abs()
        x[0, at] = torch.nan
        clean = quantize(x.nan_to_num(0.0), spec).dequantize()
        rows = slice(max(spec.granularity.rows or 0, 1), None)
        assert quantize(x, spec).dequantize()[rows].equal(clean[rows])
