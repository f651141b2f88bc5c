"""TRL's GRPOTrainer by a recipe: rollouts, a reward function, a reference. Needs `pip install narrowgauge[hf]`.

    python examples/trl_grpo.py [--recipe narrow8] [--steps 20] [--output runs/grpo]

Two things differ from a script for TRL alone: the import of `GRPOTrainer`, and `recipe=`. Tokenizer and model are those
of `trl_sft.py`: nothing is downloaded. The reward is the share of digits in what the model writes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from datasets import Dataset
from transformers import set_seed
from trl import GRPOConfig
from trl_sft import make_model, make_tokenizer

import narrowgauge as ng
from narrowgauge.integrations.trl import GRPOTrainer


def share_of_digits(completions: list[str], **_: Any) -> list[float]:
    """A reward in [0, 1] for each completion."""
    return [sum(each.isdigit() for each in text) / max(len(text), 1) for text in completions]


def train(recipe: str, steps: int, output: str) -> GRPOTrainer:
    """Train; with beta, a copy of the model as it is now is the reference, frozen by the recipe."""
    set_seed(0)
    tokenizer = make_tokenizer()
    prompts = Dataset.from_list([{"prompt": f"Write {n} digits: "} for n in range(10)])
    config = GRPOConfig(
        output, max_steps=steps, per_device_train_batch_size=16, num_generations=8, max_completion_length=8,
        learning_rate=3e-3, beta=0.02, logging_steps=5, save_strategy="no", report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        make_model(tokenizer), args=config, reward_funcs=share_of_digits, train_dataset=prompts,
        processing_class=tokenizer, recipe=recipe,
    )  # fmt: skip
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="narrow8", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/grpo")
    arguments = parser.parse_args()
    trainer = train(arguments.recipe, arguments.steps, arguments.output)
    print("the policy:", trainer.ledger, "the reference:", ng.ledger(trainer.ref_model), sep="\n")


if __name__ == "__main__":
    main()
