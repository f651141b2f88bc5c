"""Planned bytes of activations are those that autograd saves in a real forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.ledger import SavedActivations
from narrowgauge.observe.plan_activations import extrapolated, saved
from narrowgauge.observe.plan_search import family
from narrowgauge.observe.planner import plan

BATCH, TOKENS = 2, 24
GPT3 = GPTConfig(
    vocab_size=301, layers=4, width=64, heads=4, context=32, activation="gelu", norm="layernorm", norm_bias=True,
    positions="learned", attention_bias=True, mlp_bias=True, tied_embeddings=True,
)  # fmt: skip
LLAMA = GPTConfig(vocab_size=256, layers=3, width=64, heads=4, kv_heads=2, context=32)


def really_saved(config: GPTConfig, recipe: str, checkpointing: bool = False) -> int:
    model = GPT(config, activation_checkpointing=checkpointing)
    model, _ = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    with SavedActivations(model) as counter:
        model(ids, ids)[1].backward()
    return counter.bytes


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_lm_o2", "narrow8", "fp8_rowwise", "mxfp4"])
@pytest.mark.parametrize("config", [GPT3, LLAMA], ids=["gpt", "llama"])
def test_what_a_gpt_saves_is_what_autograd_saves(config, recipe):
    found = plan(config, recipe, batch_size=BATCH, sequence_length=TOKENS)
    assert found.bytes["activation"] == really_saved(config, recipe)


@pytest.mark.parametrize(("recipe", "within"), [("fp8_lm_o3", 0.001), ("nvfp4", 0.02)])
def test_where_the_planner_takes_a_mean_it_is_near(recipe, within):
    found = plan(GPT3, recipe, batch_size=BATCH, sequence_length=TOKENS).bytes["activation"]
    assert found == pytest.approx(really_saved(GPT3, recipe), rel=within)


def test_a_checkpointed_model_saves_what_goes_between_blocks_and_one_block():
    config, recipe = LLAMA, ng.recipe("narrow8").resolve("cpu")
    whole, part = (saved(config, recipe, BATCH, TOKENS, checkpointing) for checkpointing in (False, True))
    assert part.total(config.layers) == really_saved(config, "narrow8", checkpointing=True)
    found = plan(config, recipe, batch_size=BATCH, sequence_length=TOKENS, checkpointing="full")
    assert found.bytes["activation"] == part.total(config.layers) + whole.block


def test_codes_of_weights_are_what_does_not_follow_the_batch():
    recipe = ng.recipe("narrow8").resolve("cpu")
    one, two = (saved(LLAMA, recipe, batch, TOKENS, False) for batch in (1, 2))
    norms, scales = 2 * 4 * LLAMA.width, 4 * 4  # float32 copies of the norms' weights; a scale for each input
    assert 2 * one.block - two.block == one.weights + norms + scales


def test_a_family_is_extrapolated_to_the_byte():
    recipe = ng.recipe("fp8_lm_o2").resolve("cpu")
    members = {blocks: family(blocks, 8) for blocks in (1, 2, 3, 6)}
    found = {blocks: saved(config, recipe, 1, 16, False) for blocks, config in members.items()}
    assert extrapolated(6, {blocks: found[blocks] for blocks in (1, 2, 3)}) == found[6]


def test_any_model_is_planned_from_a_function_that_runs_it():
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    x = torch.zeros(8, 64)
    model, _ = ng.prepare(make(), None, "bf16")
    with SavedActivations(model) as counter:
        model(x).float().sum().backward()
    with torch.device("meta"):
        planned = make()
    found = plan(planned, "bf16", run=lambda m: m(torch.zeros(8, 64)).float().sum())
    assert found.bytes["activation"] == counter.bytes


def test_what_depends_on_values_is_refused():
    with pytest.raises(ng.NarrowgaugeError, match="dense model"):
        plan(LLAMA.replace(experts=4), "bf16")
    model = nn.Linear(64, 64, device="meta")
    with pytest.raises(ng.NarrowgaugeError, match=r"no config.*expected run="):
        plan(model, "bf16")
    with pytest.raises(ng.NarrowgaugeError, match="does not run without values"):
        plan(model, "bf16", run=lambda m: m(torch.zeros(4, 63)).sum())
