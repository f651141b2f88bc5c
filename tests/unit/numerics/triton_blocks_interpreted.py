"""Run as a program with TRITON_INTERPRET=1: holds the Triton kernels of blocks against the torch twin on the CPU."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton_interpreted import assert_bits_equal

from narrowgauge.numerics import hadamard, kernels, packing, philox, rounding
from narrowgauge.numerics.companding import LINEAR, SQUARE_ROOT
from narrowgauge.numerics.formats import BF16, E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, INT4, INT8, UINT4, UINT8, Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.kernels import paths, triton_blocks, triton_cast, triton_hadamard, triton_packing, twin
from narrowgauge.numerics.kernels.triton_round import encode, fields_of
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_RULES, E8M0_UP, NVFP4, ULP, ScaleRule

FORMATS = (E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN)
RULES = tuple(rule for rule in ScaleRule if rule is not ULP)
KEY = torch.tensor(-0x123456789ABCDEF, dtype=torch.int64)
STREAM = 5
# shape, tile, format, rule, key, dtype
TILES = (
    ((20, 300), Block(1, 128), E4M3FN, CURRENT, None, torch.bfloat16),
    ((300, 20), Block(128, 1), E4M3FN, CURRENT_POW2, KEY, torch.float16),
    ((140, 132), Block(128, 128), E4M3FN, CURRENT, KEY, torch.bfloat16),
    ((9, 70), Block(1, 32), E5M2, E8M0_UP, KEY, torch.float32),
    ((70, 36), Block(32, 1), E4M3FN, E8M0_UP, KEY, torch.bfloat16),
    ((40, 70), Block(32, 32), E2M1FN, E8M0_FLOOR, KEY, torch.float32),
    ((9, 68), Block(1, 16), E2M1FN, NVFP4, KEY, torch.bfloat16),
    ((68, 9), Block(16, 1), E2M1FN, NVFP4, KEY, torch.float32),
    ((40, 70), Block(16, 16), E2M1FN, NVFP4, None, torch.float16),
    ((23, 28), Block(5, 12), E3M2FN, CURRENT, KEY, torch.float32),
    ((28, 23), Block(12, 5), E2M3FN, E8M0_UP, KEY, torch.float32),
    ((3, 1000), PER_ROW, E4M3FN, CURRENT, KEY, torch.bfloat16),
    ((200, 30), PER_COLUMN, E5M2, CURRENT_POW2, KEY, torch.bfloat16),
    ((40, 50), PER_TENSOR, E4M3FN, CURRENT, None, torch.float32),
    ((2, 40), Block(64, 128), E2M1FN, E8M0_UP, KEY, torch.float32),
)
# tiles of more values than one program holds, once that is FEW
FEW = 2048
LARGE_TILES = (
    ((3, 3000), PER_ROW, E2M1FN, NVFP4, KEY, torch.bfloat16),
    ((300, 40), PER_COLUMN, E4M3FN, CURRENT, KEY, torch.bfloat16),
    ((300, 40), Block(250, 3), E5M2, E8M0_UP, KEY, torch.float32),
    ((3, 2600), Block(2, 2598), E4M3FN, CURRENT_POW2, KEY, torch.float32),
    ((70, 132), PER_TENSOR, E2M3FN, E8M0_FLOOR, KEY, torch.float32),
)


def matrix(rows: int, columns: int) -> Tensor:
    """Magnitudes over 14 powers of two, in a third of all 16x16 tiles from anywhere in float32; some are zeros."""
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=draw) * torch.rand(rows, columns, generator=draw).mul(-14).exp2()
    grid = (-(-rows // 16), -(-columns // 16))
    far = torch.randint(-150, 126, grid, generator=draw).where(torch.rand(grid, generator=draw) < 0.3, 0)
    exponents = far.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
    x = torch.ldexp(x.double(), exponents).float()
    x[torch.rand(rows, columns, generator=draw) < 0.05] = 0.0
    return x


def with_specials(x: Tensor) -> Tensor:
    """Infinities, NaN and zeros in some rows of the last column; other tiles stay finite."""
    specials = torch.tensor([-0.0, torch.inf, torch.nan, -torch.nan, -torch.inf, 0.0])[: len(x)]
    return torch.cat([x[:, :-1], torch.cat([specials, x[len(specials) :, -1]])[:, None]], dim=1)


def check_blocks(
    x: Tensor, fmt: Format, block: Block, rule: ScaleRule, key: Tensor | None, carrier: torch.dtype, *bend: Any
) -> None:
    arguments = (fmt, block, rule, True, carrier, True, key, STREAM, *bend)
    found = triton_blocks.quantize_blocks(x, *arguments)
    expected = twin.quantize_blocks(x, fmt, block, rule, key, STREAM, True, carrier, True, *bend)
    for name, a, b in zip(("codes", "carrier", "scales", "amax", "saturated", "flushed"), found, expected, strict=True):
        assert a is not None and b is not None
        try:
            assert torch.equal(a, b) if a.dtype is torch.int64 else assert_bits_equal(a, b) is None
        except AssertionError as error:
            raise AssertionError((name, tuple(x.shape), x.dtype, arguments, a, b)) from error


def check_dequantize(x: Tensor, fmt: Format, block: Block, rule: ScaleRule, dtype: torch.dtype) -> None:
    codes, _, scales, amax, *_ = twin.quantize_blocks(x, fmt, block, rule, None, 0, True, None, False)
    for of_tensor in (None, amax) if rule is NVFP4 else (None,):
        arguments = (codes, scales, fmt, block, of_tensor, dtype)
        assert_bits_equal(triton_blocks.dequantize_blocks(*arguments), twin.dequantize_blocks(*arguments))


def check_every_format_and_rule() -> None:
    x = matrix(32, 96)
    for fmt, rule in itertools.product(FORMATS, RULES):
        check_blocks(x, fmt, Block(16, 16), rule, None, torch.float32)
        if fmt is E2M1FN or rule is CURRENT:
            y = x if rule is NVFP4 else with_specials(x)
            check_blocks(y, fmt, Block(1, 16), rule, KEY, torch.bfloat16)
            check_dequantize(with_specials(x), fmt, Block(1, 16), rule, torch.float32)


def check_curves() -> None:
    """Integers, plain and on the square root, and casts that make no zeros."""
    for fmt, curve in itertools.product((INT8, UINT8, INT4, UINT4), (LINEAR, SQUARE_ROOT)):
        for block, nonzero, dtype in ((Block(1, 32), True, torch.float32), (Block(16, 16), False, torch.bfloat16)):
            x = with_specials(matrix(19, 70)).to(dtype)
            check_blocks(x, fmt, block, CURRENT, None, torch.float32, curve, nonzero)
            codes, _, scales, *_ = twin.quantize_blocks(x, fmt, block, CURRENT, None, 0, True, None, False, curve)
            for dtype in (torch.float32, torch.bfloat16):
                arguments = (codes, scales, fmt, block, None, dtype, curve)
                assert_bits_equal(triton_blocks.dequantize_blocks(*arguments), twin.dequantize_blocks(*arguments))
    for fmt, rule in ((E4M3FN, CURRENT), (E2M1FN, NVFP4), (E3M2FN, E8M0_UP), (INT8, E8M0_UP)):
        check_blocks(matrix(20, 70), fmt, Block(1, 16), rule, None, torch.float32, LINEAR, True)


def check_every_tile() -> None:
    for shape, block, fmt, rule, key, dtype in TILES:
        x = matrix(*shape)
        x = x.clamp(-6e4, 6e4) if dtype is torch.float16 else x
        is_whole = rule is NVFP4 or block == PER_TENSOR  # one NaN would be everywhere
        check_blocks((x if is_whole else with_specials(x)).to(dtype), fmt, block, rule, key, torch.bfloat16)
        check_dequantize(x, fmt, block, rule, torch.bfloat16)
    check_blocks(matrix(68, 40).T, E4M3FN, Block(1, 32), E8M0_UP, KEY, torch.float32)


def check_tiles_that_programs_share() -> None:
    """Tiles larger than a program: cut into several, whose columns do or do not start at a multiple of four."""
    most, triton_blocks.MOST_VALUES = triton_blocks.MOST_VALUES, FEW
    for shape, block, fmt, rule, key, dtype in LARGE_TILES:
        assert triton_blocks.Plan.of(block, *shape).is_cut
        check_blocks(matrix(*shape).to(dtype), fmt, block, rule, key, torch.bfloat16)
    triton_blocks.MOST_VALUES = most


def check_tensors() -> None:
    """Stochastic casts with one scale."""
    bits = torch.randint(-(2**31), 2**31, (4000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    specials = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.39e38, 3.4028234e38, -3.3895314e38, 448.0])
    near = torch.randn(4000, generator=torch.Generator().manual_seed(1))
    x = torch.cat([specials, bits.view(torch.float32), near, near * 2.0**-128, bits[:99].view(torch.float32) * 2.0**-9])
    for fmt, scale in ((E4M3FN, None), (E5M2, torch.tensor(1.7))):
        expected = twin.quantize(x, scale, fmt, None, True, torch.bfloat16, True, KEY, STREAM)
        found = triton_cast.quantize(x, scale, fmt, True, torch.bfloat16, KEY, STREAM)
        assert_bits_equal(found[0], expected[0])
        assert_bits_equal(found[1], expected[1])
        assert triton_cast.count(x, scale, fmt, KEY, STREAM) == expected[2:]
    for scale in (None, torch.tensor(1.7)):
        rounded = twin.quantize(x, scale, BF16, None, True, None, False, KEY, STREAM)[0]
        assert_bits_equal(triton_cast.round_to_bfloat16(x, scale, KEY, STREAM), rounded)


def check_words() -> None:
    """A word of every lane decides, and the key's and the stream's bits all count."""
    x = torch.full((4096,), 1 + 2.0**-8)  # bfloat16 has 1 and 1 + 2^-7: an even chance
    seen = set()
    for key, stream in ((0, 0), (1, 0), (1 << 32, 0), (-1, 0), (0, 1), (0, 2**31 - 1)):
        rounded = triton_cast.round_to_bfloat16(x, None, torch.tensor(key), stream)
        words = philox.random_words(torch.tensor(key), stream, 4096)
        assert torch.equal(rounded > 1, words < 2**31)
        seen.add(tuple((rounded > 1).tolist()))
    assert len(seen) == 6


@triton.jit
def encode_kernel(x, words, codes, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, 4096)
    code = encode(tl.load(x + place), tl.load(words + place).to(tl.uint32), EXPONENT, MANTISSA, TOP, True)
    tl.store(codes + place, code.to(tl.uint8))


def check_thresholds() -> None:
    """Words that just do, and just do not, round upwards; values of every exponent, and none."""
    draw = torch.Generator().manual_seed(2)
    bits = torch.arange(0, 0x7F800000, 0x7F800000 // 511)[:512] + torch.randint(0, 1 << 20, (512,), generator=draw)
    x = bits.clamp(max=0x7F7FFFFF).to(torch.int32).view(torch.float32).repeat_interleave(8)
    for fmt in FORMATS:
        x[:2048] = torch.randn(2048, generator=draw) * fmt.max / 4
        lower = rounding.round_stochastically(x, fmt, torch.full((4096,), (1 << 32) - 1)).double()
        gap = rounding.round_stochastically(x, fmt, torch.zeros(4096, dtype=torch.int64)).double() - lower
        share = ((x - lower) / gap.where(gap != 0, 1.0) * 2.0**24).ceil().long().clamp(1, (1 << 24) - 1)
        words = torch.stack([share - 1, share], dim=1)[torch.arange(4096), torch.arange(4096) % 2] << 8
        words[::5] = 0
        words[1::5] += 255
        found = torch.empty(4096, dtype=torch.uint8)
        encode_kernel[(1,)](x, words, found, **fields_of(fmt))
        assert_bits_equal(found.view(fmt.dtype), rounding.encode(x, fmt, saturating=True, words=words))


def check_scales() -> None:
    """Blocks of one value each, at the edges of every rule, and the two orders of NVFP4's products that differ."""
    edges = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF]
    for largest, exponent in itertools.product((1.0, *(fmt.max for fmt in FORMATS)), (-149, -127, -126, -125, 0, 118)):
        bits = int(torch.tensor(largest * 2.0**exponent).view(torch.int32))
        edges += [bits - 1, bits, bits + 1, bits + 3]
    amax = torch.tensor(edges, dtype=torch.int32).clamp(0, 0x7F7FFFFF).view(torch.float32)
    many = torch.rand(256 - len(amax), generator=torch.Generator().manual_seed(0)).bfloat16().float()
    x = torch.cat([amax, many])[:, None].expand(256, 16)
    unlike = torch.tensor([[0.75], [0.5625], [0.0]]).expand(3, 16).contiguous()
    endless = torch.tensor([[torch.inf], [3e38], [1.0]]).expand(3, 16).contiguous()
    for rule in RULES:
        for fmt in FORMATS if rule in E8M0_RULES else (E2M1FN, E5M2):
            check_blocks(x, fmt, Block(1, 16), rule, None, torch.float32)
    for y in (unlike, endless):
        check_blocks(y, E2M1FN, Block(1, 16), NVFP4, None, torch.float32)


def check_packing() -> None:
    for bits, shape in ((4, (2, 5, 37)), (4, (2, 64)), (6, (7, 37)), (6, (3, 1032)), (6, (1, 2)), (4, (1,))):
        codes = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        packed = packing.pack_in_torch(codes, bits)
        assert torch.equal(triton_packing.pack(codes, bits, packed.shape[-1]), packed), (bits, shape)
        assert torch.equal(triton_packing.unpack(packed, bits, shape[-1]), codes & ((1 << bits) - 1)), (bits, shape)


def check_hadamard() -> None:
    for shape in ((16, 128), (37, 130), (1, 5)):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            for signs in (hadamard.SIGNS, hadamard.Hadamard.seeded(3).signs):
                assert_bits_equal(triton_hadamard.transform(x, signs), hadamard.transform(x, signs))


def check_dispatch() -> None:
    """What the dispatch would call for a CUDA tensor, with a CPU one."""
    calls: list[str] = []
    seen = (triton_blocks.quantize_blocks, triton_blocks.dequantize_blocks, triton_cast.quantize, triton_cast.count)
    seen += (triton_cast.round_to_bfloat16, triton_hadamard.transform, triton_packing.pack, triton_packing.unpack)
    for function in seen:
        setattr(sys.modules[function.__module__], function.__name__, counting(function, calls))
    paths.has_gpu_kernels = packing.has_gpu_kernels = lambda x: True
    paths.fast_module = lambda x, suits, least=0: triton_cast if suits else None
    x, block = matrix(16, 64), Block(1, 16)
    found = kernels.quantize_blocks(x, E2M1FN, block, NVFP4, carrier=torch.float32, count=True, key=KEY, stream=STREAM)
    expected = twin.quantize_blocks(x, E2M1FN, block, NVFP4, KEY, STREAM, True, torch.float32, True)
    assert all(a is not None and torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
    codes, scales, amax = found.codes, found.dequant_scale, found.amax
    values = kernels.dequantize_blocks(codes, scales, E2M1FN, block, torch.bfloat16, amax)
    assert_bits_equal(values, twin.dequantize_blocks(codes, scales, E2M1FN, block, amax, torch.bfloat16))
    found = kernels.quantize(x, None, E4M3FN, carrier=torch.bfloat16, count=True, key=KEY, stream=STREAM)
    expected = twin.quantize(x, None, E4M3FN, None, True, torch.bfloat16, True, KEY, STREAM)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
    rounded = kernels.quantize(x, None, BF16, key=KEY, stream=STREAM)
    assert_bits_equal(rounded.codes, twin.quantize(x, None, BF16, None, True, None, False, KEY, STREAM)[0])
    assert_bits_equal(kernels.transform(x, hadamard.SIGNS), hadamard.transform(x, hadamard.SIGNS))
    packed = packing.pack(codes, 4)
    assert torch.equal(packed, packing.pack_in_torch(codes, 4)) and torch.equal(packing.unpack(packed, 4, 64), codes)
    assert sorted(calls) == sorted(function.__name__ for function in seen), calls


def counting(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """The function, which notes its calls."""

    def counted(*arguments: Any) -> Any:
        calls.append(function.__name__)
        return function(*arguments)

    return counted


if __name__ == "__main__":
    check_words()
    check_thresholds()
    check_scales()
    check_packing()
    check_tensors()
    check_hadamard()
    check_every_format_and_rule()
    check_curves()
    check_every_tile()
    check_tiles_that_programs_share()
    check_dispatch()
