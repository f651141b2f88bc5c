"""Products of many experts against a separate layer for each: the same casts, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics.formats import BF16, FP16
from narrowgauge.numerics.scaling import TENSOR_POW2
from narrowgauge.numerics.tally import Tally
from narrowgauge.ops import operands
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.grouped import grouped_linear
from narrowgauge.ops.linear import DelayedSlots, linear
from narrowgauge.recipes.spec import CastSpec, Emulation
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

SPLITS = [[5, 0, 33, 2], [40, 0, 0, 0], [0, 0, 0, 0]]
RECIPES = [
    "fp32", "bf16", "fp16", "fp8_current", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_block", "mxfp8", "mxfp6", "nvfp4",
]  # fmt: skip
K, N = 160, 96  # tiles of 128 are ragged too


def casts_of(name: str, smooth: bool = False) -> LinearCasts:
    recipe = ng.recipe(name).resolve("cpu").replace(emulation="exact")
    if name == "nvfp4":  # random bits follow the position within a tensor: compared in a test of their own
        recipe = ng.recipe(name, stochastic=False).resolve("cpu").replace(emulation="exact")
    return LinearCasts.of(recipe, recipe.quantizes_gemms, smooth)


class Problem:
    """The tensors of a grouped layer, and one forward and backward through any function of them."""

    def __init__(self, counts: list[int], dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.counts, self.experts = counts, len(counts)
        # experts and tokens of different magnitudes, so that a scale of the wrong ones shows
        self.x = randn(sum(counts), K) * torch.logspace(-2, 2, sum(counts))[:, None].to(dtype)
        self.weight = randn(self.experts, N, K) * torch.logspace(-3, 0, self.experts)[:, None, None].to(dtype)
        self.bias = randn(self.experts, N)
        self.grad_output = randn(sum(counts), N)

    def through(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (self.x, self.weight, self.bias)]
        output = function(*leaves)
        output.backward(self.grad_output.to(output.dtype))
        x, weight, bias = (leaf.grad for leaf in leaves)
        return {"output": output.detach(), "grad_input": x, "grad_weight": weight, "grad_bias": bias}

    def grouped(self, casts: LinearCasts, **options: Any) -> dict[str, Tensor]:
        options = {"out_dtype": self.x.dtype, **options}
        counts = torch.tensor(self.counts)
        return self.through(lambda x, w, b: grouped_linear(x, counts, w, b, casts, **options))

    def separate(self, casts: LinearCasts) -> dict[str, Tensor]:
        """One ops.linear for each expert."""

        def all_experts(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            parts = zip(x.split(self.counts), weight, bias, strict=True)
            return torch.cat([linear(part, w, b, casts, out_dtype=x.dtype) for part, w, b in parts])

        return self.through(all_experts)


def assert_bits_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert found[name] is not None and found[name].dtype is tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("counts", SPLITS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_separate_layers_in_every_bit(recipe, counts):  # cases 96, 98
    problem, casts = Problem(counts), casts_of(recipe)
    found = problem.grouped(casts)
    assert_bits_equal(found, problem.separate(casts))
    for expert, size in enumerate(counts):
        assert bool(found["grad_weight"][expert].any()) == bool(found["grad_bias"][expert].any()) == (size > 0)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "fp8_rowwise", "fp8_current"])
def test_is_as_far_from_float32_as_the_formats_make_it(recipe):  # case 98
    problem = Problem([5, 0, 33, 2])
    problem.bias.zero_()
    found, exact = problem.grouped(casts_of(recipe)), problem.grouped(casts_of("fp32"))
    for name in ("output", "grad_input", "grad_weight"):
        for expert, rows in enumerate(torch.arange(40).split(problem.counts)):
            part = expert if name == "grad_weight" else rows
            if len(rows):
                error = (found[name][part] - exact[name][part]).norm() / exact[name][part].norm()
                assert 0.01 < error < 0.09, (name, expert)


def test_float32_is_the_plain_formula():
    problem = Problem([5, 0, 33, 2])
    found = problem.grouped(casts_of("fp32"))
    owner = torch.arange(4).repeat_interleave(torch.tensor(problem.counts))
    expected = problem.through(lambda x, w, b: torch.einsum("tk,tnk->tn", x, w[owner]) + b[owner])
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4 * float(tensor.abs().max()))


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block"])
def test_smoothing_is_each_experts_own(recipe):
    problem, casts = Problem([5, 0, 33, 2]), casts_of(recipe, smooth=True)
    problem.x[:, 3] *= 1000.0
    found = problem.grouped(casts)
    assert_bits_equal(found, problem.separate(casts))
    assert not torch.equal(found["output"], problem.grouped(casts_of(recipe))["output"])


def test_a_token_changes_its_own_experts_output_only():
    problem, casts = Problem([5, 0, 33, 2]), casts_of("fp8_block")
    before = problem.grouped(casts)
    problem.x[5] *= 1000.0  # the first of expert 2
    after = problem.grouped(casts)
    changed = (before["output"] != after["output"]).any(dim=1)
    assert changed[5] and int(changed.sum()) == 1
    # its tiles down the tokens hold its neighbours of the same expert, and no others
    assert [not torch.equal(a, b) for a, b in zip(before["grad_weight"], after["grad_weight"], strict=True)] == [
        False, False, True, False
    ]  # fmt: skip


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8"])
def test_row_wise_input_is_cast_once_for_all_experts(recipe, monkeypatch):
    cast_rows = []
    original = operands.cast_operand

    def noting(x: Tensor, *rest: Any, **options: Any) -> Any:
        cast_rows.append(len(x))
        return original(x, *rest, **options)

    monkeypatch.setattr(operands, "cast_operand", noting)
    problem = Problem([5, 0, 33, 2])
    counts = torch.tensor(problem.counts)
    with torch.no_grad():
        grouped_linear(problem.x, counts, problem.weight, None, casts_of(recipe), out_dtype=torch.float32)
    assert cast_rows == [40, N, N, N]  # and the weights of the three experts that have tokens


def saved_tensors(output: Tensor) -> list[Tensor]:
    return [t for t in output.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]


@pytest.mark.parametrize(("recipe", "bits"), [("fp8_current", 8), ("mxfp8", 8), ("mxfp6", 6)])
def test_codes_are_saved_and_no_wide_tensors(recipe, bits):
    problem = Problem([5, 0, 33, 2])
    x, weight = problem.x.requires_grad_(), problem.weight.requires_grad_()
    y = grouped_linear(x, torch.tensor(problem.counts), weight, None, casts_of(recipe), out_dtype=torch.float32)
    total = sum(t.numel() * t.element_size() for t in saved_tensors(y))
    values = 40 * K + 3 * N * K  # of unused experts nothing
    assert values * bits / 8 <= total < values * bits / 8 * 1.06 + 64


def test_the_weight_is_kept_by_reference_where_grad_input_runs_wide():
    problem = Problem([5, 0, 33, 2])
    recipe = ng.recipe("fp8_current", override_linear_precision=(False, True, False)).resolve("cpu")
    casts = LinearCasts.of(recipe.replace(emulation="exact"), quantized=True)
    weight = problem.weight.requires_grad_()
    y = grouped_linear(
        problem.x.requires_grad_(), torch.tensor(problem.counts), weight, None, casts, out_dtype=torch.float32
    )
    assert any(t.data_ptr() == weight.data_ptr() for t in saved_tensors(y))
    assert_bits_equal(problem.grouped(casts), problem.separate(casts))


def slots(experts: int, length: int) -> dict[str, DelayedSlots]:
    roles = ("input", "weight", "grad_output")
    return {role: DelayedSlots(torch.full((experts,), 0.5), torch.zeros(experts, length)) for role in roles}


def test_delayed_scales_and_histories_are_each_experts_own():  # case 96
    problem = Problem([5, 0, 33, 2])
    casts = LinearCasts.of(ng.recipe("fp8_delayed").resolve("cpu").replace(emulation="exact"), quantized=True)
    state = slots(4, 3)
    state["input"].quant_scale[2] = 4.0
    scales = {role: slot.quant_scale.clone() for role, slot in state.items()}
    found = problem.grouped(casts, delayed=state, record=True)
    for expert, part in enumerate(problem.x.split(problem.counts)):
        if len(part) == 0:
            assert not any(slot.history[expert].any() for slot in state.values())
            continue
        own = {role: DelayedSlots(scales[role][expert], torch.zeros(3)) for role in state}
        weight, bias = problem.weight[expert], problem.bias[expert]
        y = linear(part, weight, bias, casts, delayed=own, record=True, out_dtype=torch.float32)
        assert torch.equal(found["output"].split(problem.counts)[expert], y)
        assert torch.equal(state["input"].history[expert], torch.stack([part.abs().max(), *torch.zeros(2)]))
        assert state["weight"].history[expert, 0] == problem.weight[expert].abs().max()
        assert state["grad_output"].history[expert, 0] == problem.grad_output.split(problem.counts)[expert].abs().max()
    assert all(torch.equal(slot.quant_scale, scales[role]) for role, slot in state.items())


def test_a_delayed_cast_without_slots_is_refused():
    problem = Problem([5, 0, 33, 2])
    casts = LinearCasts.of(ng.recipe("fp8_delayed").resolve("cpu"), quantized=True)
    with pytest.raises(RecipeError, match="expected its slots"):
        problem.grouped(casts)


def test_stochastic_casts_take_other_bits_for_every_expert_and_repeat_for_a_seed():
    problem = Problem([8, 8, 8])
    problem.x, problem.weight = problem.x[:8].repeat(3, 1), problem.weight[:1].repeat(3, 1, 1)
    problem.grad_output, problem.bias = problem.grad_output[:8].repeat(3, 1), torch.zeros(3, N)
    casts = LinearCasts.of(ng.recipe("nvfp4").resolve("cpu").replace(emulation="exact"), quantized=True)

    def run(seed: int) -> dict[str, Tensor]:
        return problem.grouped(casts, generator=torch.Generator().manual_seed(seed))

    first, again, other = run(1), run(1), run(2)
    assert_bits_equal(first, again)
    assert not torch.equal(first["grad_weight"], other["grad_weight"])
    # the same data for every expert, and other roundings of it
    assert not torch.equal(first["grad_weight"][0], first["grad_weight"][1])
    assert torch.equal(first["output"][:8], first["output"][8:16])  # forward rounds to nearest
    one = Problem([8])
    one.x, one.grad_output = problem.x[:8], problem.grad_output[:8]
    one.weight, one.bias = problem.weight[:1], problem.bias[:1]
    generator = torch.Generator().manual_seed(1)
    single = one.through(lambda x, w, b: linear(x, w[0], b[0], casts, out_dtype=x.dtype, generator=generator))
    assert torch.equal(single["grad_weight"][0], first["grad_weight"][0])


def test_infinity_shows_in_the_product():
    problem = Problem([5, 0, 33, 2])
    problem.x[7, 3] = torch.inf
    assert not problem.grouped(casts_of("fp8_current"))["output"][5:38].isfinite().all()
    assert problem.grouped(casts_of("fp8_current"))["output"][:5].isfinite().all()


def test_a_quantized_weight_gives_its_codes():
    problem = Problem([5, 0, 33, 2])
    spec = CastSpec(FP16, scale=TENSOR_POW2)
    weight = quantize(problem.weight, spec)
    casts = LinearCasts(CastSpec(FP16), CastSpec(FP16), CastSpec(FP16), FP16, emulation=Emulation.EXACT)
    y = grouped_linear(problem.x, torch.tensor(problem.counts), weight, None, casts, out_dtype=torch.float32)
    parts = enumerate(problem.x.split(problem.counts))
    one = [QuantizedTensor(weight.codes[e], weight.dequant_scale, spec) for e in range(4)]
    expected = torch.cat([linear(part, one[e], None, casts, out_dtype=torch.float32) for e, part in parts])
    assert torch.equal(y, expected)


def test_bf16_inputs_give_bf16_gradients():
    problem = Problem([5, 0, 33, 2], torch.bfloat16)
    found = problem.grouped(casts_of("fp8_current"))
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert_bits_equal(found, problem.separate(casts_of("fp8_current")))


def test_frozen_tensors_get_no_gradient():
    problem, casts = Problem([5, 0, 33, 2]), casts_of("fp8_current")
    counts, x = torch.tensor(problem.counts), problem.x.requires_grad_()
    grouped_linear(x, counts, problem.weight, None, casts, out_dtype=torch.float32).sum().backward()
    assert x.grad is not None and problem.weight.grad is None
    weight = problem.weight.requires_grad_()
    grouped_linear(x.detach(), counts, weight, None, casts, out_dtype=torch.float32).sum().backward()
    assert weight.grad is not None


def test_counts_that_do_not_fit_are_refused():
    with pytest.raises(NarrowgaugeError, match=r"add up to 8 tokens, and 40 are given"):
        problem = Problem([5, 0, 33, 2])
        grouped_linear(
            problem.x, torch.tensor([2, 2, 2, 2]), problem.weight, None, casts_of("bf16"), out_dtype=torch.float32
        )


def test_the_counter_is_told_the_same_as_by_separate_layers():
    class Counts:
        has_bins = False

        def __init__(self) -> None:
            self.values: dict[str, list[float]] = {}

        def add(self, role: str, tally: Tally) -> None:
            numel, saturated, flushed = (int(tally.sums[key]) for key in ("values", "saturated", "flushed"))
            old, peak = self.values.get(role, [0, 0, 0, 0.0]), float(tally.maxima.get("amax", 0.0))
            self.values[role] = [old[0] + numel, old[1] + saturated, old[2] + flushed, max(old[3], peak)]

    for recipe in ("fp8_current", "fp8_rowwise"):
        problem, casts = Problem([5, 0, 33, 2]), casts_of(recipe)
        together, apart = Counts(), Counts()
        problem.grouped(casts, counter=together)

        def separate(x: Tensor, weight: Tensor, bias: Tensor, casts=casts, problem=problem, apart=apart) -> Tensor:
            parts = [(p, w) for p, w in zip(x.split(problem.counts), weight, strict=True) if len(p)]
            outputs = [linear(p, w, None, casts, out_dtype=x.dtype, counter=apart) for p, w in parts]
            return torch.cat(outputs) + 0 * bias.sum()

        problem.through(separate)
        assert together.values == apart.values and together.values["input"][0] == 40 * K


def test_dtype_of_a_wide_layer_follows_the_request():
    problem = Problem([5, 0, 33, 2])
    casts = LinearCasts(CastSpec(BF16), CastSpec(BF16), CastSpec(BF16), BF16)
    found = problem.grouped(casts, out_dtype=torch.bfloat16)
    assert found["output"].dtype is torch.bfloat16 and found["grad_weight"].dtype is torch.float32
