"""The tables of docs/numerics.md say what the code does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
numerics_page = importlib.import_module("numerics_page")
sys.path.pop(0)


@pytest.fixture(scope="module")
def page() -> str:
    return numerics_page.PAGE.read_text(encoding="utf-8")


def test_the_page_is_as_the_code_writes_it(page: str) -> None:
    assert numerics_page.filled(page) == page, "stale: run python benchmarks/numerics_page.py"


def test_a_figure_that_was_changed_by_hand_is_written_anew(page: str, monkeypatch) -> None:
    monkeypatch.setattr(numerics_page, "TABLES", {"formats": numerics_page.formats_table})
    assert "| E4M3FN | 8 | 4, 3 | 448 |" in page
    assert numerics_page.filled(page.replace("| E4M3FN | 8 | 4, 3 | 448 |", "| E4M3FN | 8 | 4, 3 | 480 |")) == page


def test_a_table_without_a_place_is_an_error(page: str, monkeypatch) -> None:
    monkeypatch.setattr(numerics_page, "TABLES", {"formats": numerics_page.formats_table})
    with pytest.raises(SystemExit, match="expected one place for the table 'formats', found 0"):
        numerics_page.filled(page.replace("formats: begin", "formats"))


def test_every_rule_rounding_and_curve_is_described() -> None:
    assert set(numerics_page.RULES) == set(numerics_page.ScaleRule)
    assert set(numerics_page.ROUNDINGS) == set(numerics_page.Rounding)
    assert set(numerics_page.CURVES) == set(numerics_page.Companding)
    assert "saturates" in numerics_page.RULES[numerics_page.ScaleRule.E8M0_FLOOR]
