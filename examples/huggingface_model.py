"""A Hugging Face Llama trained in FP8 and saved the usual way. Needs `pip install narrowgauge[hf]`.

    python examples/huggingface_model.py [--recipe fp8_current] [--steps 20] [--save DIR]

The model is made small and random, so that nothing is downloaded; `from_pretrained` works the same.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng


def make_model() -> LlamaForCausalLM:
    """A Llama of two blocks over single bytes."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(recipe: str, steps: int, save: str | None = None) -> list[float]:
    """Learn to repeat a sentence; return the loss of every step."""
    torch.manual_seed(0)
    text = b"the same numbers on a laptop as on a graphics processor. " * 2
    ids = torch.tensor(list(text))[None, :96]
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = ng.prepare(model, optimizer, recipe)
    print(ng.report(model))
    losses = []
    for step in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        ng.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step:3}  loss {losses[-1]:.4f}")
    if save:
        model.save_pretrained(save)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fp8_current", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="a directory to save the trained model in")
    arguments = parser.parse_args()
    train(arguments.recipe, arguments.steps, arguments.save)


if __name__ == "__main__":
    main()
