"""The commands that make a run and read it, on a run of a few steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from narrowgauge.cli.main import main

TINY = [
    "--steps", "6", "--model.layers", "1", "--model.width", "32", "--model.heads", "2", "--model.kv_heads", "1",
    "--model.context", "32", "--batch_size", "4", "--eval_every", "3", "--eval_batches", "3", "--save_every", "3",
    "--statistics_every", "2", "--data.tokenizer", "bytes", "--sample_tokens", "8", "--data.validation_fraction", "0.2",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with texts, and a finished run in runs/done."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "texts").mkdir()
    for number in range(20):
        (folder / "texts" / f"{number}.txt").write_text(f"document {number}: the quick brown fox. " * 40)
    assert main(train_words(folder, "done")) == 0
    return folder


def train_words(folder, name: str, *more: str) -> list[str]:
    places = ["--data.corpus", f"{folder}/texts/*.txt", "--runs_dir", f"{folder}/runs"]
    return ["train", *TINY, *places, "--cache_dir", f"{folder}/cache", "--name", name, *more]


@pytest.fixture
def run(place):
    return place / "runs" / "done"


@pytest.fixture
def copied_run(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def test_training_ends_with_losses_speed_bytes_and_a_sample(place, capsys):
    assert main(train_words(place, "shown")) == 0
    shown = capsys.readouterr().out
    for fact in (
        "validation loss",
        "bits per byte",
        "tokens/s",
        "sample",
        "param",
        "exp_avg_sq",
        "narrowgauge generate",
    ):
        assert fact in shown
    for name in ("config.yaml", "journal.jsonl", "tokenizer.json", "checkpoints/step-000006"):
        assert (place / "runs" / "shown" / name).exists()


def test_json_of_a_run_is_all_that_standard_output_gets(place, capsys):
    assert main(train_words(place, "as json", "--json")) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["status"] == "finished" and found["step"] == 6
    assert found["validation"]["bits_per_byte"] > 0 and found["tokens"] == 6 * 4 * 32
    assert found["bytes"]["param"] == 2 * found["parameters"] == 2 * found["bytes"]["master"]
    assert "step 6/6" in captured.err
    assert "narrowgauge" not in captured.err  # the hints at the end go with the tables

    assert main(["resume", str(place / "runs" / "as json"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["validation"] == found["validation"] and again["tokens"] == 0


def test_a_command_that_is_suggested_can_be_pasted(place, capsys):
    assert main(train_words(place, "with space", "--steps", "1")) == 0
    assert f"narrowgauge generate '{place}/runs/with space' --prompt" in capsys.readouterr().out


def test_a_sample_longer_than_the_context_is_cut_short(place, capsys):
    assert main(train_words(place, "short", "--model.context", "8", "--sample_tokens", "64", "--steps", "1")) == 0
    assert main(["generate", str(place / "runs" / "short"), "--prompt", "a", "--tokens", "64"]) == 0


def test_a_configuration_file_is_overridden_by_what_comes_after_it(place, run, capsys):
    (place / "more.yaml").write_text("steps: 2\noptimizer:\n  lr: 1e-3\n  beta2: 0.9\n")
    words = ["--config", f"{run}/config.yaml", "--config", f"{place}/more.yaml", "--optimizer.lr=5e-4"]
    assert main(["train", *words, "--name", "again", "--sample_tokens", "0"]) == 0
    written = (place / "runs" / "again" / "config.yaml").read_text()
    for line in ("steps: 2", "lr: 0.0005", "beta2: 0.9", "width: 32", "name: again"):
        assert line in written


def test_a_name_that_is_taken_is_refused_and_the_run_left_alone(place, run, capsys):
    before = (run / "journal.jsonl").read_bytes()
    assert main(train_words(place, "done")) == 2
    assert "resume" in capsys.readouterr().err
    assert (run / "journal.jsonl").read_bytes() == before
    assert main(["resume", str(run)]) == 0  # the refused one has let go of the folder


@pytest.mark.parametrize("at", ["runs_dir", "name"])
def test_a_run_folder_that_cannot_be_made_is_a_bad_argument(at, place, capsys):
    (place / "file").write_text("")
    words = {"runs_dir": ["--runs_dir", f"{place}/file"], "name": ["--name", "n" * 300]}[at]
    assert main(train_words(place, "nowhere", *words)) == 2
    assert "choose another runs_dir or name" in capsys.readouterr().err


def test_an_export_that_cannot_be_written_says_so(place, run, capsys):
    (place / "file").write_text("")
    assert main(["export", str(run), f"{place}/file/hf"]) == 1
    assert "was not written: Not a directory" in capsys.readouterr().err


def test_evaluation_repeats_the_last_of_training_exactly(run, capsys):
    rows = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
    trained = [row for row in rows if row["kind"] == "evaluation"][-1]
    assert main(["eval", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in ("step", "loss", "perplexity", "bits_per_byte")} == {
        key: trained[key] for key in ("step", "loss", "perplexity", "bits_per_byte")
    }


def test_evaluation_of_the_whole_split_of_another_corpus_and_of_an_earlier_step(place, run, capsys):
    (place / "other.jsonl").write_text(
        "".join(json.dumps({"text": f"{n}: other text " * 30}) + "\n" for n in range(20))
    )
    assert main(["eval", str(run), "--corpus", f"{place}/other.jsonl", "--batches", "0", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert main(["eval", str(run), "--checkpoint", "step-000003"]) == 0
    assert "loss" in capsys.readouterr().out
    assert other["corpus"].endswith("other.jsonl")
    assert other["tokens"] % (4 * 32) and other["tokens"] % 32 == 0  # the last batch is smaller than the others
    assert 0.99 < other["text_bytes"] / other["tokens"] <= 1.0  # a token is a byte, but for ends of documents


def test_generation_starts_with_the_prompt_and_repeats_with_the_seed(run, capsys):
    def written(*words: str) -> str:
        assert main(["generate", str(run), "--prompt", "the quick", "--tokens", "12", *words]) == 0
        return capsys.readouterr().out

    assert written().startswith("the quick")
    assert written("--prompt", os.fsdecode(b"\xff")).startswith("\ufffd")  # no UTF-8
    assert written("--seed", "3") == written("--seed", "3")
    assert written("--temperature", "0") == written("--temperature", "0", "--seed", "9")


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["generate", "RUN", "--prompt", "a", "--tokens", "0"], 2, "--tokens"),
        (["generate", "RUN", "--prompt", "a", "--temperature", "-1"], 2, "temperature=-1"),
        (["eval", "RUN", "--batches", "-2"], 2, "--batches"),
        (["eval", "RUN", "--checkpoint", "step-000001"], 1, "step-000003, step-000006"),
        (["eval", "RUN", "--corpus", "/nowhere/*.txt"], 2, "/nowhere/*.txt"),
        (["eval", "RUN", "--device", "tpu"], 2, "tpu"),
        (["export", "RUN", "RUN"], 2, "empty"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(run, words, code, expected, capsys):
    assert main([str(run) if word == "RUN" else word for word in words]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert expected in error


def test_a_damaged_checkpoint_names_the_last_good_one_which_serves_on_request(copied_run, capsys):
    newest = copied_run / "checkpoints" / "step-000006"
    for path in newest.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    assert main(["generate", str(copied_run), "--prompt", "a"]) == 1
    assert "step-000003" in capsys.readouterr().err
    assert main(["generate", str(copied_run), "--prompt", "a", "--checkpoint", "last-good", "--tokens", "4"]) == 0


def test_text_that_changed_since_the_run_is_refused(place, run, copied_run, capsys):
    words = ["train", "--config", f"{run}/config.yaml", "--name", "words", "--data.tokenizer", "bpe"]
    assert main([*words, "--data.vocab_size", "300", "--sample_tokens", "0"]) == 0
    others = [place / "texts" / f"other-{number}.txt" for number in range(20)]
    for number, path in enumerate(others):
        path.write_text(f"zebras zigzag {number} " * 400)
    try:
        assert main(["eval", str(place / "runs" / "words")]) == 1
        assert "changed since the run" in capsys.readouterr().err
    finally:
        for path in others:
            path.unlink()


def test_resuming_a_finished_run_changes_nothing_and_ends_well(copied_run, capsys):
    before = (copied_run / "checkpoints" / "step-000006" / "model.safetensors").read_bytes()
    assert main(["resume", str(copied_run)]) == 0
    assert (copied_run / "checkpoints" / "step-000006" / "model.safetensors").read_bytes() == before


def test_the_exported_directory_has_what_transformers_looks_for(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "hf")]) == 0
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == 257 and config["dtype"] == "bfloat16"


@pytest.mark.slow
def test_an_interrupted_run_exits_with_130_after_a_checkpoint_and_goes_on(place):
    words = train_words(place, "stopped", "--steps", "100000", "--save_every", "0", "--eval_every", "0")
    command = [sys.executable, "-u", "-m", "narrowgauge", *words, "--log_every", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "narrowgauge resume" in rest
    assert list((place / "runs" / "stopped" / "checkpoints").glob("step-*"))
