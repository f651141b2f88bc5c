from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_programs import interpret

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E4M3FN, E5M2, FP16, INT4, INT8, Format
from narrowgauge.numerics.kernels import cpu_wire, twin_wire, wire
from narrowgauge.numerics.kernels.wire import FORMATS, WireFormat
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, NVFP4, ScaleRule

HERE = Path(__file__).parent
KEY = torch.tensor(-0x123456789ABCDEF, dtype=torch.int64)
# rows, values of a row, values there are: more than a part of a row, padding within and beyond the last row's blocks
SHAPES = ((2, 512, 1000), (3, 2500, 5100), (1, 77, 77))


def values(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Magnitudes over 20 powers of two, zeros, and what is not finite in two places."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=draw) * torch.rand(numel, generator=draw).mul(-20).exp2()
    x[3] = 0.0
    x[5], x[numel // 2] = torch.nan, -torch.inf
    return x.to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in bits, a NaN like any other."""
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("fmt", "rule", "block"),
    [
        *itertools.product((E4M3FN, E5M2, INT8, E2M1FN), (E8M0_UP, CURRENT), (128,)),
        (E4M3FN, E8M0_FLOOR, 1500), (INT4, CURRENT_POW2, 6), (E4M3FN, CURRENT, 1), (E4M3FN, E8M0_UP, 48),
    ],
    ids=str,
)  # fmt: skip
def test_the_kernels_give_the_bytes_of_the_twin(fmt: Format, rule: ScaleRule, block: int, key: Tensor | None) -> None:
    form = WireFormat(fmt, block, rule)
    cases = (
        (torch.float32, True, 3.0),
        (torch.bfloat16, False, 2.0),
        (torch.float16, False, 0.5),
        (torch.float32, True, 4.0),
    )
    for (rows, n, numel), (dtype, fed_back, divisor) in zip((*SHAPES, SHAPES[0]), cases, strict=True):
        x = values(numel, dtype)
        residual = None if not fed_back else values(numel, seed=1).nan_to_num(0.0, 0.0, 0.0) / 100
        found, expected = (torch.zeros(rows, form.row_bytes(n), dtype=torch.uint8) for _ in range(2))
        kept = [None if residual is None else residual.clone() for _ in range(2)]
        cpu_wire.encode(x, rows, n, form, key, 3, kept[0], found)
        twin_wire.encode(x, rows, n, form, key, 3, kept[1], expected)
        assert torch.equal(found, expected)
        assert kept[0] is None or kept[1] is None or same(kept[0], kept[1])
        for out_dtype in (torch.float32, torch.bfloat16):
            decoded = [torch.empty(numel, dtype=out_dtype) for _ in range(2)]
            cpu_wire.decode(found, n, form, decoded[0])
            twin_wire.decode(found, n, form, decoded[1])
            assert same(*decoded)
        assert same(cpu_wire.reduce(found, n, form, divisor), twin_wire.reduce(found, n, form, divisor))
        sums = [torch.zeros(form.row_bytes(n), dtype=torch.uint8) for _ in range(2)]
        kept = [None if residual is None else residual[:n].clone() for _ in range(2)]
        cpu_wire.reduce_and_encode(found, n, form, divisor, key, 4, kept[0], sums[0])
        twin_wire.reduce_and_encode(found, n, form, divisor, key, 4, kept[1], sums[1])
        assert torch.equal(*sums)
        assert kept[0] is None or kept[1] is None or same(kept[0], kept[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_long_rows_are_shared_by_threads_and_written_past_the_caches(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        form, n = WireFormat(E4M3FN, 128, E8M0_UP), 1 << 22
        x = torch.randn(2 * n + 5, generator=torch.Generator().manual_seed(0))
        rows = wire.encode(x, 3, n, form)
        found = wire.decode(rows, len(x), n, form)
        total = wire.reduce(rows, n, form, 2)
    finally:
        torch.set_num_threads(before)
    expected = torch.empty_like(x)
    twin_wire.decode(rows, n, form, expected)
    assert torch.equal(found, expected)
    assert (x - found).norm() / x.norm() < 0.03  # E4M3: 2^-4 / sqrt(3) at most, 2.6 % where magnitudes are spread
    assert torch.equal(total, twin_wire.reduce(rows, n, form, 2.0))


def test_golden_bytes() -> None:
    """448 = 1.75 * 2^8 is code 0x7E; E8M0 byte 127 is 1, and rounds up to 2^1 for 449 / 448."""
    form = WireFormat(E4M3FN, 2, E8M0_UP)
    x = torch.tensor([448.0, -1.0, 449.0, 0.0, torch.nan, 1.0, 1.0, torch.inf])
    bytes_ = wire.encode(x, 1, 8, form)[0].tolist()
    assert bytes_ == [0x7E, 0xB8, 0x76, 0x00, 0, 0, 0, 0, 127, 128, 255, 255]
    assert wire.decode(torch.tensor([bytes_], dtype=torch.uint8), 3, 8, form).tolist() == [448.0, -1.0, 448.0]
    packed = wire.encode(torch.tensor([6.0, -1.0, 0.5]), 1, 3, WireFormat(E2M1FN, 2, CURRENT))[0].tolist()
    # codes 7, 0xA | 7 (0.5 of 0.5 is 6 of 6); scales 1 and fl(1/12), the lowest byte first
    assert packed == [0xA7, 0x07, 0, 0, 0x80, 0x3F, 0xAB, 0xAA, 0xAA, 0x3D]


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(fmt: Format) -> None:
    form = WireFormat(fmt, 4, CURRENT)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(12)
        x[5] = bad
        found = wire.decode(wire.encode(x, 1, 12, form), 12, 12, form)
        assert found.isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4
    rows = wire.encode(torch.full((2, 4), 3e38), 2, 4, form)
    assert wire.reduce(rows, 4, form, 2).isinf().all()  # the sum is beyond float32, though the mean is not
    assert wire.decode(wire.reduce_and_encode(rows, 4, form, 2).unsqueeze(0), 4, 4, form).isnan().all()


def test_residuals_hold_what_was_not_sent_and_stay_where_nothing_was() -> None:
    form = WireFormat(E2M1FN, 4, CURRENT)
    x = torch.tensor([6.0, 0.9, 0.2, 0.0, torch.nan, 1.0, 1.0, 1.0])
    residual = torch.tensor([0.0, 0.2, 0.0, 0.3, 7.0, 8.0, 9.0, 10.0])
    rows = wire.encode(x, 1, 8, form, residual=residual)
    # 6, 0.9 + 0.2 = 1.1 -> 1, 0.2 -> 0, 0.3 -> 0.5
    assert wire.decode(rows, 4, 8, form).tolist() == [6.0, 1.0, 0.0, 0.5]
    wanted = torch.tensor([0.0, torch.tensor(0.9) + torch.tensor(0.2) - 1, 0.2, torch.tensor(0.3) - 0.5, 7, 8, 9, 10])
    assert torch.equal(residual, wanted)


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1FN, INT8], ids=repr)
def test_stochastic_rounding_is_unbiased_and_nothing_lies_beyond_a_step(fmt: Format) -> None:
    form, draws = WireFormat(fmt, 128, CURRENT), 4000
    x = torch.rand(128, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[0] = 1.0  # amax: the widest step is 32 of 448, of E2M1 2 of 6, of INT8 1 of 127
    step = {E4M3FN: 32 / 448, E2M1FN: 1 / 3, INT8: 1 / 127}[fmt]
    rows = wire.encode(x.repeat(draws), draws, 128, form, key=KEY)
    found = wire.decode(rows, draws * 128, 128, form).view(draws, 128)
    assert (found - x).abs().max() <= step * 1.001
    error = (found.double().mean(0) - x.double()).abs().max()
    assert error < 5 * step / 2 / draws**0.5  # five standard deviations, each at most half a step a draw
    assert found.std(0).max() > step / 10
    assert not torch.equal(wire.encode(x, 1, 128, form, key=KEY), wire.encode(x, 1, 128, form, key=KEY, stream=1))


@pytest.mark.parametrize("numel", [0, 1, 127, 129])
def test_any_size_and_rows_that_lie_apart(numel: int) -> None:
    form = WireFormat(E4M3FN, 128, E8M0_UP)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    rows = wire.encode(x, 2, numel, form)  # the second row is zeros
    assert rows.shape == (2, form.row_bytes(numel)) == (2, numel + -(-numel // 128))
    apart = torch.cat([rows, torch.full((2, 3), 0xFF, dtype=torch.uint8)], dim=1)[:, : rows.shape[1]]
    found = wire.decode(apart, numel, numel, form)
    assert torch.equal(found, wire.decode(rows, numel, numel, form)) and len(found) == numel
    assert torch.equal(wire.reduce(apart, numel, form, 1), found)
    out = torch.empty(numel, dtype=torch.float16)
    assert wire.decode(apart, numel, numel, form, out=out) is out and torch.equal(out, found.half())


def test_under_fake_tensors_the_rows_are_operators_that_ask_nothing_of_the_device() -> None:
    form = WireFormat(E2M1FN, 128, CURRENT)
    with FakeTensorMode():
        x = torch.empty(1000, device="cuda", dtype=torch.bfloat16)
        residual = torch.empty(1000, device="cuda")
        key = torch.empty((), dtype=torch.int64, device="cuda")
        rows = wire.encode(x, 3, 384, form, key=key, residual=residual)
        assert rows.shape == (3, 192 + 12) and rows.dtype is torch.uint8 and rows.device.type == "cuda"
        assert wire.reduce(rows, 384, form, 3).shape == (384,)
        mean = wire.reduce_and_encode(rows, 384, form, 3, key=key, residual=torch.empty(384, device="cuda"))
        assert mean.shape == (204,)
        assert wire.decode(rows, 1000, 384, form, torch.bfloat16).shape == (1000,)


@pytest.mark.parametrize(
    ("fmt", "block", "rule", "told"),
    [
        (FP16, 128, CURRENT, "FP16 on the wire: expected one of E4M3FN"),
        (E2M3FN, 128, CURRENT, "E2M3FN on the wire"),
        (E2M1FN, 16, NVFP4, "expected one of CURRENT"),
        (E2M1FN, 15, CURRENT, "blocks of 15 values of E2M1FN.*even number"),
        (E4M3FN, 8192, CURRENT, "blocks of 8192 values.*1 to 4096"),
    ],
)
def test_what_has_no_rows_is_refused(fmt: Format, block: int, rule: ScaleRule, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        WireFormat(fmt, block, rule)


def test_the_triton_kernels_give_the_bytes_of_the_twin_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch on Linux for GPUs, and not elsewhere")
    interpret(HERE / "triton_wire_interpreted.py")


@pytest.mark.slow
def test_the_triton_kernels_compile_without_a_gpu(gpu_build) -> None:
    from triton_wire_compiled import build_all

    build_all(gpu_build)
