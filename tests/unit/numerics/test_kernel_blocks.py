"""The Numba kernels for tiles against their twin in torch operations, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from narrowgauge.numerics import hadamard, kernels, scaling
from narrowgauge.numerics.companding import LINEAR, SQUARE_ROOT, Companding
from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2, INT4, INT8, UINT4, UINT8, Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.kernels import cpu_tiles, twin
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, NVFP4, ScaleRule

FORMATS = (E4M3FN, E5M2, E2M1FN, E3M2FN, E2M3FN)
RULES = (CURRENT, CURRENT_POW2, E8M0_UP, E8M0_FLOOR)
CASTS = [*itertools.product(FORMATS, RULES), (E2M1FN, NVFP4)]
INPUTS = (torch.float32, torch.bfloat16, torch.float16)
BLOCKS = (
    Block(1, 16), Block(1, 32), Block(1, 128), Block(16, 16), Block(128, 128), Block(32, 1), Block(128, 1),
    Block(3, 5), Block(None, 4), Block(7, None), PER_ROW, PER_COLUMN, PER_TENSOR,
)  # fmt: skip
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bits_equal(a: Tensor | None, b: Tensor | None) -> None:
    """Equal in bits, but for a NaN's payload; None equals None."""
    assert (a is None) == (b is None)
    if a is None or b is None:
        return
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    view = BITS[a.element_size()]
    same = a.contiguous().view(view) == b.contiguous().view(view)
    if a.is_floating_point():
        same |= a.float().isnan() & b.float().isnan()
    assert same.all()


def assert_equals_twin(
    x: Tensor, fmt: Format, block: Block, rule: ScaleRule, key: Tensor | None = None, *bend: Companding | bool
) -> None:
    plain = [(True, None, False), (False, torch.bfloat16, True)]
    for codes, carrier, count in plain if key is None else [(True, torch.float32, True)]:
        fast = cpu_tiles.quantize_blocks(x, fmt, block, rule, codes, carrier, count, key, 3, *bend)
        slow = twin.quantize_blocks(x, fmt, block, rule, key, 3, codes, carrier, count, *bend)
        for a, b in zip(fast, slow, strict=True):
            assert_bits_equal(a, b)


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal values, each row and column of a scale of its own, with a few zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= 2.0 ** torch.randint(-12, 12, (rows, 1), generator=generator)
    x *= 2.0 ** torch.randint(-3, 4, (1, columns), generator=generator)
    x[torch.rand(rows, columns, generator=generator) < 0.05] = 0.0
    return x


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
def test_casts_of_every_tile_in_a_ragged_matrix(fmt: Format, rule: ScaleRule) -> None:
    x, key = matrix(19, 141), torch.tensor(-(3**37))
    for block in BLOCKS:
        assert_equals_twin(x, fmt, block, rule)
        assert_equals_twin(x, fmt, block, rule, key)


@pytest.mark.parametrize("dtype", INPUTS[1:], ids=str)
@pytest.mark.parametrize(("fmt", "rule"), [(E4M3FN, CURRENT), (E5M2, E8M0_UP), (E2M1FN, NVFP4)], ids=repr)
def test_casts_of_16_bit_inputs(fmt: Format, rule: ScaleRule, dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    x = torch.where(x.isfinite(), x, 1.0)[::7][:9360].view(60, 156)
    for block in (Block(1, 16), Block(1, 32), Block(16, 16), Block(128, 1), PER_ROW):
        assert_equals_twin(x, fmt, block, rule)


@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
def test_casts_of_tiles_with_every_exponent_nan_and_infinity(fmt: Format, rule: ScaleRule) -> None:
    # row r: the largest of a tile is 1.mantissa times 2^(r - 149), with neighbours of powers of two among them
    exponents = torch.arange(-149, 128)[:, None]
    mantissas = torch.tensor([1.0, 1.0 + 2.0**-23, 1.25, 1.5, 1.75, 1.75 + 2.0**-23, 1.875, 2.0 - 2.0**-23])
    heads = (mantissas.double() * 2.0 ** exponents.double()).float()[:, :, None]
    x = (heads * torch.linspace(-1.0, 1.0, 16)).view(277, 128)
    x[5, 20], x[6, 40], x[7, 60], x[8, 80] = torch.nan, torch.inf, -torch.inf, -torch.nan
    x[9:11, 16:48] = 0.0
    x[10, 50], x[10, 55] = torch.nan, torch.inf
    for block in (Block(1, 16), Block(3, 16), Block(16, 1)):
        assert_equals_twin(x, fmt, block, rule)
        assert_equals_twin(x, fmt, block, rule, torch.tensor(7))
    finite = x.nan_to_num(0.0, 0.0, 0.0)  # in NVFP4 one NaN or infinity speaks for the whole tensor
    for scale in (1.0, 2.0**-100):
        assert_equals_twin(finite * scale, fmt, Block(1, 16), rule)


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
@pytest.mark.parametrize("curve", [LINEAR, SQUARE_ROOT], ids=repr)
@pytest.mark.parametrize("fmt", [INT8, UINT8, INT4, UINT4], ids=repr)
def test_integers_plain_and_on_the_root(fmt: Format, curve: Companding, dtype: torch.dtype) -> None:
    x = matrix(19, 300) ** 3
    x[0, :2] = torch.tensor([2.0**-149, 2.0**120])  # the first times its scale underflows
    x[3, 5], x[4, 7] = torch.nan, -torch.inf
    x = x.to(dtype)
    for block, nonzero in itertools.product((Block(1, 128), Block(1, 2000), Block(16, 16), PER_COLUMN), (False, True)):
        assert_equals_twin(x, fmt, block, CURRENT, None, curve, nonzero)
        codes, _, scales, *_ = twin.quantize_blocks(x, fmt, block, CURRENT, None, 0, True, None, False, curve, nonzero)
        for out in (torch.float32, torch.bfloat16):
            arguments = (codes, scales, fmt, block, None, out, curve)
            assert_bits_equal(cpu_tiles.dequantize_blocks(*arguments), twin.dequantize_blocks(*arguments))


@pytest.mark.parametrize(("fmt", "rule"), [(E4M3FN, CURRENT), (E2M1FN, NVFP4), (INT8, E8M0_UP)], ids=repr)
def test_casts_that_make_no_zeros(fmt: Format, rule: ScaleRule) -> None:
    for block in (Block(1, 16), Block(16, 1)):
        assert_equals_twin(matrix(19, 141) ** 3, fmt, block, rule, None, LINEAR, True)


@pytest.mark.parametrize(("fmt", "rule"), [(E4M3FN, CURRENT), (E4M3FN, E8M0_UP), (E2M1FN, NVFP4)], ids=repr)
def test_casts_of_zeros(fmt: Format, rule: ScaleRule) -> None:
    for x in (torch.zeros(20, 40), -torch.zeros(20, 40)):
        assert_equals_twin(x, fmt, Block(1, 16), rule)
        assert_equals_twin(x, fmt, Block(16, 16), rule, torch.tensor(1))


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_casts_of_any_bits_in_any_shape_by_any_tile(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 90))
    size = st.none() | st.sampled_from([1, 2, 16, 32, 64]) | st.integers(1, 100)
    block = Block(data.draw(size), data.draw(size))
    fmt, rule = data.draw(st.sampled_from(CASTS))
    seed = data.draw(st.integers(0, 2**63 - 1))
    bits = torch.randint(-(2**31), 2**31, (rows, columns), generator=torch.Generator().manual_seed(seed))
    x = bits.to(torch.int32).view(torch.float32)
    if data.draw(st.booleans()):
        x = torch.where(x.abs() < 1e30, x, 1.0)  # else a random float32 is often NaN or huge
    assert_equals_twin(x, fmt, block, rule, data.draw(st.sampled_from([None, torch.tensor(seed)])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("fmt", "rule"), CASTS, ids=repr)
def test_every_code_comes_back_by_the_scale_of_its_tile(fmt: Format, rule: ScaleRule, dtype: torch.dtype) -> None:
    codes = torch.arange(1 << fmt.bits).to(torch.uint8).repeat(5, 2)[:, :-3].contiguous().view(fmt.dtype)
    for block in BLOCKS:
        count = block.grid_of(*codes.shape)
        stored = torch.arange(count[0] * count[1]).view(count) * 37
        if rule in (CURRENT, CURRENT_POW2):
            scales = 1.3 * 2.0 ** (stored % 250 - 130)
        else:
            scales = (stored % 256).to(torch.uint8).view(scaling.stored_dtype(rule))
        for amax in (None, torch.tensor(3.3)):
            fast = cpu_tiles.dequantize_blocks(codes, scales, fmt, block, amax, dtype)
            assert_bits_equal(fast, twin.dequantize_blocks(codes, scales, fmt, block, amax, dtype))


@pytest.mark.parametrize("block", [Block(1, 128), Block(128, 1), Block(128, 128), PER_ROW, PER_COLUMN], ids=repr)
@pytest.mark.parametrize("columns", [1024, 1000], ids=["whole", "ragged"])
def test_threads_give_the_bits_of_one(block: Block, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, key = matrix(1100, columns), torch.tensor(11)

    def run() -> list[Tensor | None]:
        cast = kernels.quantize_blocks(
            x, E4M3FN, block, CURRENT_POW2, carrier=torch.bfloat16, count=True, key=key, stream=2
        )
        assert cast.codes is not None
        return [*cast, kernels.dequantize_blocks(cast.codes, cast.dequant_scale, E4M3FN, block)]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    in_threads = run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for a, b in zip(in_threads, run(), strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize("block", [Block(1, 32), Block(32, 1), Block(16, 16)], ids=repr)
def test_strided_inputs_give_the_bits_of_their_contiguous_copies(block: Block) -> None:
    # case 51
    x = matrix(90, 140)
    for view in (x.t(), x[:, ::2], x[1::3].t()[::5], x[:, :1].expand(-1, 70)):
        strided = kernels.quantize_blocks(view, E4M3FN, block, E8M0_UP, carrier=torch.bfloat16, count=True)
        plain = kernels.quantize_blocks(view.contiguous(), E4M3FN, block, E8M0_UP, carrier=torch.bfloat16, count=True)
        for a, b in zip(strided, plain, strict=True):
            assert_bits_equal(a, b)
        assert strided.codes is not None
        turned = strided.codes.t().contiguous().t()
        assert_bits_equal(
            kernels.dequantize_blocks(turned, strided.dequant_scale, E4M3FN, block),
            kernels.dequantize_blocks(strided.codes, strided.dequant_scale, E4M3FN, block),
        )


@pytest.mark.parametrize("shape", [(0, 0), (0, 16), (16, 0), (1, 1), (1, 17), (17, 1)], ids=str)
@pytest.mark.parametrize(("fmt", "rule"), [(E4M3FN, CURRENT), (E2M1FN, NVFP4), (E5M2, E8M0_UP)], ids=repr)
def test_empty_and_tiny_matrices(shape: tuple[int, int], fmt: Format, rule: ScaleRule) -> None:
    # case 54
    x, key = torch.randn(shape), torch.tensor(1)
    for block in (Block(1, 16), Block(16, 16)):
        cast = kernels.quantize_blocks(x, fmt, block, rule, carrier=torch.float32, count=True, key=key)
        for a, b in zip(
            cast, twin.quantize_blocks(x, fmt, block, rule, key, 0, True, torch.float32, True), strict=True
        ):
            assert_bits_equal(a, b)
        assert cast.codes is not None
        assert kernels.dequantize_blocks(cast.codes, cast.dequant_scale, fmt, block).shape == shape


def test_float64_is_rounded_to_float32_first_and_gradients_are_not_made() -> None:
    x = matrix(20, 50).double().requires_grad_()
    a = kernels.quantize_blocks(x, E4M3FN, Block(1, 16), CURRENT, carrier=torch.float32)
    b = kernels.quantize_blocks(x.detach().float(), E4M3FN, Block(1, 16), CURRENT, carrier=torch.float32)
    for left, right in zip(a, b, strict=True):
        assert_bits_equal(left, right)
    assert a.carrier is not None and not a.carrier.requires_grad


def test_operators_pass_torchs_own_check() -> None:
    # as in test_kernel_operators: torch's check of aliasing multiplies float8 tensors, which it cannot
    x, checks = matrix(30, 50), ("test_faketensor",)
    for key, rule, fmt in ((None, "CURRENT", "E4M3FN"), (torch.tensor(3), "NVFP4", "E2M1FN")):
        arguments = (x, fmt, 1, 16, rule, True, torch.bfloat16, True, key, 1)
        torch.library.opcheck(torch.ops.narrowgauge.quantize_blocks.default, arguments, test_utils=checks)
    cast = kernels.quantize_blocks(x, E2M1FN, Block(1, 16), NVFP4)
    arguments = (cast.codes, cast.dequant_scale, "E2M1FN", 1, 16, torch.float32, cast.amax)
    torch.library.opcheck(torch.ops.narrowgauge.dequantize_blocks.default, arguments, test_utils=checks)
    torch.library.opcheck(torch.ops.narrowgauge.hadamard.default, (x, list(hadamard.SIGNS)), test_utils=checks)
