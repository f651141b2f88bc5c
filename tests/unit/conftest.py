"""What unit tests of several parts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=[90, 100])
def gpu_build(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `triton_builds.Builder` for one architecture, with an empty cache, or nothing would be built twice."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux for GPUs, and not elsewhere")
    from triton_builds import Builder

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return Builder(request.param)
