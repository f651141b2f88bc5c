"""`eval`, `generate` and `export` of Hugging Face directories and fine-tuning runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import validate
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge.cli.main import main
from narrowgauge.integrations.finetune_config import DPOConfig
from narrowgauge.integrations.finetune_run import LAST_WRITTEN, FinetuneRun
from tiny_chat import sums, turn, write_lines, write_model

# What alpaca_eval's `model_outputs` must be, and what its leaderboard files hold.
ALPACA_EVAL = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["instruction", "output", "generator"],
        "properties": {
            "dataset": {"type": "string"},
            "instruction": {"type": "string", "minLength": 1},
            "output": {"type": "string"},
            "generator": {"type": "string", "minLength": 1},
            "datasplit": {"type": "string"},
        },
        "additionalProperties": False,
    },
}
# A line of FastChat's llm_judge: data/mt_bench/model_answer/MODEL.jsonl.
MT_BENCH = {
    "type": "object",
    "required": ["question_id", "answer_id", "model_id", "choices", "tstamp"],
    "properties": {
        "question_id": {"type": "integer"},
        "answer_id": {"type": "string", "pattern": "^[0-9A-Za-z]{22}$"},
        "model_id": {"type": "string", "minLength": 1},
        "choices": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["index", "turns"],
                "properties": {
                    "index": {"type": "integer"},
                    "turns": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
                },
                "additionalProperties": False,
            },
        },
        "tstamp": {"type": "number"},
    },
    "additionalProperties": False,
}
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Write.", "Now shorter."]},
    {"question_id": 111, "category": "math", "turns": ["1 + 1?", "And 2 + 2?"], "reference": ["2", "4"]},
    {"question_id": 112, "category": "math", "turns": ["What is 3 + 3, please?", "Why?"]},
]
INSTRUCTIONS = [{"instruction": f"{q} Say.", "dataset": "sums", "output": "x"} for q, _ in sums(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model, which says anything."""
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    """A fine-tuning run with one checkpoint, as training leaves it."""
    config = DPOConfig(model=str(model), data="d.jsonl", recipe="fp8_current", output=str(tmp_path / "run"))
    folder = FinetuneRun.begin(config)
    folder.unlock()
    path = folder.checkpoint(3)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    (path / LAST_WRITTEN).write_text("{}")
    return folder.path


def batch(model: Path, questions: Path, output: Path, *more: str) -> int:
    words = ["generate", str(model), "--batch", str(questions), "--output", str(output), "--tokens", "6", *more]
    return main(words)


@pytest.mark.parametrize("as_lines", [False, True])
def test_alpaca_eval_outputs_have_their_schema(as_lines: bool, model: Path, tmp_path: Path, capsys) -> None:
    path = tmp_path / "alpaca_eval.json"
    if as_lines:
        write_lines(path, INSTRUCTIONS)
    else:
        path.write_text(json.dumps(INSTRUCTIONS))
    assert batch(model, path, tmp_path / "out.json", "--name", "tiny-8bit", "--batch-size", "2") == 0
    assert "5 answers in AlpacaEval's format, as 'tiny-8bit'" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    validate(written, ALPACA_EVAL)
    assert [record["instruction"] for record in written] == [record["instruction"] for record in INSTRUCTIONS]
    assert {record["generator"] for record in written} == {"tiny-8bit"}
    assert {record["dataset"] for record in written} == {"sums"}
    assert [record["output"] for record in written] == [
        greedy(model, [turn("user", r["instruction"])]) for r in INSTRUCTIONS
    ]


def greedy(model: Path, messages: list[dict[str, str]]) -> str:
    """The likeliest answer of 6 tokens, one sequence at a time, by transformers alone."""
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = loaded.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True).strip()


def test_mt_bench_answers_have_two_turns_and_the_second_sees_the_first(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "question.jsonl", QUESTIONS)
    assert batch(model, path, tmp_path / "a.jsonl", "--temperature", "0") == 0
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    for line, question in zip(lines, QUESTIONS, strict=True):
        validate(line, MT_BENCH)
        assert (line["question_id"], line["model_id"]) == (question["question_id"], model.name)
        first, second = line["choices"][0]["turns"]
        turns = [turn("user", question["turns"][0])]
        assert first == greedy(model, turns)
        assert second == greedy(model, [*turns, turn("assistant", first), turn("user", question["turns"][1])])
    assert len({line["answer_id"] for line in lines}) == 3


def test_mt_bench_draws_by_the_temperature_of_each_category(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "question.jsonl", QUESTIONS)
    found = []
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert batch(model, path, tmp_path / name, "--seed", seed) == 0
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        found.append([line["choices"][0]["turns"] for line in lines])
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]  # writing: 0.7
    assert found[0][1:] == found[2][1:]  # math: the likeliest


def test_a_question_longer_than_the_context_loses_no_other_answer(model: Path, tmp_path: Path, capsys) -> None:
    long = "a" * 200  # of 128
    questions = [
        QUESTIONS[0],
        {"question_id": 7, "category": "math", "turns": [long, "And then?"]},
        {"question_id": 8, "category": "math", "turns": ["1 + 1?", long]},
        QUESTIONS[1],
    ]
    path = write_lines(tmp_path / "question.jsonl", questions)
    assert batch(model, path, tmp_path / "a.jsonl", "--temperature", "0") == 1
    error = capsys.readouterr().err
    assert "2 of 4 questions could not be answered" in error
    assert "question_id 7, turn 1: expected fewer than 128 tokens" in error and "question_id 8, turn 2" in error
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    for line in lines:
        validate(line, MT_BENCH)
    turns = [line["choices"][0]["turns"] for line in lines]
    assert turns[1] == ["ERROR", "ERROR"] and turns[2][1] == "ERROR"
    for found, question in ((turns[0], QUESTIONS[0]), (turns[2], questions[2]), (turns[3], QUESTIONS[1])):
        assert found[0] == greedy(model, [turn("user", question["turns"][0])]) != "ERROR"

    (tmp_path / "alpaca_eval.json").write_text(json.dumps([{"instruction": long}, *INSTRUCTIONS]))
    assert batch(model, tmp_path / "alpaca_eval.json", tmp_path / "out.json") == 1
    assert "question 1, turn 1: expected fewer than 128 tokens" in capsys.readouterr().err
    written = json.loads((tmp_path / "out.json").read_text())
    validate(written, ALPACA_EVAL)
    assert written[0]["output"] == "" and [bool(record["output"]) for record in written[1:]] == [True] * 5


def test_a_question_near_the_end_of_the_context_leaves_the_others_their_room(model: Path, tmp_path: Path) -> None:
    near = "b" * 106  # with its template 125 tokens of 128
    (tmp_path / "alpaca_eval.json").write_text(json.dumps([{"instruction": near}, *INSTRUCTIONS]))
    assert batch(model, tmp_path / "alpaca_eval.json", tmp_path / "out.json") == 0
    written = json.loads((tmp_path / "out.json").read_text())
    for record in written[1:]:
        assert record["output"] == greedy(model, [turn("user", record["instruction"])])


def test_a_prompt_is_continued_or_answered(model: Path, run: Path, capsys) -> None:
    assert main(["generate", str(model), "--prompt", "1 + 1?", "--chat", "--temperature", "0", "--tokens", "6"]) == 0
    assert capsys.readouterr().out == greedy(model, [turn("user", "1 + 1?")]) + "\n"
    assert main(["generate", str(run), "--prompt", "1 + 1?", "--tokens", "6"]) == 0
    assert capsys.readouterr().out.startswith("1 + 1?")


def test_eval_of_a_directory_and_of_a_run_in_its_precision(model: Path, run: Path, tmp_path: Path, capsys) -> None:
    data = str(write_lines(tmp_path / "d.jsonl", [{"text": f"{q} {a}"} for q, a in sums(8)]))
    figures: list[dict[str, Any]] = []
    for words in ([str(model)], [str(run)], [str(model), "--recipe", "fp8_current"]):
        assert main(["eval", *words, "--data", data, "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    assert [each["recipe"] for each in figures] == ["none", "fp8_current", "fp8_current"]
    assert figures[1]["model"].endswith("checkpoint-3")
    assert figures[1]["loss"] == figures[2]["loss"] != figures[0]["loss"]
    assert all(each["loss"] == pytest.approx(5.56, abs=0.05) for each in figures)  # log 260: it knows nothing
    assert {each["examples"] for each in figures} == {8}


@pytest.mark.parametrize(("weight_format", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_run_is_exported(weight_format: str, dtype: torch.dtype, model: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--format", weight_format]) == 0
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()) and {p.dtype for p in loaded.parameters()} == {dtype}
    source = AutoModelForCausalLM.from_pretrained(model)
    for name, p in source.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p.to(dtype))
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert main(["export", str(run), str(out)]) == 2


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["eval", "MODEL"], 2, "--data: expected held-out JSON Lines"),
        (["eval", "MODEL", "--data", "FILE", "--corpus", "a"], 2, "--corpus: for runs of `narrowgauge train`"),
        (["eval", "MODEL", "--data", "FILE", "--batch-size", "-1"], 2, "--batch-size=-1"),
        (["eval", "MODEL", "--data", "nowhere.jsonl"], 1, "nowhere.jsonl: expected a file"),
        (["eval", "MODEL", "--data", "FILE"], 1, "missing key"),
        (["eval", "MODEL", "--data", "FILE", "--checkpoint", "step-1"], 2, "is no run"),
        (["eval", "RUN", "--data", "FILE", "--checkpoint", "checkpoint-1"], 1, "found checkpoint-3"),
        (["generate", "MODEL", "--batch", "FILE"], 2, "--batch: expected --output FILE"),
        (["generate", "MODEL", "--prompt", "a", "--output", "b"], 2, "--output: goes with --batch"),
        (["generate", "MODEL", "--prompt", "a", "--batch", "FILE"], 2, "not allowed with"),
        (["generate", "MODEL", "--prompt", "a" * 200], 1, "fewer than 128 tokens, the model's context, found 200"),
        (["generate", "MODEL", "--prompt", ""], 1, "at least one token"),
        (["generate", "MODEL", "--batch", "FILE", "--output", "FILE"], 2, "expected a new file"),
        (["generate", "MODEL", "--batch", "FILE", "--output", "none/a"], 2, "expected a folder none"),
        (["generate", "nowhere", "--batch", "FILE", "--output", "a"], 2, "--batch: for fine-tuning runs"),
    ],
)
def test_bad_input_is_told(
    words: list[str], code: int, said: str, model: Path, run: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    questions = write_lines(tmp_path / "question.jsonl", QUESTIONS)
    known = {"MODEL": str(model), "RUN": str(run), "FILE": str(questions)}
    assert main([known.get(word, word) for word in words]) == code
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
