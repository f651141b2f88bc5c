"""transformers' Trainer with weights, gradients and optimizer states in 8 bits. Needs `pip install narrowgauge[hf]`.

    python examples/huggingface_trainer.py [--recipe narrow8] [--steps 30] [--output runs/trainer]

Two lines differ from a script for transformers alone: the import of `Trainer`, and `recipe=`. The model is made small
and random, so that nothing is downloaded; `from_pretrained` works the same.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

import narrowgauge as ng
from narrowgauge.integrations.transformers import Trainer

TEXT = b"the same numbers on a laptop as on a graphics processor. " * 40


def make_model() -> LlamaForCausalLM:
    """A Llama of two blocks over single bytes."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def make_dataset(length: int = 64) -> list[dict[str, Tensor]]:
    """The text in pieces of `length` bytes."""
    ids = torch.tensor(list(TEXT))
    return [{"input_ids": part, "labels": part} for part in ids.split(length) if len(part) == length]


def train(recipe: str, steps: int, output: str, resume: bool = False) -> Trainer:
    """Train, with a checkpoint half-way; resume: from the last checkpoint in `output`."""
    set_seed(0)
    arguments = TrainingArguments(
        output, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=3e-3,
        logging_steps=10, save_steps=steps // 2, report_to=[], dataloader_pin_memory=torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(make_model(), arguments, train_dataset=make_dataset(), recipe=recipe)  # type: ignore[arg-type]
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="narrow8", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs/trainer", help="a directory for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint there")
    arguments = parser.parse_args()
    trainer = train(arguments.recipe, arguments.steps, arguments.output, arguments.resume)
    print(trainer.conversion_report)
    print(trainer.ledger)


if __name__ == "__main__":
    main()
