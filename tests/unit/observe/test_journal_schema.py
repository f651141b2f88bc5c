"""docs/journal.md and its schema say what journals hold: real ones fit; every kind, role and measure is described."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

import narrowgauge as ng
from narrowgauge.observe.journal_rows import SCHEMA
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.loop import resume, run

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "journal.md").read_text(encoding="utf-8")
DEFINITION: dict[str, Any] = json.loads((DOCS / "journal.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(DEFINITION)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """As they stand in the file, without our reader."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that was resumed, looked at in every step, with exponents in every second."""
    home = tmp_path_factory.mktemp("schema")
    (home / "text.txt").write_text("def f(x):\n    return 2 * x\n" * 300)
    threads = torch.get_num_threads()
    config = TrainConfig.from_dict(
        {
            "model": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64, "context": 32},
            "data": {"corpus": str(home / "text.txt"), "tokenizer": "bytes", "validation_fraction": 0.2},
            "batch_size": 2, "steps": 4, "eval_every": 2, "eval_batches": 1, "save_every": 2, "sample_tokens": 0,
            "statistics_every": 1, "histograms_every": 2, "threads": 1, "cache_dir": str(home / "cache"),
            "runs_dir": str(home), "name": "run",
        }
    )  # fmt: skip
    result = run(config)
    resume(result.run_dir, checkpoint="step-000002")
    torch.set_num_threads(threads)
    yield result.run_dir


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(DEFINITION)


def test_every_row_of_a_real_journal_fits(folder: Path) -> None:
    rows = rows_of(folder)
    for row in rows:
        errors = [error.message for error in VALIDATOR.iter_errors(row)]
        assert not errors, (row["kind"], errors)
    assert {row["kind"] for row in rows} >= {
        "header", "step", "evaluation", "precision", "histograms", "bytes", "resumed", "warning",
    }  # fmt: skip
    assert rows[0]["schema"] == SCHEMA == 2
    assert [row["step"] for row in rows if row["kind"] == "histograms"] == [2, 4]
    assert [row["step"] for row in rows if row["kind"] == "bytes"][0] == 1


def test_the_header_has_nothing_private(folder: Path) -> None:
    header = rows_of(folder)[0]
    text = json.dumps({key: header[key] for key in ("environment", "versions", "conversion", "formats", "device")})
    home = str(Path.home())
    assert str(folder.parent) not in text and (home == "/" or home not in text)
    assert not re.search(r"(^|[\s\"'])/[a-z]+/", text)


def test_formats_cover_what_was_cast(folder: Path) -> None:
    rows = rows_of(folder)
    formats = rows[0]["formats"]
    layers = next(row["layers"] for row in rows if row["kind"] == "precision")
    for layer, roles in layers.items():
        assert roles.keys() <= formats[layer].keys() | {"collective"}, layer


def test_rows_that_are_not_as_described_are_refused(folder: Path) -> None:
    row = next(row for row in rows_of(folder) if row["kind"] == "precision")
    layer = next(iter(row["layers"]))
    for change in (
        {"input": {"saturated": 1.5}},
        {"input": {"unheard_of": 1.0}},
        {"unheard_of": {"amax": 1.0}},
        {"input": {"amax": "nan"}},
    ):
        bad = copy.deepcopy(row)
        bad["layers"][layer] = change
        assert not VALIDATOR.is_valid(bad), change
    assert not VALIDATOR.is_valid({"kind": "precision", "layers": {}})
    assert not VALIDATOR.is_valid({"kind": "unheard_of", "step": 1})
    assert VALIDATOR.is_valid({"kind": "precision", "step": 1, "layers": {"a": {"input": {"sqnr_db": "Infinity"}}}})


def test_a_decision_of_the_guard_fits() -> None:
    row = {
        "kind": "guard", "step": 3, "action": "promote", "layer": "a", "role": "input", "measure": "saturated",
        "value": 0.5, "threshold": 0.01, "before": "E4M3FN", "after": "BF16", "message": "m",
    }  # fmt: skip
    assert VALIDATOR.is_valid(row) and not VALIDATOR.is_valid(row | {"action": "none"})


def test_the_page_describes_every_kind_role_measure_and_field() -> None:
    definitions = DEFINITION["$defs"]
    kinds = [definition["properties"]["kind"]["const"] for definition in definitions.values() if _is_row(definition)]
    assert set(re.findall(r"^\| `(\w+)` \| (?:first|every|after|sampled|at|the|when|a |\|)", TEXT, re.M)) >= set(kinds)
    for name in (*definitions["role"]["enum"], *definitions["measures"]["properties"]):
        assert re.search(rf"^\|[^|]*`{name}`", TEXT, re.M), name
    for definition in definitions.values():
        for name in definition["properties"] if _is_row(definition) else ():
            assert f"`{name}`" in TEXT, name


def _is_row(definition: dict[str, Any]) -> bool:
    return "const" in definition.get("properties", {}).get("kind", {})


def test_the_loop_on_the_page_runs_and_its_journal_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (block for block in re.findall(r"```py\n(.*?)```", TEXT, re.S) if "JournalWriter" in block)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "journal.md", "exec"), {})
    rows = rows_of(tmp_path)
    assert all(map(VALIDATOR.is_valid, rows)) and [r["step"] for r in rows if r["kind"] == "precision"] == [50, 100]
    journal = ng.observe.Journal(tmp_path)
    assert len(journal.steps["loss"]) == 100 and math.isfinite(journal.steps["loss"][-1]) and not journal.problems


def test_the_reader_on_the_page_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (block for block in re.findall(r"```py\n(.*?)```", TEXT, re.S) if "of_kind" in block)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    printed: list[Any] = []
    exec(compile(code, "journal.md", "exec"), {"print": lambda *values: printed.append(values)})
    assert [values[0] for values in printed[:-1]] == [1, 2, 3, 4] and printed[-1] == ([],)
