"""Files of questions for benchmarks of answers: AlpacaEval's instructions, and MT-Bench's questions of several turns.

AlpacaEval (https://github.com/tatsu-lab/alpaca_eval): a JSON list, or JSON Lines, of {"instruction": "...", ...}.
MT-Bench (FastChat's llm_judge): JSON Lines of {"question_id": 81, "category": "writing", "turns": ["...", "..."]}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from narrowgauge.data.jsonl import Kind, Problems, Record, read_jsonl, text_problem, type_name
from narrowgauge.errors import DataError


class Benchmark(StrEnum):
    """Whose questions they are."""

    ALPACA_EVAL = "AlpacaEval"
    MT_BENCH = "MT-Bench"


@dataclass(frozen=True)
class Question:
    """One question: what the user says, turn by turn. record: as it stood in the file."""

    turns: tuple[str, ...]
    record: Record


@dataclass(frozen=True)
class Questions:
    """A checked file of questions."""

    benchmark: Benchmark
    questions: tuple[Question, ...]


def read_questions(path: Path | str) -> Questions:
    """Read a whole file. Raises DataError with what is wrong, by line, or by item of a JSON list."""
    path = Path(path)
    problems = Problems(path)
    found: list[tuple[int, Benchmark, Question]] = []
    seen: dict[Any, int] = {}
    for line, record in _records(path, problems):
        benchmark = _benchmark(line, record, problems)
        if benchmark is None:
            continue
        if found and benchmark is not found[0][1]:
            problems.add(line, Kind.MIXED, f"a question of {benchmark}, where earlier ones are of {found[0][1]}")
            continue
        question = _question(line, record, benchmark, problems)
        if question is None:
            continue
        number = record.get("question_id") if benchmark is Benchmark.MT_BENCH else None
        if number is not None and seen.setdefault(number, line) != line:
            problems.add(line, Kind.DUPLICATE, f"question_id {number} stands in line {seen[number]}, too")
        found.append((line, benchmark, question))
    problems.raise_any()
    if not found:
        raise DataError(f"{path}: expected questions, found none: is this the right file?")
    return Questions(found[0][1], tuple(question for *_, question in found))


def _records(path: Path, problems: Problems) -> Iterator[tuple[int, Record]]:
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
            is_list = start.startswith(b"[")
        if not is_list:
            yield from read_jsonl(path, problems)
            return
        items = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path}: expected a file of questions, found: {error.strerror}: look at the path") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected a JSON list, found: {error}: mend it") from None
    for number, item in enumerate(items, 1):
        if isinstance(item, dict):
            yield number, item
        else:
            problems.add(number, Kind.TYPE, f"expected an object, found {type_name(item)}")


def _benchmark(line: int, record: Record, problems: Problems) -> Benchmark | None:
    if "turns" in record:
        return Benchmark.MT_BENCH
    if "instruction" in record:
        return Benchmark.ALPACA_EVAL
    found = ", ".join(f"'{key}'" for key in list(record)[:5]) or "an empty object"
    expected = "'instruction' (AlpacaEval), or 'question_id' and 'turns' (MT-Bench)"
    problems.add(line, Kind.MISSING, f"expected {expected}, found {found}")
    return None


def _question(line: int, record: Record, benchmark: Benchmark, problems: Problems) -> Question | None:
    key = "instruction" if benchmark is Benchmark.ALPACA_EVAL else "turns"
    turns = [record[key]] if benchmark is Benchmark.ALPACA_EVAL else record[key]
    if benchmark is Benchmark.MT_BENCH and not isinstance(record.get("question_id"), int | str):
        problems.add(line, Kind.MISSING, "expected 'question_id', a number or text")
        return None
    if not isinstance(turns, list) or not turns:
        problems.add(line, Kind.TYPE, "'turns': expected a list of texts with at least one")
        return None
    for turn in turns:
        problem = text_problem(turn, key) or ((Kind.EMPTY, f"'{key}' has no text") if not turn.strip() else None)
        if problem:
            problems.add(line, *problem)
            return None
    return Question(tuple(turns), record)
