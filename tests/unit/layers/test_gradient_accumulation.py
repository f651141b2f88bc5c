"""Sums of gradients over several backward passes; copies of a model; the dtype of gradients."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.layers import gradients
from narrowgauge.numerics.formats import BF16, E4M3FN
from narrowgauge.numerics.granularity import Block
from narrowgauge.ops.experts import GroupedLinear
from narrowgauge.tensors.quantized import QuantizedTensor

SPEC = ng.CastSpec(E4M3FN)


class Scalar(nn.Module):
    """One weight, whose gradient is what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, gradient: float) -> Tensor:
        return (self.weight * gradient).sum()


def model_in(dtype: torch.dtype, recipe: str | ng.Recipe = "narrow8", **fields: object) -> nn.Sequential:
    """Two converted layers with parameters of `dtype`, gradients by the recipe."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(dtype)
    resolved = ng.recipe(recipe, **{"min_state_size": 16, **fields}).resolve("cpu")
    ng.convert(model, resolved)
    gradients.install(model, resolved)
    return model


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int = 0) -> None:
    model(inputs(seed)).square().sum().backward()


def bits(grad: Tensor | None) -> bytes:
    assert isinstance(grad, QuantizedTensor)
    return grad.codes.view(torch.uint8).numpy().tobytes() + grad.dequant_scale.numpy().tobytes()


# accumulate


@pytest.mark.parametrize("inside", [True, False], ids=["accumulate", "plain"])
@pytest.mark.parametrize("name", ["fp32", "bf16_pure", "fp8_lm_o2", "narrow8", "narrow8_sr"])
def test_small_terms_survive_large_ones(name: str, inside: bool) -> None:
    recipe = ng.recipe(name, min_state_size=1)  # case 28
    model = Scalar(torch.bfloat16 if recipe.param.format is BF16 else torch.float32)
    gradients.install(model, recipe)
    warned = False
    with ng.accumulate(model) if inside else torch.enable_grad():
        for gradient in (256.0, 1.0, -256.0):
            if not inside and recipe.grad.is_scaled and gradient == 1.0:
                with pytest.warns(UserWarning, match="second backward"):
                    model(gradient).backward()
                warned = True
            else:
                model(gradient).backward()
            assert not inside or type(model.weight.grad) is Tensor and model.weight.grad.dtype is torch.float32
    in_bf16 = name == "bf16_pure" and not inside  # torch's own sum, in the dtype that the recipe asks for
    assert model.weight.grad.item() == (0.0 if in_bf16 else 1.0)
    assert isinstance(model.weight.grad, QuantizedTensor) == (recipe.grad.is_scaled and not warned)
    assert model.weight.grad.dtype is (torch.bfloat16 if name == "bf16_pure" else torch.float32)


def test_it_casts_the_sum_once_when_the_outermost_ends() -> None:
    model = model_in(torch.float32)
    with ng.accumulate(model):
        backward(model, 0)
        with ng.accumulate(model[0]):  # a part of it
            backward(model, 1)
        assert all(type(p.grad) is Tensor for p in model.parameters())
        wide = [p.grad.clone() for p in model.parameters()]
    for p, each in zip(model.parameters(), wide, strict=True):
        assert bits(p.grad) == bits(ng.quantize(each, SPEC))


def test_it_goes_on_from_gradients_that_are_there_in_silence() -> None:
    model = model_in(torch.float32)
    backward(model)
    before = model[2].weight.grad.dequantize()
    with ng.accumulate(model):
        backward(model, 1)
        added = model[2].weight.grad - before
    model.zero_grad()
    with ng.accumulate(model):
        backward(model, 1)
        torch.testing.assert_close(added, model[2].weight.grad, rtol=0, atol=1e-4)


def test_it_casts_whatever_the_body_raises() -> None:
    model = model_in(torch.float32)
    with pytest.raises(ZeroDivisionError), ng.accumulate(model):
        backward(model)
        raise ZeroDivisionError
    assert isinstance(model[0].weight.grad, QuantizedTensor)
    model.zero_grad()
    backward(model)
    assert isinstance(model[0].weight.grad, QuantizedTensor)


def test_it_refuses_what_is_no_module_and_takes_any_module() -> None:
    with pytest.raises(ng.ConversionError, match="expected the torch.nn.Module.*found list"), ng.accumulate([1]):  # type: ignore[arg-type]
        pass
    plain = nn.Linear(4, 4)
    with ng.accumulate(plain):
        plain(torch.ones(1, 4)).sum().backward()
    assert type(plain.weight.grad) is Tensor


def test_a_recipe_of_tiles_keeps_gradients_in_tiles() -> None:
    tiles = ng.CastSpec(E4M3FN, Block(1, 16))
    model = model_in(torch.float32, grad=tiles)
    with ng.accumulate(model):
        backward(model)
        wide = model[0].weight.grad.clone()
    expected = ng.quantize(wide, tiles)
    assert bits(model[0].weight.grad) == bits(expected) and model[0].weight.grad.spec == tiles


# copies


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "deepcopy of a deepcopy"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_copy_keeps_gradients_as_its_original(how: str, dtype: torch.dtype) -> None:
    model = model_in(dtype)
    backward(model)
    if how == "torch.save":
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        made = torch.load(file, weights_only=False)
    else:
        made = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
        made = copy.deepcopy(made) if how.endswith("of a deepcopy") else made
    assert made[0].weight.grad is None and made[0].weight.grad_dtype is torch.float32
    backward(made)
    assert [bits(p.grad) for p in made.parameters()] == [bits(p.grad) for p in model.parameters()]
    with ng.accumulate(made):  # it is the copy's own
        backward(made)
        assert type(made[0].weight.grad) is Tensor and isinstance(model[0].weight.grad, QuantizedTensor)


def test_a_model_and_its_gradients_are_freed() -> None:
    model = model_in(torch.bfloat16)
    backward(model)
    dead = [weakref.ref(model), weakref.ref(model[0].weight)]
    del model
    gc.collect()
    assert all(ref() is None for ref in dead)


def test_a_model_from_the_meta_device_keeps_gradients_so() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    model, _ = ng.prepare(model, None, "narrow8_sr")
    model.to_empty(device="cpu")  # replaces the parameters
    for p in model.parameters():
        nn.init.normal_(p, std=0.1)
    model(torch.randn(2, 80)).sum().backward()
    assert isinstance(model[0].weight.grad, QuantizedTensor) and model[0].weight.grad.dtype is torch.float32


# dtypes


@pytest.mark.parametrize("emulation", ["exact", "fast"])
def test_gradients_of_bfloat16_parameters_are_rounded_once(emulation: str) -> None:
    """They are those of float32 parameters of the same values."""
    narrow = model_in(torch.bfloat16, emulation=emulation)
    wide = model_in(torch.float32, emulation=emulation)
    wide.load_state_dict({name: p.float() for name, p in narrow.state_dict().items()})
    for model in (narrow, wide):
        backward(model)
    assert [bits(p.grad) for p in narrow.parameters()] == [bits(p.grad) for p in wide.parameters()]
    with ng.accumulate(narrow):
        narrow.zero_grad()
        backward(narrow)
        assert all(p.dtype is torch.bfloat16 and p.grad.dtype is torch.float32 for p in narrow.parameters())
        if emulation == "exact":
            assert any(not torch.equal(p.grad, p.grad.bfloat16().float()) for p in narrow.parameters())


def test_gradients_of_experts_are_rounded_once() -> None:
    made = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        experts = GroupedLinear(3, 32, 48).to(torch.bfloat16).to(dtype)
        recipe = ng.recipe("narrow8", min_state_size=16, emulation="exact").resolve("cpu")
        model = nn.ModuleDict({"experts": experts})
        ng.convert(model, recipe)
        gradients.install(model, recipe)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
        model["experts"](x, torch.tensor([5, 0, 3])).square().sum().backward()
        made.append([bits(p.grad) for p in model.parameters()])
    assert made[0] == made[1]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while compiling
def test_compiled_gradients_of_bfloat16_parameters_are_in_the_recipes_format() -> None:
    model = model_in(torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    backward(model)
    eager = [bits(p.grad) for p in model.parameters()]
    model.zero_grad()
    backward(compiled)
    for p, expected in zip(model.parameters(), eager, strict=True):
        assert p.grad.dtype is torch.float32
        if p.ndim == 2:  # emulated products are rounded to bfloat16 in either
            assert bits(p.grad) == expected


@pytest.mark.parametrize("name", ["narrow8", "fp8_lm_o2", "fp8_lm_o3"])
def test_a_move_keeps_hooks_each_once(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    model, _ = ng.prepare(model, torch.optim.AdamW(model.parameters()), name)
    fired: list[str] = []
    model[0].weight.register_hook(lambda grad: fired.append("before"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: fired.append(type(p.grad).__name__))
    for move in (model.double, model.float, lambda: model.to("cpu"), model.bfloat16):
        move()
        fired.clear()
        model.zero_grad()
        model(torch.randn(2, 80)).sum().backward()
        assert isinstance(model[0].weight.grad, QuantizedTensor)
        assert move == model.double or model[0].weight.grad.dtype is torch.float32
        assert fired == ["before", "QuantizedTensor"]
    with pytest.warns(UserWarning, match="second backward"):
        model(torch.randn(2, 80)).sum().backward()
    assert type(model[0].weight.grad) is Tensor
