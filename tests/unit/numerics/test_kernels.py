from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics import formats, kernels, rounding, scaling
from narrowgauge.numerics.formats import E4M3FN, E5M2, Format
from narrowgauge.numerics.kernels import cpu, paths, twin

FP8 = (E4M3FN, E5M2)
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SCALES = (1.0, 1.7, 2.0**-20, 3e5, scaling.FLT_MAX)


def assert_bits_equal(a: Tensor | None, b: Tensor | None) -> None:
    """Equal in bits, but for a NaN's payload."""
    assert a is not None and b is not None
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    view = BITS[a.element_size()]
    same = a.contiguous().view(view) == b.contiguous().view(view)
    assert (same | (a.float().isnan() & b.float().isnan())).all()


def every_bit_pattern(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit dtype."""
    return torch.arange(1 << 16).to(torch.uint16).view(dtype)


def assert_numba_equals_twin(x: Tensor, scale: Tensor | None, fmt: Format) -> None:
    for codes, carrier in [(True, None), (True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float32)]:
        encoded, carried = cpu.quantize(x, scale, fmt, codes, carrier)
        expected = twin.quantize(x, scale, fmt, None, codes, carrier, True)
        if codes:
            assert_bits_equal(encoded, expected[0])
        if carrier is not None:
            assert_bits_equal(carried, expected[1])
        assert cpu.count(x, scale, fmt) == expected[2:]


@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_numba_equals_the_twin_in_every_class_of_float32(fmt: Format, float32_classes) -> None:
    assert_numba_equals_twin(float32_classes(fmt), None, fmt)


@pytest.mark.parametrize("fmt", FP8, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numba_equals_the_twin_for_every_16_bit_input(fmt: Format, dtype: torch.dtype) -> None:
    for scale in SCALES:
        assert_numba_equals_twin(every_bit_pattern(dtype), torch.tensor(scale), fmt)


@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_numba_equals_the_twin_for_random_bits_and_scales(fmt: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (100_003,), dtype=torch.int32, generator=generator).view(torch.float32)
    for scale in SCALES:
        assert_numba_equals_twin(x, torch.tensor(scale), fmt)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FP8, ids=repr)
def test_numba_equals_the_twin_for_every_29th_float32(fmt: Format) -> None:
    # a prime: every exponent, and every pattern of the bits that rounding looks at; all take minutes
    step = 29 << 21
    for start in range(-(1 << 31), 1 << 31, step):
        x = torch.arange(start, min(start + step, 1 << 31), 29, dtype=torch.int64).to(torch.int32).view(torch.float32)
        assert_bits_equal(cpu.quantize(x, None, fmt, True, None)[0], rounding.encode(x, fmt))


@pytest.mark.parametrize("fmt", FP8, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dequantize_equals_the_twin_for_every_code(fmt: Format, dtype: torch.dtype) -> None:
    codes = torch.arange(256).to(torch.uint8).view(fmt.dtype)
    for scale in (None, *map(torch.tensor, SCALES), torch.tensor(2.0**-120), torch.tensor(1e-42)):
        values = cpu.dequantize(codes, scale, fmt, torch.empty(256, dtype=dtype))
        assert_bits_equal(values, twin.dequantize(codes, scale, fmt, dtype))


@pytest.mark.parametrize("offset", [0, 1, 16], ids=["aligned", "unaligned", "next line"])
def test_streaming_past_the_caches_writes_the_same_bits(offset: int, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "MIN_STREAMED", 1)
    codes = torch.arange(100_003).to(torch.uint8).view(E4M3FN.dtype)
    out = torch.zeros(100_003 + 2 * offset)[offset : offset + 100_003]
    assert_bits_equal(cpu.dequantize(codes, torch.tensor(0.3), E4M3FN, out), codes.float() * torch.tensor(0.3))


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("length", [1, 1023, 1024, 5000, 200_001])
def test_amax_equals_the_twin(dtype: torch.dtype, length: int) -> None:
    x = torch.randn(length, generator=torch.Generator().manual_seed(length)).to(dtype)
    assert_bits_equal(kernels.amax(x), scaling.tensor_amax(x))
    assert_bits_equal(cpu.amax(x), scaling.tensor_amax(x))
    x[length // 2] = -float("inf")
    assert kernels.amax(x) == float("inf")
    x[length // 3] = float("nan")
    assert kernels.amax(x).isnan() and cpu.amax(x).isnan()
    assert kernels.amax(torch.zeros(length, dtype=dtype)) == 0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second column": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:, :1].expand(-1, 70),
    "part of a wider tensor": lambda x: x[..., :40],
    "permuted": lambda x: x.view(2, -1, 70).permute(1, 2, 0),
    "rows reversed in steps": lambda x: x[1::3].t()[::5],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("rows", [50, 5000], ids=["one thread", "threads"])
def test_strided_inputs_give_the_bits_of_their_contiguous_copies(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype, rows: int
) -> None:
    # case 51
    x = layout(torch.randn(rows, 70, generator=torch.Generator().manual_seed(0)).to(dtype))
    scale = torch.tensor(3.1)
    copy = x.contiguous()
    assert_bits_equal(kernels.amax(x), kernels.amax(copy))
    strided = kernels.quantize(x, scale, E4M3FN, carrier=torch.bfloat16, count=True)
    plain = kernels.quantize(copy, scale, E4M3FN, carrier=torch.bfloat16, count=True)
    for a, b in zip(strided, plain, strict=True):
        assert_bits_equal(a, b)
    assert strided.codes is not None and strided.codes.is_contiguous()


@pytest.mark.parametrize("shape", [(), (0,), (0, 16), (2, 0, 16)], ids=str)
def test_empty_and_0_dimensional_tensors(shape: tuple[int, ...]) -> None:
    # case 54
    x = torch.ones(shape)
    result = kernels.quantize(x, torch.tensor(2.0), E4M3FN, carrier=torch.float32, count=True)
    assert result.codes is not None and result.codes.shape == shape
    assert result.carrier is not None and result.carrier.shape == shape
    assert result.saturated == result.flushed == 0
    assert kernels.dequantize(result.codes, torch.tensor(0.5), E4M3FN).shape == shape
    assert kernels.amax(x) == (1.0 if shape == () else 0.0)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_zeros_come_back_as_zeros_with_finite_scales(dtype: torch.dtype) -> None:
    # case 1, per tensor
    x = torch.zeros(4, 256, dtype=dtype)
    scale = scaling.quant_scale_of(kernels.amax(x), E4M3FN, scaling.CURRENT)
    inverse = scaling.dequant_scale_of(scale)
    assert scale.item() > 0 and inverse.item() > 0 and scale.isfinite() and inverse.isfinite()
    codes = kernels.quantize(x, scale, E4M3FN).codes
    assert codes is not None
    assert torch.equal(kernels.dequantize(codes, inverse, E4M3FN, dtype), x)


@pytest.mark.parametrize("rule", [scaling.CURRENT, scaling.CURRENT_POW2], ids=repr)
def test_quantizing_ten_times_drifts_nowhere(rule: scaling.ScaleRule) -> None:
    # case 9
    def round_trip(x: Tensor) -> Tensor:
        scale = scaling.quant_scale_of(kernels.amax(x), E4M3FN, rule)
        codes = kernels.quantize(x, scale, E4M3FN).codes
        assert codes is not None
        return kernels.dequantize(codes, scaling.dequant_scale_of(scale), E4M3FN)

    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    first = z = round_trip(x)
    assert not torch.equal(first, x)
    for _ in range(10):
        z = round_trip(z)
    if rule is scaling.CURRENT_POW2:
        assert_bits_equal(z, first)
    else:
        torch.testing.assert_close(z, first, rtol=1e-6, atol=0)


@pytest.mark.parametrize("fmt", formats.ALL.values(), ids=repr)
def test_every_format_goes_through_quantize_and_dequantize(fmt: Format) -> None:
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(0)).abs().clamp(min=2.0**-10)
    codes = kernels.quantize(x, torch.tensor(1.5), fmt).codes
    assert codes is not None
    assert_bits_equal(codes, rounding.encode(x * 1.5, fmt))
    expected = rounding.decode(codes, fmt) * torch.tensor(0.75)
    assert_bits_equal(kernels.dequantize(codes, torch.tensor(0.75), fmt), expected)


def test_ieee_overflow_of_e5m2_on_request() -> None:
    x = torch.full((2000,), 1e6)
    codes = kernels.quantize(x, None, E5M2, saturating=False).codes
    assert codes is not None and codes.float().isinf().all()


def test_a_scale_for_each_row_is_broadcast() -> None:
    x, scale = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)), torch.rand(8, 1) + 0.5
    codes = kernels.quantize(x, scale, E4M3FN).codes
    assert codes is not None
    for row in range(8):
        assert_bits_equal(codes[row], kernels.quantize(x[row], scale[row], E4M3FN).codes)
    assert_bits_equal(kernels.dequantize(codes, scale, E4M3FN), codes.float() * scale)


def test_gradients_are_neither_needed_nor_made() -> None:
    x = torch.randn(5000, requires_grad=True)
    result = kernels.quantize(x, kernels.amax(x), E4M3FN, carrier=torch.float32)
    assert result.carrier is not None and not result.carrier.requires_grad


@pytest.mark.parametrize("fmt", [E4M3FN, formats.E2M1FN], ids=repr)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_dequantize_into_a_given_tensor_writes_it_and_tells_autograd(fmt: Format, dtype: torch.dtype) -> None:
    codes = rounding.encode(torch.randn(50, 50, generator=torch.Generator().manual_seed(0)), fmt)
    scale = torch.tensor(0.3)
    expected = kernels.dequantize(codes, scale, fmt, dtype)
    for out in (torch.zeros(50, 50, dtype=dtype), torch.zeros(50, 50, dtype=dtype).t()):
        before = out._version
        assert kernels.dequantize(codes, scale, fmt, out=out) is out
        assert_bits_equal(out, expected)
        assert out._version > before


def test_small_and_large_tensors_take_the_same_bits_on_either_side_of_the_threshold() -> None:
    x = torch.randn(paths.MIN_NUMBA * 2, generator=torch.Generator().manual_seed(0))
    whole = kernels.quantize(x, torch.tensor(9.0), E5M2).codes
    half = kernels.quantize(x[: paths.MIN_NUMBA // 2], torch.tensor(9.0), E5M2).codes
    assert whole is not None
    assert_bits_equal(whole[: paths.MIN_NUMBA // 2], half)
