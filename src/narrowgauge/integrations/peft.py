"""PEFT's adapters on a base that `narrowgauge.freeze` stores in FP8. Needs `pip install narrowgauge[hf]`.

    base = ng.freeze(base, "fp8_current")
    model = peft.get_peft_model(base, peft.LoraConfig(...))
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model, optimizer = ng.prepare(model, optimizer, "narrow8")

That much needs nothing of this module. What it has is the way out: the adapter as PEFT saves it, and a merged model,
both with all the digits that training has given them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from narrowgauge.errors import ConfigError
from narrowgauge.integrations.requirements import require
from narrowgauge.layers.adapters import allow_merging
from narrowgauge.layers.convert import convert
from narrowgauge.layers.parameters import replace
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.replace import current
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.tensors.values import values_of

require("peft", "0.17", "narrowgauge[hf]")

import peft  # noqa: E402


def save_adapter(
    model: peft.PeftModel,
    directory: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    **kwargs: Any,
) -> None:
    """Write the adapter as `model.save_pretrained` does, in float32 with the digits that the optimizer holds.

    optimizer: the one that trains it; without it parameters are taken as they are. kwargs: as save_pretrained takes
    them. Raises ConfigError for what is no PeftModel.
    """
    _check(model)
    full = _full_values(model, optimizer)
    learned = {name: full[p] for name, p in model.named_parameters(remove_duplicate=False) if p in full}
    # of the base nothing is written, and codes are no values
    rest = {name: value for name, value in model.state_dict().items() if not isinstance(value, QuantizedTensor)}
    model.save_pretrained(str(directory), state_dict=rest | learned, **kwargs)


def merge_and_unload(
    model: peft.PeftModel, optimizer: torch.optim.Optimizer | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The base model with the adapter merged in: plain weights, the values of the FP8 codes plus what was learned.

    The sum is taken in float32, then rounded once to `dtype`; it is no QuantizedTensor, and `save_pretrained` writes it
    for any tool. Takes the place of `model`, whose base is no longer in 8 bits afterwards; 4 bytes a value are needed
    meanwhile. It computes as a plain model does. optimizer: the one that trained the adapter, which has all
    its digits; without it parameters are taken as they are.

    Raises ConfigError for what is no PeftModel and for a dtype that is no floating one.
    """
    _check(model)
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: expected torch.float32, torch.bfloat16 or torch.float16")
    for p, value in _full_values(model, optimizer).items():
        replace(model, p, nn.Parameter(value, requires_grad=p.requires_grad))
    for p in list(model.parameters()):
        if isinstance(p.data, QuantizedTensor):
            replace(model, p, nn.Parameter(_values(p), requires_grad=False))
    allow_merging(model)
    merged: nn.Module = model.merge_and_unload()  # type: ignore[operator]
    convert(merged, "fp32")  # so that nothing of the recipe goes into files
    vars(merged).pop("_narrowgauge_notes", None)
    for p in list(merged.parameters()):
        if p.dtype is not dtype and p.is_floating_point():
            replace(merged, p, nn.Parameter(p.detach().to(dtype), requires_grad=p.requires_grad))
    config = getattr(merged, "config", None)
    if config is not None:
        config.dtype = dtype  # which save_pretrained writes, and from_pretrained goes by
    return merged


def _full_values(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[nn.Parameter, torch.Tensor]:
    """float32 values of the parameters that train, with all digits that there are."""
    optimizer = current(optimizer)
    held = set(optimizer.parameters()) if isinstance(optimizer, LowPrecisionOptimizer) else set()
    found = {}
    for p in model.parameters():
        if p.requires_grad and p.is_floating_point():
            value = optimizer.full_values(p) if p in held else _values(p)  # type: ignore[union-attr]
            found[p] = value.detach().float().clone()
    return found


def _values(p: nn.Parameter) -> torch.Tensor:
    value = p.detach()
    return (values_of(value) if isinstance(value, QuantizedTensor) else value).float()


def _check(model: Any) -> None:
    if not isinstance(model, peft.PeftModel):
        raise ConfigError(
            f"expected what peft.get_peft_model returned, found {type(model).__name__}: pass model.module of a wrapper"
        )
