"""Folders that appear whole or not at all, and tell whether they are still as they were written.

A folder is filled under a temporary name, every file is fsynced, a manifest with sizes and SHA-256 sums is added, and
only then the folder is renamed; its parent is fsynced after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from narrowgauge.errors import CheckpointError

MANIFEST = "manifest.json"
TEMPORARY = ".writing-"  # how the name of a folder begins that is not finished
REPLACED = ".replaced-"  # how the name of a folder begins that a new one takes the place of
FORMAT_VERSION = 1


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on leaving without an error it becomes `path`, replacing what was there.

    Raises OSError, after removing the temporary folder; what was at `path` before is then untouched.
    """
    temporary = make_temporary(path)
    try:
        with os_errors():
            yield temporary
        publish(temporary, path, {file.name: seal(file) for file in sorted(temporary.iterdir())})
    finally:  # after a rename there is nothing left to remove
        shutil.rmtree(temporary, ignore_errors=True)


def make_temporary(path: Path) -> Path:
    """An empty folder beside `path`, under a name that says that it is not finished. Raises OSError."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def seal(file: Path) -> dict[str, Any]:
    """Bring a file that is written to the disk, and say what the manifest is to say of it: its size and SHA-256."""
    _fsync(file)
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def publish(temporary: Path, path: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the manifest to a folder whose files are sealed, and let it become `path`, replacing what was there."""
    manifest = temporary / MANIFEST
    manifest.write_text(json.dumps({"format_version": FORMAT_VERSION, "files": dict(files)}, indent=1))
    _fsync(manifest)
    _fsync(temporary)
    replaced = path.with_name(f"{REPLACED}{path.name}")
    if path.exists():  # a folder cannot be renamed onto one that is not empty
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    try:
        temporary.rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    _fsync(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def verify(path: Path, share: int = 0, of: int = 1) -> None:
    """Raise CheckpointError where a file of the folder is missing, truncated or changed since it was written.

    share, of: of several that look, each reads one part of the files: those whose number modulo `of` is `share`.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: expected a checkpoint folder, found none{_replaced_hint(path)}")
    manifest = _read_manifest(path)
    for file in path.iterdir():
        if file.suffix in (".safetensors", ".json") and file.name not in (*manifest["files"], MANIFEST):
            raise CheckpointError(f"{path}: {MANIFEST} is corrupt: it does not list {file.name}")
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        found = file.stat().st_size
        if found != entry["bytes"]:
            raise CheckpointError(f"{path}: {name} is truncated: expected {entry['bytes']} bytes, found {found}")
    for name, entry in list(manifest["files"].items())[share::of]:
        if _sha256(path / name) != entry["sha256"]:
            raise CheckpointError(f"{path}: {name} is corrupt: its SHA-256 differs from the manifest's")


def size_bytes(path: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(file.stat().st_size for file in path.iterdir())


def remove_unfinished(parent: Path) -> None:
    """Clear away what a crash during `whole_folder` may have left below `parent`; a folder half replaced comes back."""
    for replaced in parent.glob(f"{REPLACED}*"):
        original = replaced.with_name(replaced.name.removeprefix(REPLACED))
        if original.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(original)
    for leftover in parent.glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def write_file(path: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises OSError."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _fsync(path.parent)
    except OSError as error:  # a write that failed does not know its file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _read_manifest(path: Path) -> dict:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version = manifest["format_version"]
        entries = list(manifest["files"].values())
        if not all(isinstance(e["bytes"], int) and isinstance(e["sha256"], str) for e in entries):
            raise TypeError
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {MANIFEST} is missing: this is no checkpoint, or not a whole one") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: {MANIFEST} is corrupt") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: expected checkpoint format {FORMAT_VERSION}, found {version}: "
            "read it with the version of narrowgauge that wrote it"
        )
    return manifest


def _replaced_hint(path: Path) -> str:
    replaced = path.with_name(f"{REPLACED}{path.name}")
    return f"; the one before it is whole in {replaced}: rename that" if replaced.is_dir() else ""


@contextmanager
def os_errors() -> Iterator[None]:
    """safetensors reports a full disk in words; turn that back into the OSError that it was."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
