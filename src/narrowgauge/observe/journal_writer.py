"""Appends to the journal of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from narrowgauge.observe.journal_rows import SCHEMA, Row, decode, encode


class JournalWriter:
    """Appends rows. A row that the disk refuses is kept and written before the next one, so none is lost or torn."""

    def __init__(self, path: Path | str) -> None:
        """Open for appending. Raises OSError."""
        self.path = Path(path)
        self._descriptor: int | None = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pending: list[bytes] = []

    @classmethod
    def create(cls, path: Path | str, header: Row) -> JournalWriter:
        """Start a new journal with its header, replacing one that is there."""
        Path(path).unlink(missing_ok=True)
        journal = cls(path)
        journal.write("header", schema=SCHEMA, **header)
        return journal

    def write(self, kind: str, **fields: Any) -> None:
        """Append one row. Raises OSError where the disk is full; the row is then tried again with the next one."""
        self._pending.append(encode({"kind": kind, **fields}))
        self.flush()

    def complete_header(self, header: Row) -> None:
        """Write the header anew with more fields, where no row has followed it yet. Raises OSError."""
        self.flush()
        lines = self.path.read_bytes().splitlines()
        if len(lines) == 1:
            assert self._descriptor is not None
            line = encode({**decode(lines[0]), **header})
            os.ftruncate(self._descriptor, 0)  # it appends: at the new end
            _write_all(self._descriptor, line)

    def flush(self) -> None:
        """Write rows that are still waiting. Raises OSError where the disk refuses them."""
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        while self._pending:
            start = os.fstat(self._descriptor).st_size
            try:
                _write_all(self._descriptor, self._pending[0])
            except OSError:
                os.ftruncate(self._descriptor, start)  # half a line in the middle would make the file unreadable
                raise
            del self._pending[0]

    def sync(self) -> None:
        """Flush, and have the operating system put everything on the disk. Raises OSError."""
        self.flush()
        assert self._descriptor is not None  # flush checked it
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; a second call does nothing. Rows that are still waiting are lost."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
