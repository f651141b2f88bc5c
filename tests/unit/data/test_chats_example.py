"""The example's lines are conversations that fine-tuning takes."""

from __future__ import annotations

import runpy
from pathlib import Path

from narrowgauge.data.conversations import Format, check_records

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "chats.py"


def test_the_standard_library_gives_conversations_and_some_are_held_out(tmp_path: Path, capsys) -> None:
    files = [tmp_path / "chats.jsonl", tmp_path / "held-out.jsonl"]
    runpy.run_path(str(EXAMPLE))["main"]([str(file) for file in files])
    train, held_out = (check_records(file, (Format.MESSAGES,)) for file in files)
    assert train.count > 400 and abs(train.count - 9 * held_out.count) <= 9
    questions = [{row["messages"][0]["content"] for row in records.rows()} for records in (train, held_out)]
    assert "What does textwrap.dedent do?" in questions[0] | questions[1]
    assert not questions[0] & questions[1]
