"""PEFT's adapters on a base in FP8: what trains, what it costs, gradients, merging, and files that stock PEFT reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.errors import ConfigError, ConversionError
from narrowgauge.integrations.peft import merge_and_unload, save_adapter
from narrowgauge.tensors.quantized import QuantizedTensor

IDS = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(1))
KINDS = {"lora": {}, "dora": {"use_dora": True}}
TARGETS = ["q_proj", "v_proj", "down_proj"]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"

# `get_peft_model` asks transformers for a method that transformers itself deprecates
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=96, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, **shape | changes)
    return LlamaForCausalLM(config)


def adapted(base: nn.Module, rank: int = 16, **options: Any) -> peft.PeftModel:
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, **options))
    for name, p in model.named_parameters():  # an adapter at its start adds nothing, and its A has no gradient
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def prepared(
    kind: str, recipe: str, freezing: str = "fp8_current", **changes: Any
) -> tuple[Any, torch.optim.Optimizer]:
    model = adapted(ng.freeze(llama(**changes), freezing), **KINDS[kind])
    return ng.prepare(model, torch.optim.AdamW(trainable(model).values(), lr=5e-3), recipe)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def codes(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.data.codes.clone() for name, p in model.named_parameters() if isinstance(p.data, QuantizedTensor)}


@pytest.mark.parametrize("recipe", ["bf16", "narrow8", "fp8_lm_o2"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_train_and_the_base_keeps_its_codes_and_bytes(kind: str, recipe: str) -> None:
    model, optimizer = prepared(kind, recipe)
    adapters = trainable(model)
    assert len(adapters) == 2 * len(TARGETS) * (2 if kind == "lora" else 3)
    assert all("lora_" in name for name in adapters)
    frozen = {name: p for name, p in model.named_parameters() if name not in adapters}
    before = {name: value for name, value in codes(model).items() if name in frozen}
    assert len(before) == 2 * 7 + 2  # linear layers, table and head
    rows = {row.name: row for row in ng.report(model)}
    assert "weight stored as E4M3FN, frozen" in rows[f"{FIRST}.base_layer"].reason
    assert rows[f"{FIRST}.lora_A.default"].status == ("kept" if recipe == "bf16" else "converted")
    losses = train(model, optimizer, 4)
    assert losses[-1] < losses[0] - 0.05
    for name, value in before.items():
        assert torch.equal(frozen[name].data.codes, value) and frozen[name].grad is None, name

    rest = sum(p.numel() * 4 for p in frozen.values() if not isinstance(p.data, QuantizedTensor))
    in_codes = sum(p.numel() + 4 + 4 for p in frozen.values() if isinstance(p.data, QuantizedTensor))  # scale, amax
    held = sum(p.data.nbytes for p in adapters.values())
    params = ng.ledger(model, optimizer).roles["param"]
    assert abs(params - (rest + in_codes + held)) <= 8 * len(frozen)


def test_a_base_that_is_tied_stays_tied() -> None:
    model, optimizer = prepared("lora", "narrow8", tie_word_embeddings=True)
    inner = model.base_model.model
    assert inner.lm_head.weight is inner.model.embed_tokens.weight and isinstance(
        inner.lm_head.weight.data, QuantizedTensor
    )
    train(model, optimizer)
    merged = merge_and_unload(model, optimizer)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


def reference(kind: str, model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the adapters in float32, on the values of the codes, without this library."""
    base = llama()
    plain = adapted(base, **KINDS[kind])
    with torch.no_grad():
        for (name, p), (other, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert name == other
            value = q.detach()
            p.copy_(value.dequantize() if isinstance(value, QuantizedTensor) else value)
    plain(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in trainable(plain).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_codes_values(kind: str) -> None:
    model, _ = prepared(kind, "fp32")
    model(input_ids=IDS, labels=IDS).loss.backward()
    for name, expected in reference(kind, model).items():
        found = trainable(model)[name].grad
        assert (found - expected).norm() <= 2e-5 * expected.norm(), name  # float32 sums in another order

    # every product rounds two operands: E4M3 by 2.6 % of their norm (2^-4 / sqrt(3) / sqrt(2)), E5M2 by 5.2 %. A
    # gradient has at most 2 x 7 products behind it forward, as many backward, with adapters twice that
    model, _ = prepared(kind, "fp8_current")
    model(input_ids=IDS, labels=IDS).loss.backward()
    most = (2 * 2 * 7 * (2 * 0.026**2 + 0.026**2 + 0.052**2)) ** 0.5
    for name, expected in reference(kind, model).items():
        error = (trainable(model)[name].grad.float() - expected).norm() / expected.norm()
        assert 2e-3 < error < most, (name, error.item())


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_has_the_values_of_codes_and_delta_and_stock_transformers_reads_it(
    kind: str, recipe: str, tmp_path: Path
) -> None:
    model, optimizer = prepared(kind, recipe)
    train(model, optimizer)
    # the same merge by PEFT alone, on plain float32 weights
    plain = adapted(llama(), **KINDS[kind])
    with torch.no_grad():
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            value = q.detach()
            full = optimizer.full_values(q) if q.requires_grad else value
            p.copy_(full.dequantize() if isinstance(full, QuantizedTensor) else full)
    layer = plain.base_model.model.model.layers[0].self_attn.q_proj
    weight, delta = layer.weight.detach().clone(), layer.get_delta_weight("default").detach()
    expected = plain.merge_and_unload().state_dict()
    if kind == "lora":
        assert torch.equal(expected["model.layers.0.self_attn.q_proj.weight"], weight + delta)

    merged = merge_and_unload(model, optimizer)
    found = merged.state_dict()
    assert set(found) == set(expected) and ng.report(merged).counts()["converted"] == 0
    for name, value in expected.items():
        assert type(found[name]) is Tensor and found[name].dtype is torch.float32
        assert torch.equal(found[name], value), name
    merged.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_a_merged_model_is_rounded_once() -> None:
    first, second = (prepared("lora", "narrow8") for _ in range(2))
    for each in (first, second):
        torch.manual_seed(2)
        train(*each)
    wide, narrow = merge_and_unload(*first), merge_and_unload(*second, dtype=torch.bfloat16)
    assert narrow.config.dtype is torch.bfloat16
    for name, value in wide.state_dict().items():
        assert torch.equal(narrow.state_dict()[name], value.to(torch.bfloat16)), name


@pytest.mark.parametrize("kind", KINDS)
def test_pefts_own_merge_into_codes_is_refused(kind: str) -> None:
    model, optimizer = prepared(kind, "narrow8")
    train(model, optimizer, 1)
    before = codes(model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ConversionError, match="narrowgauge.integrations.peft.merge_and_unload"):
            merge()
    assert all(torch.equal(value, before[name]) for name, value in codes(model).items())
    with pytest.raises(ConversionError, match="merge_and_unload"):
        ng.freeze(adapted(llama()), "fp8_current").merge_and_unload()  # a reference model with its adapter


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2"])
def test_stock_peft_reads_the_adapter_with_all_its_digits(recipe: str, tmp_path: Path) -> None:
    model, optimizer = prepared("dora", recipe)
    train(model, optimizer)
    save_adapter(model, tmp_path, optimizer)
    assert not list(tmp_path.glob("*.bin"))
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path)
    learned = dict(loaded.named_parameters())
    for name, p in trainable(model).items():
        assert torch.equal(learned[name], optimizer.full_values(p)), name
    # on the values of the codes it computes what the trained model does, but for the roundings of products
    onto_codes = peft.PeftModel.from_pretrained(ng.freeze(llama(), "fp8_current"), tmp_path, is_trainable=True)
    again, _ = ng.prepare(onto_codes, torch.optim.AdamW(trainable(onto_codes).values()), recipe)
    found, expected = (each.eval()(input_ids=IDS).logits.float() for each in (again, model))
    assert (found - expected).norm() <= 0.02 * expected.norm()


def test_frozen_after_the_adapter_nothing_trains() -> None:
    model = ng.freeze(adapted(llama()), "fp8_current")
    assert not trainable(model)


def test_what_is_no_peft_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found LlamaForCausalLM"):
        merge_and_unload(llama())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="get_peft_model"):
        save_adapter(llama(), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dtype=torch.int8"):
        merge_and_unload(adapted(llama()), dtype=torch.int8)
