"""accelerate's loop with weights, gradients and optimizer states in 8 bits. Needs `pip install narrowgauge[hf]`.

    python examples/accelerate_loop.py [--recipe narrow8] [--steps 8] [--output runs/accelerate]
    accelerate launch examples/accelerate_loop.py

Two lines differ from a script for accelerate alone: the import of `Accelerator`, and `recipe=`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.integrations.accelerate import Accelerator

TEXT = b"the same numbers on a laptop as on a graphics processor. " * 80


def make_model() -> nn.Module:
    """Says the next byte from the last one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 256))


def train(recipe: str, steps: int, output: str = "", resume: bool = False, cpu: bool = False) -> list[float]:
    """Losses of the steps; output: where the state is saved at the end; resume: go on from there."""
    accelerator = Accelerator(recipe=recipe, gradient_accumulation_steps=2, cpu=cpu)
    model: Any = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor(list(TEXT))
    pieces = [part for part in ids.split(33) if len(part) == 33][: 16 * steps]
    loader: Any = DataLoader(pieces, batch_size=8)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(output)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    if output:
        accelerator.save_state(output)
    accelerator.print(ng.report(model))
    accelerator.print(accelerator.ledger)
    accelerator.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="narrow8", help=f"one of {', '.join(ng.recipe_names())}")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output", default="runs/accelerate", help="a directory for the state")
    parser.add_argument("--resume", action="store_true", help="go on from what is there")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    train(arguments.recipe, arguments.steps, arguments.output, arguments.resume, arguments.cpu)


if __name__ == "__main__":
    main()
