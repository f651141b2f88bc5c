"""Files for fine-tuning: the formats of TRL, and what is wrong with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.data.conversations import Format, Records, check_records
from narrowgauge.errors import DataError

SFT = (Format.MESSAGES, Format.PROMPT_COMPLETION, Format.TEXT)
USER, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def check(path: Path, *records: Any, formats: tuple[Format, ...] = SFT) -> Records:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return check_records(path, formats)


@pytest.mark.parametrize(
    ("formats", "record", "format_", "conversational", "columns"),
    [
        (SFT, {"text": "a"}, Format.TEXT, False, ("text",)),
        (SFT, {"messages": [USER, ANSWER]}, Format.MESSAGES, True, ("messages",)),
        (SFT, {"messages": [USER, ANSWER], "tools": []}, Format.MESSAGES, True, ("messages", "tools")),
        (SFT, {"prompt": "a", "completion": "b"}, Format.PROMPT_COMPLETION, False, ("prompt", "completion")),
        (SFT, {"prompt": [USER], "completion": [ANSWER]}, Format.PROMPT_COMPLETION, True, ("prompt", "completion")),
        ((Format.PREFERENCE,), {"chosen": "a", "rejected": "b"}, Format.PREFERENCE, False, ("chosen", "rejected")),
        (
            (Format.PREFERENCE,),
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [ANSWER]},
            Format.PREFERENCE, True, ("chosen", "rejected", "prompt"),
        ),
        ((Format.PROMPT,), {"answer": 2, "prompt": "a"}, Format.PROMPT, False, ("prompt", "answer")),
        ((Format.PROMPT,), {"prompt": [USER], "chosen": "b"}, Format.PROMPT, True, ("prompt", "chosen")),
    ],
)  # fmt: skip
def test_formats_are_known_by_their_keys(formats, record, format_, conversational, columns, path: Path) -> None:
    found = check(path, record, record, formats=formats)
    assert (found.format, found.conversational, found.columns, found.ignored) == (format_, conversational, columns, ())
    assert found.count == 2
    assert list(found.rows()) == [{key: record[key] for key in columns}] * 2


def test_other_keys_are_left_out_and_named(path: Path) -> None:
    found = check(path, {"prompt": "a", "messages": [USER, ANSWER | {"weight": 1}], "id": 3}, {"messages": [ANSWER]})
    assert found.ignored == ("prompt", "id")
    assert list(found.rows()) == [{"messages": [USER, ANSWER]}, {"messages": [ANSWER]}]


def test_columns_for_rewards_may_be_null_but_have_one_type(path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": 1},
        {"prompt": "b", "answer": None},
        {"prompt": "c"},
        {"prompt": "d", "answer": 2.5},
    ]
    found = check(path, *rows, formats=(Format.PROMPT,))
    assert [row["answer"] for row in found.rows()] == [1, None, None, 2.5]
    with pytest.raises(DataError, match="line 2: wrong type: 'answer': expected a number, .* found text"):
        check(path, rows[0], {"prompt": "b", "answer": "1"}, formats=(Format.PROMPT,))
    with pytest.raises(DataError, match="line 1: wrong type: 'answer': .* 64 bits"):
        check(path, {"prompt": "b", "answer": 2**63}, formats=(Format.PROMPT,))


def turns(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"txt": "a"}, r"missing key: expected \{'messages'\} or .*found 'txt'"),
        ({"conversations": []}, "missing key: .*ShareGPT"),
        ({"instruction": "a", "output": "b"}, "missing key: .*Alpaca"),
        ({"completion": "a"}, "missing key: expected 'prompt' beside 'completion'"),
        ({"text": 3}, "wrong type: 'text': expected text, found a number"),
        ({"text": None}, "wrong type: 'text': expected text, found null"),
        ({"text": " \n"}, "empty: 'text'"),
        ({"text": "a\0b"}, "not UTF-8: .*NUL"),
        ({"text": "\ud800"}, "not UTF-8: .*surrogate"),
        ({"prompt": "a", "completion": ""}, "empty: 'completion'"),
        ({"prompt": [USER], "completion": []}, "empty: 'completion' has no message"),
        ({"prompt": "a", "completion": {}}, "wrong type: 'completion': .*found an object"),
        ({"prompt": "a", "completion": [ANSWER]}, "mixed formats: 'completion' is messages"),
        ({"prompt": [USER], "completion": [USER]}, "empty: 'completion' has no message of the role 'assistant'"),
        (turns(), "empty: 'messages' has no message"),
        (turns(USER), "empty: .*nothing to learn"),
        (turns("hello"), r"wrong type: 'messages\[0\]': .*found text"),
        (turns(USER, {"role": "assistant"}), r"missing key: 'messages\[1\]': expected 'content', found 'role'"),
        (turns({"from": "human", "value": "a"}), r"missing key: 'messages\[0\]': expected 'role'"),
        (turns({"role": "human", "content": "a"}), "unknown role: .*did you mean 'user'"),
        (turns({"role": "asistant", "content": "a"}), "unknown role: .*did you mean 'assistant'"),
        (turns({"role": ["user"], "content": "a"}), "unknown role"),
        (turns(USER, ANSWER | {"content": "  "}), r"empty: 'messages\[1\].content'"),
        (turns(USER, ANSWER | {"content": None}), r"wrong type: 'messages\[1\].content': .*found null"),
        (turns(USER | {"content": [{"type": "text"}]}, ANSWER), "wrong type: .*list of parts"),
        ({"messages": {"role": "user"}}, "wrong type: 'messages': expected a list of messages, found an object"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(record: Any, said: str, path: Path) -> None:
    with pytest.raises(DataError, match=f"line 1: {said}"):
        check(path, record)


def test_a_call_of_a_tool_needs_no_text(path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": "{}"}]}
    result = {"role": "tool", "content": "2", "name": "add"}
    assert list(check(path, turns(USER, call, result, ANSWER)).rows()) == [turns(USER, call, result, ANSWER)]


def test_formats_are_not_mixed(path: Path) -> None:
    with pytest.raises(DataError, match="line 2: mixed formats: 'text', where earlier lines have 'messages'"):
        check(path, turns(ANSWER), {"text": "a"})
    with pytest.raises(DataError, match="line 2: mixed formats: 'prompt' is messages"):
        check(path, {"prompt": "a", "completion": "b"}, {"prompt": [USER], "completion": [ANSWER]})
    pairs = {"chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match="line 2: mixed formats: with a prompt, where earlier lines are without one"):
        check(path, pairs, pairs | {"prompt": "c"}, formats=(Format.PREFERENCE,))


def test_all_that_is_wrong_is_said_at_once(path: Path) -> None:
    path.write_text('{"text": ""}\n{"text": "a"}\n\n{"text": 1}\n{"text": NaN}\n')
    with pytest.raises(DataError) as caught:
        check_records(path, SFT)
    kinds = [line.strip().split(":")[:2] for line in str(caught.value).splitlines()[1:]]
    assert kinds == [["line 1", " empty"], ["line 4", " wrong type"], ["line 5", " not a finite number"]]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_a_file_without_a_record_is_refused(data: bytes, path: Path) -> None:
    path.write_bytes(data)
    with pytest.raises(DataError, match="expected one JSON object a line, found none"):
        check_records(path, SFT)


def test_a_file_that_changes_later_is_noticed(path: Path) -> None:
    found = check(path, {"text": "a"})
    path.write_text('{"text": "a"}\n{"text": ""}\n')
    with pytest.raises(DataError, match="line 2: empty"):
        list(found.rows())
