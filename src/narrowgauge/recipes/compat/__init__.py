"""Recipes from the configurations of other libraries: every option is honoured, or refused by name."""

from narrowgauge.recipes.compat.accelerate import from_accelerate
from narrowgauge.recipes.compat.torchao import from_torchao
from narrowgauge.recipes.compat.transformer_engine import from_transformer_engine

__all__ = ["from_accelerate", "from_torchao", "from_transformer_engine"]
