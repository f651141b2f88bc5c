"""Products in CUDA hardware, for every granularity: what the hardware sees, and that the numbers are the plain ones."""

from __future__ import annotations

import pytest
import torch
from cuda_hardware import Hardware
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.formats import E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2
from narrowgauge.numerics.granularity import PER_ROW, Block
from narrowgauge.numerics.scaling import CURRENT_POW2, E8M0_FLOOR, E8M0_UP, NVFP4
from narrowgauge.ops.cuda.product import Side, _e8m0_bytes, _pack, scaled_product
from narrowgauge.ops.cuda.routes import Machine, Route, Scaling, native_of
from narrowgauge.recipes.spec import CastSpec

ADA, HOPPER, BLACKWELL = (Machine(c, (12, 9)) for c in ((8, 9), (9, 0), (10, 0)))
B1, B128 = Block(1, 128), Block(128, 128)
MX8, MX6, MX4 = (CastSpec(fmt, Block(1, 32), E8M0_UP) for fmt in (E4M3FN, E3M2FN, E2M1FN))
NV = CastSpec(E2M1FN, Block(1, 16), NVFP4)
# name: left cast, right cast, machine, what scaled_mm is told of either side
T, R, V, S, M, N = "TensorWise", "RowWise", "BlockWise1x128", "BlockWise128x128", "BlockWise1x32", "BlockWise1x16"
CASES = {
    "tensor": (CastSpec(E5M2), CastSpec(E4M3FN), ADA, T, T),
    "tensor, 6 bits": (CastSpec(E3M2FN), CastSpec(E2M3FN), ADA, T, T),
    "rows, Ada": (CastSpec(E4M3FN, PER_ROW), CastSpec(E4M3FN, PER_ROW), ADA, R, R),
    "rows, Hopper": (CastSpec(E5M2, PER_ROW), CastSpec(E4M3FN, PER_ROW, CURRENT_POW2), HOPPER, R, R),
    "rows by tensor": (CastSpec(E4M3FN, PER_ROW), CastSpec(E4M3FN), HOPPER, R, R),
    "rows, E5M2 on the right": (CastSpec(E4M3FN, PER_ROW), CastSpec(E5M2, PER_ROW), ADA, T, T),
    "1x128 by 128x128": (CastSpec(E4M3FN, B1), CastSpec(E4M3FN, B128), HOPPER, V, S),
    "128x128 by 1x128": (CastSpec(E4M3FN, B128), CastSpec(E4M3FN, B1, CURRENT_POW2), HOPPER, S, V),
    "1x128 by 1x128": (CastSpec(E4M3FN, B1), CastSpec(E4M3FN, B1), HOPPER, V, V),
    "128x128 by 128x128": (CastSpec(E4M3FN, B128), CastSpec(E4M3FN, B128), HOPPER, V, S),
    "1x256 by 256x128": (CastSpec(E4M3FN, Block(1, 256)), CastSpec(E4M3FN, Block(256, 128)), HOPPER, V, S),
    "1x128 by tensor": (CastSpec(E4M3FN, B1), CastSpec(E4M3FN), HOPPER, V, S),
    "E2M1 in 1x128, E8M0": (CastSpec(E2M1FN, B1, E8M0_UP), CastSpec(E4M3FN, B128), HOPPER, V, S),
    "MXFP8": (MX8, CastSpec(E4M3FN, Block(1, 32), E8M0_FLOOR), BLACKWELL, M, M),
    "MXFP8, square": (MX8, CastSpec(E4M3FN, Block(32, 32), E8M0_UP), BLACKWELL, M, M),
    "MXFP8 with E5M2": (CastSpec(E5M2, Block(1, 32), E8M0_UP), MX8, BLACKWELL, M, M),
    "MXFP6": (MX6, CastSpec(E2M3FN, Block(1, 32), E8M0_UP), BLACKWELL, M, M),
    "MXFP4": (MX4, MX4, BLACKWELL, M, M),
    "1x128 on Blackwell": (CastSpec(E4M3FN, B1, CURRENT_POW2), CastSpec(E4M3FN, B128, CURRENT_POW2), BLACKWELL, M, M),
    "NVFP4": (NV, NV, BLACKWELL, N, N),
    "NVFP4, 16x16": (NV, CastSpec(E2M1FN, Block(16, 16), NVFP4), BLACKWELL, N, N),
}  # fmt: skip
SIZES = [(7, 17, 31), (1, 16, 16), (130, 70, 33), (40, 300, 150)]  # rows, summed over, columns
ROW_DTYPES = {ADA: (torch.bfloat16,), HOPPER: (torch.bfloat16, torch.float16, torch.float32)}


def route_of(name: str) -> Route:
    left, right, machine, *_ = CASES[name]
    route = native_of(left, right, machine)
    assert isinstance(route, Route), route
    return route


def side_of(x: Tensor, spec: CastSpec) -> Side:
    """The operand `x` [outer, summed over] cast by `spec`."""
    if not spec.in_blocks:
        scale = scaling.quant_scale_of(scaling.tensor_amax(x), spec.format, spec.scale)
        codes = kernels.quantize(x, scale, spec.format).codes
        return Side(codes, spec.format, spec.granularity, None, scaling.dequant_scale_of(scale))
    done = kernels.quantize_blocks(x, spec.format, spec.granularity, spec.scale)
    factor = scaling.nvfp4_tensor_factor(done.amax) if spec.scale is NVFP4 else None
    return Side(done.codes, spec.format, spec.granularity, done.dequant_scale, factor)


def values_of(side: Side) -> Tensor:
    """What the operand stands for, in float64."""
    values = kernels.dequantize(side.codes, None, side.format).double()
    if side.block_scale is not None:
        factors = scaling.block_factors(side.block_scale).double()
        height, width = side.block.size_in(*values.shape)
        spread = factors.repeat_interleave(height, 0).repeat_interleave(width, 1)
        values = values * spread[: values.shape[0], : values.shape[1]]
    return values if side.tensor_factor is None else values * side.tensor_factor.double()


def operands(name: str, m: int, k: int, n: int, seed: int = 0) -> tuple[Side, Side]:
    generator = torch.Generator().manual_seed(seed)
    # every block has a magnitude of its own, so that a scale in the wrong place shows
    loud = torch.exp2(torch.randint(-6, 7, (max(m, n), k), generator=generator).float())
    left = torch.randn(m, k, generator=generator) * loud[:m]
    right = torch.randn(n, k, generator=generator) * loud[:n].flip(1)
    return side_of(left, CASES[name][0]), side_of(right, CASES[name][1])


def hardware_of(name: str, **options) -> Hardware:
    return Hardware(row_dtypes=ROW_DTYPES.get(CASES[name][2], (torch.bfloat16,)), **options)


def install(monkeypatch: pytest.MonkeyPatch, hardware: Hardware) -> None:
    monkeypatch.setattr(F, "scaled_mm", hardware)
    monkeypatch.setattr(torch, "_scaled_mm", hardware.older)


# cases 49, 53
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_hardware_sees_what_it_demands_and_the_product_is_the_plain_one(monkeypatch, name, sizes):
    hardware = hardware_of(name)
    install(monkeypatch, hardware)
    left, right = operands(name, *sizes)
    a, b = values_of(left), values_of(right)
    exact, magnitude = a @ b.t(), a.abs() @ b.abs().t()
    y = scaled_product(left, right, route_of(name), torch.float32)
    assert y.shape == exact.shape and y.dtype is torch.float32 and y.is_contiguous()
    # the hardware here sums in float64, so what is left are roundings to float32: result, scales, factors
    assert ((y.double() - exact).abs() <= 4 * 2.0**-24 * magnitude).all()
    assert len(hardware.seen) == 1


@pytest.mark.parametrize("name", CASES)
def test_what_the_hardware_is_told_of_the_scales(monkeypatch, name):
    hardware = hardware_of(name)
    install(monkeypatch, hardware)
    left, right = operands(name, 40, 300, 150)
    scaled_product(left, right, route_of(name), torch.bfloat16)
    ((told_left, told_right, dtype),) = hardware.seen
    assert (told_left[0], told_right[0]) == CASES[name][3:]
    # no kernel takes E5M2 on the right: multiplied without scales, which are applied after it
    assert dtype is (torch.float32 if name == "rows, E5M2 on the right" else torch.bfloat16)
    assert len(told_left) == len(told_right) == (2 if name.startswith("NVFP4") else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_bias_is_rounded_to_the_results_dtype_and_added_once(monkeypatch, name, dtype):
    install(monkeypatch, hardware_of(name))
    left, right = operands(name, 20, 70, 33)
    factor = 2.0 ** -torch.tensor(float(values_of(left).abs().max() * values_of(right).abs().max())).log2().ceil()
    left = left._replace(
        tensor_factor=torch.full((), factor) * (1 if left.tensor_factor is None else left.tensor_factor)
    )
    bias = torch.linspace(-2, 2, 33) * (1 + 2**-9)
    exact = values_of(left) @ values_of(right).t() + bias.to(dtype).double()
    y = scaled_product(left, right, route_of(name), dtype, bias)
    # one rounding to the dtype, and those of the float32 scales of 70 terms below 1
    error = (y.double() - exact).abs()
    assert y.dtype is dtype and (error <= torch.finfo(dtype).eps / 2 * exact.abs() + 2.0**-16).all()


# case 49
@pytest.mark.parametrize("sizes", [(7, 17, 31), (130, 70, 33), (256, 512, 384)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_fake_cuda_tensors_pass_torchs_own_checks(monkeypatch, name, sizes):
    hardware = hardware_of(name, real=F.scaled_mm, real_older=torch._scaled_mm)
    install(monkeypatch, hardware)
    left_spec, right_spec, *_ = CASES[name]
    m, k, n = sizes
    with FakeTensorMode(), torch.no_grad():
        some_bias = torch.empty(n, device="cuda")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for bias in (None, some_bias):
                # the operands of grad_weight are transposed: their rows are the ones that are summed over
                left = fake_side(k, m, left_spec.transposed)
                left = left._replace(
                    codes=left.codes.t(), block_scale=turned(left.block_scale), block=left_spec.granularity
                )
                right = fake_side(n, k, right_spec)
                y = scaled_product(left, right, route_of(name), dtype, bias)
                assert (y.shape, y.dtype, y.device.type, y.is_contiguous()) == ((m, n), dtype, "cuda", True)
    assert len(hardware.seen) == 6


def turned(scale: Tensor | None) -> Tensor | None:
    return None if scale is None else scale.t()


def fake_side(rows: int, columns: int, spec: CastSpec) -> Side:
    grid = spec.granularity.grid_of(rows, columns)
    scale = torch.empty(grid, dtype=scaling.stored_dtype(spec.scale), device="cuda") if spec.in_blocks else None
    has_factor = scale is None or spec.scale is NVFP4
    factor = torch.empty((), device="cuda") if has_factor else None
    return Side(
        torch.empty(rows, columns, device="cuda").to(spec.format.dtype), spec.format, spec.granularity, scale, factor
    )


# case 51
@pytest.mark.parametrize("name", CASES)
def test_strides_make_no_difference(monkeypatch, name):
    install(monkeypatch, hardware_of(name))
    left, right = operands(name, 40, 144, 150)
    plain = scaled_product(left, right, route_of(name), torch.bfloat16)
    strided = [
        side._replace(codes=strange(side.codes), block_scale=strange(side.block_scale)) for side in (left, right)
    ]
    assert torch.equal(scaled_product(*strided, route_of(name), torch.bfloat16), plain)


def strange(x: Tensor | None) -> Tensor | None:
    """The same values, column-major and every second column of something wider."""
    if x is None:
        return None
    wide = torch.stack([x.view(torch.uint8) if x.element_size() == 1 else x] * 2, dim=-1).permute(1, 0, 2).contiguous()
    return wide.permute(1, 0, 2)[..., 0].view(x.dtype)


# case 53
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_padding_is_never_read(monkeypatch, name, poison):
    left, right = operands(name, 130, 70, 33)
    bias = torch.ones(33)
    install(monkeypatch, hardware_of(name))
    clean = scaled_product(left, right, route_of(name), torch.bfloat16, bias)
    install(monkeypatch, hardware_of(name, poison=poison))
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    try:
        poisoned = scaled_product(left, right, route_of(name), torch.bfloat16, bias)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(clean, poisoned) and clean.isfinite().all()


# case 54
@pytest.mark.parametrize("sizes", [(0, 16, 32), (3, 0, 5), (3, 16, 0)], ids=str)
@pytest.mark.parametrize("name", ["tensor", "rows, Ada", "1x128 by 128x128", "MXFP8", "NVFP4"])
def test_no_values_give_zeros_and_the_bias(monkeypatch, name, sizes):
    hardware = hardware_of(name)
    install(monkeypatch, hardware)
    m, k, n = sizes
    left, right = side_of(torch.zeros(m, k), CASES[name][0]), side_of(torch.zeros(n, k), CASES[name][1])
    assert torch.equal(scaled_product(left, right, route_of(name), torch.bfloat16), torch.zeros(m, n).bfloat16())
    assert torch.equal(scaled_product(left, right, route_of(name), torch.float32, torch.ones(n)), torch.ones(m, n))
    assert hardware.seen == []


@pytest.mark.parametrize("name", [name for name in CASES if name != "tensor, 6 bits"])  # whose cast refuses NaN
def test_what_is_not_finite_shows_in_its_own_rows(monkeypatch, name):
    install(monkeypatch, hardware_of(name))
    x, w = torch.randn(20, 160), torch.randn(33, 160)
    x[3, 5] = torch.nan
    left, right = side_of(x, CASES[name][0]), side_of(w, CASES[name][1])
    y = scaled_product(left, right, route_of(name), torch.float32)
    assert y[3].isnan().all()
    # NVFP4's scale of the whole tensor is NaN too
    assert y.isfinite().sum() == (0 if name.startswith("NVFP4") else 19 * 33)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_factor_that_is_not_finite_reaches_every_result(monkeypatch, name, value):
    install(monkeypatch, hardware_of(name))
    left, right = operands(name, 20, 70, 33)
    y = scaled_product(left._replace(tensor_factor=torch.tensor(value)), right, route_of(name), torch.bfloat16)
    assert not y.isfinite().any()


@pytest.mark.parametrize("name", ["tensor", "rows, Hopper"])
def test_torchs_own_cpu_product_agrees(name):
    left, right = operands(name, 40, 70, 33)
    y = scaled_product(left, right, route_of(name), torch.float32)
    a, b = values_of(left), values_of(right)
    assert ((y.double() - a @ b.t()).abs() <= 80 * 2.0**-24 * (a.abs() @ b.abs().t())).all()


def test_float32_scales_by_rows_are_applied_after_the_sum_where_the_hardware_rounds_to_bf16(monkeypatch):
    hardware = hardware_of("rows, Ada")
    install(monkeypatch, hardware)
    left, right = operands("rows, Ada", 20, 70, 33)
    scaled_product(left, right, route_of("rows, Ada"), torch.float32)
    assert hardware.seen == [((T,), (T,), torch.float32)]


def test_two_codes_are_a_byte_the_even_column_in_the_low_bits():
    side = operands("NVFP4", 16, 32, 16)[0]
    packed = _pack(side, Scaling.NVFP4, E2M1FN).codes.view(torch.uint8)
    assert torch.equal(packed & 15, side.codes[:, ::2]) and torch.equal(packed >> 4, side.codes[:, 1::2])


def test_power_of_two_scales_become_bytes_exactly():
    scales = torch.ldexp(torch.ones(255), torch.arange(-127, 128)).reshape(1, 255)
    side = Side(torch.zeros(1, 255 * 32), E4M3FN, Block(1, 32), scales, None)
    assert torch.equal(_e8m0_bytes(side), torch.arange(255, dtype=torch.uint8).reshape(1, 255))
    assert _e8m0_bytes(side._replace(block_scale=torch.full((1, 255), torch.nan))).unique().tolist() == [255]


@pytest.mark.parametrize("name", ["1x128 by 128x128", "NVFP4, 16x16"])
def test_a_compiler_sees_one_graph_with_one_product(name):
    graphs = []

    def capture(module: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return lambda *arguments: (torch.zeros(40, 33),)

    def product(left: Side, right: Side) -> Tensor:
        left_spec, right_spec, machine, *_ = CASES[name]
        route = native_of(left_spec, right_spec, machine)
        assert isinstance(route, Route)
        return scaled_product(left, right, route, torch.bfloat16)

    torch._dynamo.reset()
    torch.compile(product, backend=capture, fullgraph=True)(*operands(name, 40, 70, 33))
    ((*targets,),) = graphs
    assert sum("_scaled_mm_v2" in target for target in targets) == 1
