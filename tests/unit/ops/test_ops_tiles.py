"""The three GEMMs of a linear layer with scales of rows and tiles: every operand along its own reduction dimension."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.numerics import hadamard, kernels, scaling
from narrowgauge.numerics.formats import BF16, E2M1FN, E2M3FN, E4M3FN, E5M2, FP32, INT8, Format
from narrowgauge.numerics.granularity import PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_UP, NVFP4
from narrowgauge.ops.linear import LinearCasts, linear
from narrowgauge.recipes.spec import CastSpec, Emulation


def casts(
    format: Format, granularity: Block, scale: object, weight: Block | None = None, **fields: object
) -> LinearCasts:
    spec = CastSpec(format, granularity, scale)
    made = LinearCasts(spec, replace(spec, granularity=weight or granularity), spec, FP32, emulation=Emulation.EXACT)
    return replace(made, **fields)


ROWS = casts(E4M3FN, PER_ROW, CURRENT_POW2)
ROWS_F32 = casts(E4M3FN, PER_ROW, CURRENT)
BLOCKS = casts(E4M3FN, Block(1, 128), CURRENT_POW2, Block(128, 128))
BLOCKS_F32 = casts(E4M3FN, Block(1, 128), CURRENT, Block(128, 128))
MX = casts(E4M3FN, Block(1, 32), E8M0_UP)
MX_E5M2 = replace(MX, grad_output=CastSpec(E5M2, Block(1, 32), E8M0_UP))
MXFP6 = casts(E2M3FN, Block(1, 32), E8M0_UP)
MXFP4 = casts(E2M1FN, Block(1, 32), E8M0_UP)
FP4 = casts(E2M1FN, Block(1, 16), NVFP4, Block(16, 16))
ALL = {"rows": ROWS, "rows f32": ROWS_F32, "blocks": BLOCKS, "blocks f32": BLOCKS_F32, "mx": MX, "mx e5m2": MX_E5M2,
       "mxfp6": MXFP6, "mxfp4": MXFP4, "nvfp4": FP4}  # fmt: skip
each_casts = pytest.mark.parametrize("which", ALL.values(), ids=list(ALL))
each_shape = pytest.mark.parametrize("shape", [(1, 17, 31), (15, 64, 101), (7, 40, 16), (130, 200, 70)], ids=str)


def values_of(x: Tensor, spec: CastSpec) -> Tensor:
    """What the cast of a matrix stands for, in float64, by the slow twin's formulas."""
    if not spec.in_blocks:
        return ng.quantize(x, spec).dequantize().double()
    done = kernels.quantize_blocks(x, spec.format, spec.granularity, spec.scale)
    exact = kernels.dequantize_blocks(done.codes, done.dequant_scale, spec.format, spec.granularity).double()
    return exact * (scaling.nvfp4_tensor_factor(done.amax).double() if spec.scale is NVFP4 else 1.0)


class Problem:
    def __init__(self, m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(m * k + n)
        self.x = torch.randn(m, k, generator=draw).to(dtype)
        self.weight = torch.randn(n, k, generator=draw)
        self.bias = torch.randn(n, generator=draw)
        self.grad = torch.randn(m, n, generator=draw).to(dtype)

    def run(self, which: LinearCasts, out_dtype: torch.dtype = torch.float32, **options: object) -> dict[str, Tensor]:
        leaves = [t.clone().requires_grad_() for t in (self.x, self.weight, self.bias)]
        y = linear(*leaves, which, out_dtype=out_dtype, **options)
        y.backward(self.grad.to(y.dtype))
        return {"y": y.detach(), **dict(zip(("x", "weight", "bias"), (leaf.grad for leaf in leaves), strict=True))}

    def expected(self, which: LinearCasts) -> dict[str, Tensor]:
        """Each operand cast along the dimension that its product sums over, from the source; products in float64."""
        rows = {"x": values_of(self.x, which.input), "w": values_of(self.weight, which.weight),
                "g": values_of(self.grad, which.grad_output)}  # fmt: skip
        columns = {"x": values_of(self.x.t(), which.input).t(), "w": values_of(self.weight.t(), which.weight).t(),
                   "g": values_of(self.grad.t(), which.grad_output).t()}  # fmt: skip
        return {
            "y": rows["x"] @ rows["w"].t() + self.bias,
            "x": rows["g"] @ columns["w"],
            "weight": columns["g"].t() @ columns["x"],
            "bias": self.grad.double().sum(0),
        }


@each_casts
@each_shape
def test_products_are_those_of_operands_cast_along_their_own_reduction(which, shape):  # case 49
    problem = Problem(*shape)
    found, expected = problem.run(which), problem.expected(which)
    for name, want in expected.items():
        assert found[name].shape == want.shape
        # all that may differ is the order of a float32 sum, and with float32 scales of tiles one rounding of a factor
        assert (found[name].double() - want).norm() <= 4e-6 * want.norm() + 1e-12, name


@each_casts
def test_the_fast_emulation_rounds_once_more_at_most(which):
    problem = Problem(64, 96, 48, torch.bfloat16)
    fast = problem.run(replace(which, emulation=Emulation.FAST), torch.bfloat16)
    exact = problem.run(which, torch.bfloat16)
    for name in ("y", "x", "weight"):
        # one unit in the last place of bfloat16 where a sum lies at a tie
        assert (fast[name].double() - exact[name].double()).norm() <= 2**-9 * exact[name].double().norm(), name


@each_casts
def test_memory_layout_does_not_matter(which):  # case 51
    problem = Problem(40, 48, 33)
    expected = problem.run(which)
    problem.x, problem.weight = problem.x.t().contiguous().t(), problem.weight.repeat(1, 2)[:, :48]
    problem.grad = torch.stack([problem.grad, problem.grad], dim=-1)[..., 0]
    assert not problem.x.is_contiguous() and not problem.grad.is_contiguous()
    for name, value in problem.run(which).items():
        assert torch.equal(value, expected[name]), name
    problem.grad = torch.ones(()).expand(40, 33)
    expanded = problem.run(which)
    problem.grad = torch.ones(40, 33)
    for name, value in problem.run(which).items():
        assert torch.equal(value, expanded[name]), name


@each_casts
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)], ids=str)
def test_no_rows_give_zero_gradients(which, shape):  # case 54
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    y = linear(x, weight, None, which, out_dtype=torch.float32)
    y.backward(torch.zeros_like(y))
    assert y.shape == (*shape[:-1], 32) and x.grad.shape == shape
    assert weight.grad.shape == (32, 16) and not weight.grad.any()


@each_casts
def test_zero_tiles_give_exact_zeros(which):  # case 1
    problem = Problem(64, 256, 32)
    problem.x[3] = 0.0
    problem.x[:, 128:] = 0.0
    found = problem.run(replace(which, grad_output=CastSpec(FP32)))
    assert all(value.isfinite().all() for value in found.values())
    problem.bias.zero_()
    assert not problem.run(which)["y"][3].any()
    assert not found["weight"][:, 128:].any()
    problem.grad.zero_()
    found = problem.run(which)
    assert not found["x"].any() and not found["weight"].any()


@each_casts
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["x", "grad"])
def test_a_value_that_is_not_finite_reaches_the_products(which, bad, where):
    problem = Problem(33, 48, 20)
    getattr(problem, where)[5, 7] = bad
    found = problem.run(which)
    for name in {"x": ("y", "weight"), "grad": ("x", "weight")}[where]:
        assert not found[name].isfinite().all(), name


def test_one_copy_serves_two_products_where_tiles_are_square(monkeypatch):
    made = []
    real = kernels.quantize_blocks
    monkeypatch.setattr(
        kernels,
        "quantize_blocks",
        lambda x, fmt, block, rule, **how: made.append(block) or real(x, fmt, block, rule, **how),
    )
    Problem(64, 64, 64).run(BLOCKS)
    # input twice, weight once, grad_output twice
    assert sorted(map(repr, made)) == sorted(map(repr, [Block(1, 128), Block(128, 1)] * 2 + [Block(128, 128)]))
    made.clear()
    Problem(64, 64, 64).run(casts(E4M3FN, Block(32, 32), E8M0_UP))
    assert made == [Block(32, 32)] * 3


@pytest.mark.parametrize(("which", "bytes_per_value"), [(MX, 1 + 1 / 32), (FP4, 0.5 + 1 / 16), (MXFP6, 0.75 + 1 / 32)])
def test_saved_codes_are_packed(which, bytes_per_value):
    saved: list[Tensor] = []
    x, weight = torch.randn(256, 128), torch.randn(64, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, weight, None, which, out_dtype=torch.float32)
    assert sum(t.nbytes for t in saved) == pytest.approx(256 * 128 * bytes_per_value, abs=8)


def stochastic(which: LinearCasts) -> LinearCasts:
    return replace(which, grad_output=replace(which.grad_output, rounding=ng.STOCHASTIC))


@each_casts
def test_stochastic_gradients_repeat_for_a_seed_and_differ_between_seeds(which):
    problem, which = Problem(32, 64, 48), stochastic(which)
    runs = [problem.run(which, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    for name in ("x", "weight"):
        assert torch.equal(runs[0][name], runs[1][name]) and not torch.equal(runs[0][name], runs[2][name])
    assert torch.equal(runs[0]["y"], runs[2]["y"])
    torch.manual_seed(1)
    default = problem.run(which)
    torch.manual_seed(1)
    assert torch.equal(problem.run(which)["x"], default["x"])


def test_stochastic_gradients_are_right_on_average():
    problem, which = Problem(16, 32, 32), stochastic(FP4)
    draw = torch.Generator().manual_seed(0)
    runs = 200
    mean = sum(problem.run(which, generator=draw)["x"].double() for _ in range(runs)) / runs
    # without the rounding of grad_output there is only the weight's
    exact = problem.grad.double() @ values_of(problem.weight, which.weight)
    single = (problem.run(which, generator=draw)["x"].double() - exact).norm() / exact.norm()
    left = (mean - exact).norm() / exact.norm()
    # the error of a mean of independent roundings falls as 1/sqrt(runs): a bias would stay
    assert 0.5 * single / runs**0.5 <= left <= 1.5 * single / runs**0.5


@pytest.mark.parametrize("rows", [16, 5, 40])
def test_the_transform_goes_to_both_operands_of_grad_weight_alone(rows):
    problem = Problem(rows, 64, 48)
    plain, turned = problem.run(FP4), problem.run(replace(FP4, hadamard=Hadamard()))
    for name in ("y", "x", "bias"):
        assert torch.equal(plain[name], turned[name])
    signs = Hadamard().signs
    x, grad = (hadamard.transform(t, signs) for t in (problem.x, problem.grad))
    expected = values_of(grad.t(), FP4.grad_output) @ values_of(x.t(), FP4.input).t()
    assert (turned["weight"].double() - expected).norm() <= 4e-6 * expected.norm()
    assert not torch.equal(plain["weight"], turned["weight"])


def test_the_transform_spreads_outliers():
    problem = Problem(64, 96, 48)
    problem.grad[::16] *= 30.0
    exact = problem.grad.double().t() @ problem.x.double()
    errors = [
        float((problem.run(which)["weight"].double() - exact).norm() / exact.norm())
        for which in (MXFP4, replace(MXFP4, hadamard=Hadamard()))
    ]
    assert errors[1] < 0.9 * errors[0]


def smooth(which: LinearCasts) -> LinearCasts:
    return replace(which, smooth=True)


@pytest.mark.parametrize("which", [casts(E4M3FN, PER_TENSOR, CURRENT), MX, FP4], ids=["tensor", "mx", "nvfp4"])
def test_smoothing_is_a_change_of_variables(which):
    problem = Problem(32, 64, 48)
    factors = torch.ldexp(torch.ones(64), torch.arange(64) % 9)
    # channels that differ by powers of two are brought to one magnitude: the same problem, scaled
    problem.x = problem.x / problem.x.abs().amax(0)
    base = problem.run(smooth(which))
    problem.x, problem.weight = problem.x * factors, problem.weight / factors
    found = problem.run(smooth(which))
    assert torch.equal(found["y"], base["y"])
    assert torch.equal(found["x"] * factors, base["x"])
    assert torch.equal(found["weight"] / factors, base["weight"])


def test_smoothing_keeps_every_channel_whatever_one_of_them_does():
    # one channel of the input is 1000 times the others, and carries no more of the result
    problem = Problem(64, 64, 48)
    problem.x[:, 3] *= 1000.0
    problem.weight[:, 3] /= 1000.0
    which = casts(E5M2, PER_TENSOR, CURRENT)
    exact = problem.x.double() @ problem.weight.double().t() + problem.bias.double()
    errors = [
        float((problem.run(w)["y"].double() - exact).norm() / exact.norm())
        for w in (casts(INT8, PER_TENSOR, CURRENT), smooth(casts(INT8, PER_TENSOR, CURRENT)), smooth(which))
    ]
    assert errors[0] > 0.5  # in INT8 the other channels are flushed
    assert errors[1] < 0.15 and errors[2] < 0.1


def test_smoothing_shows_what_is_not_finite():
    problem = Problem(16, 32, 24)
    problem.x[3, 5] = torch.inf
    found = problem.run(smooth(MX))
    assert not found["y"].isfinite().all()


def test_two_uses_by_the_same_stochastic_cast_see_the_same_values():
    which = casts(E4M3FN, Block(32, 32), E8M0_UP)
    which = replace(which, input=replace(which.input, rounding=ng.STOCHASTIC))
    problem = Problem(32, 32, 32)
    problem.weight = torch.eye(32)
    problem.grad = torch.eye(32)
    problem.bias.zero_()
    found = problem.run(which, generator=torch.Generator().manual_seed(3))
    assert torch.equal(found["y"], found["weight"])  # both are the operand itself


def test_wide_operands_can_be_rounded_stochastically():
    which = LinearCasts(*[CastSpec(BF16, rounding=ng.STOCHASTIC)] * 3, BF16, emulation=Emulation.EXACT)
    problem = Problem(8, 16, 8)
    found = problem.run(which, generator=torch.Generator().manual_seed(0))
    again = problem.run(which, generator=torch.Generator().manual_seed(0))
    exact = problem.x @ problem.weight.t() + problem.bias
    assert torch.equal(found["y"], again["y"])
    assert 1e-4 < (found["y"] - exact).norm() / exact.norm() < 2**-7


def test_a_call_without_gradients_draws_no_bits_for_backward_unless_it_may_be_recomputed():
    x, weight, which = torch.randn(16, 32), torch.randn(24, 32), stochastic(MXFP4)
    for training, draws in ((False, False), (True, True)):
        before = torch.get_rng_state()
        with torch.no_grad():
            linear(x, weight, None, which, out_dtype=torch.float32, training=training)
        assert torch.equal(torch.get_rng_state(), before) is not draws
    before = torch.get_rng_state()
    forward = replace(MXFP4, input=replace(MXFP4.input, rounding=ng.STOCHASTIC))
    with torch.no_grad():
        linear(x, weight, None, forward, out_dtype=torch.float32, training=False)
    assert not torch.equal(torch.get_rng_state(), before)
