"""Optimizers that `prepare` takes, and parameters that change under them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from narrowgauge.errors import ConversionError
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.guard import parameters_of

SUPPORTED = (Adam, AdamW, SGD, Muon, LowPrecisionOptimizer)


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise ConversionError for an optimizer of another kind, or one that holds parameters of another model."""
    if not isinstance(optimizer, SUPPORTED):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        remedy = "pass None to prepare the model alone" if isinstance(optimizer, Optimizer) else "pass the optimizer"
        raise ConversionError(
            f"optimizer: expected torch.optim.AdamW, Adam, SGD or Muon, or one of narrowgauge.optim, found {kind}: "
            f"{remedy}"
        )
    owned = {id(p) for p in model.parameters()}
    for at, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            if id(p) not in owned:
                raise ConversionError(
                    f"optimizer: parameter {i} of group {at}, shape {list(p.shape)}, is none of the model's: build the "
                    "optimizer from model.parameters() after the last change to the model, and before prepare"
                )
            if p.is_meta:
                raise ConversionError(
                    f"optimizer: parameter {i} of group {at}, shape {list(p.shape)}, is on the meta device and has no "
                    "values, and whatever gives it some puts another one in its place: call "
                    "model.to_empty(device=...) and initialise or load the model, then build the optimizer and prepare"
                )


def replace_parameters(optimizer: Optimizer, replaced: Sequence[tuple[nn.Parameter, nn.Parameter]]) -> None:
    """Put new parameter objects in the place of old ones: the same groups, order and state."""
    new_of = {id(old): new for old, new in replaced}
    for group in optimizer.param_groups:
        group["params"][:] = [new_of.get(id(p), p) for p in group["params"]]
    for old, new in replaced:
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def match_state_dtypes(optimizer: Optimizer) -> None:
    """Bring moments that were made for a parameter in another dtype into the dtype that it has now."""
    for p in parameters_of(optimizer):
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == p.shape and value.is_floating_point() and value.ndim:
                optimizer.state[p][name] = value.to(p.dtype)
