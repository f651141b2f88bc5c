"""TRL's DPOTrainer and RewardTrainer with a recipe: frozen references, and log-probabilities in float32."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.nn import functional as F
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOConfig, RewardConfig
from trl_tiny import arguments, llama, logged, preferences, scorer, tokenizer, weights

import narrowgauge as ng
from narrowgauge.integrations.trl import DPOTrainer, RewardTrainer
from narrowgauge.tensors.quantized import QuantizedTensor

RECIPES = ["bf16", "fp8_current", "narrow8"]
# TRL uses names that transformers has given up
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")


def dpo(folder: Path, recipe: str, **changes: Any) -> DPOTrainer:
    own = {name: changes.pop(name) for name in ("ref_model", "peft_config") if name in changes}
    model, data = changes.pop("model", None) or llama(), changes.pop("data", None) or preferences()
    args = arguments(DPOConfig, folder, **changes)
    return DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer(), recipe=recipe, **own)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_beside_a_frozen_reference_and_resumes(recipe: str, tmp_path: Path) -> None:  # case 106
    run = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    whole = dpo(tmp_path, recipe, **run)
    reference, bits = whole.ref_model, weights(whole.ref_model)
    whole.train()
    assert not any(p.requires_grad for p in reference.parameters())
    stored = [p for p in reference.parameters() if isinstance(p.data, QuantizedTensor)]
    assert len(stored) == (0 if recipe == "bf16" else 14)
    wide = 2 if recipe == "narrow8" else 4
    values, of_layers = sum(p.numel() for p in reference.parameters()), sum(p.numel() for p in stored)
    held = ng.ledger(reference).roles["param"]
    # a byte a value of the layers, a scale and an amax each; the table, the head and the norms as the policy has them
    assert held == (values - of_layers) * wide + of_layers + 8 * len(stored)
    assert all(torch.equal(value, bits[name]) for name, value in weights(reference).items())

    assert logged(whole, "rewards/margins")[0] == 0.0 and logged(whole, "loss")[0] == pytest.approx(math.log(2))
    assert logged(whole, "loss")[-1] < 0.6 and logged(whole, "rewards/margins")[-1] > 0.1
    assert all(math.isfinite(v) for row in whole.state.log_history for v in row.values() if isinstance(v, float))

    resumed = dpo(tmp_path, recipe, **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    for name, value in weights(whole.model).items():
        assert torch.equal(weights(resumed.model)[name], value), name
    _, info = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("recipe", ng.recipe_names())
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_equal_weights_have_no_kl_whatever_the_recipe(recipe: str, tied: bool) -> None:  # case 106
    from narrowgauge.train.frozen_models import freeze_reference

    policy = llama(tie_word_embeddings=tied)
    reference = copy.deepcopy(policy)
    ng.prepare(policy, torch.optim.AdamW(policy.parameters()), recipe)
    freeze_reference(reference, policy, ng.recipe(recipe))
    ids = torch.randint(0, 104, (4, 16), generator=torch.Generator().manual_seed(0))
    logits = policy.train()(input_ids=ids).logits
    with torch.no_grad():
        assert torch.equal(reference(input_ids=ids).logits, logits)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_lm_o3"])
def test_a_reference_follows_the_delayed_scales_of_the_policy(recipe: str) -> None:  # case 106
    from narrowgauge.train.frozen_models import freeze_reference

    policy = llama()
    reference = copy.deepcopy(policy)
    _, optimizer = ng.prepare(policy, torch.optim.AdamW(policy.parameters(), lr=0.0, weight_decay=0.0), recipe)
    freeze_reference(reference, policy, ng.recipe(recipe))
    ids = torch.randint(0, 104, (4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(20):  # more than fp8_lm_o3 begins with current scaling for
        policy.train()(input_ids=ids).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(reference(input_ids=ids).logits, policy.eval()(input_ids=ids).logits)


def test_a_reference_of_another_precision_is_warned_of_and_measured(tmp_path: Path) -> None:  # case 106
    reference = ng.freeze(llama(), "fp8_current")  # its table and its head in FP8, too
    trainer = dpo(tmp_path, "bf16", ref_model=reference, max_steps=1)
    with pytest.warns(UserWarning, match="its KL from the policy is .* a floor"):
        trainer.train()
    (floor,) = logged(trainer, "kl_at_start")
    assert 1e-6 < floor < 0.1


def test_log_probabilities_are_those_of_the_float32_logits(tmp_path: Path) -> None:  # case 104
    model, reference = llama(vocab_size=2048), llama(seed=1, vocab_size=2048)
    with torch.no_grad():
        for each in (model, reference):
            each.lm_head.weight.mul_(30 / (each(torch.arange(64)[None]).logits.std()))
    letters = "".join(chr(33 + at % 90) for at in range(508))
    data = Dataset.from_list([{"prompt": "a", "chosen": letters, "rejected": letters[::-1]}] * 2)
    trainer = dpo(tmp_path, "fp8_current", model=model, ref_model=reference, data=data, max_steps=1, learning_rate=0.0)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.train()
    assert batch["input_ids"].shape[1] >= 509
    used = {name: batch[name] for name in ("input_ids", "attention_mask")}
    sums = []
    for each in (trainer.model, trainer.ref_model):
        with torch.no_grad():
            logits = each(**used).logits
        assert logits.dtype is torch.bfloat16 and logits.float().std() > 20
        chosen = F.log_softmax(logits[:, :-1].double(), -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        sums.append((chosen * batch["completion_mask"][:, 1:]).sum(1))
    rewards = 0.1 * (sums[0] - sums[1])
    assert logged(trainer, "rewards/chosen")[0] == pytest.approx(rewards[:2].mean().item(), abs=1e-2)
    assert logged(trainer, "rewards/rejected")[0] == pytest.approx(rewards[2:].mean().item(), abs=1e-2)


def test_precomputed_references_run_by_the_recipe(tmp_path: Path) -> None:
    for recipe in ("narrow8", "bf16"):  # a second recipe does not read what was cached for the first
        trainer = dpo(tmp_path, recipe, precompute_ref_log_probs=True, max_steps=1, data=preferences())
        trainer.train()
        assert trainer.ref_model is None and logged(trainer, "rewards/margins")[0] == 0.0


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2"])
def test_a_synchronized_reference_is_the_policy_at_once(recipe: str, tmp_path: Path) -> None:  # case 109, TR-DPO
    run = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0, "max_steps": 3}
    trainer = dpo(tmp_path, recipe, learning_rate=1e-2, **run)
    trainer.train()
    margins = logged(trainer, "rewards/margins")
    assert margins[1] > 0.0 and margins[2] == 0.0  # after the second step the reference is the policy again
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())


@pytest.mark.parametrize("recipe", ["fp8_current", "narrow8"])
def test_reference_weights_written_into_the_policy_are_seen(recipe: str, tmp_path: Path) -> None:  # case 109
    trainer = dpo(tmp_path, recipe, learning_rate=1e-2, max_steps=2)
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    policy = trainer.model.eval()
    ids = torch.randint(5, 100, (2, 12), generator=torch.Generator().manual_seed(0))

    def log_probs(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return F.log_softmax(model(input_ids=ids).logits.float(), -1)

    own, trained = log_probs(policy), {name: p.detach().clone() for name, p in policy.named_parameters()}
    for name, p in policy.named_parameters():
        p.data.copy_(start[name])
    swapped = log_probs(policy)
    for name, p in policy.named_parameters():
        p.data.copy_(trained[name])
    assert torch.equal(swapped, log_probs(trainer.ref_model)) and (swapped - own).abs().max() > 1e-2
    assert torch.equal(log_probs(policy), own)


def test_adapters_on_a_frozen_base_have_the_base_for_reference(tmp_path: Path) -> None:  # case 60
    base = ng.freeze(llama(), "narrow8")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    trainer = dpo(tmp_path, "narrow8", model=base, peft_config=lora, learning_rate=3e-2, max_steps=6)
    before = base.model.layers[0].self_attn.k_proj.weight.data.codes.clone()
    trainer.train()
    assert trainer.ref_model is None
    assert logged(trainer, "rewards/margins")[0] == 0.0 and logged(trainer, "loss")[-1] < 0.68
    assert torch.equal(base.model.layers[0].self_attn.k_proj.weight.data.codes, before)
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)


def test_empty_answers_have_finite_rewards(tmp_path: Path) -> None:
    data = Dataset.from_list([{"prompt": "a", "chosen": "", "rejected": "b"}] * 4)
    trainer = dpo(tmp_path, "narrow8", data=data, max_steps=2)
    trainer.train()
    assert all(math.isfinite(each) for each in logged(trainer, "rewards/margins"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_reward_model_learns_which_answer_is_better(recipe: str, tmp_path: Path) -> None:
    run = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "learning_rate": 1e-2}

    def make() -> RewardTrainer:
        args = arguments(RewardConfig, tmp_path, **run)
        return RewardTrainer(
            scorer(), args=args, train_dataset=preferences(), processing_class=tokenizer(), recipe=recipe
        )

    whole = make()
    whole.train()
    rows = [row for row in whole.conversion_report if row.module == "Linear"]
    assert sum(row.status == "converted" for row in rows) == (0 if recipe == "bf16" else 14)
    assert whole.conversion_report["score"].status == "kept"
    assert logged(whole, "loss")[-1] < 0.5 * logged(whole, "loss")[0] and logged(whole, "accuracy")[-1] == 1.0
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(resumed, "loss") == logged(whole, "loss")
    _, info = LlamaForSequenceClassification.from_pretrained(tmp_path / "checkpoint-6", output_loading_info=True)
    assert not any(info.values()), info
