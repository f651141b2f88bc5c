"""Compiled kernels on disk that their sources have left behind.

Numba keeps a compiled function by the date of the file that it stands in, although it has compiled in functions and
constants of other files too: after one of those changes, in a checkout that is updated, it would go on with old bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from numba import njit


@njit(cache=True)
def _probe() -> int:
    """Never called: a function whose cache is where those of the kernels are."""
    return 0


def drop_stale(indices: Iterable[Path], sources: Iterable[Path]) -> None:
    """Delete Numba's index files that are older than the newest source; what they name is then compiled anew."""
    newest = max(source.stat().st_mtime for source in sources)
    for index in indices:
        try:
            if index.stat().st_mtime < newest:
                index.unlink()
        except OSError:  # another process has deleted it, or the folder is read-only and belongs to an installation
            continue


def drop_stale_kernels() -> None:
    """`drop_stale` for the kernels of this folder."""
    folder = Path(_probe.stats.cache_path)  # type: ignore[attr-defined]
    drop_stale(folder.glob("numba_*.nbi"), sources())


def sources() -> list[Path]:
    """What the kernels of this folder are compiled from: they use constants of `numerics`."""
    here = Path(__file__).resolve().parent
    return [*here.glob("numba_*.py"), *here.parent.glob("*.py")]
