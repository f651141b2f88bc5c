"""Adapters beside frozen weights in FP8, such as PEFT's: merging them into the codes is refused."""

from __future__ import annotations

from typing import Any

from torch import nn

from narrowgauge.errors import ConversionError
from narrowgauge.tensors.quantized import QuantizedTensor


def refuse_merging(model: nn.Module) -> None:
    """Let `merge` of adapter layers raise ConversionError where the layer below stores its weight in 8 bits.

    An in-place addition would round what was learned into the codes. An adapter layer is known by its `base_layer`, as
    PEFT calls it, and its `merge`.
    """
    for module in model.modules():
        below = getattr(module, "base_layer", None)
        if not isinstance(below, nn.Module) or not callable(getattr(type(module), "merge", None)):
            continue
        if any(isinstance(p.data, QuantizedTensor) for p in below.parameters()):
            module.merge = _refused  # type: ignore[assignment]


def allow_merging(model: nn.Module) -> None:
    """Undo `refuse_merging`."""
    for module in model.modules():
        if module.__dict__.get("merge") is _refused:
            del module.merge


def _refused(*args: Any, **kwargs: Any) -> None:
    raise ConversionError(
        "expected plain weights to merge an adapter into, found some in 8 bits, into whose codes it would be rounded: "
        "call narrowgauge.integrations.peft.merge_and_unload(model, optimizer), which merges into their values"
    )
