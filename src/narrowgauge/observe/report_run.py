"""A run as the report sees it: its journal, read as a stream, in memory that does not grow with the journal."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from narrowgauge.numerics import formats
from narrowgauge.observe.journal import Journal
from narrowgauge.observe.journal_rows import Line, Row, Text, number, start_of, texts
from narrowgauge.observe.loss_band import RobustBand
from narrowgauge.observe.report_histograms import HistogramReader
from narrowgauge.observe.report_precision import ALL_LAYERS, Cell, PrecisionReader
from narrowgauge.observe.report_rules import cell_tallies

COLUMNS = ("loss", "grad_norm", "lr", "tokens_per_s", "loss_scale")
EVENTS = ("recipe", "warning", "resumed", "guard")
BAND = {"window": 32, "spreads": 10.0, "floor": 1.5}  # as train.sections.DivergenceConfig has them
MOST_EVENTS = 2000
MOST_PROBLEMS = 20
_TAIL_BYTES = 256
_HISTOGRAMS, _HISTOGRAMS_END = start_of("histograms"), b"}}}}\n"


class RunReader:
    """Reads a run's journal; `update` takes in what was added since."""

    def __init__(self, run: Path | str) -> None:
        """Open the run folder `run`, or its journal. Raises ConfigError, CheckpointError as `Journal` does."""
        self.journal = Journal(run)
        self.folder = self.journal.path.parent
        self.name = self.folder.resolve().name
        self.config = _read_config(self.folder / "config.yaml")
        self._clear()
        self.update()

    def update(self) -> bool:
        """Read on to the journal's end, from its start where it was cut back; False where nothing was added."""
        path = self.journal.path
        size = path.stat().st_size
        if self._line is not None:
            was_cut_back = size < self._line.end or _tail(path, self._line.end) != self._tail
            if size == self._size and not was_cut_back:
                return False
            self.journal = Journal(path)  # whether the last line is whole may have changed
            if was_cut_back:
                self._clear()
        passed_over: Text | None = None
        for text in texts(path, self._line):
            self._line = Line(text.number, text.end, None)
            if text.data.startswith(_HISTOGRAMS):
                if passed_over is not None:
                    self.histograms.skip()
                    passed_over = None
                if not self.histograms.keeps_next and text.data.endswith(_HISTOGRAMS_END):
                    passed_over = text
                    continue
            self._read(text)
        if passed_over is not None:
            self._read(passed_over)
        self._size = size
        self._tail = _tail(path, self._line.end) if self._line else b""
        return True

    @property
    def header(self) -> Row:
        """The journal's first row."""
        return self.journal.header

    @property
    def all_problems(self) -> list[str]:
        """What is wrong with the journal, in words that name no folder."""
        return [*self.problems, *map(self._private, self.journal.problems)]

    @property
    def steps(self) -> dict[str, np.ndarray]:
        """Columns of the steps: step int64, skipped bool, the others float64."""
        found: dict[str, np.ndarray] = {name: np.array(column, np.float64) for name, column in self._columns.items()}
        return found | {"step": np.array(self._steps, np.int64), "skipped": np.array(self._skipped, bool)}

    @property
    def band_ends(self) -> np.ndarray:
        """The end of the robust band before each step's loss, nats a token: infinite where there is none yet."""
        return np.array(self._ends, np.float64)

    @property
    def band(self) -> tuple[int, float, float]:
        """(window, spreads, floor) of the band, as the run's configuration has them."""
        section = _mapping(self.config.get("divergence"))
        window, spreads, floor = (
            value if isinstance(value := section.get(key), int | float) and value > 0 else default
            for key, default in BAND.items()
        )
        return max(1, int(window)), float(spreads), float(floor)

    @property
    def tag(self) -> str:
        """Changes with the journal."""
        return f"{self._size:x}.{hash(self._tail) & 0xFFFFFFFF:x}"

    @property
    def planned_steps(self) -> int | None:
        """Of its configuration; None where there is none."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    @property
    def conversion(self) -> list[Row]:
        """Of the header: a row for each layer; none where it has no such list."""
        rows = self.header.get("conversion")
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    def format_of(self, cell: Cell) -> Row:
        """Of the header's formats: format, granularity, scale, max, min; empty where it is not known."""
        if cell.role == "collective":
            return _sent_as(_mapping(self.header.get("recipe")), cell.layer)
        return _mapping(_mapping(_mapping(self.header.get("formats")).get(cell.layer)).get(cell.role))

    def _clear(self) -> None:
        self.problems: list[str] = []
        self.damaged = 0
        self.bad_parameters: dict[str, list[int]] = {}  # name -> [first step, last step, times]
        self.evaluations: list[Row] = []
        self.events: list[Row] = []
        self.events_left_out = 0
        self.bytes: Row | None = None
        self.precision = PrecisionReader(cell_tallies(self.format_of))
        self.histograms = HistogramReader()
        self.has_layers = False
        self._steps, self._skipped = array("q"), array("b")
        self._columns = {name: array("d") for name in COLUMNS}
        self._band, self._ends = RobustBand(*self.band), array("d")
        self._line: Line | None = None  # the last one taken in, without its row
        self._size = 0
        self._tail = b""

    def _read(self, text: Text) -> None:
        line = text.parsed(self.journal.path)
        if line.row is not None:
            self._take(line.row)
            return
        self.damaged += 1
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(self._private(line.problem))

    def _private(self, text: str) -> str:
        return text.replace(str(self.journal.path), self.journal.path.name)

    def _take(self, row: Row) -> None:
        kind, step = row["kind"], row.get("step", 0)
        if kind == "step":
            self._take_step(row)
        elif kind == "precision":
            self.has_layers = True
            self.precision.add(step, row.get("layers"))
        elif kind == "histograms":
            self.histograms.add(step, row.get("layers"))
        elif kind == "evaluation":
            self.evaluations.append({key: number(row.get(key)) for key in ("step", "loss", "perplexity")})
        elif kind == "bytes":
            self.bytes = row
        elif kind in EVENTS:
            if len(self.events) < MOST_EVENTS:
                self.events.append(row)
            else:
                self.events_left_out += 1

    def _take_step(self, row: Row) -> None:
        self._steps.append(row["step"])
        self._skipped.append(row.get("skipped") is True)
        for name, column in self._columns.items():
            column.append(number(row.get(name)))
        self._ends.append(self._band.end)
        self._band.add(self._columns["loss"][-1])
        bad = row.get("bad_parameter")
        if isinstance(bad, str):
            found = self.bad_parameters.setdefault(bad, [row["step"], row["step"], 0])
            found[1] = row["step"]
            found[2] += 1
        if isinstance(row.get("statistics"), dict) and self.header.get("schema", 1) == 1:
            self.precision.add(row["step"], {ALL_LAYERS: row["statistics"]})


def _sent_as(recipe: Row, layer: str) -> Row:
    """As a header's formats have it, what a recipe sends under `layer`: a communication role, or a parameter's name."""
    roles = (layer,) if layer.endswith("_comm") else ("grad_comm", "param_comm")
    specs = [_mapping(recipe.get(role)) for role in roles]
    name = specs[0].get("format")
    found = getattr(formats, name, None) if isinstance(name, str) else None
    if any(spec != specs[0] for spec in specs) or not isinstance(found, formats.Format):
        return {}
    words = {key: str(specs[0].get(key)) for key in ("granularity", "scale")}
    return {"format": name, **words, "max": found.max, "min": found.smallest_subnormal}


def _tail(path: Path, end: int) -> bytes:
    with path.open("rb") as file:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        return file.read(end - start)


def _read_config(path: Path) -> Row:
    """The run's configuration as plain values; empty where there is none that can be read."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return _mapping(found)


def _mapping(value: Any) -> Row:
    return value if isinstance(value, dict) else {}
