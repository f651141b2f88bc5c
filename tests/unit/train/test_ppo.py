"""PPO on tiny models: it learns, pays for leaving the reference, resumes bit for bit, and names what is wrong."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError, DataError, DivergenceError
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.train.log_probabilities import completion_log_probs
from narrowgauge.train.ppo import PPOConfig, PPOStatistics, PPOTrainer, ValueHead
from narrowgauge.train.scoring import padded

CONFIG = GPTConfig(vocab_size=12, layers=1, width=32, heads=2, context=16)
WANTED, END = 7, 0
PROMPTS = [[1 + i % 11, 1 + 3 * i % 11] + [5] * (i % 3) for i in range(16)]
FAST = PPOConfig(
    max_new_tokens=4, batch_size=16, epochs=2, micro_batch_size=16, learning_rate=2e-2, kl_coefficient=0.01
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_and_seeded(one_thread: None, seeded: None) -> None:
    """Applies to every test of this file."""


def wants_the_token(prompts: list[list[int]], completions: list[list[int]]) -> list[float]:
    return [sum(token == WANTED for token in completion) / 4 for completion in completions]


def policy_of(seed: int = 0, **fields: Any) -> GPT:
    return GPT(CONFIG.replace(**fields), generator=torch.Generator().manual_seed(seed))


def trainer_of(recipe: Any = "fp32", reward: Any = wants_the_token, **fields: Any) -> PPOTrainer:
    return PPOTrainer(policy_of(), reward=reward, recipe=recipe, config=FAST.replace(**fields), stop_ids=END)


def weights(trainer: PPOTrainer) -> list[torch.Tensor]:
    models = (trainer.policy.model, trainer.value.model)
    return [p.detach().float().clone() for model in models for p in model.parameters()]


@pytest.mark.parametrize("recipe", ["bf16", "narrow8"])
def test_the_policy_learns_to_emit_a_token(recipe: str) -> None:
    trainer = trainer_of(recipe)
    seen = list(trainer.train(PROMPTS, 15))
    first, last = seen[0], seen[-1]
    assert first.reward_mean < 0.3 and last.reward_mean > 0.8
    assert first.kl == first.kl_per_token == 0.0  # case 106
    assert last.kl > 1 and last.entropy < first.entropy - 0.5
    assert last.explained_variance > first.explained_variance
    assert sum(s.skipped + s.invalid_log_probs + s.dropped for s in seen) == 0
    assert all(math.isfinite(value) for s in seen for value in s.to_dict().values())
    stored = [p for p in trainer.reference.model.parameters() if isinstance(p.data, ng.QuantizedTensor)]
    assert len(stored) == (4 if recipe == "narrow8" else 0)  # the linear layers of the block


def test_the_kl_penalty_holds_the_policy() -> None:
    free, held = (list(trainer_of(kl_coefficient=beta).train(PROMPTS, 12))[-1] for beta in (0.0, 2.0))
    assert free.reward_mean > 0.8
    assert held.reward_mean < free.reward_mean - 0.3
    assert held.kl < free.kl / 5


def test_the_adaptive_coefficient_follows_the_target() -> None:
    trainer = trainer_of(kl_target=0.5, kl_horizon=16, kl_coefficient=0.1)
    seen = list(trainer.train(PROMPTS, 6))
    for before, after in zip(seen, seen[1:], strict=False):
        error = min(max(before.kl / 0.5 - 1, -0.2), 0.2)
        assert after.kl_coefficient == pytest.approx(before.kl_coefficient * (1 + error), rel=1e-6)
    assert seen[0].kl_coefficient == 0.1 and seen[1].kl_coefficient == pytest.approx(0.08)


@pytest.mark.parametrize("recipe", ["fp32", "narrow8", "fp8_lm_o2", "mxfp8"])
def test_the_first_ratio_is_exactly_1(recipe: str) -> None:
    trainer = trainer_of(recipe, epochs=1, micro_batch_size=4)
    statistics = trainer.step(PROMPTS)
    assert statistics.policy_kl == 0.0 and statistics.clip_fraction == 0.0
    assert statistics.policy_loss == pytest.approx(0.0, abs=1e-6)  # the mean of whitened advantages
    assert trainer.step(PROMPTS).policy_kl == 0.0  # also after an update
    # a second pass is another policy
    assert trainer_of(recipe, epochs=2).step(PROMPTS).policy_kl > 0.0


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_delayed", "fp8_lm_o2", "fp8_lm_o3"])
def test_a_policy_that_stays_where_it_was_keeps_a_kl_of_0(recipe: str) -> None:
    trainer = trainer_of(recipe, learning_rate=0.0, epochs=1)
    assert [s.kl for s in trainer.train(PROMPTS, 3)] == [0.0, 0.0, 0.0]  # while delayed scales go on
    if recipe == "fp8_delayed":
        layer = trainer.policy.model.get_submodule("blocks.0.mlp.down")
        assert int(layer.get_buffer("amax_rolls")) == 3 and float(layer.get_buffer("input_quant_scale")) != 1.0


def test_one_step_is_the_step_of_the_formulas() -> None:
    """The policy gradient of one minibatch by hand: the ratio is 1, its gradient that of the log-probability."""
    trainer = trainer_of(epochs=1, gamma=0.9, lam=0.8, kl_coefficient=0.0, max_grad_norm=1e9)
    plain, value = policy_of(), copy.deepcopy(trainer.value.model)
    completions = [[7, 3, END], [2, 7, 7, 7], [END]]
    prompts = [[1, 2], [3], [4, 5, 6]]
    rewards = wants_the_token(prompts, [c[:-1] if c[-1] == END else c for c in completions])
    ids, attention = padded([p + c for p, c in zip(prompts, completions, strict=True)], END, torch.device("cpu"))
    mask = attention.clone()
    for row, prompt in enumerate(prompts):
        mask[row, : len(prompt)] = False
    with torch.no_grad():
        values = value(ids, attention).logits[..., 0][:, :-1].tolist()
    flat: list[tuple[int, int, float]] = []
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        own = values[row][len(prompt) - 1 : len(prompt) - 1 + len(completion)]
        advantage = following = 0.0
        for t in reversed(range(len(completion))):
            reward = rewards[row] if t == len(completion) - 1 else 0.0
            advantage = reward + 0.9 * following - own[t] + 0.9 * 0.8 * advantage
            following = own[t]
            flat.append((row, len(prompt) - 1 + t, advantage))
    numbers = torch.tensor([a for _, _, a in flat])
    normalized = (numbers - numbers.mean()) / (numbers.var(unbiased=False) + 1e-8).sqrt()
    log_probs = completion_log_probs(plain(ids)[0], ids, mask)
    loss = -sum(a * log_probs[row, t] for (row, t, _), a in zip(flat, normalized, strict=True)) / len(flat)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    statistics = trainer.step(prompts, completions)
    assert statistics.policy_grad_norm == pytest.approx(float(norm), rel=1e-4)
    assert statistics.reward_mean == pytest.approx(sum(rewards) / 3)
    assert statistics.completion_tokens == pytest.approx(8 / 3) and statistics.ended == pytest.approx(2 / 3)
    torch.optim.AdamW(plain.parameters(), lr=2e-2, weight_decay=0.0).step()
    for mine, expected in zip(trainer.policy.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), expected.detach(), rtol=1e-3, atol=1e-4)


def test_micro_batches_change_the_gradient_only_by_rounding() -> None:
    completions = [[7, 3], [2, 7, 7, 7]] * 8
    norms = {
        size: trainer_of(epochs=1, micro_batch_size=size).step(PROMPTS, completions).policy_grad_norm
        for size in (16, 5, 1)
    }
    assert norms[5] == pytest.approx(norms[16], rel=1e-4) and norms[1] == pytest.approx(norms[16], rel=1e-4)


def test_minibatches_take_a_step_each() -> None:
    trainer = trainer_of(epochs=3, micro_batch_size=2, minibatch_size=4)
    steps = []
    trainer.policy.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    trainer.step(PROMPTS[:10])  # five micro-batches: minibatches of 4, 4 and 2 sequences
    assert len(steps) == 9


@pytest.mark.parametrize("recipe", ["bf16", "narrow8", "fp8_delayed"])
def test_runs_repeat_and_resume_bit_for_bit(recipe: str, tmp_path) -> None:
    fields = {"batch_size": 6, "micro_batch_size": 3, "epochs": 1, "kl_target": 1.0}
    whole = trainer_of(recipe, **fields)
    straight = list(whole.train(PROMPTS, 2))
    whole.save(tmp_path / "run")
    straight += whole.train(PROMPTS, 2)
    again = trainer_of(recipe, **fields)
    assert list(again.train(PROMPTS, 4)) == straight
    resumed = trainer_of(recipe, **fields)
    resumed.load(tmp_path / "run")
    assert list(resumed.train(PROMPTS, 2)) == straight[2:]
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))
    other = PPOTrainer(policy_of(1), reward=wants_the_token, recipe=recipe, config=whole.config, stop_ids=END)
    with pytest.raises(CheckpointError, match="reference is not that of the saved run"):
        other.load(tmp_path / "run")
    ng.save(tmp_path / "run" / "value", resumed.value.model, resumed.value.optimizer, steps=9)
    with pytest.raises(CheckpointError, match="policy is of step 2 and the value model of step 9"):
        resumed.load(tmp_path / "run")


def test_another_precision_of_the_reference_is_warned_of_with_its_floor() -> None:  # case 106
    trainer = PPOTrainer(
        policy_of(init_std=0.3),
        reward=wants_the_token,
        recipe="narrow8",
        config=FAST,
        stop_ids=END,
        reference_recipe="bf16",
    )
    with pytest.warns(UserWarning, match="'narrow8' and 'bf16'.*before any update their KL is .* nats a token"):
        first = trainer.step(PROMPTS)
    assert 0 < first.kl_floor < 0.1 and math.isfinite(first.kl)
    second = trainer.step(PROMPTS)  # and once only: warnings are errors
    assert second.kl_floor == first.kl_floor


def test_one_bad_reward_is_named_or_dropped() -> None:
    def bad(prompts, completions):
        found = wants_the_token(prompts, completions)
        return [math.nan if prompt == PROMPTS[3] else r for prompt, r in zip(prompts, found, strict=True)]

    def raises(prompts, completions):
        if PROMPTS[3] in prompts:
            raise KeyError("no answer")
        return wants_the_token(prompts, completions)

    with pytest.raises(DataError, match=r"sample 3 \(prompt of 2 tokens that begins with \[4, 10\].* has reward nan"):
        trainer_of(reward=bad).step(PROMPTS)
    with pytest.raises(
        DataError, match=r"reward of sample 3 \(prompt.*raised KeyError: 'no answer'.*bad_rewards='drop'"
    ):
        trainer_of(reward=raises).step(PROMPTS)
    for reward in (bad, raises, lambda p, c: [None if x == PROMPTS[3] else 1.0 for x in p]):
        statistics = trainer_of(reward=reward, bad_rewards="drop").step(PROMPTS)
        assert (statistics.dropped, statistics.samples) == (1, 15)
        assert math.isfinite(statistics.policy_loss)
    with pytest.raises(DataError, match="returned 1 numbers: expected 16"):
        trainer_of(reward=lambda p, c: [1.0]).step(PROMPTS)
    with pytest.raises(ConfigError, match="no reward"):
        trainer_of(reward=None).step(PROMPTS)


def test_a_step_without_any_reward_changes_nothing() -> None:
    trainer = trainer_of(reward=lambda p, c: [math.nan] * len(p), bad_rewards="drop")
    before = weights(trainer)
    statistics = trainer.step(PROMPTS)
    assert (statistics.dropped, statistics.samples, statistics.step) == (16, 0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))


def test_completions_may_be_empty_and_end_tokens_are_not_rewarded() -> None:
    seen: list[list[int]] = []

    def reward(prompts, completions):
        seen.extend(completions)
        return [1.0] * len(completions)

    statistics = trainer_of(reward=reward).step(PROMPTS[:4], [[], [END], [7, END], [7, 7]])
    assert seen == [[], [], [7], [7, 7]]
    assert statistics.completion_tokens == 5 / 4 and statistics.ended == 0.5
    assert math.isfinite(statistics.policy_loss) and math.isfinite(statistics.value_loss)
    nothing = trainer_of(reward=reward).step(PROMPTS[:2], [[], []])
    assert nothing.policy_loss == nothing.kl == 0.0 and nothing.skipped == 0


def test_completions_without_an_end_pay_for_it() -> None:
    statistics = trainer_of(missing_end_penalty=2.0).step(PROMPTS[:2], [[7, END], [7, 7]])
    assert statistics.reward_mean == pytest.approx((0.25 + 0.5 - 2.0) / 2)


def test_missing_log_probs_of_a_sampler_teach_nothing() -> None:  # case 108
    completions = [[7, 3, 2, END], [2, 7, 7, 7]]
    exact = trainer_of(epochs=1)
    ids, attention = padded([p + c for p, c in zip(PROMPTS[:2], completions, strict=True)], END, exact.device)
    with torch.no_grad():
        found = completion_log_probs(exact.policy.model(ids)[0], ids, attention).tolist()
    rows: list[list[float | None]] = [list(found[0][1:5]), list(found[1][2:6])]

    def after(sampler) -> tuple[PPOStatistics, list[torch.Tensor]]:
        trainer = trainer_of(epochs=1)
        return trainer.step(PROMPTS[:2], completions, sampler), weights(trainer)

    plain, expected = after(None)
    same, got = after(rows)
    assert same.invalid_log_probs == 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    broken = copy.deepcopy(rows)
    broken[0][1], broken[1][2] = math.nan, None
    statistics, one = after(broken)
    assert statistics.invalid_log_probs == 2 and math.isfinite(statistics.policy_loss)
    assert not all(torch.equal(a, b) for a, b in zip(one, expected, strict=True))
    none, _ = after([[None] * 4, []])
    assert none.invalid_log_probs == 8 and none.policy_loss == 0.0
    with pytest.raises(DataError, match="sample 0: 5 log-probabilities for a completion of 4 tokens"):
        after([[0.0] * 5, [0.0]])
    with pytest.raises(DataError, match="1 sampler_log_probs for 2 prompts"):
        after([[0.0]])
    with pytest.raises(ConfigError, match="sampler_log_probs without completions"):
        trainer_of().step(PROMPTS, None, rows)


def test_a_policy_that_is_nan_ends_the_run() -> None:
    trainer = trainer_of()
    with torch.no_grad():
        trainer.policy.model.norm.weight.fill_(math.nan)
    with pytest.raises(DivergenceError, match="not finite"):
        trainer.step(PROMPTS)


def test_steps_with_bad_gradients_are_skipped_and_counted() -> None:
    trainer = trainer_of(max_skips=5, epochs=2)
    trainer.value.model.head.bias.register_hook(lambda grad: grad * math.inf)
    before = [p.detach().clone() for p in trainer.value.model.parameters()]
    statistics = trainer.step(PROMPTS)
    assert statistics.skipped == 2
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.value.model.parameters(), strict=True))
    with pytest.raises(DivergenceError, match="the last 5 steps were skipped.*head.bias"):
        for _ in range(2):
            trainer.step(PROMPTS)


def test_reward_models_are_frozen_in_fp8_and_asked() -> None:
    reward = ValueHead(policy_of(3, layers=2), generator=torch.Generator().manual_seed(3))
    plain = copy.deepcopy(reward)
    trainer = trainer_of("narrow8", reward=reward)
    stored = [p for p in trainer.reward.model.parameters() if isinstance(p.data, ng.QuantizedTensor)]  # type: ignore[union-attr]
    assert len(stored) == 9  # four layers of two blocks, and the table
    statistics = trainer.step([[1, 2]], [[7, 7, END]])
    expected = float(plain(torch.tensor([[1, 2, 7, 7, END]])).logits[0, -1, 0].detach())
    assert statistics.reward_mean != expected
    assert statistics.reward_mean == pytest.approx(expected, abs=0.1)
    assert set(trainer.ledgers()) == {"policy", "value", "reference", "reward"}


def test_transformers_models_train_alike() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaForTokenClassification

    shape = LlamaConfig(
        vocab_size=12, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, bos_token_id=1, eos_token_id=END, pad_token_id=None, num_labels=1,
    )  # fmt: skip
    trainer = PPOTrainer(
        LlamaForCausalLM(shape), LlamaForTokenClassification(shape), LlamaForCausalLM(shape),
        LlamaForSequenceClassification(shape), recipe="narrow8", config=FAST.replace(epochs=1), stop_ids=END,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        statistics = trainer.step(PROMPTS)
    assert statistics.kl != 0  # the reference has weights of its own
    assert all(math.isfinite(value) for value in statistics.to_dict().values())
    assert statistics.invalid_log_probs == statistics.skipped == 0


def test_wrong_calls_are_named() -> None:
    trainer = trainer_of()
    with pytest.raises(DataError, match="no prompts"):
        trainer.step([])
    with pytest.raises(DataError, match="no prompts"):
        next(trainer.train([], 1))
    with pytest.raises(DataError, match="prompt 0 has 13 tokens: expected at most 12"):
        trainer.step([[1] * 13])
    with pytest.raises(DataError, match="3 completions for 2 prompts"):
        trainer.step(PROMPTS[:2], [[1], [2], [3]])
    assert trainer.steps == 0


def test_prompts_come_without_replacement() -> None:
    seen: list[list[int]] = []
    trainer = trainer_of(batch_size=6, reward=lambda p, c: (seen.extend(p), [0.0] * len(p))[1], epochs=1)
    list(trainer.train([[1 + i] for i in range(9)], 3))
    assert sorted(seen[:9]) == sorted(seen[9:]) == [[1 + i] for i in range(9)]


def test_values_are_of_their_own_model() -> None:
    with pytest.raises(ConfigError, match=r"value model's logits have shape \[16, .*, 12\]"):
        PPOTrainer(policy_of(), policy_of(1), reward=wants_the_token, recipe="fp32", config=FAST).step(PROMPTS)
    value: nn.Module = ValueHead(policy_of(1))
    trainer = PPOTrainer(policy_of(), value, reward=wants_the_token, recipe="fp32", config=FAST)
    assert trainer.step(PROMPTS).value_loss > 0
