"""The journal of a training run: opened or cut back, written whatever the disk does, and read again on resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from narrowgauge import __version__
from narrowgauge.errors import CheckpointError, RecipeError
from narrowgauge.observe import journal
from narrowgauge.observe.journal_writer import JournalWriter
from narrowgauge.observe.ledger import Ledger
from narrowgauge.observe.observation import Precision
from narrowgauge.observe.run_header import header
from narrowgauge.recipes.serialize import from_dict, to_dict
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train import events
from narrowgauge.train.assemble import Parts
from narrowgauge.train.events import OnEvent


class RunJournal:
    """What a session writes to. Of several processes the first one has the file; the others' rows go nowhere.

    step: the one that rows are of.
    """

    def __init__(self, path: Path, emit: OnEvent) -> None:
        self.path, self.emit = path, emit
        self.step = 0
        self._writer: JournalWriter | None = None
        self._is_behind = False
        self._bytes: dict[str, Any] | None = None

    def open(self, start: int | None, parts: Parts) -> journal.Contents | None:
        """A new journal; or, of a run that goes on from step `start`, the old one, cut back: its header, and its rows
        of steps and evaluations. Only the first process calls it.
        """
        if start is None or not self.path.exists():
            self._writer = JournalWriter.create(self.path, _header(parts))
            return None
        return self.cut(start)

    def cut(self, step: int) -> journal.Contents:
        """Go on from `step`: rows after it are removed. Returns header, steps and evaluations; the first process's."""
        self.close()
        contents = journal.cut(self.path, step, ("step", "evaluation"))
        self._writer = JournalWriter(self.path)
        return contents

    def resumed(self) -> None:
        """Say that a run goes on, and by what."""
        self.write("resumed", versions=_versions())

    def write(self, kind: str, **fields: Any) -> None:
        """Append a row; where the disk is full, say so once and keep the row for later."""
        if self._writer is None:
            return
        try:
            self._writer.write(kind, step=self.step, **fields)
            self._is_behind = False
        except OSError as error:
            if not self._is_behind:
                self._is_behind = True
                message = f"the journal is not written for now: {error.strerror}; its rows are kept until it can be"
                self.emit(events.Warned(step=self.step, message=message))

    def warn(self, message: str) -> None:
        """Write a warning, and emit it."""
        self.write("warning", message=message)
        self.emit(events.Warned(step=self.step, message=message))

    def precision(self, found: Precision) -> None:
        """Write what a sampled step showed."""
        for kind, fields in found.rows().items():
            self.write(kind, **fields)

    def bytes(self, found: Ledger) -> None:
        """Write bytes by role, where they are not those written last."""
        fields = found.row()
        if fields != self._bytes:
            self._bytes = fields
            self.write("bytes", **fields)

    def sync(self) -> None:
        """Have everything on the disk. Raises OSError."""
        if self._writer is not None:
            self._writer.sync()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def is_recipe(written: Any, recipe: Recipe) -> bool:
    """True where a journal's header holds `recipe`, perhaps as an earlier version wrote it."""
    try:
        return from_dict(written) == recipe
    except RecipeError:
        return False


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """For rows that are not as training writes them."""
    return CheckpointError(
        f"{path}: expected rows as training writes them, found {error!r}: restore the file, or "
        "remove it, and the run goes on with a new one"
    )


def _header(parts: Parts) -> dict[str, Any]:
    return {
        **header(parts.model, parts.optimizer, to_dict(parts.recipe)),
        "versions": _versions(),
        "device": str(parts.device),
        "parameters": parts.parameters,
    }


def _versions() -> dict[str, str]:
    return {"narrowgauge": __version__, "torch": torch.__version__}
