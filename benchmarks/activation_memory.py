"""Bytes that the linear layers of the default GPT save for backward, under each recipe.

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

RECIPES = ("fp32", "bf16", "fp8_current", "fp8_delayed")
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


def measure(recipe: str, batch: int) -> int:
    """Bytes saved by the linear layers in one forward pass of the default GPT at its full context."""
    torch.manual_seed(0)
    model = GPT(preset(DEFAULT_PRESET))
    model, _ = ng.prepare(model, None, recipe)
    ids = torch.randint(0, model.config.vocab_size, (batch, model.config.context))
    counter = SavedByLinears(model)
    with counter.counting():
        _, loss = model(ids, ids)
        loss.backward()
    return counter.bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    saved = {recipe: measure(recipe, arguments.batch) for recipe in RECIPES}
    passed = True
    for recipe, size in saved.items():
        of_fp32, of_bf16 = size / saved["fp32"], size / saved["bf16"]
        ok = not recipe.startswith("fp8") or (of_fp32 <= ALLOWED_OF_FP32 and of_bf16 <= ALLOWED_OF_BF16)
        passed &= ok
        verdict = ("ok" if ok else "MISSED") if recipe.startswith("fp8") else ""
        print(f"{recipe:12} {size:13,} bytes  {of_fp32:.3f} x fp32  {of_bf16:.3f} x bf16  {verdict}".rstrip())
    if arguments.json:
        allowed = {"of_fp32": ALLOWED_OF_FP32, "of_bf16": ALLOWED_OF_BF16}
        common.write_result("activation_memory", {"bytes": saved, "batch": arguments.batch, "allowed": allowed})
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
