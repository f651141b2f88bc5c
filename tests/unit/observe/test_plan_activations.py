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
from narrowgauge.observe.plan_layers import casts_of
from narrowgauge.observe.plan_layout import Spread
from narrowgauge.observe.plan_rank import Step, of_stage
from narrowgauge.observe.plan_search import best, family, largest
from narrowgauge.observe.plan_state import weight_codes
from narrowgauge.observe.planner import plan

BATCH, TOKENS = 2, 24
GPT3 = GPTConfig(
    vocab_size=301, layers=4, width=64, heads=4, context=32, activation="gelu", norm="layernorm", norm_bias=True,
    positions="learned", attention_bias=True, mlp_bias=True, tied_embeddings=True,
)  # fmt: skip
LLAMA = GPTConfig(vocab_size=256, layers=3, width=64, heads=4, kv_heads=2, context=32)


def really_saved(config: GPTConfig, recipe: str | ng.Recipe, checkpointing: bool = False) -> int:
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


def mixed(config: GPTConfig, base: str) -> ng.Recipe:
    """Blocks of three kinds: the first by itself, and two that take turns."""
    recipe = ng.recipe(base).replace(name="mixed")
    recipe = recipe.for_layers([f"blocks.{at}.mlp.down" for at in range(1, config.layers, 2)], "mxfp8")
    return recipe.for_layers("blocks.0.attention.qkv", "bf16").for_layers(f"*.{config.layers - 1}.mlp.*", "nvfp4")


@pytest.mark.parametrize("base", ["narrow8", "fp8_lm_o2", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_with_casts_of_their_own_save_what_autograd_saves(base, checkpointing):
    config = LLAMA.replace(layers=5)
    recipe = mixed(config, base)
    found = saved(config, recipe.resolve("cpu"), BATCH, TOKENS, checkpointing)
    assert found.total(config.layers) == really_saved(config, recipe, checkpointing)
    assert len({found.of_block(at) for at in range(1, 4)}) == 2
    assert found.of_block(1) == found.of_block(3)
    if not checkpointing:
        assert plan(config, recipe, batch_size=BATCH, sequence_length=TOKENS).bytes["activation"] == found.total(5)
        return
    whole = saved(config, recipe.resolve("cpu"), BATCH, TOKENS, False)
    planned = plan(config, recipe, batch_size=BATCH, sequence_length=TOKENS, checkpointing="full")
    most = max(whole.of_block(at)[0] for at in range(5))  # the block that keeps the most while it is recomputed
    assert planned.bytes["activation"] == found.total(5) + most


def test_a_stage_has_its_own_blocks():
    config = LLAMA.replace(layers=4)
    wide = ng.recipe("fp8_current").for_layers(["blocks.0.*", "blocks.1.*"], "bf16").replace(name="half")
    kept = {at: saved(config, wide.resolve("cpu"), 1, TOKENS, False).of_block(at)[0] for at in range(4)}
    assert kept[0] == kept[1] != kept[2] == kept[3]
    step = {"batch_size": 1, "sequence_length": TOKENS, "accumulation": 4}
    resolved = wide.resolve("cpu")
    first, last = (
        of_stage(config, resolved, Spread(pipeline=2), Step(1, TOKENS, 4, False),
                 saved(config, resolved, 1, TOKENS, False), at)
        for at in (0, 1)
    )  # fmt: skip
    whole = saved(config, resolved, 1, TOKENS, False)
    assert first.bytes["activation"] == 2 * (whole.first + kept[0] + kept[1])  # two micro-batches under way
    assert last.bytes["activation"] == kept[2] + kept[3] + whole.last
    assert plan(config, wide, Spread(pipeline=2), **step).recipe == "half"


def test_fields_of_layers_that_the_model_has_not_are_refused():
    recipe = ng.recipe("narrow8").for_layers("blocks.7.mlp.down", "mxfp8").replace(name="other")
    with pytest.raises(ng.NarrowgaugeError, match=r"'blocks.7.mlp.down', and a GPT of 3 blocks has no such layer"):
        plan(LLAMA, recipe)
    with pytest.raises(ng.NarrowgaugeError, match="layers of one model by name"):
        largest(recipe, 8, 80.0)
    with pytest.raises(ng.NarrowgaugeError, match="'blocks.7.mlp.down'"):
        best(LLAMA, recipe, 8, 80.0)
    mine = ng.recipe("narrow8").for_layers("blocks.1.mlp.down", "mxfp8")
    assert best(LLAMA, mine, 8, 80.0).fits


def test_codes_of_weights_are_what_does_not_follow_the_batch():
    recipe = ng.recipe("narrow8").resolve("cpu")
    one, two = (saved(LLAMA, recipe, batch, TOKENS, False) for batch in (1, 2))
    norms, scales = 2 * 4 * LLAMA.width, 4 * 4  # float32 copies of the norms' weights; a scale for each input
    codes = sum(weight_codes(each.layer, each.recipe) for each in casts_of(LLAMA, recipe).kinds[0])
    assert 2 * one.block - two.block == codes + norms + scales


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
