"""TRL's DPOTrainer by a recipe, beside a reference frozen in FP8. Needs `pip install narrowgauge[hf]`.

    python examples/trl_dpo.py [--recipe narrow8] [--steps 20] [--output runs/dpo]

Two things differ from a script for TRL alone: the import of `DPOTrainer`, and `recipe=`. Tokenizer and model are those
of `trl_sft.py`: nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from transformers import set_seed
from trl import DPOConfig
from trl_sft import make_model, make_tokenizer

import narrowgauge as ng
from narrowgauge.integrations.trl import DPOTrainer


def make_dataset() -> Dataset:
    """Questions, each with a better and a worse answer."""
    return Dataset.from_list(
        [
            {"prompt": f"What is {a} + {b}? ", "chosen": str(a + b), "rejected": "I do not know"}
            for a in range(8)
            for b in range(8)
        ]
    )


def train(recipe: str, steps: int, output: str) -> DPOTrainer:
    """Train; without a reference model, the model as it is now is the reference."""
    set_seed(0)
    tokenizer = make_tokenizer()
    config = DPOConfig(
        output, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=5, beta=0.1,
        save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = DPOTrainer(
        make_model(tokenizer), args=config, train_dataset=make_dataset(), processing_class=tokenizer, recipe=recipe
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="narrow8", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/dpo")
    arguments = parser.parse_args()
    trainer = train(arguments.recipe, arguments.steps, arguments.output)
    print("the policy:", trainer.ledger, "the reference:", ng.ledger(trainer.ref_model), sep="\n")


if __name__ == "__main__":
    main()
