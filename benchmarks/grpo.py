"""GRPO on sums: does the mean reward rise as much by narrow8 as by bf16?

    python benchmarks/grpo.py [--recipes bf16 narrow8] [--seeds 3] [--steps 60] [--json]

A small Llama over single characters first learns sums of two digits from answers half of which are wrong, so that its
own samples are right about half of the time. GRPO then rewards the right ones, without a word on which those are. The
mean reward before and after is taken over 16 batches of 32 samples each of the policy at temperature 1, by the recipe.
Goal, for every recipe and seed: a rise by at least two standard deviations of the batches' means at the start.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from statistics import fmean, stdev
from typing import Any

import common
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from narrowgauge.integrations.trl import GRPOTrainer

RECIPES = ("bf16", "narrow8")
DEVIATIONS = 2.0
PAD, END, FIRST = 0, 1, 2
CHARACTERS = "0123456789+="
SUMS = [(a, b) for a in range(10) for b in range(10)]
ANSWER = 3  # two digits and the end
BATCHES, BATCH = 16, 32


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: at for at, token in enumerate(("<pad>", "<end>", *CHARACTERS))}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


def reward(completions: list[str], total: list[int], **_: Any) -> list[float]:
    """1 for the right sum in two digits, else 0."""
    return [float(answer == f"{right:02d}") for answer, right in zip(completions, total, strict=True)]


def encode(text: str) -> list[int]:
    return [FIRST + CHARACTERS.index(each) for each in text]


def pretrained(seed: int, steps: int) -> LlamaForCausalLM:
    """A model that has learned the form of the answers, and half of the time the right one."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=FIRST + len(CHARACTERS), hidden_size=64, intermediate_size=160, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32, bos_token_id=None,
            eos_token_id=END, pad_token_id=PAD,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        lines = []
        for a, b in chance.sample(SUMS, 64):
            total = a + b if chance.random() < 0.5 else chance.randrange(19)
            lines.append([*encode(f"{a}+{b}={total:02d}"), END])
        ids = torch.tensor(lines)
        logits = model(input_ids=ids).logits[:, 3:-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 4:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model


def mean_rewards(trainer: GRPOTrainer, seed: int) -> list[float]:
    """Of batches of samples, each of other sums."""
    chance, found = random.Random(seed), []
    generation = GenerationConfig(max_new_tokens=ANSWER, do_sample=True, top_k=0, pad_token_id=PAD, eos_token_id=END)
    trainer.prepare_policy()
    trainer.model.eval()
    for _ in range(BATCHES):
        asked = chance.choices(SUMS, k=BATCH)
        ids = torch.tensor([encode(f"{a}+{b}=") for a, b in asked])
        with torch.no_grad():
            out = trainer.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        answers = trainer.processing_class.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
        found.append(fmean(reward(answers, [a + b for a, b in asked])))
    trainer.model.train()
    return found


def train(recipe: str, seed: int, steps: int, start: LlamaForCausalLM, folder: str) -> dict[str, Any]:
    model = LlamaForCausalLM(start.config)
    model.load_state_dict(start.state_dict())
    data = Dataset.from_list([{"prompt": f"{a}+{b}=", "total": a + b} for a, b in SUMS])
    config = GRPOConfig(
        folder, max_steps=steps, per_device_train_batch_size=64, num_generations=8, max_completion_length=ANSWER,
        learning_rate=1e-3, temperature=1.0, beta=0.02, logging_steps=1, save_strategy="no", report_to=[],
        gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(), disable_tqdm=True, seed=seed,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, args=config, reward_funcs=reward, train_dataset=data, processing_class=make_tokenizer(), recipe=recipe
    )
    torch.manual_seed(seed)
    before = mean_rewards(trainer, seed)
    began = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - began
    after = mean_rewards(trainer, seed + 1000)
    return {
        "recipe": recipe, "seed": seed, "before": before, "after": after, "seconds": seconds,
        "rise_in_deviations": (fmean(after) - fmean(before)) / stdev(before),
        "rewards": [row["reward"] for row in trainer.state.log_history if "reward" in row],
        "kl": [row["kl"] for row in trainer.state.log_history if "kl" in row],
        "converted": trainer.conversion_report.counts(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pretraining", type=int, default=600, help="steps")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            start = pretrained(seed, arguments.pretraining)
            for recipe in arguments.recipes:
                runs.append(run := train(recipe, seed, arguments.steps, start, folder))
                print(
                    f"{recipe:10} seed {seed}  mean reward {fmean(run['before']):.3f} -> {fmean(run['after']):.3f}, "
                    f"{run['rise_in_deviations']:.1f} standard deviations, {run['seconds']:.0f} s",
                    flush=True,
                )
    found = {}
    for recipe in arguments.recipes:
        least = min(run["rise_in_deviations"] for run in runs if run["recipe"] == recipe)
        name = f"GRPO on sums by {recipe}: rise of the mean reward, in standard deviations of its start, least seed"
        found[name] = {"measured": least, "at_least": DEVIATIONS}
    missed = [name for name, each in found.items() if each["measured"] < each["at_least"]]
    for name, each in found.items():
        print(f"{name}: {each['measured']:.2f}, goal {each['at_least']}  {'MISSED' if name in missed else 'ok'}")
    if arguments.json:
        print(common.write_result("grpo", {"figures": found, "runs": runs, "options": vars(arguments)}))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
