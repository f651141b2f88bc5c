"""PPO on a file, beside its loop: learning rates, the rows that a step takes, and what reward functions are told."""

from __future__ import annotations

import asyncio
import math
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from narrowgauge.errors import DataError
from narrowgauge.integrations.finetune_config import PPOConfig
from narrowgauge.integrations.finetune_ppo import PPORun, _numbers, _order, prompt_ids
from narrowgauge.integrations.rewards import checked


def run_of(steps_taken: int = 0, rows: list[dict[str, Any]] | None = None, **values: Any) -> PPORun:
    """A run without models: its trainer notes the prompts that it is given."""
    run = PPORun.__new__(PPORun)
    given = {"learning_rate": 0.5, "warmup_steps": 0, "steps": 10, "schedule": "linear", "batch_size": 2,
             "accumulation": 1, "seed": 3, "reward": ["one", "two"]}  # fmt: skip
    run.config = SimpleNamespace(**{**given, **values})  # type: ignore[assignment]
    run.rows = rows or []
    run.prompts = [[at] for at in range(len(run.rows))]
    run._chosen = []
    groups = [SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.0}, {"lr": 0.0}])) for _ in range(2)]

    def step(prompts: list[list[int]]) -> list[int]:
        run.trainer.steps += 1
        return [row for (row,) in prompts]

    run.trainer = SimpleNamespace(steps=steps_taken, policy=groups[0], value=groups[1], step=step)  # type: ignore
    return run


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ("linear", [0.25, 0.5, 0.5, 0.375, 0.25, 0.125]),
        ("cosine", [0.25, 0.5] + [0.25 * (1 + math.cos(math.pi * at / 4)) for at in range(4)]),
    ],
)
def test_rates_rise_over_the_warmup_and_fall_by_the_schedule(schedule: str, expected: list[float]) -> None:
    runs = [run_of(step, schedule=schedule, warmup_steps=2, steps=6) for step in range(6)]
    assert [run.rate() for run in runs] == pytest.approx(expected, rel=1e-12)
    runs[3]._set_rate()
    both = (runs[3].trainer.policy, runs[3].trainer.value)
    assert [group["lr"] for trained in both for group in trained.optimizer.param_groups] == [runs[3].rate()] * 4


def test_rows_come_in_an_order_of_their_own_for_each_pass_and_go_on_where_they_were() -> None:
    first, second = (list(islice(_order(7, 3), at, at + 7)) for at in (0, 7))
    assert sorted(first) == sorted(second) == list(range(7)) and first != second
    assert list(islice(_order(7, 4), 7)) != first
    rows = [{"prompt": f"{at}"} for at in range(7)]
    whole = list(run_of(rows=rows, accumulation=2).steps())
    assert len(whole) == 10 and [row for step in whole for row in step] == list(islice(_order(7, 3), 40))
    assert list(run_of(6, rows=rows, accumulation=2).steps()) == whole[6:]


def test_functions_are_told_the_rows_and_their_rewards_are_added() -> None:
    told: list[dict[str, Any]] = []

    def one(**columns: Any) -> list[float | None]:
        told.append(columns)
        return [1.0, None]

    def two(completions: list[Any], **_: Any) -> list[float | None]:
        return [0.5, 4.5] if len(completions) == 2 else []

    run = run_of(rows=[{"prompt": "p0", "answer": 0}, {"prompt": "p1", "answer": 1}, {"prompt": "p2", "answer": 2}])
    run._rewards = [checked(one, "one"), checked(two, "two")]
    run._chosen = [2, 0]
    run.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: f"{ids} {skip_special_tokens}")
    assert run._score([[9], [8]], [[5, 6], [7]]) == [1.5, 4.5]
    assert told == [{
        "prompts": ["p2", "p0"], "answer": [2, 0], "completions": ["[5, 6] True", "[7] True"],
        "completion_ids": [[5, 6], [7]],
    }]  # fmt: skip
    run.rows = [{"prompt": [{"role": "user", "content": "q"}]}] * 3
    assert run._score([[9], [8]], [[5], [7]]) == [1.5, 4.5]
    assert told[-1]["completions"][1] == [{"role": "assistant", "content": "[7] True"}]
    run._rewards = [checked(lambda **_: [None, 1.0], "one")] * 2
    with pytest.raises(DataError, match="completion 0 of the batch has no reward: one, two gave None"):
        run._score([[9], [8]], [[5], [7]])


def test_a_reward_function_may_be_a_coroutine() -> None:
    async def slow(completions: list[Any], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text)) for text in completions]

    run = run_of(rows=[{"prompt": "p"}] * 2, reward=["slow"])
    run._rewards, run._chosen = [checked(slow, "slow")], [0, 1]
    run.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "x" * len(ids))
    assert run._score([[9], [8]], [[5, 6], [7]]) == [2.0, 1.0]


def test_every_number_of_the_loop_is_the_commands() -> None:
    config = PPOConfig(
        model="m", data="d", output="o", reward_model="r", max_completion=11, temperature=0.7, batch_size=3,
        accumulation=4, mini_batch_size=6, passes=2, learning_rate=0.01, weight_decay=0.02, clip=0.5, gamma=0.9,
        gae_lambda=0.8, clip_range=0.3, kl=0.07, seed=5,
    )  # fmt: skip
    found = _numbers(config)
    assert (found.batch_size, found.micro_batch_size, found.minibatch_size, found.epochs) == (12, 3, 6, 2)
    assert (found.max_new_tokens, found.temperature, found.learning_rate, found.weight_decay) == (11, 0.7, 0.01, 0.02)
    assert (found.max_grad_norm, found.gamma, found.lam, found.clip_range) == (0.5, 0.9, 0.8, 0.3)
    assert (found.kl_coefficient, found.seed) == (0.07, 5)


def test_a_prompt_of_messages_ends_where_the_answer_begins() -> None:
    class Tokenizer:
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

        def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
            return messages[0]["content"] + ">" * add_generation_prompt + "!" * tokenize

    assert prompt_ids("a", Tokenizer()) == [1, ord("a")]
    assert prompt_ids([{"role": "user", "content": "a"}], Tokenizer()) == [ord("a"), ord(">")]
    with pytest.raises(DataError, match="expected at least one token"):
        prompt_ids("", lambda text: {"input_ids": []})
