"""Inputs that reach every class of float32 for a format, and the golden files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics import reference
from narrowgauge.numerics.formats import Format

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


@pytest.fixture
def golden() -> Callable[[str], Any]:
    """The content of a file under tests/golden."""
    return lambda name: json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.fixture
def float32_classes() -> Callable[[Format], Tensor]:
    """Every value of a small format, every tie between two, the neighbours of all these, and the special values."""
    return _classes


def _classes(fmt: Format) -> Tensor:
    magnitudes = sorted({reference.float_of(reference.decode(c, fmt)) for c in range(1 << min(fmt.bits, 8))})
    values = np.array([m for m in magnitudes if 0 <= m < float("inf")], np.float32)
    spacing = values[-1] - values[-2]
    edges = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1] + spacing * np.float32([0.5, 1, 2])])
    bits = edges.astype(np.float32).view(np.int32)
    bits = np.concatenate([bits - 1, bits, bits + 1, bits + 2**12])
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000]
    bits = np.concatenate([np.maximum(bits, 0), np.array(special, np.int32)])
    x = np.concatenate([bits, bits | np.int32(-0x80000000)])
    if fmt.has_nan:
        x = np.concatenate([x, np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000], np.int32)])
    return torch.from_numpy(x).view(torch.float32)
