"""Optimizers with state in any format, and what surrounds their step: guard, loss scaling, clipping."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from narrowgauge.optim.clip import clip_grad_norm_
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.scaler import LossScaler

# public name -> the module of this package that defines it; loaded on first use
_HOMES = {
    "Adam": "adam",
    "AdamW": "adam",
    "EMA": "ema",
    "Lion": "lion",
    "LowPrecisionOptimizer": "base",
    "Muon": "muon",
    "SGD": "sgd",
    "StateFormats": "formats",
    "override": "overrides",
    "release_gradients": "release",
}

if TYPE_CHECKING:
    from narrowgauge.optim.adam import Adam, AdamW
    from narrowgauge.optim.base import LowPrecisionOptimizer
    from narrowgauge.optim.ema import EMA
    from narrowgauge.optim.formats import StateFormats
    from narrowgauge.optim.lion import Lion
    from narrowgauge.optim.muon import Muon
    from narrowgauge.optim.overrides import override
    from narrowgauge.optim.release import release_gradients
    from narrowgauge.optim.sgd import SGD

__all__ = [
    "EMA", "SGD", "Adam", "AdamW", "Lion", "LossScaler", "LowPrecisionOptimizer", "Muon", "StateFormats", "StepGuard",
    "clip_grad_norm_", "override", "release_gradients",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"narrowgauge.optim.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'narrowgauge.optim' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
