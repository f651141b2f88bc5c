"""prepare on models of the transformers library."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers

import narrowgauge as ng
from narrowgauge.layers.report import CONVERTED, KEPT

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")


def tiny_llama(positions: int = 64, **options: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


IDS = torch.arange(48).reshape(3, 16)


@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_the_tied_head_stays_tied_and_is_stepped_once(recipe: str) -> None:  # case 55
    model = tiny_llama()
    reference = copy.deepcopy(model)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ng.prepare(model, ours, recipe)
    scaler = ng.LossScaler(recipe, init_scale=256.0)

    def check() -> None:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert sum(p.numel() for p in model.parameters()) == 17568

    check()
    assert sum(p is model.lm_head.weight for p in ours.param_groups[0]["params"]) == 1
    for _ in range(3):
        scaler.scale(model(input_ids=IDS, labels=IDS).loss).backward()
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        reference(input_ids=IDS, labels=IDS).loss.backward()
        theirs.step()
        theirs.zero_grad()
    steps = {int(state["step"]) for state in ours.state.values()}
    assert steps == {3}
    moved = model.lm_head.weight.detach().float() - reference.lm_head.weight.detach()
    # Adam's steps are lr each: an update made twice would be 3e-3 away
    assert moved.abs().mean() < 5e-4
    model.to("cpu")
    check()
    model.load_state_dict(model.state_dict())
    check()
    rows = {row.name: row for row in ng.report(model)}
    quantizes = ng.recipe(recipe).quantizes_gemms
    assert rows["model.layers.0.self_attn.q_proj"].status == (CONVERTED if quantizes else KEPT)
    assert rows["lm_head"].status == KEPT and rows["model.embed_tokens"].status == KEPT


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
@pytest.mark.parametrize("cast", [False, True])
def test_rotary_frequencies_stay_float32(recipe: str, cast: bool, tmp_path) -> None:  # case 99
    model = tiny_llama(positions=2048)
    exact, plain = copy.deepcopy(model).eval(), copy.deepcopy(model).eval().to(torch.bfloat16)
    ng.prepare(model, None, recipe)
    model.eval()
    if cast:
        model.to(torch.bfloat16)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.dtype is torch.float32
    positions = torch.tensor([[257, 1857, 2047]])
    wanted = exact.model.rotary_emb(torch.zeros(1, 3, 32), positions)[0]
    found = rotary(torch.zeros(1, 3, 32), positions)[0]
    assert (found - wanted).abs().max() < 1e-2
    torch.save(model.state_dict(), tmp_path / "state.pt")
    model.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert rotary.inv_freq.dtype is torch.float32
    ids = torch.randint(0, 64, (1, 2048), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs, truth = (m(input_ids=ids).logits[0, -1].float() for m in (model, plain, exact))
    if recipe == "bf16":  # with FP8 products the casts, not the positions, are what differs
        assert (ours - truth).norm() < (theirs - truth).norm()


@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_initialisation_by_the_library_reaches_the_parameters(recipe: str) -> None:  # case 102
    model = tiny_llama(initializer_range=0.02)
    ng.prepare(model, None, recipe)
    for _ in range(2):
        for module in model.modules():
            for p in module.parameters(recurse=False):
                p._is_hf_initialized = False
            module._is_hf_initialized = False
        with torch.no_grad():
            model.model.embed_tokens.weight.zero_()
        model.initialize_weights()
        weight = model.model.embed_tokens.weight.detach().float()
        assert 0.019 <= weight.std() <= 0.021 and weight.mean().abs() < 1e-3


def test_signature_and_generation_work() -> None:
    model = tiny_llama()
    before = inspect.signature(model.forward)
    ng.prepare(model, None, "fp8_current")
    assert inspect.signature(model.forward) == before
    out = model.eval().generate(IDS[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 7)


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "fp8_delayed"])
def test_gradient_checkpointing_gives_the_same_gradients(recipe: str) -> None:  # cases 11, 67
    grads = []
    for recompute in (False, True):
        model = tiny_llama()
        ng.prepare(model, None, recipe)
        if recompute:
            model.activation_checkpointing_enable()
        model.train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        # in float16 the recomputed attention products are torch's own: another order of summation
        atol = 2**-10 * a.abs().max().item() if recipe == "fp16" else 0.0
        assert torch.allclose(a, b, rtol=0, atol=4 * atol)
