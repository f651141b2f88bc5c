"""TRL's SFTTrainer with a recipe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import SFTConfig
from trl_tiny import arguments, completions, dialogues, llama, logged, tokenizer, weights

import narrowgauge as ng
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.integrations.trl import SFTTrainer

RECIPES = ["bf16", "fp8_current", "fp8_lm_o2", "narrow8"]
# TRL uses names that transformers has given up
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")


def trainer(folder: Path, recipe: str | ng.Recipe, data: Dataset | None = None, **changes: Any) -> SFTTrainer:
    model, words = changes.pop("model", None) or llama(), changes.pop("tokenizer", None) or tokenizer()
    args = arguments(SFTConfig, folder, **changes)
    return SFTTrainer(model, args, train_dataset=data or completions(), processing_class=words, recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_resumes_bit_for_bit_and_transformers_loads_it(recipe: str, tmp_path: Path) -> None:
    run = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 1e-2}
    whole = trainer(tmp_path, recipe, **run)
    whole.train()
    rows = [row for row in whole.conversion_report if row.module == "Linear"]
    quantized = {row.name for row in rows if row.status == "converted"}
    assert len(rows) == 15 and quantized == ({r.name for r in rows} - {"lm_head"} if recipe != "bf16" else set())
    losses = logged(whole, "loss")
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.5
    assert all(math.isfinite(v) for row in whole.state.log_history for v in row.values() if isinstance(v, float))
    assert not whole.args.bf16  # as TRL's configuration would have it

    resumed = trainer(tmp_path, recipe, **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed, "loss") == losses
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(resumed.model)[name], value), name

    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.tensor([[10, 20, 30, 40]])
    with torch.no_grad():
        ours, theirs = whole.model.eval()(input_ids=ids).logits.float(), loaded.eval()(input_ids=ids).logits
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_the_loss_is_that_of_the_float32_logits_of_the_same_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, "fp8_current", max_steps=1, per_device_train_batch_size=8, learning_rate=0.0)
    batch = next(iter(run.get_train_dataloader()))
    run.train()
    with torch.no_grad():
        logits = run.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert logits.dtype is torch.bfloat16
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].double().flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
    )
    assert logged(run, "loss")[0] == pytest.approx(expected.item(), rel=1e-5)  # in bfloat16 it would be off by 4e-3


def test_messages_packing_and_checkpointing_do_not_change_what_is_converted(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, "narrow8", dialogues(), max_steps=2, packing=True, packing_strategy="wrapped", max_length=16
    )
    assert run.args.gradient_checkpointing
    run.train()
    assert sum(row.status == "converted" and row.module == "Linear" for row in run.conversion_report) == 14
    assert all(math.isfinite(loss) for loss in logged(run, "loss"))


def test_a_model_goes_from_one_trainer_to_the_next(tmp_path: Path) -> None:
    model = llama()
    trainer(tmp_path, "bf16", model=model, max_steps=1).train()
    again = trainer(tmp_path, "narrow8", model=model, max_steps=1)
    again.train()
    assert again.conversion_report["model.layers.0.mlp.up_proj"].status == "converted"
    assert model.forward.recipe.name == "narrow8"
    head = model.forward.inner.__func__  # TRL's, once: it calls the model's own forward
    free = dict(zip(head.__code__.co_freevars, head.__closure__, strict=True))
    assert free["original_forward"].cell_contents.__func__ is LlamaForCausalLM.forward


def test_evaluation_before_training_runs_by_the_recipe(tmp_path: Path) -> None:
    run = trainer(tmp_path, "fp8_current")
    run.evaluate(completions(4))
    assert run.conversion_report["model.layers.0.mlp.up_proj"].status == "converted"


def test_empty_completions_are_trained_to_end(tmp_path: Path) -> None:
    run = trainer(tmp_path, "narrow8", Dataset.from_list([{"prompt": "a", "completion": ""}] * 4), max_steps=2)
    run.train()
    assert all(math.isfinite(loss) and loss > 0 for loss in logged(run, "loss"))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": Dataset.from_list([{"prompt": "a" * 40, "completion": "b"}] * 3), "max_length": 16}, DataError,
         "none of 3 examples has a token to train on: max_length=16"),
        ({"data": Dataset.from_dict({"text": []})}, DataError, "expected examples, found none"),
        ({"data": dialogues(), "template": None}, ConfigError, "no chat template"),
        ({"pad_token": None, "eos_token": None}, ConfigError, "neither a pad token nor an end-of-sequence token"),
        ({"use_liger_kernel": True}, ConfigError, "use_liger_kernel=True"),
        ({"recipe": ng.recipe("narrow8", exclude=())}, ConfigError, "quantizes lm_head"),
        ({"recipe": "fp16"}, ConfigError, "take bf16"),
    ],
    ids=["all ignored", "no examples", "no template", "no pad token", "liger", "head", "fp16"],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(
    changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    words = tokenizer(**{name: changes.pop(name) for name in ("pad_token", "eos_token") if name in changes})
    words.chat_template = changes.pop("template", words.chat_template)
    data, recipe = changes.pop("data", None), changes.pop("recipe", "narrow8")
    data = completions() if data is None else data
    args = arguments(SFTConfig, tmp_path, **changes)
    with pytest.raises(error, match=message):
        SFTTrainer(llama(), args, train_dataset=data, processing_class=words, recipe=recipe)


def test_a_tokenizer_without_pad_token_fills_up_with_its_end(tmp_path: Path) -> None:
    run = trainer(tmp_path, "narrow8", max_steps=1, tokenizer=tokenizer(pad_token=None))
    run.train()
    assert run.processing_class.pad_token == "<|end|>" and math.isfinite(logged(run, "loss")[0])
