"""What frozen models hold: copies of it, and its bytes."""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge.tensors.quantized import QuantizedTensor

WEIGHTS = ["embedding.weight", "block.weight", "frozen.weight"]  # of stored.Tied


def bits_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of everything that the quantized parameters hold."""
    held = {}
    for name, p in model.named_parameters():
        if isinstance(p, QuantizedTensor):
            for part in ("codes", "dequant_scale", "amax"):
                value = getattr(p, part)
                held[f"{name}.{part}"] = (value.view(torch.uint8) if value.element_size() == 1 else value).clone()
    return held


def stored_bytes(model: nn.Module) -> int:
    """The memory behind all parameters, shared memory once."""
    parts = []
    for p in model.parameters():
        parts += [p.codes, p.dequant_scale, p.amax] if isinstance(p, QuantizedTensor) else [p.data]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())
