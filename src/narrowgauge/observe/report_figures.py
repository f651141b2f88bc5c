"""The report's pictures as files: each plot of the page as SVG."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from narrowgauge.observe.picture import Chart, Line, line_chart
from narrowgauge.observe.picture_maps import heat_map, stacked
from narrowgauge.observe.report_bins import INFINITE, LARGEST_CODE, MISSING, ZERO
from narrowgauge.observe.report_words import amount

TYPES = {"u16": "<u2", "u32": "<u4", "f32": "<f4"}
SQNR_EDGES = (3, 6, 9, 12, 15, 18, 21, 26, 32)  # dB, as on the page
SHARE_EDGES = (0.5, 0.25, 0.1, 0.05, 0.01, 1e-3, 1e-4, 1e-5, 1e-9)
MAPPED = ("sqnr_db", "saturated", "flushed", "zero", "lost")
NAMES = {"sqnr_db": "SQNR of the cast, dB", "saturated": "share saturated", "flushed": "share flushed to zero",
         "zero": "share of exact zeros", "lost": "share of updates lost"}  # fmt: skip


def figures(data: Mapping[str, Any]) -> dict[str, str]:
    """{file name without its ending: SVG} of `report_data`'s data."""
    runs = data["runs"]
    found = {"loss": _loss(runs)}
    if any(run["difference"] for run in runs):
        found["difference"] = _difference(runs, runs[data["reference"]]["name"])
    found["loss-scale"] = _over_steps(runs, "loss_scale", "Loss scale", "factor", is_log=True)
    found["grad-norm"] = _over_steps(runs, "grad_norm", "Gradient norm before clipping", "norm", is_log=True)
    found["speed"] = _over_steps(runs, "tokens_per_s", "Speed", "tokens/s", is_log=False)
    if any(run["bytes"] for run in runs):
        found["bytes"] = _bytes(runs)
    for run in runs:
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", run["name"])
        if run["precision"]:
            found |= {f"map-{measure}-{name}": _map(run, measure) for measure in MAPPED
                      if measure in run["precision"]["measures"]}  # fmt: skip
    for at, finding in enumerate(each for each in data["attention"] if each["layer"] and each["severity"] != "note"):
        picture = _cell(runs[finding["run"]], finding["layer"], finding["role"])
        if picture and at < 10:
            found[re.sub(r"[^A-Za-z0-9._-]+", "_", f"cell-{finding['layer']}-{finding['role']}")] = picture
    return found


def unpacked(packed: Mapping[str, str]) -> np.ndarray:
    """The array that `report_bins.packed` packed."""
    return np.frombuffer(base64.b64decode(packed["base64"]), TYPES[packed["type"]])


def decoded(measure: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """{cell: float64 (bins, 2)} of what `report_bins.coded` made: the least and greatest values; NaN: missing."""
    cells, codes = unpacked(measure["cells"]), unpacked(measure["codes"])
    if not len(cells):
        return {}
    codes = codes.reshape(len(cells), -1, 2)
    least, width = (unpacked(measure[name]).astype(np.float64)[:, None, None] for name in ("least", "width"))
    values = least + codes / LARGEST_CODE * width
    if measure["log"]:
        values = np.exp2(np.minimum(values, 1023.0))
    values = np.where(codes == ZERO, 0.0 if measure["log"] else -np.inf, values)
    values = np.where(codes == INFINITE, np.inf, np.where(codes == MISSING, np.nan, values))
    return dict(zip(cells.tolist(), values, strict=True))


def _columns(run: Mapping[str, Any], name: str) -> Line:
    steps = run["steps"]
    if not steps["count"]:
        return Line(run["name"], ())
    x = unpacked(steps["last"]).tolist()
    low, mean, high = (unpacked(steps[name][each]).astype(np.float64).tolist() for each in ("low", "mean", "high"))
    return Line(run["name"], tuple(zip(x, mean, strict=True)), low, high)


def _loss(runs: list[Any]) -> str:
    dots = [
        (at, [(step, loss) for step, loss, _ in run["evaluations"] if loss is not None]) for at, run in enumerate(runs)
    ]
    note = "mean, and range of the single steps; points: validation"
    return line_chart(Chart("Loss", note, "step", "nats a token", [_columns(run, "loss") for run in runs], dots))


def _difference(runs: list[Any], reference: str) -> str:
    lines, dots = [], []
    for run in runs:
        gap = run["difference"]
        if gap:
            dots.append((len(lines), [tuple(each) for each in gap["evaluations"] if None not in each]))
            lines.append(Line(run["name"], list(zip(gap["last"], gap["mean"], strict=True)), gap["low"], gap["high"]))
    note = "mean of a window; the band holds nine of ten steps; points: validation"
    return line_chart(Chart(f"Loss less that of {reference}", note, "step", "nats a token", lines, dots))


def _over_steps(runs: list[Any], name: str, title: str, unit: str, *, is_log: bool) -> str:
    marks = runs[0]["skips"] if len(runs) == 1 else ()
    note = "marks on the axis: skipped steps" if marks else "mean, and range of the single steps"
    lines = [_columns(run, name) for run in runs]
    return line_chart(Chart(title, note, "step", unit, lines, is_log=is_log, marks=marks, height=360))


def _bytes(runs: list[Any]) -> str:
    bars, say = [], {}
    for run in runs:
        if not run["bytes"]:
            continue
        sizes = {role: size for role, size in run["bytes"]["roles"].items() if size}
        total, parameters = sum(sizes.values()), run["bytes"]["parameters"]
        say[run["name"]] = f"{total / 1e6:,.1f} MB" + (f", {total / parameters:.2f} a parameter" if parameters else "")
        if run["bytes"]["activation"]:
            sizes["activation"] = run["bytes"]["activation"]
            say[run["name"]] += f", and {sizes['activation'] / 1e6:,.1f} MB of activations"
        bars.append((run["name"], sizes))
    return stacked("Bytes by role", "counted from the real storages of this process; 1 MB = 10^6 bytes", bars, say)


def _map(run: Mapping[str, Any], measure: str) -> str:
    precision = run["precision"]
    is_low = measure == "sqnr_db"
    edges = SQNR_EDGES if is_low else SHARE_EDGES
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for cell, values in decoded(precision["measures"][measure]).items():
        known = values[~np.isnan(values)]
        if known.size:
            worst = float(known.min() if is_low else known.max())
            level = next((at for at, edge in enumerate(edges) if (worst < edge if is_low else worst >= edge)), 9)
            layer, role = precision["cells"][cell]
            cells[layer, role] = level, amount(measure, worst)
    used = sorted({role for _, role in cells})
    cells = {(layer, used.index(role)): shown for (layer, role), shown in cells.items()}
    words = [str(edge) if is_low else amount(measure, edge) for edge in edges[:-1]]
    words.append(str(edges[-1]) if is_low else "> 0")
    title = f"{run['name']}: {NAMES[measure]}"
    note = f"the worst of {precision['samples']:,} sampled steps, by layer and role"
    return heat_map(title, note, precision["layers"], [precision["roles"][at] for at in used], cells, words)


def _cell(run: Mapping[str, Any], layer: str, role: str) -> str | None:
    """amax of a cell against its format's range; None where it was not measured."""
    precision = run["precision"]
    if not precision or layer not in precision["layers"] or "amax" not in precision["measures"]:
        return None
    place = [precision["layers"].index(layer), precision["roles"].index(role)]
    if place not in precision["cells"]:
        return None
    cell = precision["cells"].index(place)
    amax = decoded(precision["measures"]["amax"]).get(cell)
    if amax is None:
        return None
    steps = precision["last"]
    held = []
    scale = decoded(precision["measures"]["scale"]).get(cell) if "scale" in precision["measures"] else None
    number = precision["spec_of"][cell]
    largest = ""
    if scale is not None and number >= 0 and precision["specs"][number]["max"]:
        spec = precision["specs"][number]
        largest = "" if spec["granularity"] == "per tensor" else "largest tile's "
        held = [
            (x, spec["min"] * low, spec["max"] * high) for x, (low, high) in zip(steps, scale.tolist(), strict=True)
        ]
    line = Line("amax", list(zip(steps, amax[:, 1].tolist(), strict=True)), amax[:, 0].tolist(), amax[:, 1].tolist())
    title = f"{layer}, {role}: largest magnitude against the format's range"
    chart = Chart(title, run["name"], "step", "magnitude", [line], range=held, is_log=True, height=360,
                  range_name=f"shaded: what the format holds, with its {largest}scale" if held else "")  # fmt: skip
    return line_chart(chart)
