"""Recipes: what they are, those with names, and those made from the configurations of other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.recipes.compat import from_accelerate, from_torchao, from_transformer_engine

__all__ = ["from_accelerate", "from_torchao", "from_transformer_engine"]


def __getattr__(name: str) -> Any:
    # on first use: `import narrowgauge` loads this package, and few need them
    if name in __all__:
        from narrowgauge.recipes import compat

        return getattr(compat, name)
    raise AttributeError(f"module 'narrowgauge.recipes' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
