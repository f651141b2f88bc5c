"""Small tensors, the same for every run."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_and_seeded(one_thread: None, seeded: None) -> None:
    """Applies to every test of this folder."""
