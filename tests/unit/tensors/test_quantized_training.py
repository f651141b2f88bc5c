"""Training with a QuantizedTensor as the parameter: stock optimizers, and compilation."""

from __future__ import annotations

import pytest
import torch
from quantized_tensors import FP8, PARAMETER_SPECS, SCALED_FP16, bits, layer, values, weight_of
from torch import nn

from narrowgauge import CastSpec
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

# optimizers

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_optimizers_update_the_codes(spec: CastSpec, name: str) -> None:
    module = layer(spec, bias=False)
    plain = nn.Parameter(values(module.weight).clone())
    weight, x = module.weight, torch.randn(16, 8)
    # a step's error: one rounding of a weight for the decay and one for the step
    step_error = 2.0 ** -(spec.format.mantissa_bits + 1) * 2
    for parameter, linear in ((weight, module), (plain, None)):
        optimizer = OPTIMIZERS[name]([parameter])
        for _ in range(3):
            optimizer.zero_grad()
            y = linear(x) if linear else nn.functional.linear(x, parameter)
            y.square().mean().backward()
            optimizer.step()
        states = [s for s in optimizer.state[parameter].values() if isinstance(s, torch.Tensor)]
        assert all(type(s) is torch.Tensor and s.dtype is torch.float32 for s in states)
    assert module.weight is weight and isinstance(weight, QuantizedTensor)
    bound = 3 * step_error * plain.abs().max()
    assert (values(weight) - plain).abs().max() <= bound
    assert (plain.detach() - values(layer(spec, bias=False).weight)).abs().max() > bound / 4  # they did move


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_adamw_takes_the_same_steps_in_every_form(spec: CastSpec) -> None:
    results = []
    for options in ({"foreach": False}, {"foreach": True}):
        module = layer(spec)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **options)
        for seed in range(4):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
            module(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=seed % 2 == 0)
        results.append(bits(module.weight))
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_no_gradient_leaves_the_weight_as_it_is(name: str) -> None:
    for spec in PARAMETER_SPECS:
        p = weight_of(layer(spec))
        before = bits(p)
        p.grad = torch.zeros(6, 8)
        OPTIMIZERS[name]([p]).step()
        assert bits(p) == before


# compilation


@pytest.mark.parametrize("spec", PARAMETER_SPECS)
def test_dequantizing_compiles_in_one_graph(spec: CastSpec) -> None:
    def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x @ weight.dequantize().t()

    p, x = weight_of(layer(spec)), torch.randn(4, 8)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    y = compiled(p, x)
    assert torch.equal(y, product(p, x))
    y.sum().backward()
    assert p.grad is not None
    torch.testing.assert_close(p.grad, x.sum(0).expand(6, 8))
    p.data.fill_(3.0)
    assert torch.equal(compiled(p, x), product(p, x))  # the codes are read at each call


def test_a_module_with_quantized_parameters_compiles_in_one_graph() -> None:
    module, x = layer(SCALED_FP16), torch.randn(4, 8)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), module(x))


def test_an_in_place_step_compiles_in_one_graph() -> None:
    def step(weight: torch.Tensor, update: torch.Tensor) -> None:
        weight.mul_(0.9).add_(update, alpha=-0.1)

    eager, compiled = quantize(torch.ones(6, 8), FP8), quantize(torch.ones(6, 8), FP8)
    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager")
    for update in (torch.randn(6, 8), torch.zeros(6, 8)):  # the second changes the scale only
        step(eager, update)
        compiled_step(compiled, update)
        assert bits(compiled) == bits(eager)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports
def test_dequantizing_compiles_with_inductor() -> None:
    module, x = layer(SCALED_FP16), torch.randn(4, 8)
    compiled = torch.compile(module, fullgraph=True)
    y = compiled(x)
    torch.testing.assert_close(y, module(x))
    y.sum().backward()
    assert module.weight.grad is not None and module.weight.grad.isfinite().all()
