"""The fine-tuning commands from the command line to the exported model, on a tiny Llama."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback

from narrowgauge.cli.main import main
from narrowgauge.integrations.finetune_run import FinetuneRun
from narrowgauge.observe import journal
from narrowgauge.train import folder as folders
from tiny_chat import sums, turn, write_lines, write_model

CHATS = [{"messages": [turn("user", q), turn("assistant", a)]} for q, a in sums(24)]
PAIRS = [
    {"prompt": [turn("user", q)], "chosen": [turn("assistant", a)], "rejected": [turn("assistant", f"{a}0")]}
    for q, a in sums(24)
]
PROMPTS = [{"prompt": [turn("user", q)], "answer": a} for q, a in sums(24)]
REWARDS = """
def digits(completions, answer, **columns):
    assert len(completions) == len(answer)
    return [sum(c.isdigit() for c in said[0]["content"]) for said in completions]
def nan(completions, **columns):
    return [float("nan")] * len(completions)
def silent(completions, **columns):
    return [None] * len(completions)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with data and rewards in it."""
    monkeypatch.chdir(tmp_path)
    for name, records in (("chats", CHATS), ("pairs", PAIRS), ("prompts", PROMPTS)):
        write_lines(tmp_path / f"{name}.jsonl", records)
    write_lines(tmp_path / "held_out.jsonl", CHATS[:4])
    (tmp_path / "tiny_rewards.py").write_text(REWARDS)
    return tmp_path


def words(task: str, model: Path, data: str, run: str, *more: str) -> list[str]:
    shared = ["--steps", "4", "--batch-size", "4", "--save-every", "2", "--learning-rate", "1e-3", "--max-length", "64"]
    return [task, "--model", str(model), "--data", data, "--output", run, *shared, *more]


def rows(run: str, kind: str) -> list[dict[str, Any]]:
    return journal.read(Path(run) / "journal.jsonl").of_kind(kind)


def same_steps(one: str, other: str) -> bool:
    measured = ("seconds",)
    kept = [[{k: v for k, v in row.items() if k not in measured} for row in rows(run, "step")] for run in (one, other)]
    return kept[0] == kept[1]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_sft_from_messages_to_a_model_that_transformers_loads(files: Path, model: Path, capsys) -> None:
    more = ("--eval-data", "held_out.jsonl", "--eval-every", "2", "--statistics-every", "2", "--loss-on", "completion")
    assert main([*words("sft", model, "chats.jsonl", "runs/a", *more), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["status"], figures["step"], figures["run"]) == ("finished", 4, "runs/a")
    each = figures["memory"]["model"]["bytes_per_parameter"]
    assert (each["param"], each["master"]) == (pytest.approx(2.0), pytest.approx(1.0))  # narrow8: bfloat16, 8-bit rest
    steps = rows("runs/a", "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    assert "saturated/weight" in steps[1] and "saturated/weight" not in steps[0]
    header = journal.read(Path("runs/a/journal.jsonl")).header
    assert header["task"] == "sft" and header["recipe"]["name"] == "narrow8" and header["environment"]
    sampled = rows("runs/a", "precision")
    assert [row["step"] for row in sampled] == [2, 4] and [row["step"] for row in rows("runs/a", "bytes")] == [1]
    down = "model.layers.0.mlp.down_proj"
    found = sampled[0]["layers"][down].keys()
    assert {"input", "weight", "grad_output", "grad"} <= found <= header["formats"][down].keys()
    evaluations = rows("runs/a", "evaluation")
    assert [row["step"] for row in evaluations] == [2, 4]
    assert figures["held_out"]["loss"] == evaluations[-1]["loss"]
    trained, source = weights(Path("runs/a/model")), weights(model)
    assert trained.keys() == source.keys()
    assert {value.dtype for value in trained.values()} == {torch.bfloat16}
    name = "model.layers.0.mlp.down_proj.weight"
    assert 1e-3 < float((trained[name].float() - source[name]).abs().max()) < 1e-2  # AdamW: a learning rate a step
    tokenizer = AutoTokenizer.from_pretrained("runs/a/model")
    assert tokenizer.chat_template and tokenizer.pad_token == "<|pad|>"


@pytest.mark.parametrize(
    "record", [{"text": "1 + 1 = 2"}, {"prompt": "1 + 1 =", "completion": " 2"}], ids=["text", "pair"]
)
def test_sft_of_plain_text(record: dict[str, str], files: Path, model: Path) -> None:
    write_lines(files / "plain.jsonl", [record] * 16)
    packing = ["--packing"] if "text" in record else []
    assert main([*words("sft", model, "plain.jsonl", "runs/a", "--recipe", "fp8_current"), *packing]) == 0
    steps = rows("runs/a", "step")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1


def test_a_run_that_was_stopped_goes_on_as_if_it_never_had(files: Path, model: Path, monkeypatch, capsys) -> None:
    assert main(words("sft", model, "chats.jsonl", "runs/whole")) == 0
    stop_after(3, monkeypatch)
    assert main(words("sft", model, "chats.jsonl", "runs/a")) == 130
    assert "narrowgauge resume runs/a" in capsys.readouterr().out
    assert FinetuneRun(Path("runs/a")).steps() == [2, 3] and not Path("runs/a/model").exists()
    assert main(["resume", "runs/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "finished"
    assert same_steps("runs/whole", "runs/a")
    one, other = (weights(Path(f"runs/{name}/checkpoints/checkpoint-4")) for name in ("whole", "a"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("steps", ["3", "4"])  # within an epoch of four steps, and at its end
def test_a_run_that_is_done_takes_no_step_more(steps: str, files: Path, model: Path, capsys) -> None:
    more = ("--steps", steps, "--eval-data", "held_out.jsonl", "--eval-every", "2")
    assert main(words("sft", model, "chats.jsonl", "runs/a", *more)) == 0
    assert [row["step"] for row in rows("runs/a", "evaluation")] == [2, int(steps)]  # the last one once
    before, exported = rows("runs/a", "step"), weights(Path("runs/a/model"))
    capsys.readouterr()
    assert main(["resume", "runs/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == int(steps)
    assert rows("runs/a", "step") == before and FinetuneRun(Path("runs/a")).steps()[-1] == int(steps)
    assert all(torch.equal(value, exported[name]) for name, value in weights(Path("runs/a/model")).items())


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while that step is at work, once."""
    from narrowgauge.integrations.finetune_watch import Watch

    sent: list[int] = []

    def press(self: TrainerCallback, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step + 1 == step and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Watch, "on_step_begin", press)


def test_a_checkpoint_cut_short_is_passed_over(files: Path, model: Path, monkeypatch) -> None:
    stop_after(3, monkeypatch)
    assert main(words("sft", model, "chats.jsonl", "runs/a")) == 130
    (Path("runs/a/checkpoints/checkpoint-3") / "trainer_state.json").unlink()
    assert main(["sft", "--output", "runs/a", "--resume"]) == 0
    assert [row["step"] for row in rows("runs/a", "step")] == [1, 2, 3, 4]
    assert [row["step"] for row in rows("runs/a", "resumed")] == [2]


def test_dpo_begins_at_the_reference_and_widens_the_margin(files: Path, model: Path) -> None:
    assert main(words("dpo", model, "pairs.jsonl", "runs/a")) == 0
    steps = rows("runs/a", "step")
    assert steps[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)  # log 2: policy and reference are the same in bits
    assert steps[0]["rewards/margins"] == 0.0
    assert steps[-1]["rewards/margins"] > 0.001
    assert weights(Path("runs/a/model")).keys() == weights(model).keys()


def test_a_reward_model_tells_chosen_from_rejected_and_loads_in_transformers(
    files: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("reward", model, "pairs.jsonl", "runs/a", "--eval-data", "pairs.jsonl")) == 0
    evaluation = rows("runs/a", "evaluation")[-1]
    assert evaluation["accuracy"] > 0.7
    for directory, data in (("runs/a", ()), ("runs/a/model", ("--data", "pairs.jsonl"))):
        capsys.readouterr()
        assert main(["eval", directory, "--json", "--batch-size", "4", *data]) == 0  # scales span a batch
        found = json.loads(capsys.readouterr().out)
        assert found["pairs"] == len(Path("pairs.jsonl").read_text().splitlines()) and found["too_long"] == 0
        # what is saved has the digits that training keeps beside bf16 weights; the model directory runs in float32
        near = 2**-8 if directory == "runs/a" else 0.05
        assert found["accuracy"] == pytest.approx(evaluation["accuracy"], rel=near)
        assert found["loss"] == pytest.approx(evaluation["loss"], rel=near)
        assert found["margin"] == pytest.approx(evaluation["margin"], rel=0.05)  # of rewards in bfloat16
    assert main(["eval", "runs/a", "--max-length", "2"]) == 1 and "found none: raise it" in capsys.readouterr().err
    assert main(["generate", "runs/a", "--prompt", "a"]) == 2 and "reward model" in capsys.readouterr().err
    loaded, info = AutoModelForSequenceClassification.from_pretrained("runs/a/model", output_loading_info=True)
    assert loaded.config.num_labels == 1 and not any(info.values()), info


def grpo(model: Path, run: str, reward: str, *more: str) -> list[str]:
    shared = ["--reward", reward, "--generations", "4", "--max-completion", "8"]
    return words("grpo", model, "prompts.jsonl", run, *shared, *more)


@pytest.mark.slow
def test_grpo_with_a_function_of_the_working_directory(files: Path, model: Path) -> None:
    assert main(grpo(model, "runs/a", "tiny_rewards:digits")) == 0
    steps = rows("runs/a", "step")
    assert all(0 <= row["reward"] <= 8 for row in steps) and any(row["reward"] > 0 for row in steps)
    assert any(row["grad_norm"] > 0 for row in steps)


def test_a_reward_of_nan_ends_the_run_and_is_named(files: Path, model: Path, capsys) -> None:
    assert main(grpo(model, "runs/a", "tiny_rewards:nan")) == 1
    assert "reward function 'nan' returned nan for completion 0" in capsys.readouterr().err


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "more", "code", "said"),
    [
        (lambda d: (d / "chats.jsonl").write_text('{"messages": []}\n{"text": 1\n'), (), 1, "2 problems"),
        (lambda d: (d / "chats.jsonl").unlink(), (), 1, "chats.jsonl: expected a file"),
        (lambda d: write_lines(d / "a.jsonl", [{"text": "a"}]), ("--eval-data", "a.jsonl"), 1, "in the format of"),
        (lambda d: None, ("--max-length", "500"), 2, "at most the model's context, 128"),
        (lambda d: None, ("--max-length", "4", "--loss-on", "completion"), 1, "none of 24 examples"),
        (lambda d: None, ("--model", "./nowhere"), 2, "expected a directory, found none"),
        (lambda d: write_model(d / "plain", chat_template=None), ("--model", "plain"), 2, "--chat-template FILE.jinja"),
    ],
)  # fmt: skip
def test_bad_input_is_told_and_leaves_no_run(
    change: Change, more, code, said, files: Path, model: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    change(files)
    assert main([*words("sft", model, "chats.jsonl", "runs/a"), *more]) == code
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
    assert not Path("runs/a").exists()


def ppo(model: Path, run: str, *more: str) -> list[str]:
    shared = ["--max-completion", "8", "--passes", "2"]
    return words("ppo", model, "prompts.jsonl", run, *shared, *more)


@pytest.mark.slow
def test_ppo_by_a_function_stops_and_goes_on_bit_for_bit(files: Path, model: Path, monkeypatch, capsys) -> None:
    by_function = ("--reward", "tiny_rewards:digits")
    assert main([*ppo(model, "runs/whole", *by_function), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures["memory"]) == {"policy", "value", "reference"}
    steps = rows("runs/whole", "step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["lr"] for row in steps] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert steps[0]["kl"] == 0.0 and any(row["kl"] != 0.0 for row in steps[1:])  # reference and policy begin as one
    assert any(row["reward"] > 0 for row in steps)
    stop_ppo_after(3, monkeypatch)
    assert main(ppo(model, "runs/a", *by_function)) == 130
    assert FinetuneRun(Path("runs/a")).steps() == [2, 3]
    assert main(["resume", "runs/a"]) == 0
    assert same_steps("runs/whole", "runs/a")
    one, other = weights(Path("runs/whole/model")), weights(Path("runs/a/model"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def stop_ppo_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge.integrations.finetune_ppo import PPORun

    rate, sent = PPORun._set_rate, []

    def press(self: PPORun) -> None:
        if self.trainer.steps + 1 == step and not sent:
            sent.append(step)
            os.kill(os.getpid(), signal.SIGINT)
        rate(self)

    monkeypatch.setattr(PPORun, "_set_rate", press)


def test_a_ppo_answer_that_no_function_rewards_ends_the_run_and_names_them(files: Path, model: Path, capsys) -> None:
    assert main(ppo(model, "runs/a", "--reward", "tiny_rewards:silent")) == 1
    assert "has no reward: tiny_rewards:silent gave None" in capsys.readouterr().err


def test_a_damaged_checkpoint_names_the_last_good_one(files: Path, model: Path, capsys) -> None:
    assert main(words("sft", model, "chats.jsonl", "runs/a")) == 0
    damaged = Path("runs/a/checkpoints/checkpoint-4/narrowgauge/optimizer.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert main(["resume", "runs/a"]) == 1
    shown = capsys.readouterr().err
    assert "optimizer.safetensors is truncated" in shown and "resume runs/a --checkpoint checkpoint-2" in shown
    assert main(["resume", "runs/a", "--checkpoint", "last-good"]) == 0
    assert [row["step"] for row in rows("runs/a", "step")] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth", "model.safetensors"])
def test_a_file_of_the_trainer_that_is_missing_is_named(name: str, trained: Path, capsys, monkeypatch) -> None:
    (trained / "checkpoints" / "checkpoint-4" / name).unlink()
    assert main(["resume", str(trained)]) == 1
    shown = capsys.readouterr().err
    assert f"checkpoint-4: {name} is missing" in shown and "--checkpoint checkpoint-2" in shown
    (trained / "checkpoints" / "checkpoint-2" / name).unlink()
    assert main(["resume", str(trained)]) == 1
    assert "start the run anew" in capsys.readouterr().err


def test_the_sums_of_a_checkpoint_are_taken_once(trained: Path, sums_taken: list[Path]) -> None:
    shutil.rmtree(trained / "checkpoints" / "checkpoint-4")
    assert main(["resume", str(trained)]) == 0
    ours = trained / "checkpoints" / "checkpoint-2" / "narrowgauge"
    assert sorted(sums_taken) == sorted(file for file in ours.iterdir() if file.name != folders.MANIFEST)


def test_an_exported_model_keeps_keys_and_values_when_it_writes(trained: Path) -> None:
    config = json.loads((trained / "model" / "config.json").read_text())
    assert config["use_cache"] is True  # transformers' Trainer turns it off


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(trained_once, tmp_path / "run"))


@pytest.fixture(scope="module")
def trained_once(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with a checkpoint after every second one."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_lines(folder / "d.jsonl", [{"text": f"{question} {answer}"} for question, answer in sums(16)])
    assert main(words("sft", model, str(data), str(folder / "run"))) == 0
    return folder / "run"


@pytest.mark.slow
def test_ppo_by_the_reward_model_that_reward_trained(files: Path, model: Path, capsys) -> None:
    assert main(ppo(model, "runs/a", "--reward-model", str(model))) == 2
    assert "found one without a head" in capsys.readouterr().err
    assert main(words("reward", model, "pairs.jsonl", "runs/reward")) == 0
    capsys.readouterr()
    assert main([*ppo(model, "runs/a", "--reward-model", "runs/reward/model"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["memory"]) == {"policy", "value", "reference", "reward"}
