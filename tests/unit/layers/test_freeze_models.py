"""freeze: models in training, copies, files, the transformers library, and what is refused."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers
from frozen import WEIGHTS, bits_of, stored_bytes
from states import assert_same_state, state_of
from stored import IDS, Tied, prepared, quantized_names, step
from torch import nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.numerics.formats import E5M2
from narrowgauge.tensors.quantized import QuantizedTensor

CastSpec = ng.CastSpec


@pytest.mark.parametrize("recipe", ["fp32", "narrow8", "narrow8_sr", "fp8_lm_o1", "fp8_lm_o3"])
def test_a_reference_model_is_a_frozen_copy_of_one_in_training(recipe: str) -> None:
    model, optimizer = prepared(recipe)
    step(model, optimizer)
    before = state_of(model)
    held = {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedTensor)}
    reference = ng.freeze(copy.deepcopy(model), recipe)
    assert_same_state(before, state_of(model))
    assert {p.requires_grad for p in model.parameters()} == {True, False}
    assert quantized_names(reference) == WEIGHTS
    if recipe == "fp8_lm_o3":  # which is in FP8 already, and not rounded again
        assert all(torch.equal(reference.get_parameter(name), p) for name, p in held.items())
    assert not any(p.requires_grad for p in reference.parameters())
    expected = reference(IDS)
    assert (expected.float() - model(IDS).float()).norm() < 0.15 * expected.float().norm()
    for _ in range(2):
        step(model, optimizer)
    assert torch.equal(reference(IDS), expected) and not expected.requires_grad


def test_frozen_models_are_copied_saved_and_loaded() -> None:
    model = ng.freeze(Tied(), "fp8_block")
    other = copy.deepcopy(model)
    assert quantized_names(other) == WEIGHTS and other.lm_head.weight is other.embedding.weight
    assert not any(p.requires_grad for p in other.parameters())
    first, second = bits_of(model), bits_of(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    plain = Tied()
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(100)
    fresh = ng.freeze(plain, "fp8_block")
    fresh.load_state_dict(torch.load(file, weights_only=True))
    loaded = bits_of(fresh)
    assert all(torch.equal(first[name], loaded[name]) for name in first)
    fresh.load_state_dict(Tied().state_dict())  # plain values are cast
    loaded = bits_of(fresh)
    assert all(torch.equal(first[name], loaded[name]) for name in first)
    assert torch.equal(fresh(IDS), model(IDS))
    back = Tied()
    back.load_state_dict(model.state_dict())
    assert not quantized_names(back)


def test_loaded_weights_bring_their_own_scales() -> None:  # case 77
    for recipe in ("fp8_current", "fp8_block", "mxfp8"):
        torch.manual_seed(0)
        layer, loaded = nn.Linear(64, 64), nn.Linear(64, 64)
        with torch.no_grad():
            layer.weight.zero_()
            loaded.weight.mul_(100)
        ng.freeze(layer, recipe)
        layer.load_state_dict(loaded.state_dict())
        x, grad = torch.randn(2, 128, 64)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = layer(ours), loaded(theirs)
        y.backward(grad)
        expected.backward(grad)
        assert (y - expected).norm() <= 0.06 * expected.norm()
        assert (ours.grad - theirs.grad).norm() <= 0.09 * theirs.grad.norm()


def test_frozen_models_change_dtype_and_device_without_a_new_cast() -> None:
    model = ng.freeze(Tied(), "narrow8")
    before = bits_of(model)
    model.to(torch.bfloat16).half().to("cpu").share_memory()
    after = bits_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    with torch.device("meta"):
        empty = Tied()
    ng.freeze(empty, "narrow8").to_empty(device="cpu").load_state_dict(ng.freeze(Tied(), "narrow8").state_dict())
    loaded = bits_of(empty)
    assert all(torch.equal(before[name], loaded[name]) for name in before)


def test_a_transformers_model_freezes() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    plain = transformers.LlamaForCausalLM(config)
    model = ng.freeze(copy.deepcopy(plain), "narrow8")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 15 and all(isinstance(m.weight, QuantizedTensor) for m in linears)
    assert stored_bytes(model) == 17408 + 15 * 8 + 5 * 32 * 4  # codes, scales and amax, norms
    embedded = plain.get_input_embeddings()(IDS).detach()
    grads = []
    for each in (plain, model):
        x = embedded.clone().requires_grad_()
        each(inputs_embeds=x).logits.square().mean().backward()
        grads.append(x.grad.flatten())
    assert F.cosine_similarity(*grads, dim=0) > 0.98
    assert not any(p.requires_grad for p in model.parameters())


# what is refused


def test_what_cannot_be_frozen_says_why() -> None:
    with pytest.raises(ng.ConversionError, match="expected a torch.nn.Module to freeze, found dict"):
        ng.freeze({}, "narrow8")  # type: ignore[type-var]
    with pytest.raises(ng.RecipeError, match="unknown recipe"):
        ng.freeze(Tied(), "narow8")
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    with pytest.raises(ng.ConversionError, match="'0.weight' has no size yet: run one forward pass first"):
        ng.freeze(lazy, "narrow8")
    assert lazy[1].weight.requires_grad
    model = Tied()
    with pytest.raises(ng.RecipeError, match=r"recipe\.at\(steps\)"):
        ng.freeze(model, ng.recipe("narrow8").switch_at(10, ng.recipe("narrow8", weight=CastSpec(E5M2))))
    assert not quantized_names(model) and model.block.weight.requires_grad


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch.compile's own
def test_a_compiled_model_is_frozen_before() -> None:
    with pytest.raises(ng.ConversionError, match="call freeze first, then torch.compile"):
        ng.freeze(torch.compile(Tied()), "narrow8")
