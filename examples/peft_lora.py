"""LoRA on a base whose weights are frozen in FP8. Needs `pip install narrowgauge[hf]`.

    python examples/peft_lora.py [--recipe narrow8] [--steps 30] [--output runs/lora]

Two lines differ from a script for PEFT alone: `ng.freeze` before `get_peft_model`, and `ng.prepare` after it. The base
is made small and random, so that nothing is downloaded; `from_pretrained` works the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.integrations.peft import merge_and_unload, save_adapter

TEXT = b"the same numbers on a laptop as on a graphics processor. " * 12


def make_base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(recipe: str, steps: int, output: str, dora: bool = False) -> tuple[list[float], Any]:
    """Losses, and the merged model; output gets `adapter/`, which stock PEFT loads, and `merged/`."""
    base = ng.freeze(make_base(), "fp8_current")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=16, lora_alpha=32, target_modules=targets, use_dora=dora))
    optimizer: Any = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    model, optimizer = ng.prepare(model, optimizer, recipe)
    ids = torch.tensor(list(TEXT)).split(64)[:8]
    batch, losses = torch.stack(ids), []
    for _ in range(steps):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(ng.ledger(model, optimizer))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    save_adapter(model, Path(output) / "adapter", optimizer)
    merged: Any = merge_and_unload(model, optimizer, dtype=torch.bfloat16)
    merged.save_pretrained(Path(output) / "merged")
    return losses, merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="narrow8", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", default="runs/lora", help="a directory for adapter/ and merged/")
    parser.add_argument("--dora", action="store_true")
    arguments = parser.parse_args()
    train(arguments.recipe, arguments.steps, arguments.output, arguments.dora)


if __name__ == "__main__":
    main()
