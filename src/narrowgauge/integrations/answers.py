"""What a Hugging Face model writes: continuations, and answers to files of questions.

The answer files are those of AlpacaEval (`model_outputs`) and of MT-Bench (FastChat's `model_answer`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
        longest, context = max(map(len, rows)), context_of(self.model)
        if not all(rows):
            raise DataError("expected a prompt of at least one token, found an empty one: give it text")
        if context is not None and longest >= context:
            at = next(at for at, row in enumerate(rows) if len(row) >= context)
            raise DataError(
                f"{texts[at]!r:.60}: expected fewer than {context} tokens, the model's context, found {len(rows[at])}: "
                "leave it out; where an earlier answer is what is long, lower tokens"
            )
        room = self.sampling.tokens if context is None else min(self.sampling.tokens, context - longest)
        pad = self.tokenizer.pad_token_id
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
        texts = [
            self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in conversations
        ]
        return [text.strip() for text in self.write(texts, temperature)]


def answers(
    writer: Writer, questions: Questions, name: str, on_progress: Callable[[int, int], None] = lambda done, all_: None
) -> list[dict[str, Any]]:
    """A record for each question, in order. name: what the model is called there.

    on_progress: called with answers that are there and answers in all.
    """
    said: dict[int, list[str]] = {at: [] for at in range(len(questions.questions))}
    total = sum(len(question.turns) for question in questions.questions)
    for rows, turn, temperature in _batches(questions, writer.sampling):
        conversations = [_conversation(questions.questions[at], said[at], turn) for at in rows]
        for at, text in zip(rows, writer.answer(conversations, temperature), strict=True):
            said[at].append(text)
        on_progress(sum(map(len, said.values())), total)
    write = _alpaca_eval if questions.benchmark is Benchmark.ALPACA_EVAL else _mt_bench
    return [write(question, said[at], name, writer.sampling.seed) for at, question in enumerate(questions.questions)]


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
