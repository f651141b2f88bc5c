"""The fine-tuning commands' options, and what is wrong with them: told before anything is loaded."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from narrowgauge.cli.finetune import _ABOUT, _parser
from narrowgauge.cli.main import main
from narrowgauge.errors import ConfigError
from narrowgauge.integrations.finetune_config import TASKS, GRPOConfig, SFTConfig, from_yaml, task_of
from narrowgauge.integrations.finetune_run import FinetuneRun
from narrowgauge.recipes.files import recipe_text
from narrowgauge.recipes.library import recipe

HERE = ["--model", "m", "--data", "d.jsonl"]


@pytest.mark.parametrize("task", TASKS)
def test_help_has_every_field_under_its_group(task, capsys):
    assert main([task, "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{group}:" in shown for group in ("model", "data", "training", "run", "examples"))
    for each in dataclasses.fields(TASKS[task]):
        assert f"--{each.name.replace('_', '-')}" in shown


def test_documented_commands_of_several_processes_parse():
    page = Path(__file__).resolve().parents[3] / "docs" / "fine-tuning.md"
    commands = re.findall(r"^torchrun .*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert commands
    for command in commands:
        asked = get_args_parser().parse_args(shlex.split(command)[1:])
        assert asked.module and asked.training_script == "narrowgauge" and asked.nproc_per_node == "2"
        task, *words = asked.training_script_args
        given = vars(_parser(task).parse(words))
        assert {"model", "data", "output"} <= {key for key, value in given.items() if value is not None}


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_commands_that_parse(task, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    parsed = []
    monkeypatch.setattr("narrowgauge.cli.finetune.prepare_libraries", lambda: None)
    monkeypatch.setattr("narrowgauge.cli.finetune._report", lambda config, *rest: parsed.append(config) or 0)
    for example in _ABOUT[task][1]:
        assert main([task, *example.split()]) == 0
    assert [config.task for config in parsed] == [task] * len(_ABOUT[task][1])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sft", "--data", "d"], "--model is required"),
        (["sft", "--model", "m"], "--data is required"),
        (["sft", *HERE, "--step", "3"], "unknown option '--step'; did you mean '--steps'?"),
        (["sft", *HERE, "--recipe", "narow8"], "did you mean 'narrow8'?"),
        (["sft", *HERE, "--recipe-fields", "{tf33: true}"], "tf33"),
        (["sft", *HERE, "--recipe-fields", "tf32"], "expected keys and values"),
        (["sft", *HERE, "--loss-on", "answers"], "invalid choice: 'answers'"),
        (["sft", *HERE, "--steps", "-1"], "steps=-1: expected 0 or more"),
        (["sft", *HERE, "--batch-size", "0"], "batch_size=0: expected 1 or more"),
        (["sft", *HERE, "--learning-rate", "0"], "learning_rate=0.0: expected more than 0"),
        (["sft", *HERE, "--learning-rate", "nan"], "learning_rate=nan: expected a finite number"),
        (["sft", *HERE, "--max-length", "1"], "max_length=1: expected 2 or more"),
        (["sft", *HERE, "--eval-every", "3"], "eval_every=3 without eval_data"),
        (["sft", *HERE, "--resume"], "--resume: expected --output RUN"),
        (["sft", *HERE, "--resume", "--output", "nowhere"], "nowhere: expected a run folder"),
        (["sft", *HERE, "--config", "nowhere.yaml"], "nowhere.yaml: expected a YAML file"),
        (["dpo", *HERE, "--label-smoothing", "0.5"], "label_smoothing=0.5: expected less than 0.5"),
        (["grpo", *HERE], "reward: expected at least one function"),
        (["grpo", *HERE, "--reward", "a:b", "--generations", "3"], "expected a multiple of generations=3"),
        (["sft", *HERE, "--timeout-s", "0"], "timeout_s=0.0: expected more than 0"),
        (["ppo", *HERE, "--processes", "2"], "ppo in 2 processes: expected one"),
        (["ppo", *HERE], "expected either reward or reward_model, found neither"),
        (["ppo", *HERE, "--reward", "a:b", "--reward-model", "c"], "found both"),
    ],
)
def test_a_wrong_option_exits_with_2_and_says_what_to_do(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.startswith("error: ") and shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_options_go_before_a_file(tmp_path, monkeypatch):
    parsed = []
    monkeypatch.setattr("narrowgauge.cli.finetune.prepare_libraries", lambda: None)
    monkeypatch.setattr("narrowgauge.cli.finetune._report", lambda config, *rest: parsed.append(config) or 0)
    saved = SFTConfig(model="a", data="b", steps=7, packing=True, recipe="bf16", recipe_fields={"tf32": True})
    path = tmp_path / "config.yaml"
    path.write_text(saved.to_yaml())
    assert main(["sft", "--config", str(path), "--steps", "9", "--no-packing"]) == 0
    asked = {"steps": 9, "recipe": "bf16", "recipe_fields": {"tf32": True}}
    assert parsed == [SFTConfig(model="a", data="b", processes=1, **asked)]


def test_a_file_of_another_task_or_with_an_unknown_key_is_refused(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("task: dpo\nmodel: a\ndata: b\n")
    assert main(["sft", "--config", str(path)]) == 2
    assert "expected a configuration for sft, found one for dpo" in capsys.readouterr().err
    path.write_text("model: a\ndata: b\nbatchsize: 3\n")
    assert main(["sft", "--config", str(path)]) == 2
    assert "unknown configuration key 'batchsize'; did you mean 'batch_size'?" in capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS)
def test_a_configuration_reads_back_from_yaml(task):
    config = TASKS[task](model="a", data="b", seed=3)
    text = config.to_yaml()
    assert task_of(text) == task and list(yaml.safe_load(text))[0] == "task"
    assert from_yaml(text, "config.yaml") == config


def test_resuming_takes_the_runs_own_options(tmp_path, capsys):
    config = SFTConfig(model="a", data="b", output=str(tmp_path / "run"), steps=7)
    FinetuneRun.begin(config).unlock()
    assert main(["sft", "--resume", "--output", config.output, "--steps", "9"]) == 2
    assert "steps=9: expected 7, with which the run began" in capsys.readouterr().err
    assert main(["dpo", "--resume", "--output", config.output]) == 2
    assert "expected a run of dpo, found one of sft" in capsys.readouterr().err
    assert main(["sft", *HERE, "--output", config.output]) == 2
    assert "expected a new run, found one there" in capsys.readouterr().err


def test_without_the_libraries_the_extra_is_named(tmp_path: Path, capsys, monkeypatch):
    from importlib.metadata import PackageNotFoundError, version

    def missing(name: str) -> str:
        if name == "trl":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("narrowgauge.integrations.requirements.version", missing)
    assert main(["sft", *HERE, "--output", str(tmp_path / "run")]) == 2
    assert "trl is not installed: pip install 'narrowgauge[hf]'" in capsys.readouterr().err
    monkeypatch.setattr("narrowgauge.integrations.requirements.version", lambda name: "0.9.1")
    assert main(["sft", *HERE]) == 2
    assert "expected transformers 5.0 or newer, found 0.9.1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_from_a_file_is_spelled_out(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(recipe_text(recipe("bf16").replace(name="mine")))
    config = SFTConfig(model="a", data="b", recipe=str(path), recipe_fields={"tf32": True})
    spelled = config.spelled_out()
    path.unlink()
    assert spelled.recipe == "custom" and spelled.build_recipe() == recipe("bf16").replace(name="mine", tf32=True)
    assert SFTConfig(model="a", data="b", recipe="bf16").spelled_out().recipe == "bf16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ppo", *HERE, "--reward", "a:b"], "ppo in 2 processes: expected one"),
        (["eval", "{empty}", "--data", "d.jsonl"], "expected at most 1 process, torchrun started 2"),
    ],
)
def test_what_runs_in_one_process_is_refused_in_several(words, said, monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([word.replace("{empty}", str(tmp_path)) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_the_first_process_of_a_machine_tells_what_all_meet(monkeypatch, capsys) -> None:
    for rank, local_rank, told in ((0, 0, True), (1, 1, False), (8, 0, True)):
        for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", 16)):
            monkeypatch.setenv(name, str(value))
        assert main(["sft", *HERE, "--steps", "-1"]) == 2
        assert ("steps=-1" in capsys.readouterr().err) is told


def test_groups_of_answers_may_span_processes() -> None:
    config = GRPOConfig(model="m", data="d", reward=["a:b"], batch_size=2, generations=4, processes=2)
    config.check()
    with pytest.raises(ConfigError, match="batch_size=2 x accumulation=1: expected a multiple of generations=4"):
        dataclasses.replace(config, processes=1).check()


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_models_in_parts_by_accelerate_launch_are_refused(name, monkeypatch, capsys) -> None:
    def prepare_libraries() -> None:
        raise ConfigError("it goes on")

    monkeypatch.setattr("narrowgauge.cli.finetune.prepare_libraries", prepare_libraries)
    for value, is_refused in (("true", True), ("True", True), ("1", True), ("False", False), ("0", False), ("", False)):
        monkeypatch.setenv(f"ACCELERATE_USE_{name}", value)
        assert main(["sft", *HERE]) == 2
        expected = f"ACCELERATE_USE_{name}={value}: expected processes that each have the whole model"
        assert (expected if is_refused else "it goes on") in capsys.readouterr().err


def test_what_is_no_file_of_text_and_no_mapping_is_told_as_such(tmp_path, capsys) -> None:
    path = tmp_path / "config.yaml"
    for data in (b"model: \xff\n", None):
        path.unlink(missing_ok=True) if data is None else path.write_bytes(data)
        assert main(["sft", "--config", str(path)]) == 2
        assert f"--config {path}: expected a YAML file in UTF-8, found: " in capsys.readouterr().err
    for text in ("{a", "3", "[a]"):
        assert main(["sft", *HERE, "--recipe-fields", text]) == 2
        assert f"expected keys and values as {{key: value}}, found '{text}'" in capsys.readouterr().err


def test_help_names_the_defaults_that_there_are(capsys) -> None:
    assert main(["sft", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"(default: {SFTConfig(model='m', data='d').batch_size})" in shown
    assert "(default: None)" not in shown and "(default: False)" not in shown
