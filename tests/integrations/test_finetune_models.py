"""Models, tokenizers and reward functions as fine-tuning loads them, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from narrowgauge.errors import ConfigError
from narrowgauge.integrations.finetune_models import (
    check_chat_template,
    check_end_token,
    length_for,
    load,
)
from narrowgauge.integrations.finetune_rewards import reward_function
from tiny_chat import END, write_model


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tmp_path: Path) -> None:
    said: list[str] = []
    model, tokenizer = load(str(write_model(tmp_path, pad_token=None)), say=said.append)
    assert said == [f"the tokenizer has no padding token: its end token {END!r} pads"]
    assert model.config.pad_token_id == tokenizer.pad_token_id == tokenizer.eos_token_id
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_tokenizer_without_an_end_is_given_a_pad_token_and_the_model_a_row(tmp_path: Path) -> None:
    said: list[str] = []
    directory = write_model(tmp_path, pad_token=None, eos_token=None, vocab_size=257)
    model, tokenizer = load(str(directory), say=said.append)
    assert len(said) == 1 and "'<|pad|>' was added, and the model has 258 embeddings" in said[0]
    assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == 258
    with pytest.raises(ConfigError, match="expected a tokenizer with an end-of-sequence token"):
        check_end_token(tokenizer, "m")


def test_a_chat_template_is_needed_for_messages_and_may_be_given(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", chat_template=None)
    _, tokenizer = load(str(directory))
    with pytest.raises(ConfigError, match="expected a tokenizer with a chat template.*--chat-template FILE"):
        check_chat_template(tokenizer, "m")
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    _, tokenizer = load(str(directory), chat_template=str(template))
    check_chat_template(tokenizer, "m")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    template.write_text("{% for m in messages %}")
    _, tokenizer = load(str(directory), chat_template=str(template))
    with pytest.raises(ConfigError, match="expected a chat template that renders messages"):
        check_chat_template(tokenizer, "m")
    with pytest.raises(ConfigError, match="expected a Jinja file"):
        load(str(directory), chat_template=str(tmp_path / "nowhere"))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a directory with a config.json"):
        load(str(tmp_path))
    directory = write_model(tmp_path / "quantized")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="found a checkpoint quantized by fp8"):
        load(str(directory))
    with pytest.raises(ConfigError, match="expected a tokenizer of at most 200 tokens.*found 259"):
        load(str(write_model(tmp_path / "small", vocab_size=200)))


def test_the_length_is_within_the_models_context(tmp_path: Path) -> None:
    model, _ = load(str(write_model(tmp_path)))
    assert (length_for(model, 0), length_for(model, 100)) == (128, 100)
    with pytest.raises(ConfigError, match="max_length=129: expected at most the model's context, 128"):
        length_for(model, 129)


def test_a_new_head_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    model, _ = load(str(write_model(tmp_path)), is_reward=True, say=said.append)
    assert model.config.num_labels == 1
    assert said == ["not in the checkpoint, so new and random: score.weight"]


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of reward functions."""
    (tmp_path / "some_rewards.py").write_text(
        "def length(completions, **columns): return [len(each) for each in completions]\nnumber = 3\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "some_rewards"


def test_a_reward_function_is_found_by_its_path(rewards: str) -> None:
    length = reward_function(f"{rewards}:length")
    assert length(prompts=["a", "b"], completions=["xyz", ""], answer=[1, 2]) == [3, 0]
    assert length.__name__ == "length"  # by which TRL logs its rewards


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("some_rewards", "expected package.module:function"),
        ("nowhere_at_all:f", "expected a module 'nowhere_at_all', found none"),
        ("broken_rewards:f", "'broken_rewards' cannot be imported: No module named 'nowhere_to_be_found'"),
        ("some_rewards:lenght", "expected a function 'lenght' in 'some_rewards', found no such name"),
        ("some_rewards:number", "found a int"),
    ],
)
def test_what_is_no_reward_function_is_refused(path: str, said: str, rewards: str) -> None:
    with pytest.raises(ConfigError, match=said):
        reward_function(path)
