"""Kernels on disk do not outlive the sources that were compiled into them."""

from __future__ import annotations

import os

from narrowgauge.numerics.kernels.stale import drop_stale


def test_indices_older_than_any_source_are_deleted_and_others_kept(tmp_path):
    dates = {"numba_a.py": 100, "numba_b.py": 300, "old.nbi": 200, "new.nbi": 400}
    for name, date in dates.items():
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (date, date))
    drop_stale([tmp_path / "gone.nbi", *tmp_path.glob("*.nbi")], tmp_path.glob("*.py"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.nbi", "numba_a.py", "numba_b.py"]


def test_the_kernels_cache_is_where_their_index_files_are():
    from pathlib import Path

    import torch

    from narrowgauge.numerics import kernels
    from narrowgauge.numerics.formats import E4M3FN
    from narrowgauge.numerics.granularity import Block
    from narrowgauge.numerics.kernels import stale
    from narrowgauge.numerics.scaling import CURRENT

    kernels.quantize_blocks(torch.randn(64, 256), E4M3FN, Block(1, 128), CURRENT)
    assert list(Path(stale._probe.stats.cache_path).glob("numba_*.nbi"))
