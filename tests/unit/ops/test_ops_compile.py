"""torch.compile without graph breaks, equal to eager in every bit, slots of delayed scaling included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP16, FP32, TF32
from narrowgauge.numerics.scaling import Delayed
from narrowgauge.ops import backends
from narrowgauge.ops.linear import DelayedSlots, LinearCasts, linear
from narrowgauge.recipes.spec import CastSpec, Emulation

# torch 2.13's compiler uses what torch itself has deprecated
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

LATE = Delayed(history_length=4)
FP8 = LinearCasts(CastSpec(E4M3FN), CastSpec(E4M3FN), CastSpec(E5M2), BF16)
# recipes whose products are those of another one here
EQUAL = ("fp8_current", "fp8_delayed", "narrow8", "narrow8_sr", "fp8_lm_o2", "fp8_lm_o3")
CASTS = {
    "current": FP8,
    "exact": LinearCasts(FP8.input, FP8.weight, FP8.grad_output, BF16, emulation=Emulation.EXACT),
    "delayed": LinearCasts(
        CastSpec(E4M3FN, scale=LATE), CastSpec(E4M3FN, scale=LATE), CastSpec(E5M2, scale=LATE), BF16
    ),
    "override": LinearCasts(FP8.input, FP8.weight, FP8.grad_output, BF16, in_compute=(True, False, True)),
    "smooth": LinearCasts(FP8.input, FP8.weight, FP8.grad_output, BF16, smooth=True),
    **{
        name: LinearCasts.of(ng.recipe(name, compute="bf16"), quantized=True)
        for name in ng.recipe_names()
        if ng.recipe(name).quantizes_gemms and name not in EQUAL
    },
    **{f.name: LinearCasts(CastSpec(f), CastSpec(f), CastSpec(f), f) for f in (BF16, FP16, TF32, FP32)},
}


class Layer(nn.Module):
    def __init__(self, casts: LinearCasts) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.casts = casts
        self.weight = nn.Parameter(torch.randn(40, 48, generator=generator))
        self.bias = nn.Parameter(torch.randn(40, generator=generator))
        for role in ("input", "weight", "grad_output"):
            self.register_buffer(f"{role}_scale", torch.tensor(8.0))
            self.register_buffer(f"{role}_history", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        delayed = {
            role: DelayedSlots(self.get_buffer(f"{role}_scale"), self.get_buffer(f"{role}_history"))
            for role in ("input", "weight", "grad_output")
        }
        out_dtype = torch.float16 if self.casts.compute is FP16 else torch.bfloat16
        record = self.training and torch.is_grad_enabled()
        return linear(x, self.weight, self.bias, self.casts, delayed=delayed, record=record, out_dtype=out_dtype)


def train(layer: Layer, forward, steps: int = 2) -> list[Tensor]:
    results: list[Tensor] = []
    torch.manual_seed(0)  # of stochastic rounding
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(24, 48, generator=generator).requires_grad_()
        y = forward(x)
        y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
        results += [y.detach(), x.grad]  # type: ignore[list-item]
    return [*results, layer.weight.grad, layer.bias.grad, *(b.clone() for b in layer.buffers())]  # type: ignore


def test_recipes_left_out_have_the_casts_of_another():
    of = {name: LinearCasts.of(ng.recipe(name, compute="bf16"), quantized=True) for name in EQUAL[2:]}
    assert of["narrow8"] == of["narrow8_sr"] == CASTS["current"]
    assert of["fp8_lm_o2"] == of["fp8_lm_o3"] == CASTS["fp8_lm_o1"]


def check(casts: LinearCasts, backend: str) -> None:
    torch.compiler.reset()
    eager, compiled = Layer(casts), Layer(casts)
    expected = train(eager, eager)
    found = train(compiled, torch.compile(compiled, fullgraph=True, backend=backend))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


# Inductor generates code from what "aot_eager" traces and runs: a layer that it compiles need not be traced once more.
# Those left to "aot_eager" have the graph of one that is compiled, with another format, or a product less
TRACED = ("current", "delayed", "nvfp4", "mxfp8", "mxfp6", "fp8_rowwise_gw_hp", "FP32")
COMPILED = ("current", "delayed", "nvfp4", *(name for name in CASTS if name not in TRACED))


@pytest.mark.parametrize("name", TRACED)
def test_a_traced_layer_equals_eager_bitwise(name):
    check(CASTS[name], "aot_eager")


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_layer_equals_eager_bitwise(name):
    check(CASTS[name], "inductor")


@pytest.mark.slow
@pytest.mark.compiler
def test_a_compiled_layer_keeps_the_roundings_of_operands_that_are_widened_for_the_product(monkeypatch):
    monkeypatch.setattr(backends, "FAST_BF16", None)
    check(CASTS["BF16"], "inductor")


def test_a_traced_layer_infers_as_eager_does():
    torch.compiler.reset()
    layer = Layer(FP8).eval()
    x = torch.randn(24, 48)
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
