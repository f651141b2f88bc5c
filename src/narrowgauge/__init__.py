"""narrowgauge: train neural networks in low precision, the same numbers on a CPU as on a GPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import (
    CheckpointError,
    ConfigError,
    ConversionError,
    DataError,
    DivergenceError,
    NarrowgaugeError,
    ProcessError,
    RecipeError,
)

# not lazy: they tell torch.load(weights_only=True) that files may hold QuantizedTensors and PackedTensors
from narrowgauge.tensors import packed as _packed  # noqa: F401
from narrowgauge.tensors import quantized as _quantized  # noqa: F401

__version__ = "0.1.0"

# public name -> the module that defines it; loaded on first use, so that importing the package stays cheap
_HOMES = {
    "CastSpec": "recipes.spec",
    "PER_TENSOR": "numerics.granularity",
    "PER_ROW": "numerics.granularity",
    "PER_COLUMN": "numerics.granularity",
    "Block": "numerics.granularity",
    "Recipe": "recipes.spec",
    "DelayedScaling": "recipes.library",
    "recipe": "recipes.library",
    "recipe_names": "recipes.library",
    "CURRENT": "numerics.scaling",
    "CURRENT_POW2": "numerics.scaling",
    "TENSOR_POW2": "numerics.scaling",
    "E8M0_UP": "numerics.scaling",
    "E8M0_FLOOR": "numerics.scaling",
    "NVFP4": "numerics.scaling",
    "ULP": "numerics.scaling",
    "NONE": "numerics.scaling",
    "Delayed": "numerics.scaling",
    "NEAREST_EVEN": "numerics.rounding",
    "STOCHASTIC": "numerics.rounding",
    "NONZERO": "numerics.rounding",
    "LINEAR": "numerics.companding",
    "SQUARE_ROOT": "numerics.companding",
    "DYNAMIC": "numerics.companding",
    "RANGE_EXPANSION": "numerics.companding",
    "Hadamard": "numerics.hadamard",
    "QuantizedTensor": "tensors.quantized",
    "quantize": "tensors.quantized",
    "ConversionReport": "layers.report",
    "convert": "layers.convert",
    "report": "layers.report",
    "freeze": "layers.freeze",
    "prepare": "preparation",  # a module of its own name would hide the function once it is loaded
    "autocast": "layers.autocast",
    "accumulate": "layers.gradients",
    "LossScaler": "optim.scaler",
    "clip_grad_norm_": "optim.clip",
    "save": "train.checkpoint",
    "load": "train.checkpoint",
    "load_weights": "train.weights",
    "ledger": "observe.ledger",
}
_MODULES = {
    "distributed": "distributed",
    "formats": "numerics.formats",
    "observe": "observe",
    "optim": "optim",
    "recipes": "recipes",
}

if TYPE_CHECKING:  # so that type checkers and editors see the names
    from narrowgauge import distributed, observe, optim, recipes
    from narrowgauge.layers.autocast import autocast
    from narrowgauge.layers.convert import convert
    from narrowgauge.layers.freeze import freeze
    from narrowgauge.layers.gradients import accumulate
    from narrowgauge.layers.report import ConversionReport, report
    from narrowgauge.numerics import formats
    from narrowgauge.numerics.companding import DYNAMIC, LINEAR, RANGE_EXPANSION, SQUARE_ROOT
    from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
    from narrowgauge.numerics.hadamard import Hadamard
    from narrowgauge.numerics.rounding import NEAREST_EVEN, NONZERO, STOCHASTIC
    from narrowgauge.numerics.scaling import (
        CURRENT,
        CURRENT_POW2,
        E8M0_FLOOR,
        E8M0_UP,
        NONE,
        NVFP4,
        TENSOR_POW2,
        ULP,
        Delayed,
    )
    from narrowgauge.observe.ledger import ledger
    from narrowgauge.optim.clip import clip_grad_norm_
    from narrowgauge.optim.scaler import LossScaler
    from narrowgauge.preparation import prepare
    from narrowgauge.recipes.library import DelayedScaling, recipe, recipe_names
    from narrowgauge.recipes.spec import CastSpec, Recipe
    from narrowgauge.tensors.quantized import QuantizedTensor, quantize
    from narrowgauge.train.checkpoint import load, save
    from narrowgauge.train.weights import load_weights

__all__ = [
    "Block", "CURRENT", "CURRENT_POW2", "CastSpec", "CheckpointError", "ConfigError", "ConversionError",
    "ConversionReport", "DYNAMIC", "DataError", "Delayed", "DelayedScaling", "DivergenceError", "E8M0_FLOOR",
    "E8M0_UP", "Hadamard", "LINEAR", "LossScaler", "NEAREST_EVEN", "NONE", "NONZERO", "NVFP4", "NarrowgaugeError",
    "PER_COLUMN", "PER_ROW", "PER_TENSOR", "ProcessError", "QuantizedTensor", "RANGE_EXPANSION", "Recipe",
    "RecipeError", "SQUARE_ROOT", "STOCHASTIC", "TENSOR_POW2", "ULP", "accumulate", "autocast",
    "clip_grad_norm_", "convert", "distributed", "formats", "freeze", "ledger", "load", "load_weights", "observe",
    "optim", "prepare", "quantize", "recipe", "recipe_names", "recipes", "report", "save",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"narrowgauge.{_MODULES[name]}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"narrowgauge.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'narrowgauge' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
