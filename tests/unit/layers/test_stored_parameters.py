"""Parameters as a recipe stores them: formats, digits that are handed on, and what the layers do with them."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref

import pytest
import torch
from states import assert_same_state, state_of
from stored import IN_BF16, LM, NEW, TRAINABLE, Tied, loss_of, prepared, quantized_names, step
from torch import nn

import narrowgauge as ng
from narrowgauge.layers.parameters import store
from narrowgauge.numerics.formats import BF16, E4M3FN, FP32, INT8
from narrowgauge.ops.operands import cast_by
from narrowgauge.tensors.quantized import QuantizedTensor

CastSpec = ng.CastSpec
POW2 = CastSpec(E4M3FN, scale=ng.TENSOR_POW2)


# what is stored


@pytest.mark.parametrize("recipe", IN_BF16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_all_trainable_parameters_become_plain_bfloat16_in_place(recipe: str, dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what bfloat16 loses is in the master, or left to chance
        stored = store(model, ng.recipe(recipe))
    assert not stored.replaced and not stored.warnings
    for name, p in model.named_parameters():
        old, values = before[name]
        assert p is old and type(p) is nn.Parameter
        if name in TRAINABLE:
            assert torch.equal(p, values.float().bfloat16())
        else:
            assert p.dtype is dtype and torch.equal(p, values)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trainable} == {torch.bfloat16}  # FSDP2 refuses groups of mixed dtypes
    expected = torch.bfloat16 if recipe == "bf16_pure" else torch.float32
    assert {p.grad_dtype for p in trainable} == {expected}
    ng.convert(model, recipe)
    loss_of(model).backward()
    assert all(p.grad is not None and p.grad.dtype is expected for p in trainable)


@pytest.mark.parametrize("embeddings", [True, False])
@pytest.mark.parametrize("recipe", [*LM, "fp16_pure"])
def test_weights_are_quantized_once_and_the_rest_is_float32(recipe: str, embeddings: bool) -> None:
    model, chosen = Tied(), ng.recipe(recipe, embeddings=embeddings)
    old = model.block.weight
    old.tag = "kept"  # type: ignore[attr-defined]
    calls: list[str] = []
    old.register_hook(lambda grad: calls.append("hook"))
    old.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    old.grad = torch.ones_like(old)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    stored = store(model, chosen)
    names = ["embedding.weight", "block.weight"] if embeddings else ["block.weight"]  # a tied head is the table
    assert quantized_names(model) == names
    assert [old for old, _ in stored.replaced][-1] is old and len(stored.replaced) == len(names)
    assert model.lm_head.weight is model.embedding.weight
    for name, p in model.named_parameters():
        assert p.dtype is torch.float32 and p.requires_grad == (name in TRAINABLE)
        expected = ng.quantize(values[name], chosen.param).dequantize() if name in names else values[name]
        assert torch.equal(p.detach().dequantize() if name in names else p, expected)
    weight = model.block.weight
    assert weight.tag == "kept" and bool((weight.grad == 1).all()) and isinstance(weight, nn.Parameter)
    loss_of(model).backward()
    assert calls == ["hook", "accumulated"]


def test_a_bfloat16_recipe_without_a_master_is_warned_of() -> None:  # case 35
    model = Tied()
    stored = store(model, ng.recipe("bf16", param=CastSpec(BF16)))
    assert len(stored.warnings) == 1 and "below half a unit in the last place are lost" in stored.warnings[0]
    stored = store(model, ng.recipe("bf16", param=CastSpec(BF16), master=CastSpec(INT8, scale=ng.ULP)))
    assert not stored.warnings


def test_layers_without_a_size_say_so() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    for recipe in ("narrow8", "fp8_lm_o3"):
        with pytest.raises(ng.ConversionError, match="'0.weight' has no size yet.*run one forward pass first"):
            store(model, ng.recipe(recipe))
        assert model[1].weight.dtype is torch.float32
    assert not store(model, ng.recipe("fp32")).replaced


# the digits that storage loses


@pytest.mark.parametrize("recipe", NEW)
def test_lost_digits_are_handed_on_one_parameter_at_a_time(recipe: str) -> None:
    model, chosen = Tied(), ng.recipe(recipe)
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = {id(p): name for name, p in model.named_parameters()}
    alive: list[weakref.ref[torch.Tensor]] = []
    told: list[str] = []

    def on_stored(old: nn.Parameter, new: nn.Parameter, source: torch.Tensor) -> None:
        gc.collect()
        assert recipe in LM or not any(ref() is not None for ref in alive)  # replaced ones are returned as well
        alive.append(weakref.ref(source))
        name = names[id(old)]
        told.append(name)
        assert source.dtype is torch.float32 and torch.equal(source, exact[name])
        owner = model.get_submodule(name.rpartition(".")[0])
        assert getattr(owner, name.rpartition(".")[2]) is new
        assert (old is new) == (recipe in IN_BF16)

    store(model, chosen, on_stored=on_stored)
    assert told == (TRAINABLE if recipe in IN_BF16 else ["embedding.weight", "block.weight"])
    told.clear()
    store(model, chosen, on_stored=on_stored)
    assert not told  # nothing changed


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.permutations(["fp32", "narrow8", *LM[::2], "bf16_pure"], 2))
)
def test_moving_between_recipes_by_full_values_loses_nothing(first: str, second: str) -> None:
    model, direct = Tied(), Tied()
    full: dict[str, torch.Tensor] = {name: p.detach().clone() for name, p in model.named_parameters()}
    store(model, ng.recipe(first))
    names = {id(p): name for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = store(model, ng.recipe(second), full_values=lambda p: full[names[id(p)]].clone())
    assert not stored.warnings
    store(direct, ng.recipe(second))
    for (name, a), (_, b) in zip(model.named_parameters(), direct.named_parameters(), strict=True):
        assert type(a) is type(b) and a.dtype is b.dtype and a.requires_grad == b.requires_grad, name
        if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
            assert a.spec == b.spec and torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
            assert torch.equal(a.dequant_scale, b.dequant_scale)
        assert torch.equal(a, b) and a.grad_dtype is b.grad_dtype
    assert model.lm_head.weight is model.embedding.weight
    ng.convert(model, second)
    loss_of(model).backward()


def test_codes_that_are_not_all_there_is_are_not_taken_for_it() -> None:
    model = Tied()
    store(model, ng.recipe("fp8_lm_o3"))
    before = state_of(model)
    for recipe in ("fp32", "narrow8", "fp8_lm_o1"):
        with pytest.raises(ng.ConversionError, match=r"'embedding.weight' is stored as \(E4M3FN.*pass that one; or"):
            store(model, ng.recipe(recipe))
        assert_same_state(before, state_of(model))
    store(model, ng.recipe("fp8_lm_o3"))
    model.requires_grad_(False)
    store(model, ng.recipe("fp32"))  # frozen ones are left alone
    assert_same_state(before, state_of(model))


@pytest.mark.parametrize("second", ["fp32", "fp8_lm_o3", "narrow8", "fp8_lm_o1"])
@pytest.mark.parametrize("first", ["narrow8", "fp8_lm_o3"])
def test_prepare_moves_a_model_in_training_to_another_recipe(first: str, second: str) -> None:
    model, optimizer = prepared(first)
    for _ in range(3):
        step(model, optimizer)
    before = [optimizer.full_values(p).clone() for p in model.parameters()]
    loss = loss_of(model).item()
    model, optimizer = ng.prepare(model, optimizer, second)
    # half a step of the master: a residual has 254 of them in a unit of bfloat16 in the last place
    kept = {"fp32": 0.0, "fp8_lm_o3": 2.0**-11, "fp8_lm_o1": 2.0**-11, "narrow8": 2.0**-8 / 254}[second]
    kept = 0.0 if first == second else kept
    for p, values in zip(model.parameters(), before, strict=True):
        if p.requires_grad:
            error = (optimizer.full_values(p) - values).abs()
            assert (error <= kept * values.abs() * 1.001 + (kept > 0) * 2e-7).all()
    assert abs(step(model, optimizer) - loss) < 0.1
    losses = [step(model, optimizer) for _ in range(20)]
    assert losses[-1] < 0.9 * loss


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o3"])
def test_gradients_that_are_there_move_along(recipe: str) -> None:
    model = Tied()
    loss_of(model).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    store(model, ng.recipe(recipe))
    for name, p in model.named_parameters():
        assert (p.grad is not None) == (name in before)
        if name in before:
            assert p.grad.dtype is torch.float32 and torch.equal(p.grad, before[name])
    model.block.weight.grad = ng.quantize(before["block.weight"], CastSpec(E4M3FN))
    narrow = model.block.weight.grad
    full = {id(p): p.detach().float() for p in model.parameters()}
    store(model, ng.recipe("fp32"), full_values=lambda p: full[id(p)])
    assert type(model.block.weight.grad) is torch.Tensor  # a wide recipe keeps gradients wide
    assert torch.equal(model.block.weight.grad, narrow.dequantize())


# what the layers do with them


def test_codes_of_the_weights_own_format_are_multiplied_as_they_are() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(48, 64, bias=False)
    recipe = ng.recipe("fp8_lm_o3", emulation="exact", input=CastSpec(E4M3FN), grad_output=CastSpec(FP32))
    recipe = recipe.replace(override_linear_precision=(False, False, True))
    store(layer, recipe)
    ng.convert(layer, recipe)
    weight, x = layer.weight, torch.randn(5, 48, requires_grad=True)
    assert isinstance(weight, QuantizedTensor) and weight.spec == recipe.weight
    y = layer(x)
    values = weight.detach().dequantize()  # a second rounding would be off by some percent
    assert torch.allclose(y, ng.quantize(x, CastSpec(E4M3FN)).dequantize() @ values.T, rtol=1e-5, atol=1e-6)
    y.backward(grad := torch.randn(5, 64))
    assert torch.allclose(x.grad, grad @ values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("stored", "operand"),
    [
        (POW2, POW2),
        (CastSpec(E4M3FN), CastSpec(E4M3FN)),
        (POW2, CastSpec(E4M3FN)),
        (CastSpec(E4M3FN), CastSpec(E4M3FN, scale=ng.Delayed())),
        (CastSpec(E4M3FN, ng.Block(128, 128)), CastSpec(E4M3FN, ng.Block(128, 128))),
        (CastSpec(E4M3FN, ng.Block(1, 32), ng.E8M0_UP), CastSpec(E4M3FN, ng.Block(1, 32), ng.E8M0_UP)),
    ],
)
def test_the_operand_shares_the_memory_of_the_stored_codes(stored: CastSpec, operand: CastSpec) -> None:
    q = ng.quantize(torch.randn(64, 96), stored)
    scale = torch.tensor(3.0) if operand.is_delayed else None
    cast = cast_by(q, operand, scale, keep_codes=True, carrier=torch.float32, count=False)
    assert cast.codes is q.codes and cast.tally is None  # nothing was asked for
    scales = cast.block_scale if operand.in_blocks else cast.dequant_scale
    assert scales is not None
    assert torch.equal(QuantizedTensor(cast.codes, scales, stored).dequantize(), q.dequantize())
    infinite = ng.quantize(torch.tensor([[torch.inf, 1.0]]), stored)
    shown = cast_by(infinite, operand, scale, keep_codes=True, carrier=None, count=False)
    assert shown.dequant_scale is not None and not shown.dequant_scale.isfinite()  # as where the cast is made here


def test_other_formats_and_tiles_are_cast_again() -> None:
    q = ng.quantize(torch.randn(64, 96), CastSpec(E4M3FN, ng.Block(128, 128)))
    for operand in (CastSpec(E4M3FN, ng.Block(1, 32)), CastSpec(ng.formats.E5M2), CastSpec(E4M3FN)):
        cast = cast_by(q, operand, None, keep_codes=True, carrier=None, count=False)
        expected = ng.quantize(q.dequantize(), operand)
        assert torch.equal(cast.codes.view(torch.uint8), expected.codes.view(torch.uint8))


@pytest.mark.parametrize(
    "spec",
    [
        POW2,
        CastSpec(ng.formats.FP16, scale=ng.TENSOR_POW2),
        CastSpec(E4M3FN, ng.PER_COLUMN),
        CastSpec(E4M3FN, ng.Block(128, 128)),
        CastSpec(E4M3FN, ng.Block(1, 32), ng.E8M0_UP),
    ],
)
def test_an_embedding_reads_the_rows_that_are_asked_for(spec: CastSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    table = nn.Embedding(300, 48, padding_idx=3)
    table.weight = nn.Parameter(ng.quantize(table.weight.detach(), spec))
    ids = torch.tensor([[3, 299, 0, 7], [130, 7, 128, 127]])
    expected = table.weight.detach().dequantize()[ids]
    decoded: list[int] = []
    values_of = ng.tensors.lookup.values_of  # type: ignore[attr-defined]
    monkeypatch.setattr("narrowgauge.tensors.lookup.values_of", lambda q: decoded.append(len(q)) or values_of(q))
    monkeypatch.setattr("narrowgauge.tensors.rules.values_of", lambda q: pytest.fail("the whole table was read"))
    y = table(ids)
    assert decoded == [8] and torch.equal(y, expected)
    assert table(ids[:0].int()).shape == (0, 4, 48)
    assert torch.equal(table.weight.detach().index_select(0, ids[1]), expected[1])
    y.sum().backward()
    grad = torch.zeros(300, 48).index_add_(0, ids.flatten(), torch.ones(8, 48))
    grad[3] = 0
    assert type(table.weight.grad) is torch.Tensor and torch.equal(table.weight.grad, grad)
    with pytest.raises(IndexError, match="out of range"):
        table(torch.tensor([300]))


def test_infinite_rows_of_a_table_stay_infinite() -> None:
    values = torch.randn(8, 16)
    values[2, 5] = torch.inf
    for spec in (POW2, CastSpec(E4M3FN, ng.Block(1, 8))):
        table = nn.Parameter(ng.quantize(values, spec))
        rows = nn.functional.embedding(torch.tensor([0, 2]), table)
        assert rows[1, 5].isinf() and rows.isinf().sum() == 1
