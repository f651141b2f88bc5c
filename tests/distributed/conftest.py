"""What tests of whole runs on several processes share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SEQUENCES = 4  # of a micro-batch, over all ranks that read different ones


@pytest.fixture
def make_values(tmp_path: Path, corpus: Path) -> Any:
    """The values of a small run's configuration, on a layout."""

    def make(name: str, parallel: dict[str, Any], **changes: Any) -> dict[str, Any]:
        batch_ranks = parallel.get("data", 1) * parallel.get("shard", 1)
        values: dict[str, Any] = {
            "model": {"layers": 2, "width": 64, "heads": 2, "kv_heads": 2, "ffn_width": 96, "context": 32},
            "data": {"corpus": str(corpus / "*.txt"), "tokenizer": "bytes", "validation_fraction": 0.2},
            "optimizer": {"lr": 1e-3},
            "schedule": {"warmup_steps": 2},
            "parallel": parallel,
            "batch_size": SEQUENCES // max(batch_ranks, 1),
            "accumulation": 2,
            "steps": 4,
            "eval_every": 2,
            "eval_batches": 2,
            "save_every": 2,
            "statistics_every": 3,
            "sample_tokens": 4,
            "threads": 1,
            "cache_dir": str(tmp_path / "cache"),
            "runs_dir": str(tmp_path / "runs"),
            "name": name,
        }
        return values | changes

    return make
