"""Casts to scaled float16 and back by the kernels of the CPU, against the torch operations: the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.formats import FP16
from narrowgauge.numerics.kernels import cpu, twin

INPUTS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (1.0, 1.7, 2.0**-20, 3e5, 2.0**126, scaling.FLT_MAX)


def every_half() -> Tensor:
    return torch.arange(1 << 16).to(torch.uint16).view(torch.float16)


def every_tie() -> Tensor:
    """All halves between two values of float16, their neighbours in float32, what saturates, and no numbers."""
    points = every_half()[: 1 << 15].float()
    points = points[points.isfinite()]
    halves = torch.cat([(points[1:] + points[:-1]) / 2, torch.tensor([65519.0, 65520.0, 65521.0, 3e38])])
    near = [halves, halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(torch.inf)), points]
    x = torch.cat([*near, torch.tensor([torch.inf, torch.nan, 2.0**-149, 2.0**-126])])
    return torch.cat([x, -x])


def check_same(a: Tensor | None, b: Tensor | None) -> None:
    """Equal in bits, but for a NaN's payload."""
    assert a is not None and b is not None and a.dtype is b.dtype and a.shape == b.shape
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    same = a.contiguous().view(bits) == b.contiguous().view(bits)
    assert (same | (a.isnan() & b.isnan())).all()


def check_encoded(x: Tensor, scale: Tensor | None) -> None:
    for nonzero in (False, True):
        expected = twin.quantize(x, scale, FP16, True, True, None, False, nonzero=nonzero)[0]
        check_same(cpu.quantize_to_half(x, scale, nonzero), expected)
        check_same(kernels.quantize(x, scale, FP16, saturating=True, nonzero=nonzero).codes, expected)


def test_every_tie_is_rounded_as_torch_does() -> None:
    for scale in (None, *map(torch.tensor, SCALES)):
        check_encoded(every_tie(), scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_input(dtype: torch.dtype) -> None:
    for scale in SCALES:
        check_encoded(torch.arange(1 << 16).to(torch.uint16).view(dtype), torch.tensor(scale))


def test_random_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (100_003,), dtype=torch.int32, generator=generator).view(torch.float32)
    for scale in SCALES:
        check_encoded(x, torch.tensor(scale))


def test_the_nearest_half_is_taken() -> None:
    """Against float64: no float16 is nearer, and of two as near the even one."""
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1)).mul(100)
    codes = kernels.quantize(x, None, FP16, saturating=True).codes
    assert codes is not None
    error, bits = (codes.double() - x.double()).abs(), codes.view(torch.int16)
    for step in (-1, 1):
        other = (bits + step).view(torch.float16).double()
        nearer = (other - x.double()).abs() - error
        assert (nearer >= 0).all() and (bits[nearer == 0] % 2 == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_is_decoded_as_torch_does(dtype: torch.dtype) -> None:
    codes = every_half()
    for scale in (None, *map(torch.tensor, SCALES), torch.tensor(2.0**-120), torch.tensor(1e-42)):
        expected = twin.dequantize(codes, scale, FP16, dtype)
        check_same(cpu.dequantize(codes, scale, FP16, torch.empty(len(codes), dtype=dtype)), expected)
        check_same(kernels.dequantize(codes, scale, FP16, dtype), expected)
        check_same(kernels.dequantize(codes, scale, FP16, out=torch.empty(len(codes), dtype=dtype)), expected)


@pytest.mark.parametrize("offset", [0, 1, 16], ids=["aligned", "unaligned", "next line"])
def test_streaming_past_the_caches_writes_the_same_bits(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_STREAMED", 1)
    codes = every_half().repeat(2)[:100_003]
    out = torch.zeros(100_003 + 2 * offset)[offset : offset + 100_003]
    check_same(cpu.dequantize(codes, torch.tensor(0.3), FP16, out), codes.float() * torch.tensor(0.3))


@pytest.mark.parametrize("shape", [(0,), (5,), (1023,), (1024,), (3, 700), (1, 300_001)], ids=str)
@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_every_size_and_layout(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    scale = torch.tensor(64.0)
    for each in (x, x.t(), x[..., ::2]):
        codes = kernels.quantize(each, scale, FP16, saturating=True).codes
        check_same(codes, twin.quantize(each.contiguous(), scale, FP16, True, True, None, False)[0])
        assert codes is not None and codes.is_contiguous()
        check_same(
            kernels.dequantize(codes.t(), scale, FP16),
            twin.dequantize(codes.t().contiguous(), scale, FP16, torch.float32),
        )


def test_what_overflows_or_is_counted_is_as_before() -> None:
    x = torch.cat([torch.randn(2000), torch.tensor([1e6, -1e6, 1e-9])])
    found = kernels.quantize(x, torch.tensor(2.0), FP16, saturating=False).codes
    check_same(found, (x * 2).half())
    counted = kernels.quantize(x, torch.tensor(2.0), FP16, saturating=True, carrier=torch.float32, count=True)
    assert counted.saturated == 2 and counted.flushed == 1
    check_same(counted.codes, (x * 2).clamp(-65504, 65504).half())
