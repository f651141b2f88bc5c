"""TRL's GRPOTrainer and RLOOTrainer with a recipe: rollouts, references, reward models and functions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import GRPOConfig, RLOOConfig
from trl_tiny import arguments, llama, logged, scorer, tokenizer, weights

import narrowgauge as ng
from narrowgauge.errors import DataError
from narrowgauge.integrations.trl import GRPOTrainer, RLOOTrainer
from narrowgauge.tensors.quantized import QuantizedTensor

RECIPES = ["bf16", "fp8_current", "narrow8"]
# TRL uses names that transformers has given up
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")


def prompts(count: int = 8) -> Dataset:
    return Dataset.from_list([{"prompt": f"{n}+1="} for n in range(count)])


def digits(completions: list[str], **_: Any) -> list[float]:
    """The share of digits among the first characters."""
    return [sum(c.isdigit() for c in each[:6]) / 6 for each in completions]


def grpo(folder: Path, recipe: str, kind: type[Any] = GRPOTrainer, **changes: Any) -> Any:
    own = {"reward_funcs": changes.pop("reward_funcs", digits)}
    if "reward_processing_classes" in changes:
        own["reward_processing_classes"] = changes.pop("reward_processing_classes")
    model = changes.pop("model", None) or llama()
    values = {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "beta": 0.1, "max_steps": 2,
        "gradient_checkpointing": False,
    }  # fmt: skip
    args = arguments(GRPOConfig if kind is GRPOTrainer else RLOOConfig, folder, **values | changes)
    return kind(model, args=args, train_dataset=prompts(), processing_class=tokenizer(), recipe=recipe, **own)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_it_trains_beside_a_frozen_reference_and_resumes(
    kind: type[Any], recipe: str, tmp_path: Path
) -> None:  # case 106
    run = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    whole = grpo(tmp_path, recipe, kind, **run)
    reference = whole.ref_model
    whole.train()
    rows = [row for row in whole.conversion_report if row.module == "Linear"]
    assert sum(row.status == "converted" for row in rows) == (0 if recipe == "bf16" else 14)
    assert not any(p.requires_grad for p in reference.parameters())
    stored = [p for p in reference.parameters() if isinstance(p.data, QuantizedTensor)]
    assert len(stored) == (0 if recipe == "bf16" else 14)
    wide = 2 if recipe == "narrow8" else 4
    values, of_layers = sum(p.numel() for p in reference.parameters()), sum(p.numel() for p in stored)
    assert ng.ledger(reference).roles["param"] == (values - of_layers) * wide + of_layers + 8 * len(stored)
    kl = logged(whole, "kl")
    assert kl[0] == 0.0 and abs(kl[1]) > 1e-6
    assert all(math.isfinite(v) for row in whole.state.log_history for v in row.values() if isinstance(v, float))

    resumed = grpo(tmp_path, recipe, kind, **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert logged(resumed, "loss") == logged(whole, "loss") and logged(resumed, "kl") == kl
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(resumed.model)[name], value), name
    _, info = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_policy_with_frozen_layers_has_a_reference_like_any_other(kind: type[Any], tmp_path: Path) -> None:
    model = llama()
    ng.freeze(model.model.layers[0], "narrow8")
    trainer = grpo(tmp_path, "narrow8", kind, model=model, learning_rate=1e-2)
    trainer.train()
    assert logged(trainer, "kl")[0] == 0.0
    assert sum(isinstance(p.data, QuantizedTensor) for p in trainer.ref_model.parameters()) == 14
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())


def test_rollouts_are_sampled_by_the_recipe(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, "narrow8", max_steps=1, beta=0.0)
    seen: list[Any] = []
    layer = trainer.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda m, args, out: seen.append((m.quantized, out.dtype, torch.is_grad_enabled())))
    trainer.train()
    sampled = [each for each in seen if not each[2]]
    assert len(sampled) >= 6 and set(sampled) == {(True, torch.bfloat16, False)}
    assert trainer.ref_model is None


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_lm_o2"])
def test_a_reward_model_is_frozen_in_fp8_and_scores(recipe: str, tmp_path: Path) -> None:
    judge = scorer()
    judge.config._name_or_path = "judge"
    trainer = grpo(tmp_path, recipe, reward_funcs=[digits, judge], reward_processing_classes=[None, tokenizer()])
    trainer.train()
    judge = trainer.reward_funcs[1]
    assert not any(p.requires_grad for p in judge.parameters()) and not judge.training
    stored = [name for name, p in judge.named_parameters() if isinstance(p.data, QuantizedTensor)]
    assert len(stored) == 16  # its table and the score's row, too
    param, values = ng.ledger(judge).roles["param"], sum(p.numel() for p in judge.parameters())
    norms = sum(p.numel() for name, p in judge.named_parameters() if name not in stored)
    assert param == values - norms + 4 * norms + 8 * 16
    assert all(math.isfinite(each) for each in logged(trainer, "rewards/judge/mean"))


@pytest.mark.parametrize("recipe", ["fp8_current"])
def test_a_synchronized_reference_is_the_policy_at_once(recipe: str, tmp_path: Path) -> None:  # case 109, TR-DPO
    run = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0, "max_steps": 3}
    trainer = grpo(tmp_path, recipe, learning_rate=1e-2, **run)
    assert trainer.args.beta == 0.1 and trainer.args.sync_ref_model
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == 0.0 and kl[1] > 0.0 and kl[2] == 0.0


def broken(completions: list[str], **_: Any) -> list[float]:
    raise KeyError("answer")


def not_a_number(completions: list[str], **_: Any) -> list[float]:
    return [math.nan] * len(completions)


def silent(completions: list[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def nothing(completions: list[str], **_: Any) -> None:
    return None


def too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0]


def words(completions: list[str], **_: Any) -> list[str]:
    return ["good"] * len(completions)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken, "'broken' raised KeyError: 'answer'; batch of 4, prompt 0: '.*completion: '"),
        (not_a_number, "'not_a_number' returned nan for completion 0: expected a finite number"),
        (silent, "completion 0 of the batch has no reward: silent gave None"),
        (nothing, "'nothing' returned None: expected a list of 4 numbers"),
        (too_few, "'too_few' returned 1 values: expected a list of 4 numbers"),
        (words, "'words' returned 'good' for completion 0"),
    ],
)
def test_a_reward_function_that_fails_is_named_with_its_batch(function: Any, message: str, tmp_path: Path) -> None:
    trainer = grpo(tmp_path, "narrow8", reward_funcs=function, max_steps=1, beta=0.0)
    with pytest.raises(DataError, match=message):
        trainer.train()


def test_none_is_no_reward_where_another_function_gives_one(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, "narrow8", reward_funcs=[silent, digits], max_steps=1, beta=0.0)
    trainer.train()
    assert 0 <= logged(trainer, "reward")[0] <= 1 and math.isfinite(logged(trainer, "loss")[0])


def test_empty_completions_train(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():  # it ends at once
        model.lm_head.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(104))
        model.lm_head.bias[1] = 30.0
    trainer = grpo(tmp_path, "narrow8", model=model, max_steps=1)
    trainer.train()
    assert logged(trainer, "completions/mean_length") == [1.0]
    assert logged(trainer, "reward") == [0.0] and math.isfinite(logged(trainer, "loss")[0])
