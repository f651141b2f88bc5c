"""Runs that were never trained: folders with a journal by the documented rows, with troubles that a test asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.observe.journal_rows import encode

PARTS = ("attention.q", "attention.k", "attention.v", "attention.output", "mlp.gate", "mlp.up", "mlp.down")
ROLES = ("input", "weight", "grad_output", "grad", "exp_avg", "exp_avg_sq", "param")
RANGES = {"E4M3FN": (448.0, 2.0**-9), "E5M2": (57344.0, 2.0**-16), "INT8": (127.0, 1.0)}
FORMAT_OF = {"grad_output": "E5M2", "grad": "E4M3FN", "exp_avg": "INT8", "exp_avg_sq": "INT8"}
SQNR_OF = {"E4M3FN": 31.0, "E5M2": 25.0, "INT8": 38.0}
SAME: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda step, row: row  # noqa: E731


def layer_names(count: int) -> list[str]:
    """Names as a GPT's linear layers have them."""
    return [f"blocks.{at // len(PARTS)}.{PARTS[at % len(PARTS)]}" for at in range(count)]


def header(layers: Collection[str], roles: Collection[str] = ROLES, **fields: Any) -> dict[str, Any]:
    """Of a journal of schema 2."""
    formats = {
        layer: {role: _format(role) for role in roles if role != "param"} for layer in layers
    }  # fmt: skip
    conversion = [
        {"name": layer, "status": "converted", "reason": "", "backend": "emulated",
         "casts": {"input": "E4M3FN per tensor", "weight": "E4M3FN per tensor", "grad_output": "E5M2 per tensor"}}
        for layer in layers
    ]  # fmt: skip
    return {
        "kind": "header", "schema": 2, "versions": {"narrowgauge": "0.1.0", "torch": "2.13.0"}, "device": "cpu",
        "threads": 2, "parameters": 3_000_000, "environment": {"python": "3.11.7", "system": "Linux"},
        "recipe": {"name": "narrow8", "emulation": "fast"}, "formats": formats, "conversion": conversion, **fields,
    }  # fmt: skip


def _format(role: str) -> dict[str, Any]:
    name = FORMAT_OF.get(role, "E4M3FN")
    largest, least = RANGES[name]
    return {"format": name, "granularity": "per tensor", "scale": "current", "max": largest, "min": least}


def write_run(
    folder: Path,
    steps: int = 200,
    every: int = 10,
    layers: int | Collection[str] = 8,
    roles: Collection[str] = ROLES,
    *,
    seed: int = 0,
    change: Callable[[int, dict[str, Any]], Mapping[str, Any]] = SAME,
    offset: float = 0.0,
    **fields: Any,
) -> Path:
    """Write a run folder. change(step, row): a row of a kind that has layers or a loss, before it is written.

    offset: added to all losses. fields: of the header.
    """
    names = layer_names(layers) if isinstance(layers, int) else list(layers)
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "journal.jsonl").open("wb") as file:

        def put(row: dict[str, Any]) -> None:
            found = change(row["step"], row)
            if found:
                file.write(encode(dict(found)))

        file.write(encode(header(names, roles, **fields)))
        for step in range(1, steps + 1):
            loss = 2.0 + 6.0 * math.exp(-step / max(1.0, steps / 5)) + 0.08 * float(rng.normal()) + offset
            put({"kind": "step", "step": step, "loss": loss, "grad_norm": 0.5 + float(rng.random()), "lr": 1e-3,
                 "tokens": step * 1024, "tokens_per_s": 900 + 50 * float(rng.random()), "skipped": False,
                 "loss_scale": 1.0})  # fmt: skip
            if step == 1:
                put({"kind": "bytes", "step": 1, "parameters": 3_000_000, "activation": 5_000_000, "wire": 0,
                     "roles": {"param": 6_000_000, "master": 3_000_000, "grad": 3_000_000, "exp_avg": 3_100_000,
                               "exp_avg_sq": 3_100_000, "scaling": 4_000}})  # fmt: skip
            if step % every == 0:
                put({"kind": "precision", "step": step, "layers": _precision(names, roles, rng)})
            if step % (every * 5) == 0:
                put({"kind": "histograms", "step": step, "layers": _histograms(names, roles)})
            if step % max(1, steps // 8) == 0:
                put({"kind": "evaluation", "step": step, "loss": loss + 0.05, "perplexity": math.exp(loss + 0.05),
                     "bits_per_byte": 1.1, "tokens": 4096})  # fmt: skip
    return folder


def _precision(names: Collection[str], roles: Collection[str], rng: np.random.Generator) -> dict[str, Any]:
    noise = rng.normal(size=(len(names), len(roles), 2))
    found: dict[str, Any] = {}
    for at, name in enumerate(names):
        found[name] = {}
        for other, role in enumerate(roles):
            a, b = noise[at, other].tolist()
            amax = 4.0 * 2.0**a
            form = FORMAT_OF.get(role, "E4M3FN")
            cell = {"amax": amax, "scale": amax / RANGES[form][0], "saturated": 0.0, "flushed": 1e-5 * 2.0**b,
                    "sqnr_db": SQNR_OF[form] + b}  # fmt: skip
            if role == "grad":
                cell["zero"] = 0.01 + 0.002 * a
            found[name][role] = {"lost": 0.02 + 0.001 * a} if role == "param" else cell
    return found


def _histograms(names: Collection[str], roles: Collection[str]) -> dict[str, Any]:
    exponents = np.arange(-24, 3)
    counts = np.rint(1e5 * np.exp(-(((exponents + 4) / 4.0) ** 2))).astype(int).tolist()
    one = {"low": -24, "counts": counts, "zeros": 10}
    return {name: {role: one for role in roles if role != "param"} for name in names}
