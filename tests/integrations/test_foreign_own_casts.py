"""Casts of single layers, the guard and an observation on transformers' Conv1D and experts, and on adapters of PEFT."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers

import narrowgauge as ng
from narrowgauge.numerics.measure import sqnr_db
from narrowgauge.observe import Observation
from narrowgauge.train.guard import Guard
from narrowgauge.train.sections import GuardConfig

F = ng.formats
IDS = torch.arange(16).reshape(2, 8)
WIDER = ng.CastSpec(F.E5M2)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=64, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def step(model: Any, optimizer: Any) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bad(layer: str) -> dict[str, Any]:
    return {layer: {"input": {"amax": 1.0, "flushed": 1.0, "sqnr_db": 0.0}}}


def test_conv1d_has_casts_of_its_own_the_guard_widens_them_and_they_are_measured_as_they_are() -> None:
    layer = "transformer.h.0.mlp.c_fc"
    recipe = ng.recipe("fp8_current").for_layers("*.mlp.c_fc", input=WIDER)
    model = gpt2()
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    assert "'*.mlp.c_fc'" in ng.report(model)[layer].reason and "E5M2 x E4M3FN" in ng.report(model)[layer].reason
    module = model.get_submodule(layer)
    seen: list[torch.Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().float()))
    weight = module.weight.detach().clone()
    observation = Observation(model, optimizer, every=1)
    with observation.step(1):
        step(model, optimizer)
    handle.remove()
    found = observation.read()
    assert found is not None
    for role, values, spec in (("input", seen[0], WIDER), ("weight", weight, ng.CastSpec(F.E4M3FN))):
        expected = float(sqnr_db(values, ng.quantize(values, spec).dequantize()))
        assert found.layers[layer][role]["sqnr_db"] == pytest.approx(expected, abs=1e-3)
        assert found.layers[layer][role]["amax"] == float(values.abs().max())
    guard = Guard(model, optimizer, recipe, GuardConfig(mode="act", every=1, confirm=1))
    told = [d for at in (2, 3) for d in guard.end(at, 1.0, layers=bad(layer))]
    assert [(d.layer, d.before, d.after) for d in told] == [
        (layer, str(WIDER), str(ng.CastSpec(F.E5M2, ng.Block(1, 32), ng.CURRENT_POW2))),
        (layer, str(ng.CastSpec(F.E5M2, ng.Block(1, 32), ng.CURRENT_POW2)), "the compute dtype"),
    ]
    assert "BF16 x E4M3FN" in ng.report(model)[layer].reason
    step(model, optimizer)


def test_stacked_experts_are_one_layer_all_of_which_go_together() -> None:
    layer = "model.layers.0.mlp.experts"
    recipe = ng.recipe("fp8_delayed").for_layers("*.experts", grad_output=ng.CastSpec(F.E5M2)).for_layers(
        "*.experts.0.*", input=None
    )  # fmt: skip
    model = mixtral()
    with pytest.warns(UserWarning, match=r"'\*.experts.0.\*' matches no linear layer"):
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    experts = model.get_submodule(layer)
    step(model, optimizer)
    history = experts.get_buffer("weight_amax_history").clone()
    assert "gate_up_proj and down_proj of 4 experts" in ng.report(model)[layer].reason
    guard = Guard(model, optimizer, recipe, GuardConfig(mode="act", every=1, confirm=1))
    (decision,) = guard.end(2, 1.0, layers=bad(layer))
    assert decision.after == str(ng.CastSpec(F.E4M3FN)) and "input" not in experts.delayed_rules
    assert torch.equal(experts.get_buffer("weight_amax_history"), history) and bool((history != 0).any())
    step(model, optimizer)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of transformers, by peft
def test_adapters_are_seen_and_the_frozen_base_has_no_gradients() -> None:
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=16, target_modules=["c_fc"], fan_in_fan_out=True))
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = ng.prepare(model, torch.optim.AdamW(trained, lr=1e-3), "narrow8")
    observation = Observation(model, optimizer, every=1)
    with observation.step(1):
        step(model, optimizer)
    found = observation.read()
    assert found is not None
    have_gradients = {name for name, roles in found.layers.items() if "grad" in roles}
    assert len(have_gradients) == 2 and all(".lora_" in name for name in have_gradients)
    assert any(name.endswith("c_fc.base_layer") and "weight" in roles for name, roles in found.layers.items())
