"""PPO in 8 bits, whole and tiny: a policy learns to count upwards, since counting is what it gets a reward for.

python examples/ppo.py [--recipe narrow8] [--steps 40]

Four models of one shape: the policy and a value model on a copy of it are trained; another copy, the reference, holds
the policy near its beginning; the reward is a function here, and may be a fourth model.
"""

from __future__ import annotations

import argparse

import torch

import narrowgauge as ng
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.train.ppo import PPOConfig, PPOTrainer

NUMBERS, END = 11, 0  # ids 1 to 11, and what ends a completion
SHAPE = GPTConfig(vocab_size=NUMBERS + 1, layers=1, width=32, heads=2, context=16)
PROMPTS = [[number] for number in range(1, NUMBERS - 3)]


def counts_upwards(prompts: list[list[int]], completions: list[list[int]]) -> list[float]:
    """The share of four tokens that are one more than the token before; completions come without their end token."""
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        whole = prompt[-1:] + completion
        rewards.append(sum(b == a + 1 for a, b in zip(whole, completion, strict=False)) / 4)
    return rewards


def train(recipe: str, steps: int) -> list[float]:
    """Train by `recipe`; return the mean reward of every step."""
    policy = GPT(SHAPE, generator=torch.Generator().manual_seed(0))
    config = PPOConfig(
        max_new_tokens=4, batch_size=48, micro_batch_size=48, epochs=3, learning_rate=1e-2, kl_coefficient=0.005
    )  # fmt: skip
    trainer = PPOTrainer(policy, reward=counts_upwards, recipe=recipe, config=config, stop_ids=[END])

    rewards = []
    for statistics in trainer.train(PROMPTS, steps):
        rewards.append(statistics.reward_mean)
        if statistics.step % 10 == 0 or statistics.step == 1:
            print(
                f"step {statistics.step:3}  reward {statistics.reward_mean:.3f}  kl {statistics.kl:6.3f}  "
                f"entropy {statistics.entropy:.3f}  clipped {statistics.clip_fraction:.3f}"
            )
    for name, ledger in trainer.ledgers().items():
        print(f"{name:9} {ledger.per_parameter:.2f} bytes a parameter, gradients not counted")
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="narrow8", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    train(arguments.recipe, arguments.steps)


if __name__ == "__main__":
    main()
