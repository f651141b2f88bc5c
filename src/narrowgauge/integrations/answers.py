"""What a Hugging Face model writes: continuations, and answers to files of questions.

The answer files are those of AlpacaEval (`model_outputs`) and of MT-Bench (FastChat's `model_answer`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from narrowgauge.data.questions import Benchmark, Question, Questions
from narrowgauge.errors import DataError
from narrowgauge.integrations.finetune_models import Loaded, context_of, end_tokens

# Of MT-Bench's categories: FastChat, llm_judge/common.py, temperature_config. Others: 0.7.
MT_BENCH_TEMPERATURES = {
    "writing": 0.7, "roleplay": 0.7, "extraction": 0.0, "math": 0.0, "coding": 0.0, "reasoning": 0.0, "stem": 0.1,
    "humanities": 0.1,
}  # fmt: skip
_OTHER_TEMPERATURE = 0.7
# as their own programs write where a model fails: FastChat's gen_model_answer, and AlpacaEval's decoders, for a prompt
# that is longer than the context
UNANSWERED = {Benchmark.MT_BENCH: "ERROR", Benchmark.ALPACA_EVAL: ""}
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. tokens: at most so many. temperature: 0 takes the likeliest token; None: as the benchmark
    has it, 0 for AlpacaEval. top_k: among so many; 0: all. batch_size: questions at once."""

    tokens: int = 1024
    temperature: float | None = None
    top_k: int = 0
    seed: int = 0
    batch_size: int = 8


class Writer:
    """A model that writes. Each call draws from a generator state of its own, seeded by `sampling.seed`."""

    def __init__(self, loaded: Loaded, sampling: Sampling) -> None:
        self.model, self.tokenizer = loaded
        self.sampling = sampling
        self._ends = end_tokens(loaded)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token_id = self._ends[0] if self._ends else 0

    def write(self, texts: Sequence[str], temperature: float) -> list[str]:
        """What follows each text. Raises DataError for a text without a token, or as long as the model's context."""
        rows = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        if not all(rows):
            raise DataError("expected a prompt of at least one token, found an empty one: give it text")
        context, tokens = context_of(self.model), self.sampling.tokens
        for text, row in zip(texts, rows, strict=True):
            if context is not None and len(row) >= context:
                raise DataError(f"{text!r:.60}: {_too_long(len(row), context)}")
        if context is None or max(map(len, rows)) + tokens <= context:
            return self._write(rows, tokens, temperature)
        # texts near the context's end have less room, and are no reason to give the others less
        return [self._write([row], min(tokens, context - len(row)), temperature)[0] for row in rows]

    def _write(self, rows: Sequence[list[int]], room: int, temperature: float) -> list[str]:
        longest, pad = max(map(len, rows)), self.tokenizer.pad_token_id
        device = self.model.device
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        drawn: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        if temperature > 0:
            drawn = {"do_sample": True, "temperature": temperature, "top_k": self.sampling.top_k, "top_p": 1.0}
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(self.sampling.seed)
            written = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=room, pad_token_id=pad,
                eos_token_id=self._ends or None, **drawn,
            )  # fmt: skip
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in written[:, longest:]]

    def answer(self, conversations: Sequence[Messages], temperature: float) -> list[str]:
        """The assistant's next turn of each conversation, without blanks around it."""
        return [text.strip() for text in self.write(list(map(self._templated, conversations)), temperature)]

    def problem(self, conversation: Messages) -> str | None:
        """Why a conversation cannot be answered: it leaves no room in the model's context; else None."""
        context = context_of(self.model)
        length = len(self.tokenizer(self._templated(conversation), add_special_tokens=False)["input_ids"])
        return None if context is None or length < context else _too_long(length, context)

    def _templated(self, conversation: Messages) -> str:
        return self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)


def _too_long(length: int, context: int) -> str:
    return (
        f"expected fewer than {context} tokens, the model's context, found {length}: leave it out; where an earlier "
        "answer is what is long, lower tokens"
    )


class Answers(NamedTuple):
    """A record for each question, in order; and what could not be answered, in words. Its text in the records is
    `UNANSWERED`, and that of the turns after it."""

    records: list[dict[str, Any]]
    unanswered: list[str]


def answers(
    writer: Writer, questions: Questions, name: str, on_progress: Callable[[int, int], None] = lambda done, all_: None
) -> Answers:
    """All questions, answered by one model. name: what the model is called there.

    on_progress: called with answers that are there and answers in all.
    """
    said: dict[int, list[str]] = {at: [] for at in range(len(questions.questions))}
    total = sum(len(question.turns) for question in questions.questions)
    failed: dict[int, str] = {}
    for rows, turn, temperature in _batches(questions, writer.sampling):
        conversations = {at: _conversation(questions.questions[at], said[at], turn) for at in rows if at not in failed}
        for at, conversation in conversations.items():
            problem = writer.problem(conversation)
            if problem is not None:
                failed[at] = f"{_called(questions.questions[at], at)}, turn {turn + 1}: {problem}"
        due = [at for at in conversations if at not in failed]
        texts = writer.answer([conversations[at] for at in due], temperature) if due else []
        found = dict(zip(due, texts, strict=True))
        for at in rows:
            said[at].append(found.get(at, UNANSWERED[questions.benchmark]))
        on_progress(sum(map(len, said.values())), total)
    write = _alpaca_eval if questions.benchmark is Benchmark.ALPACA_EVAL else _mt_bench
    records = [write(question, said[at], name, writer.sampling.seed) for at, question in enumerate(questions.questions)]
    return Answers(records, [failed[at] for at in sorted(failed)])


def _called(question: Question, at: int) -> str:
    number = question.record.get("question_id")
    return f"question {at + 1}" if number is None else f"question_id {number}"


def _batches(questions: Questions, sampling: Sampling) -> Iterator[tuple[list[int], int, float]]:
    """(questions, turn, temperature): a question's later turns come after its earlier ones."""
    rows = range(len(questions.questions))
    temperatures = [_temperature(question, questions.benchmark, sampling) for question in questions.questions]
    for turn in range(max(len(question.turns) for question in questions.questions)):
        for temperature in dict.fromkeys(temperatures):
            due = [at for at in rows if temperatures[at] == temperature and turn < len(questions.questions[at].turns)]
            for start in range(0, len(due), sampling.batch_size):
                yield due[start : start + sampling.batch_size], turn, temperature


def _temperature(question: Question, benchmark: Benchmark, sampling: Sampling) -> float:
    if sampling.temperature is not None:
        return sampling.temperature
    if benchmark is Benchmark.ALPACA_EVAL:
        return 0.0
    asked = question.record.get("required_temperature")
    if isinstance(asked, int | float):
        return float(asked)
    return MT_BENCH_TEMPERATURES.get(str(question.record.get("category")), _OTHER_TEMPERATURE)


def _conversation(question: Question, said: list[str], turn: int) -> Messages:
    messages: Messages = []
    for at in range(turn + 1):
        messages.append({"role": "user", "content": question.turns[at]})
        if at < turn:
            messages.append({"role": "assistant", "content": said[at]})
    return messages


def _alpaca_eval(question: Question, said: list[str], name: str, seed: int) -> dict[str, Any]:
    kept = {key: question.record[key] for key in ("dataset", "datasplit") if key in question.record}
    return {**kept, "instruction": question.turns[0], "output": said[0], "generator": name}


def _mt_bench(question: Question, said: list[str], name: str, seed: int) -> dict[str, Any]:
    number = question.record["question_id"]
    return {
        "question_id": number,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_URL, f"{name}/{number}/{seed}").hex[:22],  # as long as FastChat's
        "model_id": name,
        "choices": [{"index": 0, "turns": said}],
        "tstamp": time.time(),
    }
