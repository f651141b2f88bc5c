"""What a run leaves to look at: its journal, and bytes per role."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.observe.journal import Journal
    from narrowgauge.observe.journal_writer import JournalWriter
    from narrowgauge.observe.observation import Observation
    from narrowgauge.observe.run_header import header

# public name -> its module; loaded on first use, so that importing the package stays cheap
_HOMES = {"Journal": "journal", "JournalWriter": "journal_writer", "Observation": "observation", "header": "run_header"}

__all__ = ["Journal", "JournalWriter", "Observation", "header"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'narrowgauge.observe' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"narrowgauge.observe.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
