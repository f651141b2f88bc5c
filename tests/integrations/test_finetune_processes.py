"""The fine-tuning commands in two processes that torchrun starts, on a Llama of two layers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import finetune_script
import pytest
import yaml

from narrowgauge.cli.main import main
from narrowgauge.observe import journal
from tiny_chat import sums, turn, write_lines, write_model

pytestmark = [pytest.mark.slow, pytest.mark.multiproc]
CHATS = [{"messages": [turn("user", q), turn("assistant", a)]} for q, a in sums(25)]
PAIRS = [
    {"prompt": [turn("user", q)], "chosen": [turn("assistant", a)], "rejected": [turn("assistant", f"{a}0")]}
    for q, a in sums(24)
]
PROMPTS = [{"prompt": [turn("user", q)], "answer": a} for q, a in sums(24)]
REWARDS = """
import os
def digits(completions, **columns):
    return [sum(c.isdigit() for c in said[0]["content"]) for said in completions]
def late(completions, **columns):
    if os.environ["RANK"] == "1":
        raise ValueError("no judge here")
    return [1.0] * len(completions)
"""
LONGEST_S = 120  # beside other work; a process that waited for another would take half an hour
SHARED = ["--learning-rate", "1e-3", "--max-length", "64"]


def words(task: str, data: str, output: str, *more: str, batch_size: int = 2) -> list[str]:
    given = ["--model", "model", "--data", f"{data}.jsonl", "--output", output, "--batch-size", str(batch_size)]
    return [task, *given, *SHARED, *more]


HELD_OUT = ("--eval-data", "held_out.jsonl", "--statistics-every", "2")
WIDE = ("--recipe", "fp32", "--steps", "3", "--accumulation", "2")
FOUR = ("--steps", "4", "--save-every", "2")
ANSWERS = ("--reward", "tiny_rewards:digits", "--generations", "4", "--max-completion", "8", "--beta", "0.1")
SAMPLED = ("--steps", "3", *ANSWERS, "--eval-data", "asked.jsonl")
JOBS: dict[str, list[str]] = {
    "epoch": words("sft", "chats", "runs/epoch", *HELD_OUT),
    "wide": words("sft", "chats", "runs/wide", *WIDE, "--eval-data", "held_out.jsonl"),
    "dpo": words("dpo", "pairs", "runs/dpo", "--steps", "2"),
    "reward": words("reward", "pairs", "runs/reward", *WIDE),
    "whole": words("sft", "chats", "runs/whole", *FOUR),
    "stopped": ["stop=3", *words("sft", "chats", "runs/stopped", *FOUR)],
    "resumed": ["resume", "runs/stopped"],
    "grpo": words("grpo", "prompts", "runs/grpo", *SAMPLED),
    "grpo_stopped": ["stop=2", *words("grpo", "prompts", "runs/grpo_stopped", *SAMPLED)],
    "grpo_resumed": ["grpo", "--output", "runs/grpo_stopped", "--resume"],
    # what is wrong
    "again": words("sft", "chats", "runs/epoch"),
    "unknown": words("sft", "chats", "runs/e", "--bath-size", "2"),
    "no_data": words("sft", "nowhere", "runs/e"),
    "broken": words("sft", "broken", "runs/e"),
    "no_model": [*words("sft", "chats", "runs/e"), "--model", "./nowhere"],
    "fsdp": ["env=ACCELERATE_USE_FSDP=true", *words("sft", "chats", "runs/e")],
    "long": words("sft", "chats", "runs/e", "--max-length", "4", "--loss-on", "completion"),
    "few": words("sft", "held_out", "runs/e", batch_size=4),
    "three": words("sft", "chats", "runs/e", "--processes", "3"),
    "ppo": words("ppo", "prompts", "runs/e", "--reward", "tiny_rewards:digits"),
    "groups": words("grpo", "prompts", "runs/e", "--reward", "tiny_rewards:digits", "--generations", "3"),
    "other_options": words("sft", "chats", "runs/e", "--seed", "{rank}"),
    "other_data": ["in=of{rank}", *words("sft", "chats", "runs/e")],
    "one_fails": words("grpo", "prompts", "runs/failed", "--reward", "tiny_rewards:late", "--generations", "4"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and rewards."""
    folder = tmp_path_factory.mktemp("processes")
    write_model(folder / "model")
    for name, records in (("chats", CHATS), ("pairs", PAIRS), ("prompts", PROMPTS), ("held_out", CHATS[:5])):
        write_lines(folder / f"{name}.jsonl", records)
    write_lines(folder / "asked.jsonl", PROMPTS[:2])
    (folder / "broken.jsonl").write_text('{"messages": []}\n{"text": 1\n')
    (folder / "tiny_rewards.py").write_text(REWARDS)
    for rank in (0, 1):
        (folder / f"of{rank}").mkdir()
        write_lines(folder / f"of{rank}" / "chats.jsonl", CHATS[rank:])
        (folder / f"of{rank}" / "model").symlink_to(folder / "model")
    return folder


def torchrun(*command: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


Found = dict[tuple[str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def found(place: Path) -> Found:
    """What each job did on each rank; all of them in one pair of processes, since these take long to start."""
    (place / "jobs.json").write_text(json.dumps(JOBS))
    (place / "out").mkdir()
    done = subprocess.run(
        torchrun(finetune_script.__file__, "jobs.json", "out"),
        cwd=place, env=environment(), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        (job, rank): json.loads((place / "out" / f"{job}-{rank}.json").read_text()) for job in JOBS for rank in (0, 1)
    }


def rows(place: Path, run: str, kind: str) -> list[dict[str, Any]]:
    return journal.read(place / "runs" / run / "journal.jsonl").of_kind(kind)


def figures(place: Path, run: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "step_time")} for row in rows(place, run, "step")]


def losses(place: Path, run: str) -> list[float]:
    return [row["loss"] for row in rows(place, run, "step")]


def test_an_epoch_reads_each_example_once_and_the_first_process_tells(place: Path, found: Found) -> None:
    assert [found["epoch", rank]["code"] for rank in (0, 1)] == [0, 0]
    read = [tuple(ids) for rank in (0, 1) for ids in found["epoch", rank]["read"]]
    assert len(read) == len(set(read)) == 24  # of 25, in steps of 2 processes x 2
    assert [row["step"] for row in rows(place, "epoch", "step")] == [1, 2, 3, 4, 5, 6]
    assert found["epoch", 1]["out"] == found["epoch", 1]["err"] == found["epoch", 0]["err"] == ""
    shown = found["epoch", 0]["out"]
    assert "recipe narrow8 on 2 x cpu" in shown and "25 examples, 5 held out" in shown
    assert yaml.safe_load((place / "runs/epoch/config.yaml").read_text())["processes"] == 2


@pytest.mark.parametrize("job", ["epoch", "dpo", "reward", "grpo"])
def test_weights_are_the_same_on_all_processes(job: str, found: Found) -> None:
    one, other = (found[job, rank] for rank in (0, 1))
    assert one["weights"] == other["weights"] and one["reference"] == other["reference"]
    assert (one["reference"] is not None) == (job in ("dpo", "grpo"))
    assert (one["random"] == other["random"]) == (job != "grpo")  # answers are to differ, and nothing else


def test_gradients_travel_in_8_bits(place: Path, found: Found) -> None:
    """The two tables of 260 x 32 in blocks of 128 with a byte of scale; all other tensors are below the least size."""
    sent = found["epoch", 0]["sent"]
    narrow = 2 * 260 * 32 * 129 / 128
    assert narrow <= sent["torch.uint8"] / 6 <= narrow + 2 * 129  # a process sends half of it twice
    wide = 2 * (37280 - 2 * 260 * 32)
    assert wide <= sent["torch.bfloat16"] / 6 <= wide + 64
    (row,) = rows(place, "epoch", "bytes")
    assert 0 < row["wire"] - sum(sent.values()) / 6 < 64  # flags: all processes skip a step, or none
    assert set(found["wide", 0]["sent"]) == {"torch.float32"}


def test_the_journal_says_what_precision_did(place: Path, found: Found, capsys) -> None:
    header = journal.read(place / "runs/epoch/journal.jsonl").header
    assert header["recipe"]["name"] == "narrow8" and header["environment"]["processes"] == "2"
    sampled = rows(place, "epoch", "precision")
    assert [row["step"] for row in sampled] == [2, 4, 6]
    down = sampled[0]["layers"]["model.layers.0.mlp.down_proj"]
    assert {"input", "weight", "grad_output", "grad"} <= down.keys()
    assert {"exp_avg", "exp_avg_sq"} <= sampled[0]["layers"]["model.embed_tokens"].keys()
    assert any("collective" in roles for roles in sampled[0]["layers"].values())
    assert main(["report", str(place / "runs/epoch")]) == 0
    assert (place / "runs/epoch/report.html").stat().st_size > 10_000


def alone(place: Path, monkeypatch: pytest.MonkeyPatch, job: str, run: str) -> list[float]:
    """The losses of a job in this process, with the batches of both."""
    monkeypatch.chdir(place)
    given = [*JOBS[job], "--batch-size", "4", "--output", f"runs/{run}"]
    assert main(given) == 0
    return losses(place, run)


@pytest.mark.parametrize("job", ["wide", "reward"])
def test_the_same_batches_in_one_process_have_the_same_losses(job: str, place: Path, found: Found, monkeypatch) -> None:
    expected = alone(place, monkeypatch, job, f"{job}-alone")
    assert len(expected) == 3 and losses(place, job) == pytest.approx(expected, rel=1e-5)
    if job == "wide":
        one, other = (rows(place, run, "evaluation")[-1]["loss"] for run in ("wide", "wide-alone"))
        assert one == pytest.approx(other, rel=1e-5)
        kept = [[row["num_tokens"] for row in rows(place, run, "step")] for run in ("wide", "wide-alone")]
        assert kept[0] == kept[1]


def test_8_bits_of_gradients_move_losses_by_no_more_than_their_rounding(place: Path, found: Found, monkeypatch) -> None:
    """Two roundings to E4M3, 2^-4 each, of gradients, by which losses fall; inputs are cast by other batches."""
    expected, two = alone(place, monkeypatch, "whole", "whole-alone"), losses(place, "whole")
    assert two != expected
    for loss, other in zip(two, expected, strict=True):
        assert abs(loss - other) <= 2 * 2**-4 * (expected[0] - other) + 1e-3
    assert expected[-1] < expected[0] - 0.1


GRPO = ("grpo", "grpo_stopped", "grpo_resumed")


@pytest.mark.parametrize(("whole", "stopped", "resumed"), [("whole", "stopped", "resumed"), GRPO])
def test_a_signal_to_one_process_saves_and_all_go_on_bit_for_bit(
    whole: str, stopped: str, resumed: str, place: Path, found: Found
) -> None:
    assert [found[stopped, rank]["code"] for rank in (0, 1)] == [130, 130]
    assert f"go on with: narrowgauge resume runs/{stopped}" in found[stopped, 0]["out"]
    assert [found[resumed, rank]["code"] for rank in (0, 1)] == [0, 0]
    assert figures(place, stopped) == figures(place, whole)
    for rank in (0, 1):
        assert found[resumed, rank]["weights"] == found[whole, rank]["weights"]
        assert found[resumed, rank]["random"] == found[whole, rank]["random"]
        assert found[stopped, rank]["sampled"] + found[resumed, rank]["sampled"] == found[whole, rank]["sampled"]
    checkpoint = next((place / "runs" / stopped / "checkpoints").glob("checkpoint-*"))
    assert all((checkpoint / f"rng_state_{rank}.pth").is_file() for rank in (0, 1))


def test_dpo_begins_at_the_reference(place: Path, found: Found) -> None:
    assert losses(place, "dpo")[0] == pytest.approx(math.log(2), abs=1e-6)


def test_grpo_samples_on_each_process_under_the_recipe(place: Path, found: Found) -> None:
    one, other = (found["grpo", rank] for rank in (0, 1))
    # of 3 steps, and of one held-out batch with a group for each of two prompts
    assert len(one["sampled"]) == len(other["sampled"]) == 3 * 2 + 2 * 2 and one["sampled"] != other["sampled"]
    assert one["autocast"] == [True] * 5
    assert rows(place, "grpo", "step")[0]["kl"] == 0.0
    assert "kl" in rows(place, "grpo", "step")[1]


@pytest.mark.parametrize(
    ("job", "code", "said"),
    [
        ("again", 2, "output=runs/epoch: expected a new run, found one there"),
        ("unknown", 2, "unknown option '--bath-size'; did you mean '--batch-size'?"),
        ("no_data", 1, "nowhere.jsonl: expected a file"),
        ("broken", 1, "broken.jsonl: 2 problems"),
        ("no_model", 2, "expected a directory, found none"),
        ("fsdp", 2, "ACCELERATE_USE_FSDP=true: expected processes that each have the whole model"),
        ("long", 1, "none of 25 examples"),
        ("few", 1, "expected at least 8 examples, batch_size=4 x 2 processes, found 5"),
        ("three", 2, "processes=3: expected as many, found 2"),
        ("ppo", 2, "ppo in 2 processes: expected one"),
        ("groups", 2, "batch_size=2 x accumulation=1 x 2 processes: expected a multiple of generations=3"),
        ("other_options", 1, "seed: 0 on rank 0; 1 on rank 1"),
        ("other_data", 1, "the processes of this run disagree"),
    ],
)
def test_what_is_wrong_is_told_once_and_ends_all(job: str, code: int, said: str, place: Path, found: Found) -> None:
    one, other = (found[job, rank] for rank in (0, 1))
    assert (one["code"], other["code"]) == (code, code)
    assert one["err"].startswith("error: ") and said in one["err"] and other["err"] == ""
    assert "Traceback" not in one["err"] and max(one["seconds"], other["seconds"]) < LONGEST_S
    assert not (place / "runs" / "e").exists() and not (place / "of0" / "runs" / "e" / "config.yaml").exists()


def test_an_error_of_one_process_ends_all(found: Found) -> None:
    one, other = (found["one_fails", rank] for rank in (0, 1))
    assert (one["code"], other["code"]) == (1, 1) and max(one["seconds"], other["seconds"]) < LONGEST_S
    assert "reward function 'late' raised ValueError: no judge here" in other["err"]
    assert "rank 1 (" in one["err"] and "reward function 'late' raised ValueError: no judge here" in one["err"]


def test_a_run_goes_on_in_as_many_processes_as_it_began_with(place: Path, found: Found, capsys, monkeypatch) -> None:
    monkeypatch.chdir(place)
    assert main(["resume", "runs/whole"]) == 2
    assert "processes=2: expected as many, found 1" in capsys.readouterr().err
    missing = place / "runs/whole/checkpoints/checkpoint-4/rng_state_1.pth"
    missing.rename(missing.with_suffix(".away"))
    from narrowgauge.errors import CheckpointError
    from narrowgauge.integrations.finetune_run import FinetuneRun

    with pytest.raises(CheckpointError, match="rng_state_1.pth is missing"):
        FinetuneRun(place / "runs/whole").verify(4)
    missing.with_suffix(".away").rename(missing)


def test_interrupting_torchrun_leaves_a_checkpoint(place: Path) -> None:
    command = words("sft", "chats", "runs/pressed", "--steps", "100000", "--save-every", "0", "--log-every", "1")
    process = subprocess.Popen(
        torchrun("-m", "narrowgauge", *command),
        cwd=place, env=environment() | {"PYTHONUNBUFFERED": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    shown = []
    for line in process.stdout:
        shown.append(line)
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
            break
    rest, errors = process.communicate(timeout=100)
    assert process.returncode != 0
    (ended,) = [line for line in rest.splitlines() if line.startswith("interrupted at step")]
    step = int(ended.split()[3].rstrip(";"))
    checkpoint = place / "runs/pressed/checkpoints" / f"checkpoint-{step}"
    assert (checkpoint / "trainer_state.json").is_file() and (checkpoint / "rng_state_1.pth").is_file()
    assert "find_unused_parameters" not in errors and "error: " not in errors, errors
