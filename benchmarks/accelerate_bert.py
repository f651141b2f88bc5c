"""BERT on pairs of sentences through accelerate: our recipes against bf16, in one run.

    python benchmarks/accelerate_bert.py [--recipes fp8_delayed narrow8 ...] [--seeds 3] [--steps 1000] [--json]
    accelerate launch --num_processes 2 benchmarks/accelerate_bert.py

The layout is that of accelerate's own benchmarks of FP8: a baseline and each recipe train the same model on the same
batches, and must agree in loss, accuracy and F1. The model is a small BERT with random weights in place of a
pretrained one, the pairs are made from the texts that Python carries in place of MRPC: a sentence and four fifths of
its words in another order, or of another sentence's. Such a pair is told by comparing words across the two, which a
model has to learn; the baseline must have, for among guesses every recipe would agree. Which layers were converted,
and bytes by role, are of the same run.
"""

from __future__ import annotations

import argparse
import math
import re
import zlib
from pydoc_data.topics import topics
from statistics import mean
from typing import Any

import common
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import narrowgauge as ng
from narrowgauge.integrations.accelerate import Accelerator

BASELINE = "bf16"
RECIPES = ("fp8_delayed", "fp8_current", "fp8_lm_o2", "narrow8")
LENGTH, VOCABULARY, BATCH = 64, 2048, 16
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
SPREAD = 0.1  # of the first weights: with BERT's own 0.02, made for 768 features, so narrow a model learns nothing
EVALUATED, TRAINED = 1024, 16384  # pairs
WORDS, KEPT = 8, 0.8  # least of a sentence; share of them in the other half of a pair
LEARNED = 0.8  # accuracy of the baseline
CLASSIFY, SEPARATE = 0, 1
ALLOWED_LOSS_GAP = 0.03  # as benchmarks/parity.py
# parameter, gradient, master and both moments; what is kept wide (biases, norms) and the scales add to it, and for
# fp8_delayed three histories of 1,024 amax values in each of 13 layers: 0.24 bytes a parameter of so small a model
MOST_BYTES = {BASELINE: 16.1, "fp8_delayed": 16.34, "fp8_current": 16.1, "fp8_lm_o2": 6.6, "narrow8": 6.6}


def sentences() -> list[list[int]]:
    """All sentences of enough words, as `tokens`."""
    found = []
    for text in topics.values():
        for paragraph in text.split("\n\n"):
            parts = re.split(r"(?<=[.:;])\s+", " ".join(paragraph.split()))
            found += [tokens(part) for part in parts]
    return [each for each in found if len(each) >= WORDS]


def tokens(sentence: str) -> list[int]:
    """A number for each word, by its checksum; 0 and 1 are kept for what BERT adds."""
    words = re.findall(r"\w+|[^\w\s]", sentence.lower())[: (LENGTH - 3) // 2]
    return [2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in words]


def pairs(found: list[list[int]], count: int, generator: torch.Generator) -> list[dict[str, Tensor]]:
    """`count` examples as BERT takes them, half of each label."""

    def draw() -> list[int]:
        return found[int(torch.randint(len(found), (), generator=generator))]

    examples = []
    for number in range(count):
        a, label = draw(), number % 2
        source = a if label else draw()
        kept = [word for word in source if torch.rand((), generator=generator) < KEPT]
        b = [kept[at] for at in torch.randperm(len(kept), generator=generator).tolist()]
        ids = [CLASSIFY, *a, SEPARATE, *b, SEPARATE]
        rest = LENGTH - len(ids)
        examples.append(
            {
                "input_ids": torch.tensor(ids + [SEPARATE] * rest),
                "token_type_ids": torch.tensor([0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * rest),
                "attention_mask": torch.tensor([1] * len(ids) + [0] * rest),
                "labels": torch.tensor(label),
            }
        )
    return examples


def loaders(seed: int, evaluated: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Pairs to train on, drawn by `seed`, and to evaluate, of other sentences and the same for all seeds."""
    found = sentences()
    held, rest = found[::5], [each for at, each in enumerate(found) if at % 5]
    training: Any = pairs(rest, TRAINED, torch.Generator().manual_seed(1 + seed))
    testing: Any = pairs(held, evaluated, torch.Generator().manual_seed(0))
    shuffled = DataLoader(training, batch_size=BATCH, shuffle=True)
    return shuffled, DataLoader(testing, batch_size=4 * BATCH)


def train(recipe: str, seed: int, steps: int, evaluated: int) -> dict[str, Any]:
    """Figures of the model after `steps`; the same weights and batches for every recipe."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(recipe=recipe, cpu=not torch.cuda.is_available())
    set_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=SPREAD, **SHAPE,
    )  # fmt: skip
    model: Any = BertForSequenceClassification(config)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule: Any = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    training, testing = loaders(seed, evaluated)
    model, optimizer, schedule, training, testing = accelerator.prepare(model, optimizer, schedule, training, testing)
    model.train()
    taken = 0
    while taken < steps:
        for batch in training:
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            taken += 1
            if taken == steps:
                size = accelerator.ledger  # with the gradients
                break
            optimizer.zero_grad()
    counts = ng.report(accelerator.unwrap_model(model)).counts()
    return {**evaluate(accelerator, model, testing), "bytes": dict(size.roles), "per_parameter": size.per_parameter,
            "layers": counts, "processes": accelerator.num_processes}  # fmt: skip


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: Any, testing: Any) -> dict[str, float]:
    """Loss, accuracy and F1 of label 1 on the held-out pairs."""
    model.eval()
    logits, labels = [], []
    for batch in testing:
        found = accelerator.gather_for_metrics((model(**batch).logits.float(), batch["labels"]))
        logits.append(found[0])
        labels.append(found[1])
    logits, labels = torch.cat(logits), torch.cat(labels)
    said = logits.argmax(dim=1)
    hits = int(((said == 1) & (labels == 1)).sum())
    return {
        "loss": torch.nn.functional.cross_entropy(logits, labels).item(),
        "accuracy": (said == labels).float().mean().item(),
        "f1": 2 * hits / max(int((said == 1).sum()) + int((labels == 1).sum()), 1),
    }


def figures(repeats: dict[str, list[dict[str, Any]]], evaluated: int) -> dict[str, dict[str, float]]:
    """Distances of each recipe's means from the baseline's, bytes, and layers."""
    base = repeats[BASELINE]
    found = {
        f"accuracy of BERT with {BASELINE}": {
            "measured": mean(run["accuracy"] for run in base), "at_least": LEARNED, "at_most": 1.0,
        }
    }  # fmt: skip
    # twice the standard error of a difference of two shares of the pairs, each at most that of a coin
    noise = 2 * math.sqrt(2 * 0.25 / (evaluated * len(base)))
    for recipe, runs in repeats.items():
        if recipe != BASELINE:
            for measure in ("loss", "accuracy", "f1"):
                gap = mean(run[measure] for run in runs) - mean(run[measure] for run in base)
                allowed = ALLOWED_LOSS_GAP if measure == "loss" else noise
                found[f"{measure} of BERT with {recipe}, distance from {BASELINE}'s"] = {
                    "measured": abs(gap), "at_most": allowed,
                }  # fmt: skip
            linear = SHAPE["num_hidden_layers"] * 6 + 1  # and the pooler
            found[f"linear layers of BERT converted by {recipe}, beside norms"] = {
                "measured": runs[0]["layers"]["converted"] - base[0]["layers"]["converted"],
                "at_least": linear, "at_most": linear,
            }  # fmt: skip
        if recipe in MOST_BYTES:
            found[f"bytes a parameter of BERT with {recipe}"] = {
                "measured": runs[0]["per_parameter"], "at_most": MOST_BYTES[recipe],
            }  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=ng.recipe_names(), default=list(RECIPES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--evaluated", type=int, default=EVALUATED, help="pairs that are held out")
    parser.add_argument("--json", action="store_true", help="write a result file")
    arguments = parser.parse_args()
    names = [BASELINE, *(name for name in arguments.recipes if name != BASELINE)]
    repeats: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(arguments.seeds):
        for name in names:
            repeats[name].append(train(name, seed, arguments.steps, arguments.evaluated))
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        return 0
    found = figures(repeats, arguments.evaluated)
    for name, runs in repeats.items():
        means = {key: mean(run[key] for run in runs) for key in ("loss", "accuracy", "f1")}
        size, layers = runs[0]["per_parameter"], runs[0]["layers"]
        print(
            f"{name:12} {'  '.join(f'{key} {value:.4f}' for key, value in means.items())}  "
            f"{size:5.2f} bytes a parameter  {layers['converted']} layers converted, {layers['kept']} kept"
        )
    met = True
    for label, figure in found.items():
        ok = figure.get("at_least", -math.inf) <= figure["measured"] <= figure["at_most"]
        met &= ok
        least = f"at least {figure['at_least']:.4f}, " if "at_least" in figure else ""
        print(f"{label}: {figure['measured']:.4f}, {least}at most {figure['at_most']:.4f}  {'ok' if ok else 'MISSED'}")
    if arguments.json:
        print(common.write_result("accelerate_bert", {"figures": found, "repeats": repeats}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
