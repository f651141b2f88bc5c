"""The three GEMMs as plain functions: values, rounding, layouts and padding."""

from __future__ import annotations

import pytest
import torch
from cuda_hardware import Hardware
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from narrowgauge.numerics import rounding
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, Format
from narrowgauge.ops.backends import Backend, backend_of
from narrowgauge.ops.matmul import GEMMS, GRAD_WEIGHT, OUTPUT, Factor, Gemm, emulated_gemm, multiply
from narrowgauge.recipes.spec import CastSpec

FORMATS = {"input": E4M3FN, "weight": E4M3FN, "grad_output": E5M2}
SIZES = [(16, 32, 48), (7, 17, 31), (1, 16, 16), (15, 64, 101), (0, 16, 32), (3, 0, 5)]


def emulated(carrier: torch.dtype) -> Backend:
    return Backend("emulated", False, "", carrier)


def backend_for(dtype: torch.dtype | None, gemm: Gemm) -> Backend:
    left, right = FORMATS[gemm.left], FORMATS[gemm.right]
    return backend_of(left, right, torch.device("cuda")) if dtype is None else emulated(dtype)


def codes(rows: int, columns: int, fmt: Format, seed: int, device: str) -> Tensor:
    if device != "cpu":
        return torch.empty(rows, columns, device=device).to(fmt.dtype)
    generator = torch.Generator().manual_seed(seed)
    return rounding.encode(torch.randn(rows, columns, generator=generator) * 16, fmt)


def factors(m: int, k: int, n: int, dtype: torch.dtype | None, device: str = "cpu") -> dict[str, Factor]:
    """All three operands; dtype None: codes, else their values in that dtype."""
    shapes = {"input": (m, k), "weight": (n, k), "grad_output": (m, n)}
    made = {}
    for seed, (role, shape) in enumerate(shapes.items()):
        values = codes(*shape, FORMATS[role], seed, device)
        scale = torch.full((), 0.3 + seed, device=device)
        made[role] = Factor(values if dtype is None else values.to(dtype), scale, CastSpec(FORMATS[role]))
    return made


def shape_of(gemm: Gemm, m: int, k: int, n: int) -> tuple[int, int]:
    return {"output": (m, n), "grad_input": (m, k), "grad_weight": (n, k)}[gemm.name]


def reference(gemm: Gemm, operands: dict[str, Factor]) -> Tensor:
    """The product in float64."""
    left, right = operands[gemm.left], operands[gemm.right]
    a = left.values.double().t() if gemm.left_transposed else left.values.double()
    b = right.values.double().t() if gemm.right_transposed else right.values.double()
    assert left.dequant_scale is not None and right.dequant_scale is not None
    return a @ b * (left.dequant_scale * right.dequant_scale).double()


def hardware_spy(monkeypatch: pytest.MonkeyPatch) -> list:
    """Let only what CUDA takes through to torch's scaled_mm. Returns what it was called with."""
    hardware = Hardware(real=F.scaled_mm)
    monkeypatch.setattr(F, "scaled_mm", hardware)
    return hardware.seen


# case 49
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: g.name)
def test_the_hardware_sees_multiples_of_16_in_its_layouts_and_padding_adds_nothing(monkeypatch, gemm, sizes):
    seen = hardware_spy(monkeypatch)
    operands, carried = factors(*sizes, dtype=None), factors(*sizes, dtype=torch.float32)
    bias = torch.linspace(-2, 2, shape_of(gemm, *sizes)[1])
    for out_dtype in (torch.bfloat16, torch.float32):
        y = multiply(gemm, operands[gemm.left], operands[gemm.right], backend_for(None, gemm), out_dtype, bias)
        expected = multiply(gemm, carried[gemm.left], carried[gemm.right], emulated(torch.float32), out_dtype, bias)
        assert y.shape == shape_of(gemm, *sizes) and y.dtype is out_dtype and y.is_contiguous()
        # the two may sum in another order: a rounding of bf16, or float32's over at most 101 terms of up to 5e5
        rtol, atol = (2**-7, 1e-2) if out_dtype is torch.bfloat16 else (101 * 2**-23, 101 * 5e5 * 2**-24)
        torch.testing.assert_close(y, expected, rtol=rtol, atol=atol)
    assert len(seen) == (0 if 0 in sizes else 2)


# case 49
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: g.name)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_fake_cuda_gemms_have_the_right_shapes_and_dtypes(monkeypatch, gemm, sizes, dtype):
    seen = hardware_spy(monkeypatch)
    with FakeTensorMode(), torch.no_grad():
        operands = factors(*sizes, dtype=dtype, device="cuda")
        some_bias = torch.empty(shape_of(gemm, *sizes)[1], device="cuda")
        for out_dtype in (torch.bfloat16, torch.float16, torch.float32):
            for bias in (None, some_bias):
                y = multiply(gemm, operands[gemm.left], operands[gemm.right], backend_for(dtype, gemm), out_dtype, bias)
                assert y.shape == shape_of(gemm, *sizes)
                assert (y.dtype, y.device.type) == (out_dtype, "cuda")
    assert len(seen) == (6 if dtype is None and 0 not in sizes else 0)


@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: g.name)
@pytest.mark.parametrize("sizes", [(16, 32, 48), (7, 17, 31), (64, 2048, 32), (260, 512, 1024)], ids=str)
def test_the_exact_product_is_off_by_float32_rounding_only(gemm, sizes):
    operands = factors(*sizes, dtype=torch.float32)
    y = multiply(gemm, operands[gemm.left], operands[gemm.right], emulated(torch.float32), torch.float32)
    terms = {"output": sizes[1], "grad_input": sizes[2], "grad_weight": sizes[0]}[gemm.name]
    magnitudes = {role: factor._replace(values=factor.values.abs()) for role, factor in operands.items()}
    bound = (terms + 2) * 2**-24 * reference(gemm, magnitudes)
    assert ((y.double() - reference(gemm, operands)).abs() <= bound).all()


@pytest.mark.parametrize("gemm", GEMMS, ids=lambda g: g.name)
@pytest.mark.parametrize("sizes", [(16, 32, 48), (64, 2048, 32), (260, 512, 1024)], ids=str)
def test_the_fast_product_is_scaled_before_its_one_rounding_to_bf16(gemm, sizes):
    operands = factors(*sizes, dtype=torch.bfloat16)
    expected = reference(gemm, operands)
    y = multiply(gemm, operands[gemm.left], operands[gemm.right], emulated(torch.bfloat16), torch.bfloat16)
    assert (y == expected.bfloat16()).double().mean() >= 0.99  # a sum in another order may cross a tie
    scale = operands[gemm.left].dequant_scale * operands[gemm.right].dequant_scale
    twice = ((expected / scale).bfloat16() * scale).bfloat16()
    assert (twice == expected.bfloat16()).double().mean() < 0.97  # so the line above can tell


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_small_integers_come_out_exact_in_every_carrier(dtype):
    a = torch.arange(-8, 8).repeat(16, 1).to(dtype)
    b = torch.arange(16).remainder(3).repeat(16, 1).t().to(dtype)
    half = torch.tensor(0.5)
    y = emulated_gemm(a, b, half, half, torch.float32, torch.full((16,), 0.25), dtype)
    assert torch.equal(y, (a.float() @ b.float()) * 0.25 + 0.25)


def test_a_bias_is_rounded_to_the_output_dtype_before_it_is_added():
    a, b = torch.ones(1, 1), torch.ones(1, 1)
    bias = torch.tensor([1 + 2**-9])  # bf16 rounds it to 1
    assert emulated_gemm(a, b, None, None, torch.bfloat16, bias, torch.float32).item() == 2.0
    assert emulated_gemm(a, b, None, None, torch.float32, bias, torch.float32).item() == 2 + 2**-9
    one = Factor(a.to(E4M3FN.dtype), None, CastSpec(E4M3FN))
    assert multiply(OUTPUT, one, one, backend_for(None, OUTPUT), torch.float32, bias).item() == 2 + 2**-9


def test_fp16_products_overflow_as_ieee_does():
    a = torch.full((1, 4), 256.0)
    assert emulated_gemm(a, a.t(), None, None, torch.float16, None, torch.float32).item() == float("inf")


def test_an_autocast_region_around_it_does_not_recast_the_operands():
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = emulated_gemm(a, b, None, None, torch.float32, None, torch.float32)
    assert torch.equal(y, a @ b)


# case 53
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_uninitialised_memory_is_never_read(dtype):
    operands, bias = factors(130, 70, 33, dtype=dtype), torch.ones(33)

    def products() -> list[Tensor]:
        return [
            multiply(OUTPUT, operands["input"], operands["weight"], backend_for(dtype, OUTPUT), torch.bfloat16, bias),
            multiply(
                GRAD_WEIGHT, operands["grad_output"], operands["input"], backend_for(dtype, GRAD_WEIGHT), torch.float32
            ),
        ]

    clean = products()
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        assert torch.empty(4).isnan().all()
        poisoned = products()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))
    # and the bias is there; a sum in another order may round to the other neighbour of bf16
    expected = reference(OUTPUT, factors(130, 70, 33, dtype=torch.float32)) + 1
    torch.testing.assert_close(clean[0].double(), expected, rtol=2**-7, atol=0.05)
    without = reference(OUTPUT, factors(130, 70, 33, dtype=torch.float32))
    assert ((clean[0].double() - without).mean() - 1).abs() < 0.05


@pytest.mark.parametrize("rows", [4, 16, 130, 256])
def test_a_transposed_left_side_gives_what_its_copy_gives(rows):
    g, x = torch.randn(rows, 1024).bfloat16(), torch.randn(rows, 512).bfloat16()
    for left in (g, g[:, ::2], g.t().contiguous().t()):
        y = emulated_gemm(left.t(), x, None, None, torch.bfloat16, None, torch.bfloat16)
        expected = (left.double().t() @ x.double()).bfloat16()
        assert (y == expected).double().mean() > 0.99


def test_a_wide_product_is_rounded_as_its_hardware_would_before_the_callers_dtype():
    backend = backend_of(BF16, BF16, torch.device("cpu"))
    a = Factor(torch.tensor([[1.0, 2**-9]], dtype=backend.carrier), None, CastSpec(BF16))
    b = Factor(torch.ones(1, 2, dtype=backend.carrier), None, CastSpec(BF16))
    assert multiply(OUTPUT, a, b, backend, torch.float32).item() == 1.0
