"""A GPT small enough to tune in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.train.config import TrainConfig


@pytest.fixture(scope="session")
def make_config(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[..., TrainConfig]:
    """A configuration of a tiny model, with fields changed; runs go into a folder of their own."""
    cache = tmp_path_factory.mktemp("cache")

    def make(**changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "model": {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64, "context": 32},
            "data": {"corpus": str(corpus / "*.txt"), "tokenizer": "bytes", "validation_fraction": 0.2},
            "batch_size": 2,
            "eval_batches": 2,
            "threads": 1,
            "cache_dir": str(cache),
            "runs_dir": str(tmp_path_factory.mktemp("runs")),
        }
        return TrainConfig.from_dict(values | changes)

    return make
