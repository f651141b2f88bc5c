from __future__ import annotations

import pytest
import torch

from narrowgauge.numerics import formats, reference, rounding
from narrowgauge.numerics.formats import Format

SMALL = [f for f in formats.ALL.values() if f.bits <= 8]
FLOATS = [f for f in SMALL if not f.is_integer]


def all_codes(fmt: Format) -> torch.Tensor:
    if fmt is formats.INT4:  # one code a byte, as it is stored
        return torch.arange(-8, 8, dtype=torch.int8)
    return torch.arange(1 << fmt.bits).to(torch.uint8).view(fmt.dtype)


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_value_of_every_code_equals_the_golden_value(fmt: Format, golden) -> None:
    expected = golden("codes")["formats"][fmt.name.lower()]
    assert (expected["bits"], expected["max"]) == (fmt.bits, fmt.max)
    decoded = rounding.decode(all_codes(fmt), fmt).view(torch.int32)
    for code, value in enumerate(expected["value_f32_hex"]):
        bits = int(value, 16)
        if bits % reference.SIGN > reference.INFINITY:  # a NaN's payload is not significant
            assert torch.isnan(decoded[code].view(torch.float32))
            assert reference.decode(code, fmt) % reference.SIGN == reference.NAN
        else:
            assert decoded[code].item() & 0xFFFFFFFF == bits == reference.decode(code, fmt)


@pytest.mark.parametrize("fmt", SMALL, ids=repr)
def test_extremes_follow_from_the_code_table(fmt: Format) -> None:
    values = rounding.decode(all_codes(fmt), fmt)
    finite = values[values.isfinite()]
    assert finite.max() == fmt.max
    assert finite[finite > 0].min() == fmt.smallest_subnormal
    assert values.isinf().any() == fmt.has_inf
    assert values.isnan().any() == fmt.has_nan
    if fmt.nan_code is not None:
        assert values[fmt.nan_code].isnan()


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [(formats.FP32, torch.float32), (formats.BF16, torch.bfloat16), (formats.FP16, torch.float16)],
    ids=repr,
)
def test_wide_formats_agree_with_torch(fmt: Format, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    assert (fmt.max, fmt.smallest_normal, fmt.bits) == (info.max, info.smallest_normal, info.bits)
    assert fmt.smallest_subnormal == info.smallest_normal * info.eps
    assert formats.of_dtype(dtype) is fmt


def test_smallest_values_of_the_table_in_the_standard() -> None:
    assert (formats.E4M3FN.smallest_normal, formats.E4M3FN.smallest_subnormal) == (2**-6, 2**-9)
    assert (formats.E5M2.smallest_normal, formats.E5M2.smallest_subnormal) == (2**-14, 2**-16)
    assert (formats.E2M1FN.smallest_normal, formats.E2M1FN.smallest_subnormal) == (1, 0.5)
    assert (formats.E3M2FN.smallest_normal, formats.E3M2FN.smallest_subnormal) == (2**-2, 2**-4)
    assert (formats.E2M3FN.smallest_normal, formats.E2M3FN.smallest_subnormal) == (1, 2**-3)
    assert formats.E8M0FNU.smallest_normal == 2**-127
