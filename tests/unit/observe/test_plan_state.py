"""Planned bytes of state are those that a real step keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.plan_state import bytes_of, moment_bytes, shapes_of
from narrowgauge.observe.planner import STATE, plan
from narrowgauge.optim.storage import encode
from narrowgauge.recipes.casts import MOMENTS, SCALED_FP16, TENSOR_E4M3, WIRE
from narrowgauge.recipes.spec import CastSpec

GPT3 = GPTConfig(
    vocab_size=301, layers=2, width=64, heads=4, context=32, activation="gelu", norm="layernorm", norm_bias=True,
    positions="learned", attention_bias=True, mlp_bias=True, tied_embeddings=True,
)  # fmt: skip
LLAMA = GPTConfig(vocab_size=256, layers=2, width=64, heads=4, kv_heads=2, context=32)
SPECS = [CastSpec(ng.formats.FP32), CastSpec(ng.formats.BF16), SCALED_FP16, TENSOR_E4M3, WIRE, *MOMENTS[8], *MOMENTS[4]]


@pytest.mark.parametrize("shape", [(64, 300), (7, 5), (129,), (3, 4, 50), (1, 1)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bytes_of_a_cast_are_those_of_the_tensor_that_it_makes(spec, shape):
    made = encode(torch.rand(shape), spec)
    assert moment_bytes(spec, shape) == made.nbytes
    if len(shape) < 3:
        assert bytes_of(spec, shape) == made.nbytes


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "bf16_pure", "fp8_lm_o2", "fp8_lm_o3", "narrow8", "narrow8_sr"])
@pytest.mark.parametrize("config", [GPT3, LLAMA], ids=["gpt", "llama"])
def test_state_of_a_gpt_is_the_ledgers_by_role(config, recipe):
    model = GPT(config)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(ids, ids)[1].backward()
    optimizer.step()
    found = plan(config, recipe, batch_size=1, sequence_length=8)
    assert {role: size for role, size in found.bytes.items() if role in STATE} == dict(
        ng.ledger(model, optimizer).roles
    )
    assert found.state == ng.ledger(model, optimizer).total
    assert found.parameters == model.parameter_count()


@pytest.mark.parametrize("fields", [{"embeddings": False}, {"min_state_size": 1}, {"moment_bits": 4}], ids=str)
def test_options_of_a_recipe_change_what_is_planned_as_what_is_kept(fields):
    recipe = ng.recipe("narrow8", **fields)
    model = GPT(GPT3)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    model(ids, ids)[1].backward()
    optimizer.step()
    assert plan(GPT3, recipe, sequence_length=8).state == ng.ledger(model, optimizer).total


def test_gradients_of_several_micro_batches_are_summed_in_float32():
    once, twice = (plan(LLAMA, "narrow8", sequence_length=8, accumulation=n) for n in (1, 2))
    assert twice.bytes["grad"] == 4 * twice.parameters
    assert once.bytes["grad"] < 1.1 * once.parameters


def test_frozen_parameters_keep_their_bytes_and_have_no_state():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 128, bias=False)).to("meta")
    model[0].requires_grad_(False)
    frozen, trained = shapes_of(model)
    assert (frozen.trains, trained.trains) == (False, True)
    found = plan(model, "narrow8", run=lambda m: m(torch.zeros(4, 64)).sum())
    assert found.bytes["param"] == 4 * 64 * 64 + 2 * 128 * 64  # float32 as it was, bfloat16
    assert found.bytes["master"] == 128 * 64
