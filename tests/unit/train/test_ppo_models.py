"""How PPO calls models, samples from them, and freezes the ones that it only asks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError, DataError, DivergenceError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.train.frozen_models import reference_of
from narrowgauge.train.log_probabilities import token_log_probs, vocabulary_kl
from narrowgauge.train.ppo_config import PPOConfig
from narrowgauge.train.ppo_models import prepared
from narrowgauge.train.sampling import sample_completions, until_stop
from narrowgauge.train.scoring import checked_prompts, logits_of, padded, scores_of, turn_off_dropout, values_of
from narrowgauge.train.value_head import ValueHead

CONFIG = GPTConfig(vocab_size=48, layers=2, width=64, heads=4, context=24, init_std=0.2)


@pytest.fixture(autouse=True)
def small_and_seeded(one_thread: None, seeded: None) -> None:
    """Applies to every test of this file."""


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, initializer_range=0.3, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=24, initializer_range=0.3)
    )


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ids_of(batch: int = 4, tokens: int = 12) -> torch.Tensor:
    return torch.randint(0, 48, (batch, tokens))


def of_all_recipes() -> list[str]:
    return ng.recipe_names()


@pytest.mark.filterwarnings("ignore:recipe 'narrow8_sr':UserWarning", "ignore:recipe 'bf16_pure':UserWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", of_all_recipes())
def test_a_reference_with_the_policys_weights_has_its_log_probabilities_bit_for_bit(recipe: str, tied: bool) -> None:
    # case 106
    policy = GPT(CONFIG.replace(tied_embeddings=tied))
    models = prepared(
        policy, None, None, None, ng.recipe(recipe).resolve("cpu"), ng.recipe(recipe).resolve("cpu"), PPOConfig(), None
    )
    ids, attention = ids_of(), torch.ones(4, 12, dtype=torch.bool)
    assert models.reference.matches
    with torch.no_grad():
        ours = logits_of(models.policy.model.eval(), ids, attention)
        with models.reference.region():
            theirs = logits_of(models.reference.model, ids, attention)
    assert torch.equal(ours, theirs)
    assert (vocabulary_kl(ours, theirs) == 0).all()
    spec = ng.recipe(recipe).weight
    codes = [p for p in models.reference.model.parameters() if isinstance(p.data, ng.QuantizedTensor)]
    if spec is not None and spec.format.bits == 8 and not spec.is_delayed:
        assert sum(p.data.spec == spec for p in codes) >= 8  # four layers of each block, a byte a value
    assert not any(p.requires_grad for p in models.reference.model.parameters())


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2", "fp8_current"])
def test_the_same_holds_for_transformers_models_and_references_loaded_apart(llama: nn.Module, recipe: str) -> None:
    policy, reference = copy.deepcopy(llama), copy.deepcopy(llama)
    reference.requires_grad_(False)
    resolved = ng.recipe(recipe).resolve("cpu")
    models = prepared(policy, None, reference, None, resolved, resolved, PPOConfig(), None)
    ids, attention = ids_of(), torch.arange(12)[None] < torch.tensor([12, 3, 7, 12])[:, None]
    with torch.no_grad():
        ours = logits_of(models.policy.model.eval(), ids, attention)
        theirs = logits_of(models.reference.model, ids, attention)
    assert torch.equal(ours[attention], theirs[attention])


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_lm_o3"])
def test_a_reference_follows_the_delayed_scales_of_the_policy(recipe: str) -> None:  # case 106
    resolved = ng.recipe(recipe).resolve("cpu")
    config = PPOConfig(learning_rate=0.0)
    models = prepared(GPT(CONFIG), None, None, None, resolved, resolved, config, None)
    ids, attention = ids_of(), torch.ones(4, 12, dtype=torch.bool)
    policy, optimizer = models.policy.model, models.policy.optimizer
    for _ in range(20):  # more than fp8_lm_o3 begins with current scaling for
        logits_of(policy.train(), ids, attention).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        theirs = logits_of(models.reference.model, ids, attention)
        assert torch.equal(theirs, logits_of(policy.eval(), ids, attention))


@pytest.mark.usefixtures("quiet")
def test_a_reference_of_another_precision_is_known_as_such() -> None:
    policy = GPT(CONFIG)
    narrow, wide = (ng.recipe(name).resolve("cpu") for name in ("narrow8", "bf16"))
    assert not reference_of(copy.deepcopy(policy), policy, wide, narrow).matches
    frozen = ng.freeze(copy.deepcopy(policy), narrow)
    assert not reference_of(frozen, policy, narrow, narrow).matches


@pytest.mark.parametrize("recipe", ["fp8_current", "narrow8", "fp8_lm_o2"])
def test_reference_weights_copied_into_the_policy_are_seen_at_once(recipe: str) -> None:  # case 109
    policy, other = GPT(CONFIG), GPT(CONFIG)
    apart = copy.deepcopy(other)
    policy, _ = ng.prepare(policy, torch.optim.AdamW(policy.parameters()), recipe)
    apart, _ = ng.prepare(apart, torch.optim.AdamW(apart.parameters()), recipe)
    ids = ids_of()
    labels = ids.roll(-1, 1)

    def log_probs(model: nn.Module) -> torch.Tensor:
        return token_log_probs(model(ids)[0], labels)

    with torch.no_grad(), ng.autocast(recipe, "cpu"):
        before, of_two = log_probs(policy), log_probs(apart)
        kept = {name: p.detach().clone() for name, p in policy.named_parameters()}
        for p, new in zip(policy.parameters(), apart.parameters(), strict=True):
            p.data.copy_(new)
        swapped = log_probs(policy)
        for name, p in policy.named_parameters():
            p.data.copy_(kept[name])
        again = log_probs(policy)
    assert (before - of_two).abs().mean() > 0.1
    torch.testing.assert_close((before - swapped).mean(), (before - of_two).mean(), rtol=0, atol=1e-6)
    assert torch.equal(before, again)


def test_value_heads_give_float32_numbers_of_the_last_hidden_state(llama: nn.Module) -> None:
    ids, attention = ids_of(), torch.ones(4, 12, dtype=torch.bool)
    gpt = GPT(CONFIG.replace(tied_embeddings=True))
    hidden = gpt.norm(gpt.run_blocks(gpt.embed(ids), 0, 12)[0])
    head = ValueHead(copy.deepcopy(gpt), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(ids).logits.dtype is torch.float32
    torch.testing.assert_close(head(ids).logits, hidden @ head.head.weight.T + head.head.bias)
    assert "backbone.lm_head.weight" not in head.state_dict()
    assert head.to(torch.float64).backbone.embedding.weight.dtype is torch.float64  # moves retie nothing
    on_llama = ValueHead(copy.deepcopy(llama))
    expected = llama.model(ids).last_hidden_state @ on_llama.head.weight.T
    torch.testing.assert_close(values_of(on_llama, ids, attention), expected[..., 0])
    again = ValueHead(copy.deepcopy(gpt), generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.head.weight, head.head.weight.float())
    with pytest.raises(ConfigError, match="does not say how wide.*pass width="):
        ValueHead(nn.Linear(3, 3))


class Fixed(nn.Module):
    """Returns what it was given."""

    def __init__(self, logits) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, input_ids, attention_mask):
        return self


def test_scores_are_those_of_the_last_token_or_of_the_sequence() -> None:
    ids, attention = padded([[1, 2, 3], [4]], 0, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0]] and attention.tolist() == [[True] * 3, [True, False, False]]
    per_token = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert scores_of(Fixed(per_token), ids, attention).tolist() == [3.0, 4.0]
    assert scores_of(Fixed(per_token[..., None]), ids, attention).tolist() == [3.0, 4.0]
    assert scores_of(Fixed(torch.tensor([[7.0], [8.0]])), ids, attention).tolist() == [7.0, 8.0]
    with pytest.raises(ConfigError, match=r"reward model's logits have shape \[2, 3, 5\]"):
        scores_of(Fixed(torch.zeros(2, 3, 5)), ids, attention)
    with pytest.raises(ConfigError, match=r"value model's logits have shape \[2, 1\].*ValueHead"):
        values_of(Fixed(torch.zeros(2, 1)), ids, attention)
    with pytest.raises(ConfigError, match="Fixed returned a Fixed: expected `.logits`"):
        logits_of(Fixed(None), ids, attention)


def test_prompts_that_cannot_be_continued_are_named() -> None:
    model = GPT(CONFIG)
    assert checked_prompts([[1, 2], torch.tensor([3])], model, 4, "error") == [[1, 2], [3]]
    with pytest.raises(DataError, match="prompt 1 has 21 tokens: expected at most 20, as the context is 24"):
        checked_prompts([[1], [1] * 21], model, 4, "error")
    assert checked_prompts([list(range(21))], model, 4, "truncate") == [list(range(1, 21))]
    with pytest.raises(DataError, match="prompt 0 is empty"):
        checked_prompts([[]], model, 4, "error")
    with pytest.raises(DataError, match="prompt 0: token id 48, expected 0 to 47"):
        checked_prompts([[48]], model, 4, "error")
    with pytest.raises(ConfigError, match="max_new_tokens=24 in a context of 24"):
        checked_prompts([[1]], model, 24, "error")


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15, 16]]


@pytest.mark.parametrize("kind", ["gpt", "llama", "gpt2", "no cache"])
def test_greedy_samples_are_those_of_each_prompt_alone(kind: str, llama: nn.Module, gpt2: nn.Module) -> None:
    model = {"gpt": GPT(CONFIG), "llama": llama, "gpt2": gpt2, "no cache": NoCache(llama)}[kind]
    settings = {"stop_ids": [], "pad_id": 0, "temperature": 1e-4, "generator": torch.Generator().manual_seed(0)}
    found = sample_completions(model, PROMPTS, 6, **settings)  # type: ignore[arg-type]
    for prompt, completion in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(6):
            with torch.no_grad():
                logits = logits_of(model.eval(), ids, torch.ones_like(ids, dtype=torch.bool))
            ids = torch.cat((ids, logits[:, -1:].argmax(-1)), 1)
        assert completion == ids[0, len(prompt) :].tolist()
    stop = found[2][2]
    stopped = sample_completions(model, PROMPTS, 6, **(settings | {"stop_ids": [stop], "batch_size": 2}))  # type: ignore[arg-type]
    assert stopped == [until_stop(row, [stop]) for row in found]


class NoCache(nn.Module):
    """A model without anything but ids and mask."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor):
        return self.inner(input_ids=input_ids, attention_mask=attention_mask)


def test_samples_follow_the_probabilities_at_the_temperature_and_repeat_for_a_seed() -> None:
    model = GPT(CONFIG.replace(vocab_size=5))
    prompts = [[1, 2]] * 4000

    def drawn() -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        return sample_completions(
            model, prompts, 1, stop_ids=[], pad_id=0, temperature=0.5, generator=generator, batch_size=1000
        )  # fmt: skip

    found = torch.tensor(drawn())[:, 0].bincount(minlength=5) / 4000
    expected = (model(torch.tensor([[1, 2]]))[0][0, -1] / 0.5).softmax(-1).detach()
    assert (found - expected).abs().max() < 4 * (0.25 / 4000) ** 0.5
    assert drawn() == drawn()


def test_a_policy_that_is_nan_is_an_error_and_modes_come_back() -> None:
    model = GPT(CONFIG).train()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(DivergenceError, match="logits are not finite"):
        sample_completions(model, [[1]], 2, stop_ids=[], pad_id=0, generator=torch.Generator())
    assert model.training


def test_dropout_is_turned_off(gpt2: nn.Module) -> None:
    model = copy.deepcopy(gpt2)
    ids = ids_of()
    turn_off_dropout(model)
    with torch.no_grad():
        assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)


def test_models_that_do_not_fit_are_refused() -> None:
    recipe, config = ng.recipe("narrow8"), PPOConfig()
    model = GPT(CONFIG)
    with pytest.raises(ConfigError, match="policy and reference share parameters"):
        prepared(model, None, model, None, recipe, recipe, config, None)
    with pytest.raises(ConfigError, match="policy and value model share parameters"):
        prepared(model, ValueHead(model), None, None, recipe, recipe, config, None)
    with pytest.raises(ConfigError, match="without a schedule"):
        prepared(GPT(CONFIG), None, None, None, recipe.switch_at(3, recipe), recipe, config, None)
    model = GPT(CONFIG)
    ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    with pytest.raises(ConfigError, match="policy is prepared already"):
        prepared(model, ValueHead(GPT(CONFIG)), GPT(CONFIG), None, recipe, recipe, config, None)
