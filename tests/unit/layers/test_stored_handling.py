"""What torch does with parameters that a recipe stores: ties, states, copies, dtypes, files, initialisation."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from states import assert_same_state, state_of
from stored import IN_BF16, NEW, Tied, prepared, quantized_names, step
from torch import nn

import narrowgauge as ng
from narrowgauge.layers.parameters import store
from narrowgauge.numerics.formats import FP32
from narrowgauge.recipes.spec import OPERAND_ROLES
from narrowgauge.tensors.quantized import QuantizedTensor

CastSpec = ng.CastSpec


@pytest.mark.parametrize("recipe", [*NEW, "fp16_pure"])
@pytest.mark.parametrize("write", ["load_state_dict", "copy_", "data"])
def test_loaded_weights_are_those_that_run(recipe: str, write: str) -> None:  # case 77
    chosen = ng.recipe(recipe)
    chosen = chosen.replace(**{
        role: CastSpec(getattr(chosen, role).format) for role in OPERAND_ROLES if getattr(chosen, role) is not None
    })  # fmt: skip
    torch.manual_seed(1)
    layer, loaded = nn.Linear(64, 64), nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.mul_(1e-3)
        loaded.weight.mul_(100)
    layer, _ = ng.prepare(layer, torch.optim.AdamW(layer.parameters()), chosen)
    layer(torch.randn(2, 64)).float().sum().backward()  # whatever is kept of the small weights is there
    layer.zero_grad()
    if write == "load_state_dict":
        layer.load_state_dict(loaded.state_dict())
    else:
        with torch.no_grad():
            for name, p in layer.named_parameters():
                new = loaded.get_parameter(name).detach().to(p.dtype)
                if write == "copy_":
                    p.copy_(new)
                else:
                    p.data = new
    x = torch.randn(128, 64, requires_grad=True)
    grad = torch.randn(128, 64)
    y = layer(x)
    y.float().backward(grad)
    reference = x.detach().clone().requires_grad_()
    expected = loaded(reference)
    expected.backward(grad)
    assert (y.float() - expected).norm() <= 0.06 * expected.norm()
    assert (x.grad - reference.grad).norm() <= 0.09 * reference.grad.norm()


@pytest.mark.parametrize("recipe", NEW)
def test_tied_tables_stay_tied_and_are_stepped_once(recipe: str) -> None:  # case 55
    model, optimizer = prepared(recipe)
    count = sum(p.numel() for p in model.parameters())
    assert count == sum(p.numel() for p in Tied().parameters())
    for _ in range(3):
        step(model, optimizer)
    assert sum(p is model.lm_head.weight for group in optimizer.param_groups for p in group["params"]) == 1
    assert int(optimizer.state[model.lm_head.weight]["step"]) == 3
    state = state_of(model)
    for change in (lambda m: m.to("cpu"), lambda m: m.load_state_dict(state), copy.deepcopy):
        changed = change(model)
        each = changed if isinstance(changed, nn.Module) else model
        assert each.lm_head.weight is each.embedding.weight
        assert sum(p.numel() for p in each.parameters()) == count
    plain = Tied()
    torch_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        step(plain, torch_optimizer)
    expected = (plain.lm_head.weight - Tied().lm_head.weight).flatten()
    moved = (optimizer.full_values(model.lm_head.weight) - Tied().lm_head.weight).flatten()
    assert 0.8 < moved @ expected / expected.square().sum() < 1.2  # 2 where it is stepped twice


@pytest.mark.parametrize("recipe", NEW)
def test_requires_grad_survives_whatever_happens(recipe: str) -> None:  # case 56
    model = Tied()
    for at, p in enumerate(model.parameters()):
        p.requires_grad_(at % 2 == 0)
    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), recipe)
    before = state_of(model)
    for _ in range(3):
        step(model, optimizer)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not wanted[name])
        assert name not in frozen or torch.equal(p, frozen[name])
    for change in (lambda m: m.to(torch.bfloat16), copy.deepcopy, lambda m: m.load_state_dict(state_of(m))):
        changed = change(model)
        each = changed if isinstance(changed, nn.Module) else model
        assert {name: p.requires_grad for name, p in each.named_parameters()} == wanted


@pytest.mark.parametrize("recipe", NEW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_go_both_ways(recipe: str, dtype: torch.dtype) -> None:
    model, plain = Tied(), Tied().to(dtype)
    store(model, ng.recipe(recipe))
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(3)
    objects = dict(model.named_parameters())
    model.load_state_dict(plain.state_dict())
    for name, p in model.named_parameters():
        assert p is objects[name]
        values = plain.get_parameter(name).detach()
        expected = ng.quantize(values, p.spec).dequantize() if isinstance(p, QuantizedTensor) else values.to(p.dtype)
        assert torch.equal(p.detach().float(), expected.float())
    back = Tied()
    back.load_state_dict(model.state_dict())
    assert not quantized_names(back)
    assert_same_state(state_of(back.to(torch.float32)), {k: v.float() for k, v in state_of(model).items()})
    same = Tied()
    store(same, ng.recipe(recipe))
    same.load_state_dict(model.state_dict(), assign=True)
    same.lm_head.weight = same.embedding.weight  # which torch's assignment has untied
    assert quantized_names(same) == quantized_names(model)
    assert_same_state(state_of(same), state_of(model))


@pytest.mark.parametrize("recipe", NEW)
def test_built_on_meta_prepared_and_then_given_values(recipe: str) -> None:  # case 113
    with torch.device("meta"):
        model = Tied()
    ng.prepare(model, None, recipe)
    kinds = {name: (type(p), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    model.to_empty(device="cpu")
    model.lm_head.weight = model.embedding.weight  # as for any model: torch makes plain parameters anew
    assert {name: (type(p), p.dtype, p.requires_grad) for name, p in model.named_parameters()} == kinds
    model.load_state_dict(Tied().state_dict())
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe)
    losses = [step(model, optimizer) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    whole = Tied()
    store(whole, ng.recipe(recipe))
    fresh = copy.deepcopy(whole)
    torch.manual_seed(5)
    fresh.block.reset_parameters()
    torch.manual_seed(5)
    plain = nn.Linear(32, 32)
    expected = plain.weight.detach()
    weight = fresh.block.weight
    expected = ng.quantize(expected, weight.spec) if isinstance(weight, QuantizedTensor) else expected
    # in bfloat16 the random numbers are others, of the same spread
    assert torch.equal(weight, expected) or (recipe in IN_BF16 and 0.9 < weight.std() / expected.std() < 1.1)


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o3"])
@pytest.mark.parametrize("change", ["half", "bfloat16", "float", "double"])
def test_a_change_of_dtype_loses_no_more_than_the_dtype_does(recipe: str, change: str) -> None:
    model, optimizer = prepared(recipe)
    step(model, optimizer)
    before = {name: p.detach().float() for name, p in model.named_parameters()}
    getattr(model, change)()
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}[change]
    for name, p in model.named_parameters():
        assert p.dtype is dtype
        assert torch.equal(p.detach().to(dtype), before[name].to(dtype))
    assert quantized_names(model) == ([] if recipe == "narrow8" else ["embedding.weight", "block.weight"])
    # prepared again it trains on
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = ng.prepare(model, optimizer, recipe)
    losses = [step(model, optimizer) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o3"])
def test_vectors_shared_memory_and_writes_reach_the_storage(recipe: str) -> None:
    model = Tied()
    store(model, ng.recipe(recipe))
    trainable = [p for p in model.parameters() if p.requires_grad]
    vector = nn.utils.parameters_to_vector(trainable)
    nn.utils.vector_to_parameters((vector * 2).detach(), trainable)
    assert torch.equal(nn.utils.parameters_to_vector(trainable), vector * 2)  # a power of two: exact
    model.share_memory()
    assert all(p.is_shared() for p in model.parameters())
    with torch.no_grad():
        for p in trainable:
            p[0] = 0
            p.add_(1)
        assert (model.block.weight[0] == 1).all() and (model.norm.bias[1:] == 1).all()


def test_a_file_that_cannot_hold_them_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Tied()
    store(model, ng.recipe("fp8_lm_o3"))
    with pytest.raises(ng.NarrowgaugeError, match="narrowgauge.save"):
        save_file({"weight": model.block.weight.detach()}, tmp_path / "model.safetensors")
    save_file({"weight": model.block.weight.detach().dequantize()}, tmp_path / "model.safetensors")


def sgd_of_ones(recipe: str | ng.Recipe, form: torch.dtype = torch.float32) -> torch.Tensor:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4096, dtype=form))
    model, optimizer = ng.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), recipe)
    for _ in range(100):
        model.weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = getattr(optimizer, "full_values", lambda p: p.detach().float())
    return full(model.weight)


@pytest.mark.filterwarnings("ignore:.*none of this model's is quantized")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_below_half_a_unit_are_in_the_residual(dtype: torch.dtype) -> None:  # case 35
    fp32 = CastSpec(FP32)
    residual = ng.recipe("narrow8", exp_avg=fp32, exp_avg_sq=fp32)
    assert (sgd_of_ones(residual, dtype) - 0.9).abs().max() <= 1e-4
    lossless = residual.replace(master=CastSpec(ng.formats.INT16, scale=ng.ULP), grad=fp32)
    exact = torch.ones(())
    for _ in range(100):
        exact -= 1e-3
    assert (sgd_of_ones(lossless, dtype) - exact).abs().max() <= 1e-6
    rounded = ng.recipe("narrow8_sr", exp_avg=fp32, exp_avg_sq=fp32)
    assert abs(sgd_of_ones(rounded, dtype).mean().item() - 0.9) <= 0.002
