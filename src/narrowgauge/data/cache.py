"""A folder of finished entries: written under a temporary name, fsynced, renamed, and checked when opened."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError

META = "meta.json"
ATTEMPTS = 3  # a process that repairs may move away what another has just repaired


@dataclass(frozen=True)
class CacheEntry:
    """A folder whose files have the sizes and hashes that its meta.json says."""

    path: Path
    meta: dict[str, Any]
    hashes: dict[str, str]


class _Damaged(Exception):
    """Why an entry cannot be used."""


def publish(cache_dir: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> CacheEntry:
    """The entry `key`, made by `build(folder)` where it is missing or damaged (then with a warning).

    `build` writes files into the folder and returns what else meta.json should hold. Several processes may build the
    same entry at once: the first rename wins, the others take the winner's. Raises DataError where the disk refuses.
    """
    path = cache_dir / key
    reason: _Damaged | None = None
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        for _ in range(ATTEMPTS):
            if not path.exists():
                _build(path, build)
            try:
                return _open(path)
            except _Damaged as error:
                reason = error
            if path.exists():  # else another process found the damage too, and moved it away
                warnings.warn(f"the token cache {path} is damaged ({reason}): it is made anew", stacklevel=3)
                _remove(path)
    except OSError as error:
        raise DataError(f"cannot write the token cache {cache_dir} ({error}): free space, or use another") from error
    raise DataError(f"the token cache {path} is damaged again as soon as it is made ({reason}): check the disk")


def _build(path: Path, build: Callable[[Path], dict[str, Any]]) -> None:
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        _finish(folder, build(folder))
        try:
            os.rename(folder, path)
        except OSError:
            if not path.exists():  # no other process won: the disk's own fault
                raise
        _fsync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _finish(folder: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with the size and hash of every file, and make all of it durable."""
    files = {}
    for file in sorted(folder.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size, "blake2b": _file_hash(file)}
        _fsync(file)
    meta_file = folder / META
    meta_file.write_text(json.dumps({"files": files, "meta": meta}, indent=1))
    _fsync(meta_file)
    _fsync(folder)
    os.chmod(folder, 0o755)  # mkdtemp's 0o700 would shut out other users of a shared cache


def _open(path: Path) -> CacheEntry:
    try:
        content = json.loads((path / META).read_text())
        files, meta = content["files"], content["meta"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f"{META} is not readable: {error}") from None
    hashes = {}
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise _Damaged(f"{name} is missing")
        if file.stat().st_size != expected["bytes"]:
            raise _Damaged(f"{name} has {file.stat().st_size} bytes, expected {expected['bytes']}")
        hashes[name] = _file_hash(file)
        if hashes[name] != expected["blake2b"]:
            raise _Damaged(f"{name} has another content than was written")
    return CacheEntry(path, meta, hashes)


def _remove(path: Path) -> None:
    """Move a damaged entry out of the way, then delete it: no process may see half of it deleted."""
    grave = Path(tempfile.mkdtemp(prefix=".damaged-", dir=path.parent))
    try:
        os.rename(path, grave / path.name)
    except FileNotFoundError:
        pass  # another process was faster
    shutil.rmtree(grave, ignore_errors=True)


def _file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
