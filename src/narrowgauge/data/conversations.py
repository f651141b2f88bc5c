"""Files for fine-tuning, in the dataset formats of TRL, checked line by line.

    {"text": "..."}                                                    language modelling
    {"messages": [{"role": "user", "content": "..."}, ...]}            conversations
    {"prompt": "...", "completion": "..."}                             prompt and completion
    {"prompt": "...", "chosen": "...", "rejected": "..."}              preference; the prompt may be left out
    {"prompt": "...", ...}                                             prompts; other keys go to reward functions

A prompt, completion, chosen or rejected one is text or a list of messages: the same throughout a file.
Formats: https://huggingface.co/docs/trl/dataset_formats
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from narrowgauge.data.jsonl import Kind, Problems, Record, read_jsonl, text_problem, type_name
from narrowgauge.errors import DataError, closest


class Format(StrEnum):
    """What the lines of a file hold. The value is the key by which a line is known."""

    MESSAGES = "messages"
    PREFERENCE = "chosen"
    PROMPT_COMPLETION = "completion"
    PROMPT = "prompt"
    TEXT = "text"


ROLES = ("system", "developer", "user", "assistant", "tool")
# What others call them: ShareGPT, OpenAI before tools.
_ALIASES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "function": "tool"}
_REQUIRED = {
    Format.MESSAGES: ("messages",),
    Format.PREFERENCE: ("chosen", "rejected"),
    Format.PROMPT_COMPLETION: ("prompt", "completion"),
    Format.PROMPT: ("prompt",),
    Format.TEXT: ("text",),
}
_OPTIONAL = {Format.PREFERENCE: ("prompt",)}
_TOOLS = ("tools", "chat_template_kwargs")  # what chat templates take beside the messages
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
_FOREIGN = {
    "conversations": "ShareGPT's format: write 'messages' of {'role', 'content'} instead",
    "instruction": "Alpaca's format: write 'prompt' and 'completion' instead",
    "question": "write 'prompt', and 'completion' for the answer, instead",
}


@dataclass(frozen=True)
class Records:
    """A file whose every line was checked.

    conversational: prompts and answers are lists of messages. columns: keys that `rows` gives; ignored: other keys that
    some line has. count: lines with a record.
    """

    path: Path
    format: Format
    conversational: bool
    columns: tuple[str, ...]
    ignored: tuple[str, ...]
    count: int
    _formats: tuple[Format, ...]

    def rows(self) -> Iterator[Record]:
        """The records in order, read anew; each has all `columns`, None where a line leaves one out."""
        problems = Problems(self.path)
        checker = _Checker(self._formats, problems)
        for line, record in read_jsonl(self.path, problems):
            if checker.accepts(line, record):
                yield {key: _trimmed(record.get(key), key, self.format) for key in self.columns}
        problems.raise_any()  # the file was changed since it was checked


def check_records(path: Path | str, formats: Sequence[Format]) -> Records:
    """Read a whole file of one of `formats`, keeping none of it.

    Raises DataError with the first ten problems, each with its line and kind, and their number; also where the file is
    missing or holds no record.
    """
    problems = Problems(Path(path))
    checker = _Checker(tuple(formats), problems)
    for line, record in read_jsonl(problems.path, problems):
        checker.accepts(line, record)
    problems.raise_any()
    if checker.format is None:
        raise DataError(f"{path}: expected one JSON object a line, found none: is this the right file?")
    kept = [*_REQUIRED[checker.format], *_OPTIONAL.get(checker.format, ()), *_TOOLS]
    if checker.format is Format.PROMPT:
        kept += [key for key in checker.keys if key not in kept]
    columns = tuple(key for key in kept if key in checker.keys)
    ignored = tuple(key for key in checker.keys if key not in columns)
    is_conversational = checker.is_conversational or checker.format is Format.MESSAGES
    return Records(problems.path, checker.format, is_conversational, columns, ignored, checker.count, tuple(formats))


@dataclass
class _Checker:
    formats: tuple[Format, ...]
    problems: Problems
    format: Format | None = None
    is_conversational: bool | None = None
    count: int = 0
    keys: dict[str, None] = field(default_factory=dict)  # in the order of their first appearance
    _types: dict[str, str] = field(default_factory=dict)
    _has_prompt: bool | None = None
    _line: int = 0

    def accepts(self, line: int, record: Record) -> bool:
        """True where the record is as it should be; else what is wrong is noted."""
        before, self._line = self.problems.count, line
        found = next((each for each in self.formats if each.value in record), None)
        if found is None:
            self._missing(record)
            return False
        if self.format is None:
            self.format = found
        elif found is not self.format:
            self._add(Kind.MIXED, f"'{found.value}', where earlier lines have '{self.format.value}': part the file")
            return False
        self.keys.update(dict.fromkeys(record))
        missing = [key for key in _REQUIRED[found] if key not in record]
        for key in missing:
            self._add(Kind.MISSING, f"expected '{key}' beside '{found.value}'{_near(key, record)}")
        if not missing:
            getattr(self, f"_check_{found.name.lower()}")(record)
        self.count += 1
        return self.problems.count == before

    def _check_text(self, record: Record) -> None:
        self._text(record["text"], "text")

    def _check_messages(self, record: Record) -> None:
        self._messages(record["messages"], "messages", needs_answer=True)

    def _check_prompt_completion(self, record: Record) -> None:
        self._pair(record, ("prompt", "completion"))

    def _check_preference(self, record: Record) -> None:
        has_prompt = record.get("prompt") is not None
        if self._has_prompt is None:
            self._has_prompt = has_prompt
        elif has_prompt != self._has_prompt:
            there, here = ("without", "with") if has_prompt else ("with", "without")
            self._add(Kind.MIXED, f"{here} a prompt, where earlier lines are {there} one")
        self._pair(record, ("prompt", "chosen", "rejected") if has_prompt else ("chosen", "rejected"))

    def _check_prompt(self, record: Record) -> None:
        self._pair(record, ("prompt",))
        for key, value in record.items():
            self._column(key, value)

    def _pair(self, record: Record, keys: Sequence[str]) -> None:
        """Text or messages at each of `keys`, the same in all of them and in all lines."""
        for key in keys:
            value = record[key]
            if not isinstance(value, str | list):
                self._add(Kind.TYPE, f"'{key}': expected text or a list of messages, found {type_name(value)}")
                continue
            is_list = isinstance(value, list)
            if self.is_conversational is None:
                self.is_conversational = is_list
            if is_list != self.is_conversational:
                here, there = ("messages", "text") if is_list else ("text", "messages")
                self._add(Kind.MIXED, f"'{key}' is {here}, where what went before is {there}: write all alike")
            elif is_list:
                self._messages(value, key, needs_answer=key != "prompt")
            else:
                self._text(value, key)

    def _text(self, value: Any, key: str) -> None:
        if problem := text_problem(value, key):
            self._add(*problem)
        elif not value.strip():
            self._add(Kind.EMPTY, f"'{key}' has no text: leave this line out")

    def _messages(self, value: Any, key: str, needs_answer: bool) -> None:
        if not isinstance(value, list):
            self._add(Kind.TYPE, f"'{key}': expected a list of messages, found {type_name(value)}")
            return
        if not value:
            self._add(Kind.EMPTY, f"'{key}' has no message: leave this line out")
            return
        sound = [self._message(message, f"{key}[{at}]") for at, message in enumerate(value)]
        if needs_answer and all(sound) and not any(_is_answer(message) for message in value):
            self._add(Kind.EMPTY, f"'{key}' has no message of the role 'assistant': there is nothing to learn")

    def _message(self, message: Any, where: str) -> bool:
        if not isinstance(message, dict):
            self._add(Kind.TYPE, f"'{where}': expected an object of role and content, found {type_name(message)}")
            return False
        for key in ("role", "content"):
            if key not in message:
                self._add(Kind.MISSING, f"'{where}': expected '{key}'{_near(key, message)}")
                return False
        role, content = message["role"], message["content"]
        if role not in ROLES:
            meant = _ALIASES.get(role) if isinstance(role, str) else None
            hint = f"; did you mean '{meant}'?" if meant else closest(str(role), ROLES)
            self._add(Kind.ROLE, f"'{where}': {role!r}{hint}")
            return False
        calls = bool(message.get("tool_calls"))
        if content is None and calls:
            return True
        if isinstance(content, list):
            self._add(Kind.TYPE, f"'{where}.content': expected text, found a list of parts: only text is trained on")
            return False
        if problem := text_problem(content, f"{where}.content"):
            self._add(*problem)
            return False
        if role == "assistant" and not calls and not str(content).strip():
            self._add(Kind.EMPTY, f"'{where}.content': an answer without text: leave this line out")
            return False
        return True

    def _column(self, key: str, value: Any) -> None:
        """A column has one type, or null: Arrow's tables, in which datasets lie, have no other."""
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            self._add(Kind.TYPE, f"'{key}': expected a number of 64 bits, found a larger one: write it as text")
        if value is None or key == "prompt":
            return
        found = type_name(value)
        if self._types.setdefault(key, found) != found:
            self._add(Kind.TYPE, f"'{key}': expected {self._types[key]}, as in earlier lines, found {found}")

    def _missing(self, record: Record) -> None:
        expected = " or ".join("{" + ", ".join(f"'{key}'" for key in _REQUIRED[each]) + "}" for each in self.formats)
        foreign = next((f" ('{key}' is {hint})" for key, hint in _FOREIGN.items() if key in record), "")
        found = ", ".join(f"'{key}'" for key in list(record)[:5]) or "an empty object"
        self._add(Kind.MISSING, f"expected {expected}, found {found}{foreign}")

    def _add(self, kind: Kind, text: str) -> None:
        self.problems.add(self._line, kind, text)


def _is_answer(message: Record) -> bool:
    return message["role"] == "assistant"


def _near(key: str, record: Record) -> str:
    found = ", ".join(f"'{name}'" for name in list(record)[:5])
    return f", found {found}" if found else ""


def _trimmed(value: Any, key: str, kind: Format) -> Any:
    """Messages without keys that no chat template reads, in place of which Arrow would put nulls everywhere."""
    is_reward_column = kind is Format.PROMPT and key != "prompt"
    if not isinstance(value, list) or is_reward_column or key in _TOOLS:
        return value
    return [{name: message[name] for name in _MESSAGE_KEYS if name in message} for message in value]
