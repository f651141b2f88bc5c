"""Run as a program with TRITON_INTERPRET=1: holds the Triton kernels against the torch twin on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics import scaling
from narrowgauge.numerics.formats import E4M3FN, E5M2
from narrowgauge.numerics.kernels import triton_cast, twin

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def assert_bits_equal(a: Tensor | None, b: Tensor | None) -> None:
    assert a is not None and b is not None and a.dtype == b.dtype
    same = a.view(BITS[a.element_size()]) == b.view(BITS[b.element_size()])
    assert (same | (a.float().isnan() & b.float().isnan())).all()


def check_casts() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (9001,), dtype=torch.int32, generator=generator)
    edges = torch.arange(0, 1 << 31, 1 << 19, dtype=torch.int64).to(torch.int32)  # every tie of both formats
    wide = torch.cat([bits, edges - 1, edges, edges + 1, -edges]).view(torch.float32)
    for x in (wide, wide[:4096].to(torch.bfloat16), wide[:5000].to(torch.float16)):
        assert_bits_equal(triton_cast.amax(x), scaling.tensor_amax(x))
        assert_bits_equal(triton_cast.amax(x[x.isfinite()]), scaling.tensor_amax(x[x.isfinite()]))
        for fmt in (E4M3FN, E5M2):
            for scale in (None, torch.tensor(1.7), torch.tensor(1e-5)):
                for carrier in (torch.bfloat16, torch.float32):
                    found = triton_cast.quantize(x, scale, fmt, True, carrier)
                    expected = twin.quantize(x, scale, fmt, None, True, carrier, True)
                    assert_bits_equal(found[0], expected[0])
                    assert_bits_equal(found[1], expected[1])
                found = triton_cast.count(x, scale, fmt)
                assert found == expected[2:], (x.dtype, fmt, scale, found, expected[2:])


def check_dequantize() -> None:
    for fmt in (E4M3FN, E5M2):
        codes = torch.arange(256).to(torch.uint8).view(fmt.dtype)
        for scale in (None, torch.tensor(0.3), torch.tensor(2.0**-110), torch.tensor(3e38)):
            for dtype in (torch.float32, torch.bfloat16):
                found = triton_cast.dequantize(codes, scale, fmt, torch.empty(256, dtype=dtype))
                assert_bits_equal(found, twin.dequantize(codes, scale, fmt, dtype))


if __name__ == "__main__":
    check_casts()
    check_dequantize()
