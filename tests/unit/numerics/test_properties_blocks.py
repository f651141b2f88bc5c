"""Casts by tiles: equal to the scalar twin bit for bit, and what must hold of any matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from block_cases import (
    BLOCKS,
    CASTS,
    FLOATS,
    SPECIAL,
    TILES,
    assert_equals_scalar_twin,
    assert_same,
    from_bits,
    is_nan,
    matrices,
    nan_scales,
    stored_bits,
    to_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.numerics import kernels, reference, reference_blocks, scaling
from narrowgauge.numerics.companding import LINEAR
from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E4M3FN, E5M2, E8M0FNU, Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.kernels import paths
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, NVFP4, ScaleRule

pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape: int, seed: int = 0, spread: float = 6.0) -> Tensor:
    """Normal values whose magnitude differs from row to row and from column to column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.exp2(spread * torch.randn(shape[0], 1, generator=generator)) * torch.linspace(0.5, 2, shape[1])


def all_bits(quantized: kernels.BlockQuantized) -> list:
    """Codes, scales and amax as unsigned ints."""
    assert quantized.codes is not None
    return [stored_bits(quantized.codes), stored_bits(quantized.dequant_scale), quantized.amax.item()]


# ---- equal to the scalar twin


def test_kernels_take_the_smallest_of_matrices() -> None:
    # so that what is held against the scalar twin here is what large matrices run in
    assert paths.tile_module(torch.ones(1, 1), True, E4M3FN, LINEAR, False) is not None


def check_any_matrix(data: st.DataObject, fmt: Format, rule: ScaleRule) -> None:
    block = data.draw(st.sampled_from(TILES if rule is NVFP4 else BLOCKS))
    key = data.draw(st.none() | st.integers(-(1 << 63), (1 << 63) - 1))  # None: to nearest even
    stream = data.draw(st.integers(0, 3))
    assert_equals_scalar_twin(from_bits(data.draw(matrices(fmt))), fmt, block, rule, key, stream)


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_matrix_is_cast_as_the_scalar_twin_says(data: st.DataObject, fmt: Format, rule: ScaleRule) -> None:
    check_any_matrix(data, fmt, rule)


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_many_matrices_are_cast_as_the_scalar_twin_says(data: st.DataObject, fmt: Format, rule: ScaleRule) -> None:
    check_any_matrix(data, fmt, rule)


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
def test_scales_of_every_kind_of_amax_equal_the_scalar_twin(fmt: Format, rule: ScaleRule) -> None:
    random = np.random.default_rng(0).integers(0, 0x7F800000, 40).tolist()
    edges = [reference.bits_of(fmt.max * 2.0**e) + step for e in (-140, -127, -2, 0, 1, 60) for step in (-1, 0, 1, 2)]
    amax = [*SPECIAL, 0x400000, *random, *(b for b in edges if 0 <= b < reference.INFINITY)]
    wholes = [0, 1, 0x7F7FFFFF, reference.INFINITY, reference.NAN, *random[:6]] if rule is NVFP4 else [0]
    for whole in wholes:
        tensor_amax = from_bits(np.array([whole]))[0]
        quant_scale, stored = scaling.block_scales(from_bits(np.array(amax)), fmt, rule, tensor_amax)
        expected = [reference_blocks.block_scales(bits, fmt, rule, whole) for bits in amax]
        assert_same(stored_bits(quant_scale[None]), [[scale for scale, _ in expected]], is_nan)
        assert_same(stored_bits(stored[None]), [[scale for _, scale in expected]], nan_scales(rule))


@pytest.mark.parametrize(
    ("fmt", "rule", "block"),
    [
        (E4M3FN, CURRENT, PER_ROW),
        (E4M3FN, CURRENT_POW2, Block(1, 128)),
        (E5M2, E8M0_UP, Block(1, 32)),
        (E2M1FN, NVFP4, Block(1, 16)),
        (E2M1FN, NVFP4, Block(16, 16)),
    ],
    ids=repr,
)
def test_a_matrix_of_several_tiles_is_cast_as_the_scalar_twin_says(fmt: Format, rule: ScaleRule, block: Block) -> None:
    assert_equals_scalar_twin(randn(9, 131), fmt, block, rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("rule", [CURRENT, E8M0_UP], ids=repr)
def test_other_dtypes_are_cast_as_their_float32_values(dtype: torch.dtype, rule: ScaleRule) -> None:
    x = randn(5, 70, spread=1).to(dtype)
    found = kernels.quantize_blocks(x, E4M3FN, Block(1, 32), rule)
    assert all_bits(found) == all_bits(kernels.quantize_blocks(x.float(), E4M3FN, Block(1, 32), rule))


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=repr)
def test_empty_matrices_and_single_values_are_cast(shape: tuple[int, int], block: Block) -> None:  # case 54
    x = torch.full(shape, 3.0)
    assert_equals_scalar_twin(x, E4M3FN, block, CURRENT)
    quantized = kernels.quantize_blocks(x, E4M3FN, block, CURRENT)
    assert tuple(quantized.dequant_scale.shape) == block.grid_of(*shape)
    assert quantized.amax.item() == (3.0 if x.numel() else 0.0)


# ---- tiles


@pytest.mark.parametrize("block", TILES, ids=repr)
@pytest.mark.parametrize("rule", [CURRENT, E8M0_UP, NVFP4], ids=repr)
def test_a_change_in_one_tile_changes_no_other(block: Block, rule: ScaleRule) -> None:
    fmt = E2M1FN if rule is NVFP4 else E4M3FN
    x = randn(34, 131, spread=1)
    x[0, 0] = 100  # the amax of the whole, in the first tile
    before = kernels.quantize_blocks(x, fmt, block, rule)
    down, across = block.grid_of(*x.shape)
    i, j = down - 1, across // 2
    height, width = block.size_in(*x.shape)
    tile = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
    changed = x.clone()
    changed[tile] = changed[tile].clamp(-20, 20).roll(1) * 0.37
    after = kernels.quantize_blocks(changed, fmt, block, rule)
    same_codes, same_scales = torch.ones(x.shape, dtype=torch.bool), torch.ones(down, across, dtype=torch.bool)
    if (i, j) == (0, 0):  # the tile is the matrix
        return
    same_codes[tile], same_scales[i, j] = False, False
    assert before.codes is not None and after.codes is not None
    assert torch.equal(before.codes.view(torch.uint8)[same_codes], after.codes.view(torch.uint8)[same_codes])
    scales = [q.dequant_scale.view(torch.uint8 if rule is not CURRENT else torch.int32) for q in (before, after)]
    assert torch.equal(scales[0][same_scales], scales[1][same_scales])
    assert scales[0][i, j] != scales[1][i, j]


@pytest.mark.parametrize("block", [*TILES, PER_ROW, PER_COLUMN], ids=repr)
@pytest.mark.parametrize(("fmt", "rule"), [(E4M3FN, CURRENT), (E2M1FN, E8M0_UP)], ids=repr)
def test_every_tile_is_cast_as_if_it_were_alone(block: Block, fmt: Format, rule: ScaleRule) -> None:
    x = randn(18, 131)
    whole = kernels.quantize_blocks(x, fmt, block, rule)
    assert whole.codes is not None
    height, width = block.size_in(*x.shape)
    for i, j in itertools.product(*(range(n) for n in block.grid_of(*x.shape))):
        tile = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        alone = kernels.quantize_blocks(x[tile], fmt, PER_TENSOR, rule)
        assert alone.codes is not None
        assert stored_bits(alone.codes) == stored_bits(whole.codes[tile])
        assert stored_bits(alone.dequant_scale) == stored_bits(whole.dequant_scale[i : i + 1, j : j + 1])


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
def test_tiles_of_the_transposed_matrix_are_the_transposed_tiles(fmt: Format, rule: ScaleRule) -> None:
    x = randn(37, 70, spread=2)
    for block in (Block(1, 16), Block(1, 32), Block(16, 16), Block(3, 8), *((PER_ROW,) if rule is not NVFP4 else ())):
        upright = kernels.quantize_blocks(x, fmt, block, rule)
        turned = kernels.quantize_blocks(x.t(), fmt, block.transposed, rule)
        assert upright.codes is not None and turned.codes is not None
        assert stored_bits(turned.codes) == stored_bits(upright.codes.t())
        assert stored_bits(turned.dequant_scale) == stored_bits(upright.dequant_scale.t())


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
def test_a_ragged_matrix_is_cast_as_if_padded_with_zeros(fmt: Format, rule: ScaleRule) -> None:  # case 53
    x = randn(37, 70, spread=2)
    for block in (Block(1, 32), Block(16, 16), Block(32, 1), Block(128, 128)):
        assert block.rows is not None and block.columns is not None
        padded = F.pad(x, (0, -70 % block.columns, 0, -37 % block.rows))
        ragged, full = (kernels.quantize_blocks(y, fmt, block, rule) for y in (x, padded))
        assert ragged.codes is not None and full.codes is not None
        assert stored_bits(ragged.codes) == stored_bits(full.codes[:37, :70])
        assert stored_bits(ragged.dequant_scale) == stored_bits(full.dequant_scale)


@pytest.mark.parametrize("block", BLOCKS, ids=repr)
def test_the_layout_in_memory_changes_nothing(block: Block) -> None:  # case 51
    wide = randn(40, 96)
    views = {
        "every other column": wide[:, ::2],
        "transposed": wide.t(),
        "expanded": wide[:1].expand(40, 96),
        "part of a wider one": wide[3:, 5:45],
    }
    for name, view in views.items():
        found = kernels.quantize_blocks(view, E4M3FN, block, CURRENT)
        assert all_bits(found) == all_bits(kernels.quantize_blocks(view.contiguous(), E4M3FN, block, CURRENT)), name
        assert found.codes is not None and found.codes.is_contiguous()


def test_tiles_do_not_straddle_rows() -> None:  # case 8
    x = torch.stack([torch.full((40,), 1e3), torch.full((40,), 1e-3)])
    for rule in (CURRENT, CURRENT_POW2, E8M0_UP):
        both = kernels.quantize_blocks(x, E4M3FN, Block(1, 32), rule)
        second = kernels.quantize_blocks(x[1:], E4M3FN, Block(1, 32), rule)
        assert both.codes is not None and second.codes is not None
        assert tuple(both.dequant_scale.shape) == (2, 2)  # ceil(40 / 32) in a row
        assert stored_bits(both.codes)[1:] == stored_bits(second.codes)
        assert stored_bits(both.dequant_scale)[1:] == stored_bits(second.dequant_scale)
        values = kernels.dequantize_blocks(both.codes, both.dequant_scale, E4M3FN, Block(1, 32))
        assert ((values - x).abs() <= x.abs() / 16).all()


# ---- values


@pytest.mark.parametrize(("fmt", "rule"), [cast for cast in CASTS if cast[0] in FLOATS], ids=repr)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), block=st.sampled_from(TILES))
def test_no_value_is_further_off_than_half_a_gap(data, block: Block, fmt: Format, rule: ScaleRule) -> None:
    x = from_bits(data.draw(matrices(fmt, finite=True)))
    q = kernels.quantize_blocks(x, fmt, block, rule)
    assert q.codes is not None
    found = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, block, tensor_amax=q.amax).double()
    magnitude, factors = x.double().abs(), scaling.block_factors(q.dequant_scale, q.amax).double()
    height, width = block.size_in(*x.shape)
    factors = factors.repeat_interleave(height, 0)[: x.shape[0]].repeat_interleave(width, 1)[:, : x.shape[1]]
    # half a gap of the format: 2^-(mantissa bits + 1) of a normal value, half the smallest subnormal below. On top of
    # it the scale, its inverse and the products each round once, to 2^-24 or to float32's own smallest value
    half_gap = torch.maximum(magnitude * 2.0 ** -(fmt.mantissa_bits + 1), factors * fmt.smallest_subnormal / 2)
    bound = half_gap + magnitude * 2.0**-21 + 2.0**-149 * (1 + magnitude / factors.clamp(min=2.0**-149))
    held = magnitude + bound < scaling.FLT_MAX  # above, rounding up leaves float32
    if rule is E8M0_FLOOR:  # saturates, and says so
        held &= magnitude <= fmt.max * factors
    if rule is NVFP4:
        # scale bytes round too: downwards by at most 1/16, so that a maximum saturates; near their zero, by any share
        held &= factors >= E4M3FN.smallest_normal * q.amax.double() / 2688
        held &= (q.amax > 1e-30) & (q.amax < 1e34)
        bound = torch.maximum(bound, magnitude / 16 * 1.001)
    assert ((found - x.double()).abs() <= bound)[held].all()


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
def test_a_larger_amax_never_has_a_smaller_scale(fmt: Format, rule: ScaleRule) -> None:
    bits = np.unique(np.concatenate([np.arange(1, 0x7F800000, 0x12345), [1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF]]))
    amax = from_bits(bits)
    _, stored = scaling.block_scales(amax, fmt, rule, amax[-1] if rule is NVFP4 else None)
    factors = scaling.block_factors(stored)
    assert (factors[1:] >= factors[:-1]).all()
    assert factors[-1] > factors[0]


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_casting_again_changes_nothing(fmt: Format) -> None:  # case 9
    for rule, block in itertools.product((CURRENT_POW2, E8M0_UP, E8M0_FLOOR), (PER_ROW, PER_COLUMN, Block(1, 32))):
        values = randn(8, 70, seed=1)
        for repeat in range(4):
            q = kernels.quantize_blocks(values, fmt, block, rule)
            assert q.codes is not None
            again = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, block)
            assert repeat == 0 or to_bits(again) == to_bits(values)
            values = again


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_free_float32_scales_do_not_drift(fmt: Format) -> None:  # case 9
    first = values = None
    for _ in range(10):
        q = kernels.quantize_blocks(randn(8, 70) if values is None else values, fmt, Block(1, 32), CURRENT)
        assert q.codes is not None
        values = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, Block(1, 32))
        first = values if first is None else first
        torch.testing.assert_close(values, first, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
def test_zeros_have_usable_scales_and_come_back_as_zeros(fmt: Format, rule: ScaleRule) -> None:  # case 1
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    x[2] = -0.0
    q = kernels.quantize_blocks(x, fmt, Block(1, 32), rule)
    assert q.codes is not None
    values = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, Block(1, 32), tensor_amax=q.amax)
    assert (values[1:3] == 0).all()
    assert values.isfinite().all()
    factors = scaling.block_factors(q.dequant_scale)
    assert factors.isfinite().all()
    assert (factors >= 0).all() if rule is NVFP4 else (factors > 0).all()  # NVFP4's byte of zeros is 0


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
@pytest.mark.parametrize("rule", [CURRENT, CURRENT_POW2, E8M0_UP, E8M0_FLOOR], ids=repr)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_and_spares_the_other_tiles(fmt: Format, rule: ScaleRule, bad: float) -> None:
    x = torch.ones(2, 64)
    x[0, 3] = bad
    q = kernels.quantize_blocks(x, fmt, Block(1, 32), rule)
    assert q.codes is not None
    values = kernels.dequantize_blocks(q.codes, q.dequant_scale, fmt, Block(1, 32))
    assert (values[1] == 1).all()
    assert (values[0, 32:] == 1).all()
    if bad == bad:  # saturated; the amax says what was met
        assert q.amax == float("inf")
        largest = float("inf") if rule in (E8M0_UP, E8M0_FLOOR) else fmt.max  # max * 2^127 is beyond float32
        assert values[0, 3] == (largest if bad > 0 else -largest)
    else:
        assert q.amax.isnan()
        assert values[0, 3].isnan()
        if not fmt.has_nan:  # the scale of the tile says it
            assert values[0, :32].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_the_whole_of_nvfp4(bad: float) -> None:
    # its scale has a part that is the whole tensor's: no value may come back as if nothing had happened
    x = torch.ones(2, 64)
    x[0, 3] = bad
    q = kernels.quantize_blocks(x, E2M1FN, Block(1, 16), NVFP4)
    assert q.codes is not None
    values = kernels.dequantize_blocks(q.codes, q.dequant_scale, E2M1FN, Block(1, 16), tensor_amax=q.amax)
    assert not values.isfinite().any()


# ---- the rules of E8M0


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1FN, E2M3FN], ids=repr)  # the others' maxima have the mantissa of E4M3's
def test_the_byte_rounded_up_is_the_smallest_that_fits_for_every_mantissa(fmt: Format) -> None:
    # amax * fl(1/max) is rounded twice, and yet never on the wrong side of a power of two
    amax = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)
    exponent = scaling.e8m0_byte_up(amax, fmt).double() - 127
    assert (amax.double() <= fmt.max * torch.exp2(exponent)).all()
    assert (amax.double() > fmt.max * torch.exp2(exponent - 1)).all()


def test_the_maximum_of_a_block_is_kept_when_rounded_up_and_saturates_when_rounded_down() -> None:  # case 5
    x = torch.ones(2, 32)
    x[:, 7] = torch.tensor([1.4 * 448, 500.0])  # mantissas 1.225 and 1.95; that of E4M3's maximum is 1.75
    up, down = (kernels.quantize_blocks(x, E4M3FN, Block(1, 32), rule, count=True) for rule in (E8M0_UP, E8M0_FLOOR))
    maxima = []
    for q in (up, down):
        assert q.codes is not None
        maxima.append(kernels.dequantize_blocks(q.codes, q.dequant_scale, E4M3FN, Block(1, 32))[:, 7].tolist())
    assert maxima == [[640.0, 512.0], [640.0, 448.0]]
    assert (up.saturated, down.saturated) == (0, 1)
    assert scaling.block_factors(up.dequant_scale).flatten().tolist() == [2.0, 2.0]
    assert "saturates" in E8M0_FLOOR.value


@pytest.mark.parametrize("fmt", FLOATS, ids=repr)
def test_rounded_up_no_block_saturates_and_rounded_down_about_half_do(fmt: Format) -> None:  # case 5
    x = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0))
    up, down = (kernels.quantize_blocks(x, fmt, Block(1, 32), rule, count=True) for rule in (E8M0_UP, E8M0_FLOOR))
    assert up.saturated == 0
    amax = x.abs().amax(dim=1)
    mantissa = 2 * amax.frexp().mantissa
    over = (mantissa > 2 * torch.tensor(fmt.max).frexp().mantissa).sum()
    assert down.saturated is not None and down.saturated >= over > 0
    difference = up.dequant_scale.view(torch.uint8).int() - down.dequant_scale.view(torch.uint8).int()
    assert (difference.flatten() == (mantissa > 2 * torch.tensor(fmt.max).frexp().mantissa).int()).all()
    assert scaling.stored_dtype(E8M0_UP) is E8M0FNU.dtype
