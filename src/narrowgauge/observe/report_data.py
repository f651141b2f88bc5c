"""What the report's page draws, as plain values: the runs' series in few bins, and what needs attention."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from narrowgauge.observe.journal_rows import number
from narrowgauge.observe.report_attention import attention, checked, sampling
from narrowgauge.observe.report_bins import FEWEST, coded, packed, shrunk, shrunk_steps
from narrowgauge.observe.report_precision import ROLES, Cell
from narrowgauge.observe.report_rules import SEVERITIES
from narrowgauge.observe.report_run import RunReader
from narrowgauge.observe.report_words import best_sqnr_db, format_name

VERSION = 1  # of this structure
STEP_BINS = 1000
DIFFERENCE_BINS, LEAST_WINDOW = 200, 5  # windows at most, steps of each at least: of fewer there is no band
MOST_EVALUATIONS = 1000
SERIES_BYTES = 9 << 20  # of the codes of all runs; base64 makes a third more
LOG_MEASURES = ("saturated", "flushed", "zero", "lost", "amax", "scale")
_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_OUTER_PERCENT = 5.0  # the band of a difference goes from this percentile to its mirror


def report_data(runs: Sequence[RunReader], reference: int = 0) -> dict[str, Any]:
    """Everything the page shows, ready for JSON. reference: the run that the others are held against."""
    _tell_apart(runs)
    base = runs[reference]
    found: list[dict[str, Any]] = []
    for at, run in enumerate(runs):
        for each in attention(run, base if len(runs) > 1 else None):
            found.append({"run": at, **dataclasses.asdict(each)})
    found.sort(key=lambda each: SEVERITIES.index(each["severity"]))
    shown = [_run_data(run, SERIES_BYTES // len(runs)) for run in runs]
    for at, run in enumerate(runs):
        shown[at]["difference"] = None if at == reference else difference(run, base)
    data = {
        "version": VERSION,
        "reference": reference,
        "attention": found,
        "checked": [{"run": run.name, "rules": checked(run)} for run in runs],
        "runs": shown,
    }
    return _plain(data)


def _tell_apart(runs: Sequence[RunReader]) -> None:
    """Runs of the same name in different folders get a number."""
    seen: dict[str, int] = {}
    for run in runs:
        name = run.folder.resolve().name
        seen[name] = seen.get(name, 0) + 1
        run.name = name if seen[name] == 1 else f"{name} ({seen[name]})"


def difference(run: RunReader, reference: RunReader) -> dict[str, Any] | None:
    """Loss of `run` less that of `reference` at the steps that both have, nats: means of windows, and a band.

    low, high: the 5th and the 95th percentile of the single steps' differences in a window. None: no step in common.
    """
    mine, theirs = run.steps, reference.steps
    shared, at, other = np.intersect1d(mine["step"], theirs["step"], return_indices=True)
    gap = mine["loss"][at] - theirs["loss"][other]
    shared, gap = shared[np.isfinite(gap)], gap[np.isfinite(gap)]
    if not len(shared):
        return None
    edges = _edges(len(shared), min(DIFFERENCE_BINS, max(1, len(shared) // LEAST_WINDOW)))
    windows = [gap[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    outer = [np.percentile(window, [_OUTER_PERCENT, 100 - _OUTER_PERCENT]) for window in windows]
    evaluated = {row["step"]: row["loss"] for row in reference.evaluations}
    return {
        "first": shared[edges[:-1]].tolist(),
        "last": shared[edges[1:] - 1].tolist(),
        "mean": [float(window.mean()) for window in windows],
        "low": [float(low) for low, _ in outer],
        "high": [float(high) for _, high in outer],
        "evaluations": [
            [row["step"], row["loss"] - evaluated[row["step"]]] for row in run.evaluations if row["step"] in evaluated
        ][-MOST_EVALUATIONS:],
    }


def _run_data(run: RunReader, budget: int) -> dict[str, Any]:
    return {
        "name": run.name,
        "schema": run.header.get("schema", 1),
        "facts": _facts(run),
        "sampling": sampling(run),
        "missing": _missing(run),
        "steps": _step_series(run),
        "evaluations": _thinned([[row["step"], row["loss"], row["perplexity"]] for row in run.evaluations]),
        "skips": _thinned(run.steps["step"][run.steps["skipped"]].tolist()),
        "precision": _precision(run, budget),
        "histograms": _histograms(run),
        "why_no_histograms": _why_no_histograms(run),
        "bytes": _bytes(run),
        "events": [_event(row) for row in run.events],
        "environment": {
            **_texts(run.header.get("versions")), **_texts(run.header.get("environment")),
            **_texts({key: run.header.get(key) for key in ("device", "threads", "parameters")}),
        },
        "recipe": run.header.get("recipe") if isinstance(run.header.get("recipe"), dict) else {},
        "conversion": [_conversion(row) for row in run.conversion],
    }  # fmt: skip


def _facts(run: RunReader) -> dict[str, Any]:
    columns = run.steps
    losses = columns["loss"][np.isfinite(columns["loss"])]
    speeds = columns["tokens_per_s"][np.isfinite(columns["tokens_per_s"])]
    evaluated = [row for row in run.evaluations if math.isfinite(row["loss"])]
    recipe = run.header.get("recipe")
    return {
        "recipe": str(recipe.get("name", "")) if isinstance(recipe, dict) else str(recipe or ""),
        "parameters": run.header.get("parameters"),
        "last_step": int(columns["step"][-1]) if len(columns["step"]) else None,
        "planned_steps": run.planned_steps,
        "last_loss": float(losses[-1]) if losses.size else None,
        "validation_loss": evaluated[-1]["loss"] if evaluated else None,
        "best_validation_loss": min((row["loss"] for row in evaluated), default=None),
        "skipped": int(columns["skipped"].sum()),
        "tokens_per_s": float(np.median(speeds)) if speeds.size else None,
    }


def _missing(run: RunReader) -> list[str]:
    """What the journal does not have, in words."""
    absent = []
    if not run.has_layers:
        why = "of schema 1" if run.header.get("schema", 1) == 1 else "without sampled steps"
        absent.append(f"measures of single layers (the journal is {why})")
    if not run.histograms.rows:
        absent.append(f"exponent histograms{_why_no_histograms(run)}")
    if run.bytes is None:
        absent.append("bytes by role")
    if not run.evaluations:
        absent.append("validation losses")
    if not isinstance(run.header.get("formats"), dict):
        absent.append("formats of the layers, so no ranges are drawn")
    return absent


def _why_no_histograms(run: RunReader) -> str:
    """ " (histograms_every is 200, and the run has 120 steps)"; "" where the configuration does not say why."""
    every, steps = run.config.get("histograms_every"), run.steps["step"]
    last = int(steps[-1]) if len(steps) else 0
    if not isinstance(every, int) or isinstance(every, bool) or 0 < every <= last:
        return ""
    reached = f"{every:,}, and the run has {last:,} steps" if every > 0 else "0"
    return f" (histograms_every is {reached})"


def _edges(count: int, most: int) -> np.ndarray:
    return np.unique(np.linspace(0, count, min(count, most) + 1).astype(np.int64))


def _step_series(run: RunReader) -> dict[str, Any]:
    """Columns in at most `STEP_BINS` bins: first and last step, and of each the least, greatest and mean value."""
    columns = run.steps
    steps = columns["step"]
    if not len(steps):
        return {"count": 0}
    edges = _edges(len(steps), STEP_BINS)
    starts = edges[:-1]
    found: dict[str, Any] = {
        "count": len(steps),
        "first": packed(steps[starts].astype(np.uint32)),
        "last": packed(steps[edges[1:] - 1].astype(np.uint32)),
        "band": packed(np.fmax.reduceat(run.band_ends, starts).astype(np.float32)),
    }
    for name in ("loss", "grad_norm", "lr", "tokens_per_s", "loss_scale"):
        values = columns[name]
        finite = np.isfinite(values)
        counts = np.add.reduceat(finite.astype(np.int64), starts)
        sums = np.add.reduceat(np.where(finite, values, 0.0), starts)
        known = np.where(finite, values, np.nan)
        with np.errstate(all="ignore"):
            found[name] = {
                "low": packed(np.fmin.reduceat(known, starts).astype(np.float32)),
                "high": packed(np.fmax.reduceat(known, starts).astype(np.float32)),
                "mean": packed((sums / np.where(counts, counts, np.nan)).astype(np.float32)),
            }
    return found


def _precision(run: RunReader, budget: int) -> dict[str, Any] | None:
    reader = run.precision
    bins = reader.bins
    if not bins.count or not reader.cells:
        return None
    order = _order(reader.cells)
    chosen = np.array(order)
    cells = [reader.cells[at] for at in order]
    layers = list(dict.fromkeys(cell.layer for cell in cells))
    held = dict.fromkeys(cell.role for cell in cells)
    roles = [role for role in dict.fromkeys((*ROLES, *held)) if role in held]
    live = {name: np.flatnonzero(~np.isnan(bins.low(name)[chosen]).all(axis=1)) for name in bins.measures()}
    values = sum(len(at) for at in live.values())
    most = max(FEWEST, budget // max(1, 4 * values))
    measures: dict[str, Any] = {}
    for name, at in live.items():
        low, high = shrunk(bins.low(name)[chosen[at]], bins.high(name)[chosen[at]], most)
        measures[name] = {"cells": packed(at.astype(np.uint32)), **coded(low, high, name in LOG_MEASURES)}
    first, last = shrunk_steps(bins.first[: bins.count], bins.last[: bins.count], most)
    specs, spec_of = _specs(run, cells)
    return {
        "samples": reader.samples,
        "first": first.tolist(),
        "last": last.tolist(),
        "layers": layers,
        "roles": roles,
        "cells": _places(cells, layers, roles),
        "specs": specs,
        "spec_of": spec_of,
        "measures": measures,
    }


def _places(cells: Sequence[Cell], layers: Sequence[str], roles: Sequence[str]) -> list[list[int]]:
    row, column = ({name: at for at, name in enumerate(names)} for names in (layers, roles))
    return [[row[cell.layer], column[cell.role]] for cell in cells]


def _order(cells: Sequence[Cell]) -> list[int]:
    """Cells by layer, in order of the layers' first appearance, and by role."""
    first = {}
    for cell in cells:
        first.setdefault(cell.layer, len(first))
    rank = {role: at for at, role in enumerate(ROLES)}
    return sorted(range(len(cells)), key=lambda at: (first[cells[at].layer], rank.get(cells[at].role, len(rank))))


def _specs(run: RunReader, cells: Sequence[Cell]) -> tuple[list[dict[str, Any]], list[int]]:
    """(distinct formats, the number of each cell's; -1: not known)."""
    specs: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    numbers = []
    for cell in cells:
        spec = run.format_of(cell)
        if not spec:
            numbers.append(-1)
            continue
        key = repr(sorted(spec.items(), key=str))
        if key not in seen:
            seen[key] = len(specs)
            shown = {name: spec.get(name) for name in ("format", "granularity", "scale", "rounding", "max", "min")}
            specs.append({**shown, "name": format_name(spec), "sqnr_db": best_sqnr_db(spec)})
        numbers.append(seen[key])
    return specs, numbers


def _histograms(run: RunReader) -> dict[str, Any] | None:
    """Of each kept step and cell: [layer, role, lowest exponent, offset and length in `shares`]; shares as 16 bits."""
    kept = run.histograms.kept()
    if not kept:
        return None
    shares: list[np.ndarray] = []
    steps, at = [], 0
    for step, cells in kept:
        entries = []
        for cell, (low, counts) in cells.items():
            entries.append([cell.layer, cell.role, low, at, len(counts)])
            shares.append(counts)
            at += len(counts)
        steps.append({"step": step, "cells": entries})
    joined = np.concatenate(shares) if shares else np.zeros(0, np.float32)
    # the root keeps small shares: 1 in 4 x 10^9 is the least
    return {"steps": steps, "roots": packed(np.rint(np.sqrt(joined.clip(0, 1)) * 65535).astype(np.uint16))}


def _bytes(run: RunReader) -> dict[str, Any] | None:
    row = run.bytes
    if row is None:
        return None
    roles = row.get("roles")
    sizes = {str(k): v for k, v in roles.items() if _count(v) is not None} if isinstance(roles, dict) else {}
    counts = {key: _count(row.get(key)) for key in ("step", "parameters", "activation", "wire")}
    return counts | {"roles": sizes}


def _count(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and math.isfinite(number(value)) else None


def _event(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if isinstance(value, int | float | str) or value is None else str(value)
        for key, value in row.items()
    }


def _conversion(row: Mapping[str, Any]) -> dict[str, Any]:
    casts = row.get("casts")
    named = ", ".join(f"{role} {text}" for role, text in casts.items()) if isinstance(casts, dict) else ""
    return {key: str(row.get(key) or "") for key in ("name", "status", "reason", "backend")} | {"casts": named}


def _texts(value: Any) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else {}


def _thinned(rows: list[Any], most: int = MOST_EVALUATIONS) -> list[Any]:
    return rows if len(rows) <= most else [rows[at] for at in np.linspace(0, len(rows) - 1, most).astype(int)]


def _plain(value: Any) -> Any:
    """For JSON, which has neither NaN nor infinity: null. What UTF-8 or XML has no characters for: U+FFFD."""
    if isinstance(value, str):
        return _NO_TEXT.sub("\ufffd", value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
