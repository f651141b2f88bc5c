"""Files of AlpacaEval's and MT-Bench's questions, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.data.questions import Benchmark, read_questions
from narrowgauge.errors import DataError

ALPACA = {"instruction": "Say.", "dataset": "d"}
MT = {"question_id": 81, "category": "math", "turns": ["a", "b"]}


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize(
    ("text", "benchmark", "turns"),
    [
        (json.dumps([ALPACA, ALPACA], indent=2), Benchmark.ALPACA_EVAL, ("Say.",)),
        ("\ufeff  " + json.dumps([ALPACA, ALPACA]), Benchmark.ALPACA_EVAL, ("Say.",)),
        (lines(ALPACA, ALPACA), Benchmark.ALPACA_EVAL, ("Say.",)),
        (lines(MT, MT | {"question_id": 82}), Benchmark.MT_BENCH, ("a", "b")),
    ],
)
def test_both_benchmarks_are_read(text: str, benchmark: Benchmark, turns: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "q"
    path.write_text(text, encoding="utf-8")
    found = read_questions(path)
    assert found.benchmark is benchmark
    assert [question.turns for question in found.questions] == [turns, turns]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected questions, found none"),
        ("[]", "expected questions, found none"),
        ("[1]", "line 1: wrong type: expected an object, found a number"),
        ('[{"instruction": "a"},', "expected a JSON list"),
        (lines({"question": "a"}), "line 1: missing key: .*'instruction'.*found 'question'"),
        (lines(ALPACA, MT), "line 2: mixed formats: a question of MT-Bench"),
        (lines({"instruction": 3}), "line 1: wrong type: 'instruction'"),
        (lines({"instruction": " "}), "line 1: empty"),
        (lines(MT | {"turns": []}), "line 1: wrong type: 'turns'"),
        (lines(MT | {"turns": "a"}), "line 1: wrong type: 'turns'"),
        (lines({"turns": ["a"]}), "line 1: missing key: expected 'question_id'"),
        (lines(MT, MT), "line 2: duplicate key: question_id 81 stands in line 1"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "q"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_questions(path)
    with pytest.raises(DataError, match="expected a file of questions"):
        read_questions(tmp_path / "nowhere")
