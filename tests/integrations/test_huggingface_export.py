"""An exported directory loads with transformers and gives the same logits and tokens."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from narrowgauge.data.tokenizer import END_OF_TEXT, Tokenizer
from narrowgauge.errors import CheckpointError, ConfigError, ConversionError
from narrowgauge.integrations.huggingface import export_llama
from narrowgauge.models.gpt import GPT
from narrowgauge.models.presets import preset

TEXT = "def main():\n    return 'naïve λ'\n" * 20


def a_model(**fields) -> GPT:
    shape = {"vocab_size": 300, "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "context": 64, **fields}
    return GPT(preset("tiny", **shape), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT], 300)


@pytest.mark.parametrize("fields", [{}, {"tied_embeddings": True}, {"kv_heads": 4, "attention_bias": True}], ids=str)
def test_logits_are_those_of_the_model(tokenizer, tmp_path, fields):
    from transformers import AutoModelForCausalLM

    model = a_model(**fields, vocab_size=tokenizer.vocab_size).eval()
    loaded = AutoModelForCausalLM.from_pretrained(export_llama(model, tokenizer, tmp_path / "hf", "fp32")).eval()
    ids = torch.tensor([tokenizer.encode(TEXT)[:48]])
    with torch.no_grad():
        ours, theirs = model(ids)[0], loaded(ids).logits
    assert loaded.dtype is torch.float32
    assert (ours - theirs).abs().max() <= 1e-5 * ours.abs().max()  # the order of sums: a few hundred float32 terms


def test_weights_are_bfloat16_unless_asked_for_otherwise(tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM

    model = a_model(vocab_size=tokenizer.vocab_size)
    loaded = AutoModelForCausalLM.from_pretrained(export_llama(model, tokenizer, tmp_path / "hf"))
    found = loaded.model.layers[1].mlp.down_proj.weight
    assert loaded.dtype is torch.bfloat16
    assert torch.equal(found, model.blocks[1].mlp.down.weight.bfloat16())


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp16_pure"])
def test_a_trained_model_exports_the_values_that_its_parameters_stand_for(tokenizer, tmp_path, recipe):
    from transformers import AutoModelForCausalLM

    model = a_model(vocab_size=tokenizer.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ng.prepare(model, optimizer, recipe)
    ids = torch.tensor([tokenizer.encode(TEXT)[:33]])
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    optimizer.step()
    loaded = AutoModelForCausalLM.from_pretrained(export_llama(model, tokenizer, tmp_path / "hf", "fp32"))
    found = loaded.model.layers[1].mlp.down_proj.weight
    assert torch.equal(found, model.blocks[1].mlp.down.weight.detach().float().cpu())


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o3"])
def test_residuals_and_masters_are_in_what_is_exported(tokenizer, tmp_path, recipe):
    from transformers import AutoModelForCausalLM

    model = a_model(vocab_size=tokenizer.vocab_size)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
    ids = torch.tensor([tokenizer.encode(TEXT)[:33]])
    model(ids[:, :-1], ids[:, 1:])[1].backward()
    optimizer.step()
    expected = optimizer.full_values(model.blocks[1].mlp.down.weight)
    assert not torch.equal(expected, model.blocks[1].mlp.down.weight.detach().float())
    for weight_format, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        directory = export_llama(model, tokenizer, tmp_path / weight_format, weight_format, optimizer)
        found = AutoModelForCausalLM.from_pretrained(directory).model.layers[1].mlp.down_proj.weight
        assert torch.equal(found, expected.to(dtype)), weight_format


def test_the_tokenizer_loads_with_the_same_ids_and_end(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    model = a_model(vocab_size=tokenizer.vocab_size)
    loaded = AutoTokenizer.from_pretrained(export_llama(model, tokenizer, tmp_path / "hf"))
    assert loaded(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert loaded.decode(loaded(TEXT)["input_ids"]) == TEXT
    assert loaded.eos_token == END_OF_TEXT
    assert loaded.eos_token_id == tokenizer.end_id


def test_a_model_that_llama_cannot_express_is_refused_and_nothing_is_written(tokenizer, tmp_path):
    model = a_model(vocab_size=tokenizer.vocab_size, activation="gelu", experts=2)
    with pytest.raises(ConversionError, match="activation=gelu.*experts=2"):
        export_llama(model, tokenizer, tmp_path / "hf")
    assert not list(tmp_path.iterdir())


def test_a_directory_with_something_in_it_is_left_alone(tokenizer, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="empty"):
        export_llama(a_model(vocab_size=tokenizer.vocab_size), tokenizer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_full_disk_leaves_nothing_behind(tokenizer, tmp_path, monkeypatch):
    def no_room(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("narrowgauge.integrations.huggingface.save_file", no_room)
    with pytest.raises(CheckpointError, match="hf was not written: No space left on device: make room"):
        export_llama(a_model(vocab_size=tokenizer.vocab_size), tokenizer, tmp_path / "hf")
    assert not list(tmp_path.iterdir())
