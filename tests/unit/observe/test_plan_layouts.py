"""A planned rank of a layout holds and sends what a simulated one does, which runs the real code."""

from __future__ import annotations

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.distributed import wire
from narrowgauge.distributed.simulation import simulated_ranks, without_values
from narrowgauge.models.config import GPTConfig
from narrowgauge.models.gpt import GPT
from narrowgauge.observe.ledger import SavedActivations
from narrowgauge.observe.plan_layout import Spread, blocks_of_stages, outline
from narrowgauge.observe.planner import STATE, plan

BATCH, TOKENS = 2, 32
GPT3 = GPTConfig(
    vocab_size=1000, layers=2, width=128, heads=4, context=32, activation="gelu", norm="layernorm", norm_bias=True,
    positions="learned", attention_bias=True, mlp_bias=True, tied_embeddings=True,
)  # fmt: skip
LLAMA = GPTConfig(vocab_size=512, layers=2, width=128, heads=4, kv_heads=2, context=32, ffn_width=256)


def simulated(config: GPTConfig, recipe: str, sizes: dict[str, int]) -> tuple[dict[str, int], int, dict[str, int]]:
    """Bytes held by role, saved for backward, and sent by role, of the first rank in a step."""
    with simulated_ranks(math.prod(sizes.values())):
        layout = ng.distributed.layout(**sizes, device_type="cpu")
        model = GPT(config, device="meta")
        ng.distributed.parallelize_tensor(model, layout, sequence=True)
        if layout.size("shard") > 1:
            ng.distributed.shard(model, layout, reshard_after_forward=True)
        else:
            ng.distributed.data_parallel(model, layout)
        with without_values(model, layout):
            model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
            ids = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
            with wire.counted() as count:
                with SavedActivations(model) as saved:
                    loss = model(ids, ids)[1]
                loss.backward()
                optimizer.step()
            held = dict(ng.ledger(model, optimizer).roles)
    return held, saved.bytes, {role: count.bytes_of(role) for role in ng.recipes.spec.COMM_ROLES}


@pytest.mark.parametrize(
    ("config", "recipe", "sizes"),
    [
        (GPT3, "narrow8", {"data": 4}),
        (GPT3, "fp32", {"shard": 4}),
        (LLAMA, "narrow8", {"data": 2, "shard": 2}),
        (GPT3, "fp8_lm_o2", {"shard": 4, "tensor": 2}),
        (LLAMA, "bf16", {"tensor": 2}),
        (LLAMA, "fp8_current", {"data": 2, "tensor": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_planned_rank_is_a_simulated_one(config, recipe, sizes):
    held, saved, sent = simulated(config, recipe, sizes)
    found = plan(config, recipe, Spread(**sizes), batch_size=BATCH, sequence_length=TOKENS)
    assert {role: size for role, size in found.bytes.items() if role in STATE} == held
    # buckets of replicas have bytes of their own, and delayed scales are sent beside codes
    within = {"grad_comm": 0.003, "activation_comm": 0.001}
    for role, size in sent.items():
        assert found.wire.get(role, 0) == pytest.approx(size, rel=within.get(role, 0.0))
    if "shard" not in sizes:  # else what is saved has gathered weights in it, which are freed
        assert found.bytes["activation"] == pytest.approx(saved, rel=0.02)


def tuned(model: GPTConfig, base: str = "narrow8") -> ng.Recipe:
    """As `tune` writes it: every layer by its name, all four kinds of choices, no two blocks alike."""
    found = ng.recipe(base).replace(name="tuned")
    choices = ("nvfp4", "fp8_rowwise", "mxfp8", None, "fp8_current")
    names = [each.name for each in outline(model).all_layers if each.name != "lm_head"]
    for at, name in enumerate(names):
        choice = choices[at % len(choices)]
        found = found.for_layers(name, "bf16" if choice is None else choice)
    return found


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (LLAMA, {"data": 2}),
        (LLAMA, {"shard": 4}),
        (GPT3, {"tensor": 2}),
        (LLAMA, {"data": 2, "tensor": 2}),
        (GPT3, {"shard": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_a_planned_rank_of_a_tuned_recipe_is_a_simulated_one(config, sizes):
    recipe = tuned(config)
    held, saved, sent = simulated(config, recipe, sizes)
    found = plan(config, recipe, Spread(**sizes), batch_size=BATCH, sequence_length=TOKENS)
    assert {role: size for role, size in found.bytes.items() if role in STATE} == held
    within = {"grad_comm": 0.003, "activation_comm": 0.001}
    for role, size in sent.items():
        assert found.wire.get(role, 0) == pytest.approx(size, rel=within.get(role, 0.0)), role
    if "shard" not in sizes:
        assert found.bytes["activation"] == pytest.approx(saved, rel=0.02)


def test_stages_hold_their_blocks_and_the_first_most_micro_batches():
    config = LLAMA.replace(layers=8)
    whole = plan(config, "bf16", batch_size=1, accumulation=8)
    staged = plan(config, "bf16", Spread(pipeline=4), batch_size=1, accumulation=8)
    assert sum(blocks_of_stages(config, 4)) == 8
    assert staged.bytes["param"] < whole.bytes["param"] / 2
    # four micro-batches of a quarter of the blocks
    assert staged.bytes["activation"] == pytest.approx(whole.bytes["activation"], rel=0.3)
    values = 1 * config.context * config.width
    assert staged.wire["pipeline_comm"] == 2 * 8 * values * 2  # there and back, 8 micro-batches, bfloat16


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"spread": {"tensor": 3}}, "heads: 4 does not divide into 3"),
        ({"spread": {"pipeline": 3}, "accumulation": 4}, "at most 2 stages"),
        ({"spread": {"pipeline": 2}, "accumulation": 1}, "raise accumulation to 2"),
        ({"spread": {"tensor": 4}, "sequence_length": 30}, "does not divide into parallel.tensor=4"),
        ({"spread": {"data": 0}}, "parallel.data=0: expected a whole number from 1"),
        ({"spread": {"shard": -4}}, "parallel.shard=-4"),
        ({"spread": {"data": 10**30}}, "to 16,777,216"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"accumulation": True}, "accumulation=True"),
        ({"sequence_length": 33}, "the model's context is 32"),
        ({"sequence_length": 10**20}, "sequence_length="),
        ({"checkpointing": "ful"}, "did you mean 'full'?"),
        ({"checkpointing": "selective"}, "expected none or full"),
        ({"recipe": "narow8"}, "did you mean 'narrow8'?"),
        ({"model": "gpt-175"}, "did you mean 'gpt-175b'?"),
        ({"model": 3}, "expected a preset's name"),
    ],
    ids=str,
)
def test_bad_input_says_what_would_fit(changes, error):
    arguments = {"model": GPT3, "recipe": "bf16", **changes}
    with pytest.raises(ng.NarrowgaugeError, match=error):
        plan(**{**arguments, "spread": Spread(**changes.get("spread", {}))})
