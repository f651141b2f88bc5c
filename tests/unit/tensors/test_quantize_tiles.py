"""`quantize` with a scale for each row, column or block: against golden values and numpy with ml_dtypes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from quantized_tensors import assert_same, scale_bits, seeded

from narrowgauge import (
    CURRENT,
    CURRENT_POW2,
    E8M0_FLOOR,
    E8M0_UP,
    NVFP4,
    PER_COLUMN,
    PER_ROW,
    Block,
    CastSpec,
    NarrowgaugeError,
)
from narrowgauge.numerics import formats
from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, FP16, INT8, Format
from narrowgauge.numerics.granularity import PER_TENSOR
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

GOLDEN = Path(__file__).parents[2] / "golden"
BLOCKS, MX, NV = (json.loads((GOLDEN / f"{name}.json").read_text())["cases"] for name in ("blocks", "mx", "nvfp4"))
GRANULARITIES = [PER_ROW, PER_COLUMN, Block(1, 128), Block(128, 128), Block(1, 32), Block(32, 32), Block(1, 16),
                 Block(16, 16), Block(32, 1), Block(3, 7)]  # fmt: skip
FORMATS = [E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN, INT8]
RULES = [CURRENT, CURRENT_POW2, E8M0_UP, E8M0_FLOOR]
EXACT_RULES = [CURRENT_POW2, E8M0_UP, E8M0_FLOOR]
TYPES = {E4M3FN: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1FN: ml_dtypes.float4_e2m1fn,
         E3M2FN: ml_dtypes.float6_e3m2fn, E2M3FN: ml_dtypes.float6_e2m3fn, INT8: np.int8}  # fmt: skip


def floats(words: list[str]) -> torch.Tensor:
    return torch.from_numpy(np.array([int(w, 16) for w in words], dtype=np.uint32).view(np.float32).copy())


def as_bytes(codes: torch.Tensor) -> list[int]:
    return codes.view(torch.uint8).flatten().tolist()


# golden files


@pytest.mark.parametrize("case", BLOCKS, ids=lambda c: f"{c['shape']}-{c['tile']}-{c['pow2']}")
def test_block_codes_and_scales_are_the_golden_ones(case: dict) -> None:
    words = case["x_bf16_hex"]
    bits = [int(words[i : i + 4], 16) for i in range(0, len(words), 4)]
    x = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(case["shape"])
    q = quantize(x, CastSpec(E4M3FN, Block(*case["tile"]), CURRENT_POW2 if case["pow2"] else CURRENT))
    assert bytes(as_bytes(q.codes)).hex() == case["code_hex"]
    expected = floats(case["inverse_scale_f32_hex"]).reshape(case["inverse_scale_shape"])
    assert torch.equal(q.dequant_scale, expected)
    codes = np.array(as_bytes(q.codes), dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    height, width = case["tile"]
    factors = expected.repeat_interleave(height, 0).repeat_interleave(width, 1)[: x.shape[0], : x.shape[1]]
    assert torch.equal(q.dequantize(torch.float32), torch.from_numpy(codes).reshape(x.shape) * factors)


@pytest.mark.parametrize("case", MX, ids=lambda c: f"{c['format']}-{c['shape']}")
def test_mx_codes_and_bytes_are_the_golden_ones(case: dict) -> None:
    fmt, x = formats.ALL[case["format"].upper()], floats(case["x_f32_hex"]).reshape(case["shape"])
    q = quantize(x, CastSpec(fmt, Block(1, 32), E8M0_UP))
    assert as_bytes(q.codes) == case["code"] and as_bytes(q.dequant_scale) == case["scale_byte"]
    assert q.dequant_scale.shape == (*x.shape[:-1], x.shape[-1] // 32) and q.dequant_scale.dtype is torch.float8_e8m0fnu
    codes = np.array(case["code"], dtype=np.uint8).view(TYPES[fmt]).astype(np.float64).reshape(-1, 32)
    values = codes * 2.0 ** (np.array(case["scale_byte"]) - 127)[:, None]
    assert np.array_equal(q.dequantize().numpy().reshape(-1, 32), values.astype(np.float32))


@pytest.mark.parametrize("case", NV, ids=lambda c: f"{c['shape']}-{c['tile']}")
def test_nvfp4_codes_and_bytes_are_the_golden_ones(case: dict) -> None:
    x = floats(case["x_f32_hex"]).reshape(case["shape"])
    q = quantize(x, CastSpec(E2M1FN, Block(*case["tile"]), NVFP4))
    packed = bytes.fromhex(case["packed_code_hex"])
    codes = np.array([[b & 15, b >> 4] for b in packed], dtype=np.uint8).reshape(x.shape)
    assert q.codes.tolist() == codes.tolist()
    assert as_bytes(q.dequant_scale) == case["block_scale_e4m3_byte"]
    assert list(q.dequant_scale.shape) == case["block_scale_shape"] and q.dequant_scale.dtype is torch.float8_e4m3fn
    amax = floats(case["global_amax_f32_hex"])[0]
    assert q.amax == amax
    scale = np.array(case["block_scale_e4m3_byte"], dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    factors = scale.reshape(case["block_scale_shape"]) * amax.numpy() * np.float32(1 / 2688)  # in this order
    height, width = case["tile"]
    factors = factors.repeat(height, 0).repeat(width, 1)[: x.shape[0], : x.shape[1]]
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * factors
    assert np.array_equal(q.dequantize().numpy(), values)


# by formula


def by_formula(x: np.ndarray, fmt: Format, block: Block, rule: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, factors [*batch, down, across], values: tile by tile, each step in float32."""
    matrices = x.reshape(-1, *(x.shape[-2:] if x.ndim > 1 else (1, x.shape[-1])))
    count, rows, columns = matrices.shape
    height, width = block.rows or rows, block.columns or columns
    down, across = -(-rows // height), -(-columns // width)
    factors, values = np.zeros((count, down, across), np.float32), np.zeros_like(matrices)
    codes = np.zeros(matrices.shape, TYPES[fmt])
    for b, i, j in itertools.product(range(count), range(down), range(across)):
        inside = np.s_[b, i * height : (i + 1) * height, j * width : (j + 1) * width]
        quant_scale = scale_by_formula(np.abs(matrices[inside]).max(), fmt, rule)
        scaled = np.clip(matrices[inside] * quant_scale, -fmt.max, fmt.max)
        codes[inside] = (np.rint(scaled) if fmt is INT8 else scaled).astype(TYPES[fmt])
        factors[b, i, j] = np.float32(1) / quant_scale
        values[inside] = codes[inside].astype(np.float32) * factors[b, i, j]
    grid = (*x.shape[:-2], down, across) if x.ndim > 1 else (across,)
    return codes.reshape(x.shape), factors.reshape(grid), values.reshape(x.shape)


def scale_by_formula(amax: np.float32, fmt: Format, rule: object) -> np.float32:
    largest = np.float32(fmt.max)
    if rule is E8M0_UP:
        return np.float32(2.0 ** -np.ceil(np.log2(np.float64(amax * (np.float32(1) / largest)))))
    if rule is E8M0_FLOOR:
        return np.float32(2.0 ** (np.floor(np.log2(fmt.max)) - np.floor(np.log2(np.float64(amax)))))
    scale = largest / amax
    return np.float32(2.0 ** np.floor(np.log2(np.float64(scale)))) if rule is CURRENT_POW2 else scale


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block", GRANULARITIES)
def test_codes_and_scales_follow_the_formula(fmt: Format, block: Block, rule: object) -> None:
    for shape in ((130, 70), (37,), (2, 3, 40), (2, 2, 5, 7)):
        x = seeded(*shape) * torch.logspace(-3, 3, shape[-1])
        codes, factors, values = by_formula(x.numpy(), fmt, block, rule)
        q = quantize(x, CastSpec(fmt, block, rule))  # type: ignore[arg-type]
        assert np.array_equal(q.codes.view(torch.uint8).numpy(), codes.view(np.uint8))
        assert np.array_equal(q.dequant_scale.float().numpy(), factors)
        assert np.array_equal(q.dequantize().numpy(), values)
        assert q.amax == x.abs().max() and q.shape == shape


def test_scaled_fp16_has_tiles_too() -> None:
    x = seeded(4, 40) * 1e-9
    q = quantize(x, CastSpec(FP16, PER_ROW, CURRENT_POW2))
    scale = 2.0 ** (65504 / x.abs().amax(1, keepdim=True).double()).log2().floor()
    assert torch.equal(q.dequant_scale, (1 / scale).float())
    assert torch.equal(q.codes, (x * scale.float()).half())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block", GRANULARITIES)
def test_a_batch_is_its_matrices(fmt: Format, block: Block) -> None:
    x = seeded(3, 2, 33, 40)
    q = quantize(x, CastSpec(fmt, block, E8M0_UP))
    for i, j in itertools.product(range(3), range(2)):
        alone = quantize(x[i, j], CastSpec(fmt, block, E8M0_UP))
        assert torch.equal(alone.codes.view(torch.uint8), q.codes.view(torch.uint8)[i, j])
        assert scale_bits(alone) == as_bytes(q.dequant_scale[i, j].contiguous())
        assert torch.equal(alone.dequantize(), q.dequantize()[i, j])


def test_nvfp4_of_a_batch_has_one_amax() -> None:
    x = seeded(2, 20, 24) * torch.tensor([1.0, 50.0])[:, None, None]
    spec = CastSpec(E2M1FN, Block(16, 16), NVFP4)
    q = quantize(x, spec)
    padded = torch.zeros(2, 32, 24)
    padded[:, :20] = x
    below = quantize(padded.view(64, 24), spec)  # the same tiles, one below the other
    assert q.dequant_scale.shape == (2, 2, 2) and q.amax == x.abs().max()
    assert torch.equal(q.codes, below.codes.view(2, 32, 24)[:, :20])
    assert torch.equal(q.dequantize(), below.dequantize().view(2, 32, 24)[:, :20])


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((2, 3, 40), Block(1, 32), (2, 3, 2)),
        ((5, 40), PER_ROW, (5, 1)),
        ((5, 40), PER_COLUMN, (1, 40)),
        ((40,), PER_ROW, (1,)),
        ((40,), Block(1, 32), (2,)),
        ((40,), PER_COLUMN, (40,)),
        ((), PER_ROW, (1,)),
        ((1, 1), Block(128, 128), (1, 1)),
        ((0, 40), Block(1, 32), (0, 2)),
        ((3, 0), PER_ROW, (3, 0)),
        ((0,), Block(16, 16), (0,)),
        ((2, 0, 16), PER_COLUMN, (2, 0, 16)),
        ((0, 4, 40), Block(128, 128), (0, 1, 1)),
        ((2, 200, 130), Block(128, 128), (2, 2, 2)),
    ],
)
@pytest.mark.parametrize("rule", [CURRENT, E8M0_UP])
def test_shapes_of_scales(shape: tuple[int, ...], block: Block, expected: tuple[int, ...], rule: object) -> None:
    q = quantize(torch.ones(shape), CastSpec(E4M3FN, block, rule))  # case 54  # type: ignore[arg-type]
    assert tuple(q.dequant_scale.shape) == expected
    assert q.shape == shape and torch.equal(q.dequantize(), torch.ones(shape))
    assert torch.equal(q.t().t().dequantize() if len(shape) == 2 else q.dequantize(), torch.ones(shape))
    assert q.add_(1).dequant_scale.shape == expected and (q.dequantize() == 2).all()


@pytest.mark.parametrize("shape", [(5,), (5, 3), (2, 5, 3), (2, 2, 5, 3)])
@pytest.mark.parametrize("spec", [CastSpec(fmt, Block(2**40, 2**40)) for fmt in (E4M3FN, INT8)], ids=str)
def test_tiles_far_larger_than_the_tensor_take_no_memory(shape: tuple[int, ...], spec: CastSpec) -> None:
    x = seeded(*shape)
    q = quantize(x, spec)
    matrix = x.reshape(-1, *x.shape[-2:]) if x.ndim > 1 else x[None, None]
    alone = torch.stack([quantize(each, CastSpec(spec.format)).dequantize() for each in matrix])
    assert torch.equal(q.dequantize(), alone.reshape(shape))
    q.amax.fill_(torch.inf)  # operations look for the values that were infinite
    assert q.abs().isinf().any()


# reported cases, over all granularities


ALL_SPECS = [
    *(CastSpec(fmt, block, rule) for fmt in FORMATS for block in [PER_TENSOR, *GRANULARITIES] for rule in RULES),
    CastSpec(E2M1FN, Block(1, 16), NVFP4),
    CastSpec(E2M1FN, Block(16, 16), NVFP4),
]
POW2_SPECS = [spec for spec in ALL_SPECS if spec.scale in EXACT_RULES]


def test_zeros_come_back_as_zeros() -> None:
    for spec in ALL_SPECS:  # case 1
        q = quantize(torch.zeros(4, 256), spec)
        assert not q.dequantize().any() and q.dequantize().isfinite().all()
        if spec.scale is not NVFP4:  # a byte of zeros is zero there
            assert q.dequant_scale.float().isfinite().all() and (q.dequant_scale.float() > 0).all()


def test_a_zero_row_stays_zero_and_others_are_as_alone() -> None:
    x = seeded(4, 256)  # case 1
    x[1] = 0
    for spec in ALL_SPECS:
        q = quantize(x, spec)
        values = q.dequantize()
        assert not values[1].any() and values.isfinite().all()
        if spec.granularity.rows == 1:
            for row in (0, 2, 3):
                alone = quantize(x[row : row + 1], spec)
                if spec.scale is not NVFP4 or alone.amax == q.amax:
                    assert torch.equal(alone.dequantize()[0], values[row])


@pytest.mark.parametrize("block", [PER_TENSOR, *GRANULARITIES])
def test_scales_of_fp16_input_are_float32(block: Block) -> None:
    q = quantize(torch.full((16, 16), 0.005, dtype=torch.float16), CastSpec(E4M3FN, block))  # case 3
    assert q.dequant_scale.dtype is torch.float32
    expected = 1 / np.float32(np.float32(448) / np.float32(np.float16(0.005)))
    assert (q.dequant_scale == expected).all() and abs(expected - 1.1163e-5) < 1e-8
    assert q.dequantize().dtype is torch.float16 and (q.dequantize() == np.float16(0.005)).all()


@pytest.mark.parametrize("block", [PER_TENSOR, *GRANULARITIES])
def test_e8m0_scales_are_rounded_up(block: Block) -> None:
    x = torch.ones(1, 32)  # case 5
    x[0, 5] = 627.2  # 1.4 * 448
    q = quantize(x, CastSpec(E4M3FN, block, E8M0_UP))
    assert q.dequantize()[0, 5] == 640.0
    x[0, 5] = 960.0  # 1.875 * 2^9, where the mantissa of 448 ends at 1.75
    assert quantize(x, CastSpec(E4M3FN, block, E8M0_UP)).dequantize()[0, 5] == 960.0
    assert quantize(x, CastSpec(E4M3FN, block, E8M0_FLOOR)).dequantize()[0, 5] == 896.0  # saturates, as it says
    many = seeded(200, 32) * torch.logspace(-6, 6, 200)[:, None]
    scale = quantize(many, CastSpec(E4M3FN, PER_ROW, E8M0_UP)).dequant_scale.float()
    ratio = many.abs().amax(1, keepdim=True) / scale
    assert (scale.frexp().mantissa == 0.5).all() and (ratio <= 448).all() and (ratio > 224).all()


def test_codes_stand_for_values_times_their_scale() -> None:
    a = torch.randint(-2, 3, (16, 16), generator=torch.Generator().manual_seed(0)).float()  # case 7
    product = (a @ a.t()).clamp(-16, 16)  # whole numbers to 16 and their halves are codes of E4M3
    for block in (PER_ROW, PER_COLUMN, Block(4, 8)):
        grid = block.grid_of(16, 16)
        one = QuantizedTensor(product.to(torch.float8_e4m3fn), torch.ones(grid), CastSpec(E4M3FN, block))
        half = QuantizedTensor((product / 2).to(torch.float8_e4m3fn), torch.full(grid, 2.0), CastSpec(E4M3FN, block))
        assert torch.equal(one.dequantize(), product) and torch.equal(half.dequantize(), product)
        assert as_bytes(one.codes) != as_bytes(half.codes)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block", [Block(1, 32), Block(1, 16), PER_ROW])
def test_blocks_do_not_straddle_rows(fmt: Format, block: Block) -> None:
    x = torch.tensor([[1e3], [1e-3]]).repeat(1, 40)  # case 8
    for rule in RULES:
        spec = CastSpec(fmt, block, rule)  # type: ignore[arg-type]
        q, alone = quantize(x, spec), quantize(x[1], spec)
        assert q.dequant_scale.shape == (2, -(-40 // (block.columns or 40)))
        assert torch.equal(q.dequantize()[1], alone.dequantize())
        assert as_bytes(q.dequant_scale[1]) == scale_bits(alone)
        if rule is CURRENT:
            assert ((q.dequantize() - x).abs() <= x * 1e-6).all()
        deep = quantize(x.expand(2, 2, 40).reshape(2, 2, 40)[:, [0, 1, 1]], spec)
        assert torch.equal(deep.dequantize()[0, 1], alone.dequantize()) and deep.dequant_scale.shape[:2] == (2, 3)


def test_requantizing_is_stable_with_powers_of_two() -> None:
    x = seeded(33, 70) * torch.logspace(-2, 2, 70)  # case 9
    x[0, :3] = torch.tensor([0.0, -0.0, 1e-30])
    for spec in POW2_SPECS:
        first = quantize(x, spec).dequantize()
        again = first
        for _ in range(3):
            again = quantize(again, spec).dequantize()
            assert torch.equal(again, first), spec
            assert torch.equal(again.signbit(), first.signbit()) or spec.format is INT8


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block", GRANULARITIES)
def test_requantizing_does_not_drift_with_free_scales(fmt: Format, block: Block) -> None:
    first = quantize(seeded(33, 70), CastSpec(fmt, block)).dequantize()  # case 9
    again = first
    for _ in range(10):
        again = quantize(again, CastSpec(fmt, block)).dequantize()
        torch.testing.assert_close(again, first, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x[:, ::2],
        lambda x: x.t(),
        lambda x: x[:1].expand(5, -1),
        lambda x: x[..., :40],
        lambda x: x.reshape(2, 8, 8, 6).permute(0, 3, 1, 2),
    ],
)
def test_tiles_follow_the_logical_order(strided: object) -> None:
    view = strided(seeded(16, 48))  # case 51  # type: ignore[operator]
    for spec in ALL_SPECS:
        assert_same(quantize(view, spec), quantize(view.contiguous(), spec))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_cast_as_its_float32_values(dtype: torch.dtype) -> None:
    x = seeded(20, 40).to(dtype)
    for spec in (CastSpec(E4M3FN, PER_COLUMN), CastSpec(E2M1FN, Block(1, 16), NVFP4), CastSpec(INT8, Block(8, 8))):
        q = quantize(x, spec)
        assert_same(q, quantize(x.float(), spec))
        assert q.dtype is dtype and q.dequantize().dtype is dtype


# NaN and infinity


@pytest.mark.parametrize("block", [PER_ROW, PER_COLUMN, Block(1, 32), Block(16, 16)])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_stays_in_its_tile(fmt: Format, block: Block, rule: object) -> None:
    x = seeded(40, 64)
    spec = CastSpec(fmt, block, rule)  # type: ignore[arg-type]
    clean = quantize(x, spec)
    x[17, 33] = float("nan")
    q = quantize(x, spec)
    height, width = block.size_in(40, 64)
    inside = torch.zeros(40, 64, dtype=torch.bool)
    top, left = 17 // height * height, 33 // width * width
    inside[top : top + height, left : left + width] = True
    assert torch.equal(q.dequantize()[~inside], clean.dequantize()[~inside])
    assert q.dequantize()[17, 33].isnan() and q.amax.isnan() and not clean.dequantize().isnan().any()
    if not fmt.has_nan or rule in (E8M0_UP, E8M0_FLOOR):
        assert q.dequant_scale.float().isnan().sum() == 1 and q.dequantize()[inside].isnan().all()
    else:
        assert q.dequantize().isnan().sum() == 1


@pytest.mark.parametrize("fmt", FORMATS)
def test_infinity_saturates_and_stays_in_its_tile(fmt: Format) -> None:
    x = seeded(4, 64)
    clean = quantize(x, CastSpec(fmt, PER_ROW))
    x[2, 5] = float("-inf")
    q = quantize(x, CastSpec(fmt, PER_ROW))
    assert q.dequantize()[2, 5] == -fmt.max and q.amax.isinf()
    assert torch.equal(q.dequantize()[[0, 1, 3]], clean.dequantize()[[0, 1, 3]])
    seen = q + 0  # operations see it
    assert seen[2, 5] == float("-inf") and seen.isinf().sum() == 1
    q.mul_(0.5)  # and still do where it went into the scales
    assert q.isinf().any() and q[2, 5] == float("-inf")


def test_nvfp4_shows_what_is_not_finite() -> None:
    x, spec = seeded(4, 64), CastSpec(E2M1FN, Block(1, 16), NVFP4)
    x[2, 5] = float("inf")
    q = quantize(x, spec)
    assert q.amax.isinf() and q.dequantize()[2, 5] == 448 * 6 and q.dequantize().isfinite().all()
    assert (q + 0).isinf().sum() == 1 and q[2, 5].isinf()
    x[1, 1] = float("nan")
    q = quantize(x, spec)
    assert q.amax.isnan() and q.isnan().all()  # the amax of the whole is part of every scale


# the parts


def test_parts_that_do_not_fit_are_refused() -> None:
    codes, rows = torch.zeros(3, 40, dtype=torch.float8_e4m3fn), CastSpec(E4M3FN, PER_ROW)
    for scale, message in (
        (torch.ones(()), r"expected torch.float32, one a tile of the codes, found torch.float32 of shape \(\)"),
        (torch.ones(3), r"one a tile of the codes, found torch.float32 of shape \(3,\)"),
        (torch.ones(3, 2), r"expected shape \(3, 1\), one entry for each tile \(per row\) of codes of shape \(3, 40\)"),
        (torch.ones(3, 1).double(), "expected torch.float32.*found torch.float64"),
    ):
        with pytest.raises(NarrowgaugeError, match=message):
            QuantizedTensor(codes, scale, rows)
    with pytest.raises(NarrowgaugeError, match="expected torch.float8_e8m0fnu.*found torch.float32"):
        QuantizedTensor(codes, torch.ones(3, 1), CastSpec(E4M3FN, PER_ROW, E8M0_UP))
    with pytest.raises(NarrowgaugeError, match="amax: expected one float32 value.*found torch.float32 of shape"):
        QuantizedTensor(codes, torch.ones(3, 1), rows, amax=torch.ones(3))
    nv = quantize(torch.ones(2, 16), CastSpec(E2M1FN, Block(1, 16), NVFP4))
    with pytest.raises(NarrowgaugeError, match="expected the source's amax"):
        QuantizedTensor(nv.codes, nv.dequant_scale, nv.spec)
    with pytest.raises(NarrowgaugeError, match="codes: expected a tensor, found list"):
        QuantizedTensor([1], torch.ones(3, 1), rows)  # type: ignore[arg-type]
    with pytest.raises(NarrowgaugeError, match="dequant_scale: expected a tensor, found float"):
        QuantizedTensor(codes, 1.0, rows)  # type: ignore[arg-type]
    with pytest.raises(NarrowgaugeError, match="expected a CastSpec, found 'fp8'"):
        QuantizedTensor(codes, torch.ones(3, 1), "fp8")  # type: ignore[arg-type]
    q = QuantizedTensor(codes, torch.tensor([[1.0], [2.0], [0.5]]), rows)
    assert q.amax == 896  # what the codes can reach


def test_nbytes_counts_codes_scales_and_amax() -> None:
    x = torch.ones(6, 40)
    assert quantize(x, CastSpec(E4M3FN, PER_ROW)).nbytes == 240 + 6 * 4 + 4
    assert quantize(x, CastSpec(E4M3FN, Block(1, 32), E8M0_UP)).nbytes == 240 + 12 + 4
    assert quantize(x, CastSpec(E2M1FN, Block(1, 16), NVFP4)).nbytes == 240 + 18 + 4


def test_repr_shows_the_granularity() -> None:
    text = repr(quantize(torch.ones(2, 40), CastSpec(E4M3FN, Block(1, 32), E8M0_UP)))
    assert "1x32 blocks" in text and "dequant_scale=[2, 2] of float8_e8m0fnu" in text
    assert "per row" in repr(quantize(torch.ones(2, 40), CastSpec(E4M3FN, PER_ROW)).to("meta"))
