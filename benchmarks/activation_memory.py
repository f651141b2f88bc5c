"""Bytes that the linear layers of the default GPT save for backward: torch's own layers, and FP8 recipes.

    python benchmarks/activation_memory.py [--batch 16] [--json]

Counts what autograd packs while a linear layer runs: every storage once, parameters and copies or codes of the weight
not at all. Everything is counted from real storages; nothing is computed from a formula.
"""

from __future__ import annotations

import argparse
from contextlib import contextmanager

import common
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import DEFAULT_PRESET, preset

TORCH = {"torch fp32": False, "torch bf16 autocast": True}  # name -> whether under autocast
RECIPES = ("fp8_current", "fp8_delayed")
ALLOWED_OF_FP32, ALLOWED_OF_BF16 = 0.30, 0.55


class SavedByLinears:
    """Counts, between the hooks of every linear layer, the bytes that autograd saves for backward."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._held: dict[int, torch.Tensor] = {}  # held, so that no address is seen twice
        self._weight_shape: torch.Size | None = None
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(self._leave)

    @contextmanager
    def counting(self):
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        self._weight_shape = module.weight.shape

    def _leave(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        self._weight_shape = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._weight_shape is None or tensor.shape in (self._weight_shape, self._weight_shape[::-1]):
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters and storage.data_ptr() not in self._held:
            self._held[storage.data_ptr()] = tensor
            self.bytes += storage.nbytes()
        return tensor


def measure(contender: str, batch: int) -> int:
    """Bytes saved by the linear layers in one forward pass of the default GPT at its full context."""
    torch.manual_seed(0)
    model = GPT(preset(DEFAULT_PRESET))
    if contender in RECIPES:
        model, _ = ng.prepare(model, None, contender)
    ids = torch.randint(0, model.config.vocab_size, (batch, model.config.context))
    counter = SavedByLinears(model)
    with counter.counting(), torch.autocast("cpu", torch.bfloat16, enabled=TORCH.get(contender, False)):
        _, loss = model(ids, ids)
        loss.backward()
    return counter.bytes


def figures(saved: dict[str, int]) -> dict[str, dict[str, float]]:
    """The FP8 recipes' shares of torch's bytes, as the README's table reads them."""
    goals = dict(zip(TORCH, (ALLOWED_OF_FP32, ALLOWED_OF_BF16), strict=True))
    return {
        f"bytes saved by linear layers: {recipe} / {wide}": {"measured": saved[recipe] / saved[wide], "at_most": goal}
        for recipe in RECIPES
        for wide, goal in goals.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    saved = {contender: measure(contender, arguments.batch) for contender in (*TORCH, *RECIPES)}
    found = figures(saved)
    for contender, size in saved.items():
        print(f"{contender:20} {size:13,} bytes")
    for name, figure in found.items():
        outcome = "ok" if figure["measured"] <= figure["at_most"] else "MISSED"
        print(f"{name:65} {figure['measured']:.3f}  <= {figure['at_most']:.2f}  {outcome}")
    if arguments.json:
        print(common.write_result("activation_memory", {"bytes": saved, "batch": arguments.batch, "figures": found}))
    return int(any(figure["measured"] > figure["at_most"] for figure in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
