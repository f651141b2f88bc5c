"""The journal that a transformers trainer leaves in its output directory, for `narrowgauge report`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.optim import Optimizer

import narrowgauge
from narrowgauge.layers.gradients import recipe_of
from narrowgauge.observe.journal import FILE_NAME, cut
from narrowgauge.observe.journal_writer import JournalWriter
from narrowgauge.observe.ledger import ledger
from narrowgauge.observe.observation import Precision
from narrowgauge.observe.run_header import header
from narrowgauge.optim.replace import inmost
from narrowgauge.recipes.serialize import to_dict
from narrowgauge.recipes.spec import Recipe

_EVALUATION = "eval_"  # how transformers begins the names of figures on held-out data


class CallbackJournal:
    """Rows of one process's training. A disk that refuses them is warned of once; training goes on.

    owns_steps: whether rows of steps and evaluations are written, too; not where another listener writes them.
    """

    def __init__(self, writer: JournalWriter, owns_steps: bool = True) -> None:
        self._writer = writer
        self.owns_steps = owns_steps
        self._has_bytes = False
        self._is_behind = False

    @classmethod
    def begin(
        cls, folder: Path, step: int, model: nn.Module, optimizer: Optimizer | None, recipe: Recipe | None = None
    ) -> CallbackJournal:
        """A new journal in `folder`, or after `step` steps the one that is there, cut back to them. Raises OSError.

        recipe: as in `header_of`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        if step and path.exists():
            cut(path, step)
            found = cls(JournalWriter(path))
            found.write("resumed", step, versions=_versions())
            return found
        return cls(JournalWriter.create(path, header_of(model, optimizer, recipe)))

    def complete_header(self, model: nn.Module, optimizer: Optimizer | None, recipe: Recipe | None = None) -> None:
        """Say in the header of another listener's journal, which has no row yet, how the model is prepared."""
        self._writer.complete_header(header_of(model, optimizer, recipe))

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """Append a row."""
        try:
            self._writer.write(kind, step=step, **fields)
        except OSError as error:
            if not self._is_behind:
                self._is_behind = True
                warnings.warn(f"{self._writer.path}: not written for now: {error.strerror}: make room", stacklevel=2)

    def sampled(self, step: int, found: Precision) -> None:
        """What a sampled step showed."""
        for kind, fields in found.rows().items():
            self.write(kind, step, **fields)

    def stepped(self, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        """Bytes by role, once, while the first step's gradients are there."""
        if self._has_bytes:
            return
        self._has_bytes = True
        self.write("bytes", step, **ledger(model, inmost(optimizer)).row())

    def logged(self, step: int, logs: Mapping[str, Any], skipped: bool) -> None:
        """A step's figures, or an evaluation's, as transformers logs them."""
        # what precision did has rows of its own, and names with slashes here
        figures = {k: float(v) for k, v in logs.items() if isinstance(v, int | float) and "/" not in k}
        if not self.owns_steps:
            return
        if f"{_EVALUATION}loss" in figures:
            kept = {key.removeprefix(_EVALUATION): value for key, value in figures.items() if key != "epoch"}
            self.write("evaluation", step, **kept)
        elif "loss" in figures:
            figures["lr"] = figures.pop("learning_rate", 0.0)
            self.write("step", step, **figures, skipped=skipped)

    def close(self) -> None:
        """Have everything on the disk; a second call does nothing."""
        if self.owns_steps:
            self._writer.close()


def header_of(model: nn.Module, optimizer: Optimizer | None, recipe: Recipe | None = None) -> dict[str, Any]:
    """The first row of the journal of a prepared model.

    recipe: where the model alone does not tell, since it was prepared in a wrapper.
    """
    recipe = recipe_of(model) or recipe
    inner = None if optimizer is None else getattr(optimizer, "optimizer", optimizer)
    return {
        **header(model, inner, None if recipe is None else to_dict(recipe)),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    return {module.__name__: module.__version__ for module in (narrowgauge, torch, transformers)}
