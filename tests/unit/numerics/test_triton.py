from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_programs import interpret

from narrowgauge.numerics import kernels, rounding, scaling
from narrowgauge.numerics.formats import E4M3FN, E5M2, Format

pytest.importorskip("triton", reason="Triton comes with torch on Linux for GPUs, and not elsewhere")
HERE = Path(__file__).parent


def test_kernels_give_the_bits_of_the_twin_in_the_interpreter() -> None:
    interpret(HERE / "triton_interpreted.py")


@pytest.mark.slow
def test_kernels_compile_without_a_gpu(gpu_build) -> None:
    from triton_compiled import build_all

    build_all(gpu_build)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=repr)
def test_a_gpu_gives_the_bits_of_the_cpu(fmt: Format) -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    x = bits.view(torch.float32)
    x, scale = x[x.isfinite()], torch.tensor(1.7)
    result = kernels.quantize(x.cuda(), scale.cuda(), fmt, carrier=torch.bfloat16, count=True)
    expected = kernels.quantize(x, scale, fmt, carrier=torch.bfloat16, count=True)
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a.cpu().double(), b.double())
    assert torch.equal(kernels.amax(x.cuda()).cpu(), scaling.tensor_amax(x))
    codes = rounding.encode(x, fmt)
    values = kernels.dequantize(codes.cuda(), scale.cuda(), fmt, torch.bfloat16)
    assert torch.equal(values.cpu(), kernels.dequantize(codes, scale, fmt, torch.bfloat16))
