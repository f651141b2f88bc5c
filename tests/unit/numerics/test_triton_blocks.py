from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_programs import interpret

from narrowgauge.numerics import hadamard, kernels, packing, rounding
from narrowgauge.numerics.companding import DYNAMIC, LINEAR, SQUARE_ROOT, Companding
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, E5M2, INT4, INT8, UINT4, UINT8, Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.kernels import twin
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_UP, NVFP4, ScaleRule

pytest.importorskip("triton", reason="Triton comes with torch on Linux for GPUs, and not elsewhere")
HERE = Path(__file__).parent
KEY = torch.tensor(0x123456789ABCDEF, dtype=torch.int64)
CASTS = [
    (E4M3FN, Block(1, 128), CURRENT),
    (E4M3FN, Block(128, 1), CURRENT_POW2),
    (E4M3FN, Block(128, 128), CURRENT_POW2),
    (E4M3FN, PER_ROW, CURRENT),
    (E5M2, PER_COLUMN, CURRENT),
    (E5M2, PER_TENSOR, CURRENT),
    (E4M3FN, Block(1, 32), E8M0_UP),
    (E2M1FN, Block(32, 1), E8M0_UP),
    (E2M1FN, Block(1, 16), NVFP4),
    (E2M1FN, Block(16, 16), NVFP4),
]


def test_the_kernels_give_the_bits_of_the_twin_in_the_interpreter() -> None:
    interpret(HERE / "triton_blocks_interpreted.py")


@pytest.mark.slow
def test_the_kernels_compile_without_a_gpu(gpu_build) -> None:
    from triton_blocks_compiled import build_all

    build_all(gpu_build)


def finite_values(rows: int, columns: int) -> Tensor:
    """Any finite float32, as likely as another."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int32, generator=generator)
    x = bits.view(torch.float32)
    return x.where(x.isfinite(), 1.0)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    assert a is not None and b is not None and a.is_cuda and a.dtype == b.dtype
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.cpu().view(bits), b.view(bits))


@pytest.mark.gpu
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(("fmt", "block", "rule"), CASTS, ids=str)
def test_a_gpu_casts_tiles_to_the_bits_of_the_cpu(
    fmt: Format, block: Block, rule: ScaleRule, key: Tensor | None
) -> None:
    for x in (torch.randn(1000, 20004).bfloat16(), finite_values(517, 1030)):
        key_there = None if key is None else key.cuda()
        found = kernels.quantize_blocks(
            x.cuda(), fmt, block, rule, carrier=torch.bfloat16, count=True, key=key_there, stream=3
        )
        expected = twin.quantize_blocks(x, fmt, block, rule, key, 3, True, torch.bfloat16, True)
        assert all(map(same, found, expected))
        codes, scales, amax = expected[0], expected[2], expected[3]
        assert codes is not None
        values = kernels.dequantize_blocks(codes.cuda(), scales.cuda(), fmt, block, torch.bfloat16, amax.cuda())
        assert same(values, twin.dequantize_blocks(codes, scales, fmt, block, amax, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fmt", "curve"),
    [*itertools.product((INT8, UINT8, INT4, UINT4), (LINEAR, SQUARE_ROOT)), (INT8, DYNAMIC), (UINT8, DYNAMIC)],
    ids=repr,
)
def test_a_gpu_bends_values_to_the_bits_of_the_cpu(fmt: Format, curve: Companding) -> None:
    for x in (torch.randn(1000, 20004).bfloat16(), finite_values(517, 1030)):
        for block, nonzero in ((Block(1, 128), True), (PER_ROW, False)):
            found = kernels.quantize_blocks(
                x.cuda(), fmt, block, CURRENT, carrier=torch.float32, count=True, companding=curve, nonzero=nonzero
            )
            bend = (True, torch.float32, True, curve, nonzero)
            expected = twin.quantize_blocks(x, fmt, block, CURRENT, None, 0, *bend)
            assert all(map(same, found, expected))
            codes, scales = expected[0], expected[2]
            assert codes is not None
            values = kernels.dequantize_blocks(codes.cuda(), scales.cuda(), fmt, block, companding=curve)
            assert same(values, twin.dequantize_blocks(codes, scales, fmt, block, None, torch.float32, curve))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, BF16], ids=repr)
def test_a_gpu_rounds_stochastically_to_the_bits_of_the_cpu(fmt: Format) -> None:
    x, scale = finite_values(1, 1 << 20), torch.tensor(1.7)
    found = kernels.quantize(x.cuda(), scale.cuda(), fmt, key=KEY.cuda(), stream=1).codes
    assert same(found, twin.quantize(x, scale, fmt, None, True, None, False, KEY, 1)[0])
    assert not torch.equal(found.cpu().float(), rounding.decode(rounding.encode(x * scale, fmt), fmt))


@pytest.mark.gpu
def test_a_gpu_transforms_to_the_bits_of_the_cpu() -> None:
    x = torch.randn(1001, 1030)
    assert same(kernels.transform(x.cuda(), hadamard.SIGNS), hadamard.transform(x, hadamard.SIGNS))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 6])
def test_a_gpu_packs_to_the_bytes_of_the_cpu(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (1001, 1030), dtype=torch.uint8)
    packed = packing.pack(codes.cuda(), bits)
    assert same(packed, packing.pack_in_torch(codes, bits))
    assert same(packing.unpack(packed, bits, 1030), codes)
