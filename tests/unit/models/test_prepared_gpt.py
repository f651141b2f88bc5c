"""What must hold for our own model once a recipe is on it."""

import functools

import pytest
import torch

import narrowgauge as ng
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.models.rope import rope_tables

CONFIG = GPTConfig(vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, context=32)
RECIPES = ["bf16", "fp8_current", "fp8_delayed"]


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator, losses = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        ids = torch.randint(0, 64, (2, 32), generator=generator)
        loss = model(ids, ids.roll(-1, 1))[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def prepared(config: GPTConfig, recipe: str, **kwargs) -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(config, generator=torch.Generator().manual_seed(0), **kwargs)
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)


def state_bytes(model: GPT) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_rotary_tables_stay_float32_through_conversion_and_casts(recipe):  # case 99
    model, _ = prepared(CONFIG, recipe)
    for moved in (model, model.to(torch.bfloat16)):
        assert torch.equal(moved.rope.cos, rope_tables(32, 8, 10000.0)[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_tied_head_stays_tied_and_is_stepped_once(recipe):  # case 55
    model, optimizer = prepared(CONFIG.replace(tied_embeddings=True), recipe)
    losses = train(model, optimizer, 3)
    assert model.lm_head.weight is model.embedding.weight
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(p is model.embedding.weight for p in listed) == 1
    reference, plain = prepared(CONFIG.replace(tied_embeddings=True), "fp32")
    assert losses == pytest.approx(train(reference, plain, 3), rel=0.01)


@pytest.mark.parametrize("recipe", RECIPES)
def test_converting_on_meta_then_materialising_trains_like_direct_construction(recipe):  # cases 102, 113
    direct, direct_optimizer = prepared(CONFIG, recipe)
    model = GPT(CONFIG, device="meta")
    ng.prepare(model, None, recipe)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            tensor.fill_(float("nan"))
    model.reset_parameters(torch.Generator().manual_seed(0))
    for name, tensor in direct.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ng.prepare(model, optimizer, recipe)
    assert train(model, optimizer, 3) == train(direct, direct_optimizer, 3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_generating_and_evaluating_between_steps_changes_nothing(recipe):  # case 13
    runs = []
    for interrupted in (False, True):
        model, optimizer = prepared(CONFIG, recipe)
        train(model, optimizer, 2)
        if interrupted:
            before = state_bytes(model)
            model.generate(torch.zeros(1, 1, dtype=torch.int64), 8, generator=torch.Generator().manual_seed(1))
            assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        runs.append((train(model, optimizer, 2), state_bytes(model)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], t) for name, t in runs[1][1].items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_changes_no_bit(recipe):  # cases 11, 67
    runs = []
    for recomputing in (False, True):
        model, optimizer = prepared(CONFIG, recipe, activation_checkpointing=recomputing)
        runs.append((train(model, optimizer, 3), state_bytes(model)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], t) for name, t in runs[1][1].items())


@pytest.mark.parametrize("recipe", [*RECIPES, "fp8_rowwise", "fp8_block", "mxfp8"])
def test_the_router_stays_float32_and_a_mixture_learns(recipe):
    config = CONFIG.replace(experts=4, swiglu_limit=7.0)
    model, optimizer = prepared(config, recipe)
    quantized = {row.name for row in ng.report(model) if row.module == "GroupedLinear" and row.status == "converted"}
    experts = {f"blocks.{n}.mlp.experts.{layer}" for n in range(2) for layer in ("gate_up", "down")}
    assert quantized == (set() if recipe == "bf16" else experts)
    seen = []
    for block in model.blocks:
        block.mlp.router.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    losses = train(model, optimizer, 3)
    assert set(seen) == {torch.float32} and len(seen) == 6
    reference, plain = prepared(config, "fp32")
    expected = train(reference, plain, 3)
    assert losses != expected and losses == pytest.approx(expected, rel=0.01)


@functools.cache
def learned(recipe: str) -> float:
    """The loss of a mixture after 25 steps on ids that each follow from the one before: from log 64 = 4.2 towards 0."""
    model, optimizer = prepared(CONFIG.replace(experts=4, experts_per_token=1), recipe)
    optimizer.param_groups[0]["lr"] = 1e-2
    generator, loss = torch.Generator().manual_seed(5), torch.tensor(torch.nan)
    for _ in range(25):
        ids = (torch.randint(0, 64, (4, 1), generator=generator) + 5 * torch.arange(33)) % 64
        loss = model(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_delayed", "fp8_rowwise", "fp8_block", "mxfp8"])
def test_a_mixture_learns_a_pattern_as_float32_does(recipe, one_thread):
    assert learned("fp32") < 0.2
    assert 0 < abs(learned(recipe) - learned("fp32")) < 0.02
