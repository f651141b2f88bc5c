"""Gradients that are cast within backward: when, which, and what the hooks of others see."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge.layers import gradients
from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.tensors.quantized import QuantizedTensor

SPEC = ng.CastSpec(E4M3FN)


def plain_mlp(layers: int = 2, width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def installed(model: nn.Module, **fields: object) -> nn.Module:
    """`model` with gradients in E4M3, its products in float32."""
    gradients.install(model, ng.recipe("fp32", **{"grad": SPEC, "min_state_size": 16, **fields}))
    return model


def inputs(seed: int = 0, width: int = 32) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int = 0) -> None:
    model(inputs(seed)).square().sum().backward()


def wide_gradients(model: nn.Module, *seeds: int) -> list[Tensor]:
    """The sums that autograd makes, for a model without hooks."""
    for seed in seeds:
        backward(model, seed)
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_cast(p: Tensor, wide: Tensor, spec: ng.CastSpec = SPEC) -> None:
    expected = ng.quantize(wide, spec)
    assert isinstance(p.grad, QuantizedTensor) and p.grad.spec == spec and p.grad.dtype is wide.dtype
    assert torch.equal(p.grad.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(p.grad.dequant_scale, expected.dequant_scale) and torch.equal(p.grad.amax, expected.amax)


# what becomes of a gradient


def test_each_gradient_is_the_cast_of_the_wide_one() -> None:
    expected = wide_gradients(plain_mlp(), 0)
    model = installed(plain_mlp())
    backward(model)
    for p, wide in zip(model.parameters(), expected, strict=True):
        assert_cast(p, wide)


def test_one_wide_gradient_lives_at_a_time() -> None:
    def most_alive(model: nn.Module) -> tuple[int, int]:
        seen: list[StorageWeakRef] = []
        most = 0

        def look(grad: Tensor) -> None:
            nonlocal most
            seen.append(StorageWeakRef(grad.untyped_storage()))
            most = max(most, sum(not each.expired() for each in seen))

        for p in model.parameters():
            p.register_hook(look)
        backward(model)
        assert len(seen) == 6
        return most, sum(not each.expired() for each in seen)

    assert most_alive(plain_mlp(6)) == (6, 6)
    assert most_alive(installed(plain_mlp(6))) == (1, 0)


def test_small_parameters_and_left_out_tables_stay_wide() -> None:
    model = nn.Sequential(nn.Embedding(40, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    for embeddings, kind in ((True, QuantizedTensor), (False, Tensor)):
        installed(model, embeddings=embeddings, min_state_size=1024)
        model(torch.arange(8)).square().sum().backward()
        assert type(model[0].weight.grad) is kind  # 1280 values
        assert type(model[2].weight.grad) is QuantizedTensor  # 1024
        assert all(type(p.grad) is Tensor for p in (model[1].weight, model[2].bias))
        model.zero_grad()


def test_a_table_tied_to_the_head_has_one_gradient() -> None:
    table, head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
    head.weight = table.weight
    ids = torch.arange(8)

    def run(model: nn.Module) -> None:
        head(table(ids)).square().sum().backward()

    run(model := nn.ModuleList([table, head]))
    wide = table.weight.grad
    assert wide is not None
    table.weight.grad = None
    run(installed(model))
    assert_cast(table.weight, wide)
    table.weight.grad = None
    run(installed(model, embeddings=False))  # the table is left out, so the head is
    assert type(head.weight.grad) is Tensor


def test_sparse_and_complex_gradients_stay_as_they_are() -> None:
    table = installed(nn.Embedding(40, 32, sparse=True))
    for _ in range(2):
        table(torch.tensor([3, 5])).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse

    dense = installed(nn.Embedding(40, 32))  # by the functional form, which the module does not know of
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dense(torch.tensor([3])).sum().backward()
        assert isinstance(dense.weight.grad, QuantizedTensor)
        nn.functional.embedding(torch.tensor([5]), dense.weight, sparse=True).sum().backward()
    assert len(caught) == 1
    assert dense.weight.grad.sum(1).nonzero().flatten().tolist() == [3, 5]

    rotation = nn.Module()
    rotation.phase = nn.Parameter(torch.ones(32, dtype=torch.complex64))
    installed(rotation)
    rotation.phase.abs().sum().backward()
    assert rotation.phase.grad is not None and rotation.phase.grad.dtype is torch.complex64


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_to_be_seen(bad: float) -> None:
    model = installed(plain_mlp(1))
    x = inputs()
    x[0, 0] = bad
    model(x).sum().backward()
    grad = model[0].weight.grad
    assert isinstance(grad, QuantizedTensor) and not grad.amax.isfinite()
    assert not grad.norm().isfinite() and not grad.isfinite().all()
    with ng.accumulate(model):  # and survives a sum
        backward(model)
    assert not model[0].weight.grad.amax.isfinite()


def test_gradients_with_a_graph_of_their_own_stay_wide() -> None:
    model = installed(plain_mlp(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of reference cycles
        model(inputs()).square().sum().backward(create_graph=True)
    grad = model[0].weight.grad
    assert type(grad) is Tensor and grad.requires_grad
    model.zero_grad()


# a second backward


def test_a_second_backward_adds_exactly_and_says_once_that_the_sum_is_wide() -> None:
    expected = wide_gradients(plain_mlp(), 0, 1, 2)
    model = installed(plain_mlp())
    backward(model, 0)
    first = ng.quantize(wide_gradients(plain_mlp(), 0)[1], SPEC).dequantize()
    with pytest.warns(UserWarning, match="second backward.*narrowgauge.accumulate") as caught:
        backward(model, 1)
        backward(model, 2)
    assert len(caught) == 1
    for p, wide in zip(model.parameters(), expected, strict=True):
        assert type(p.grad) is Tensor and p.grad.dtype is torch.float32
        # all that is lost is one cast of the first gradient
        assert (p.grad - wide).abs().max() <= wide_gradients(plain_mlp(), 0)[0].abs().max() / 16
    last = sum(wide_gradients(plain_mlp(), seed)[1] for seed in (1, 2))
    torch.testing.assert_close(model[1].weight.grad, first + last, rtol=1e-5, atol=1e-5)
    model.zero_grad()
    backward(model)
    assert isinstance(model[0].weight.grad, QuantizedTensor)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_cleared_gradients_are_none(set_to_none: bool) -> None:
    model = installed(plain_mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (0, 1):  # warnings are errors
        backward(model, seed)
        wide = wide_gradients(plain_mlp(), seed)
        for p, each in zip(model.parameters(), wide, strict=True):
            assert_cast(p, each)
        optimizer.zero_grad(set_to_none=set_to_none)
    with ng.accumulate(model):
        backward(model)
    with pytest.warns(UserWarning, match="second backward"):
        backward(model)
    optimizer.zero_grad(set_to_none=set_to_none)  # of wide sums
    backward(model)
    assert isinstance(model[0].weight.grad, QuantizedTensor)


def test_a_retained_graph_counts_as_a_second_backward() -> None:
    model = installed(plain_mlp(1))
    y = model(inputs()).sum()
    y.backward(retain_graph=True)
    once = model[0].weight.grad.dequantize()
    with pytest.warns(UserWarning, match="second backward"):
        y.backward()
    torch.testing.assert_close(model[0].weight.grad, once + inputs().sum(0).expand(32, 32))


def test_a_parameter_that_is_used_twice_has_one_gradient() -> None:
    model = installed(plain_mlp(1))
    layer, plain = model[0], plain_mlp(1)[0]
    layer(layer(inputs())).sum().backward()
    plain(plain(inputs())).sum().backward()
    assert_cast(layer.weight, plain.weight.grad)


def test_asking_autograd_for_gradients_leaves_those_that_are_there() -> None:
    model = installed(plain_mlp())
    backward(model)
    before = [p.grad for p in model.parameters()]
    asked = torch.autograd.grad(model(inputs(1)).sum(), list(model.parameters()))
    assert all(type(grad) is Tensor for grad in asked)
    assert all(p.grad is held for p, held in zip(model.parameters(), before, strict=True))
    x = inputs(1).requires_grad_()
    model(x).sum().backward(inputs=[x])
    assert all(p.grad is held for p, held in zip(model.parameters(), before, strict=True))


def test_stochastic_accumulation_stays_in_8_bits_and_is_right_on_average() -> None:
    model = installed(nn.Linear(32, 32, bias=False), grad_accumulation="stochastic")
    weight = model.weight
    steps, parts = 64, torch.randn(3, 32, 32)
    total = torch.zeros(32, 32)
    for _ in range(steps):
        weight.grad = None
        for part in parts:  # warnings are errors
            (weight * part).sum().backward()
            assert isinstance(weight.grad, QuantizedTensor) and weight.grad.spec == SPEC
        total += weight.grad.dequantize()
    exact = parts[1:].sum(0) + ng.quantize(parts[0], SPEC).dequantize()
    # two casts, each off by at most a spacing of its magnitude: 1/8, and the sum of steps by 1/sqrt(steps) of it
    spacing = parts.abs().sum(0).clamp(min=1e-2) / 8 * 2
    error = (total / steps - exact) / (spacing / steps**0.5)
    assert error.abs().max() < 5 and error.abs().mean() > 1e-3

    def added() -> Tensor:
        weight.grad = ng.quantize(total, SPEC)
        (weight * parts[0]).sum().backward()
        return weight.grad.codes.view(torch.uint8)

    state = torch.get_rng_state()  # of the generator that keys come from
    first, other = added(), added()
    torch.set_rng_state(state)
    assert torch.equal(added(), first) and not torch.equal(other, first)


# how it lives with the rest of torch


def test_frozen_parameters_have_no_gradients_and_no_hooks() -> None:
    model = plain_mlp()
    model[0].weight.requires_grad_(False)
    installed(model)
    backward(model)
    assert model[0].weight.grad is None and isinstance(model[1].weight.grad, QuantizedTensor)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_change_nothing(reentrant: bool) -> None:
    model = installed(plain_mlp())
    x = inputs().requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    for p, wide in zip(model.parameters(), wide_gradients(plain_mlp(), 0), strict=True):
        assert_cast(p, wide)


def test_a_compiled_model_gives_the_same_gradients() -> None:
    expected = wide_gradients(plain_mlp(), 0)
    model = installed(plain_mlp())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        backward(compiled)
        for p, wide in zip(model.parameters(), expected, strict=True):
            assert_cast(p, wide)
        model.zero_grad()
    with ng.accumulate(compiled):
        backward(compiled)
        assert type(model[0].weight.grad) is Tensor
    assert_cast(model[0].weight, expected[0])


def test_tensor_hooks_see_the_wide_gradient_and_later_ones_what_is_kept() -> None:
    seen: list[tuple[str, type]] = []

    def note(name: str) -> Callable[[Tensor], None]:
        return lambda grad: seen.append((name, type(grad)))

    model = plain_mlp(1)
    weight = model[0].weight
    weight.register_hook(note("before"))
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("kept", type(p.grad))))
    installed(model)
    weight.register_hook(note("after"))
    weight.register_hook(lambda grad: grad * 2)  # what a hook returns is what is kept
    backward(model)
    assert seen == [("before", Tensor), ("after", Tensor), ("kept", QuantizedTensor)]
    assert_cast(weight, 2 * wide_gradients(plain_mlp(1), 0)[0])


def test_hooks_can_do_what_hooks_do() -> None:
    model = installed(plain_mlp(1))  # case 33
    weight = model[0].weight
    expected = ng.quantize(wide_gradients(plain_mlp(1), 0)[0], SPEC).dequantize()
    before = weight.detach().clone()

    def use(p: Tensor) -> None:
        grad = p.grad
        assert isinstance(grad, QuantizedTensor)
        assert torch.equal(grad.view(-1) + 0, expected.view(-1)) and torch.equal(grad.clone() + 0, expected)
        assert torch.equal(grad.to(torch.float32) + 0, expected) and grad.numel() == 1024
        assert grad.isfinite().all() and grad.norm().item() == pytest.approx(expected.norm().item(), rel=2**-20)
        grad.mul_(0.5)

    weight.register_post_accumulate_grad_hook(use)
    backward(model)
    torch.optim.SGD([weight], lr=1.0).step()
    assert torch.equal(weight, before - 0.5 * expected)  # halved exactly


def test_removing_and_installing_anew_leave_no_second_hook() -> None:
    model = plain_mlp(1)
    weight = model[0].weight
    for _ in range(2):
        installed(model)
    assert len(weight._backward_hooks) == 1 and len(weight._post_accumulate_grad_hooks) == 1  # type: ignore[arg-type]
    gradients.remove(model)
    backward(model)
    assert type(weight.grad) is Tensor
    assert not weight._backward_hooks and not vars(model).get("_narrowgauge_gradients")
