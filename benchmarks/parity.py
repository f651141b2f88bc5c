"""Validation loss of the reference model under each recipe: the mean of three seeds, all in one run.

    python benchmarks/parity.py [--model moe] [--group tiles] [--recipes fp32 bf16 ...] [--seeds 3] [--steps 600] ...

A byte-level GPT on the text of `pydoc_data.topics` (first 90 % for training), width 96, 3 blocks, context 64. The text
differs between Python versions, so losses compare only within one run; its hash is in the result. `unscaled` is
fp8_current without scales: it must be far worse, or the comparison proves nothing. NVFP4 has no goal: it is measured
with and without its Hadamard transform and its stochastic rounding. `--model moe` has four experts of half the width in
place of each feed-forward network, two of which every token visits, and a clamped SwiGLU.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from pydoc_data.topics import topics

import common
import numpy as np
import torch

import narrowgauge as ng
from narrowgauge.models.gpt import GPT, GPTConfig

# recipe -> named recipe and fields; those under VARIANTS are reported, and have no goal
VARIANTS = {
    "nvfp4": ("nvfp4", {}),
    "nvfp4 without Hadamard": ("nvfp4", {"hadamard": False}),
    "nvfp4 to nearest": ("nvfp4", {"stochastic": False}),
}
# each group is a run of its own, with float32 in it, and a result file of its own
GROUPS = {
    "tensor": ("fp32", "tf32", "bf16", "fp16", "fp8_current", "fp8_delayed", "unscaled"),
    "tiles": ("fp32", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_block", "mxfp8", *VARIANTS),
}
RECIPES = tuple(dict.fromkeys(name for group in GROUPS.values() for name in group))
BATCH, CONTEXT, WARMUP_STEPS, PEAK_LR = 16, 64, 50, 2e-3
ALLOWED_LOSS_GAP, UNSCALED_LOSS_GAP = 0.03, 1.0


def load_text() -> torch.Tensor:
    return torch.from_numpy(np.frombuffer("\n".join(topics[k] for k in sorted(topics)).encode(), np.uint8).copy())


def make_recipe(name: str) -> ng.Recipe:
    if name in VARIANTS:
        base, fields = VARIANTS[name]
        return ng.recipe(base, **fields)
    if name != "unscaled":
        return ng.recipe(name)
    scaled = ng.recipe("fp8_current")
    bare = {r: dataclasses.replace(getattr(scaled, r), scale=ng.NONE) for r in ("input", "weight", "grad_output")}
    return scaled.replace(name=name, **bare)


# what differs from the reference model
MODELS = {
    "dense": {},
    "moe": {"experts": 4, "experts_per_token": 2, "ffn_width": 192, "swiglu_limit": 7.0},
}


def make_model(kind: str) -> GPT:
    reference = GPTConfig(
        vocab_size=256, layers=3, width=96, heads=4, context=CONTEXT, ffn_width=384, positions="learned",
        activation="swiglu", tied_embeddings=False, init_std=0.02,
    )  # fmt: skip
    return GPT(reference.replace(**MODELS[kind]))


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def sample(data: torch.Tensor, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.randint(len(data) - CONTEXT - 1, (batch,), generator=generator)
    windows = data[start[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def train(name: str, seed: int, steps: int, kind: str) -> dict[str, float]:
    torch.set_num_threads(1)  # the model is too small for two, and one repeats bitwise
    text = load_text()
    torch.manual_seed(seed)
    model = make_model(kind)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    recipe = make_recipe(name)
    model, optimizer = ng.prepare(model, optimizer, recipe)
    scaler = ng.LossScaler(recipe)
    training, validation = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    batches = torch.Generator().manual_seed(1000 + seed)
    start = time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        _, loss = model(*sample(training, BATCH, batches))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        ng.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train_s = time.perf_counter() - start
    model.eval()
    fixed = torch.Generator().manual_seed(7)
    with torch.no_grad():
        losses = [model(*sample(validation, 32, fixed))[1].item() for _ in range(20)]
    return {"validation_loss": statistics.fmean(losses), "train_s": train_s}


def verdict(name: str, gap: float) -> bool:
    if name in VARIANTS:
        return True
    return gap > UNSCALED_LOSS_GAP if name == "unscaled" else abs(gap) <= ALLOWED_LOSS_GAP


def figures(means: dict[str, float], kind: str) -> dict[str, dict[str, float]]:
    """Distance of every mean from fp32's, as the README's table reads it."""
    found = {}
    of_model = "" if kind == "dense" else f" ({kind})"
    for name, mean in means.items():
        gap = mean - means.get("fp32", math.nan)
        if name == "unscaled":
            found[f"validation loss of FP8 without scales, above fp32's{of_model}"] = {
                "measured": gap,
                "at_least": UNSCALED_LOSS_GAP,
            }
        elif name != "fp32" and name not in VARIANTS:
            label = f"validation loss of {name}, distance from fp32's{of_model}"
            found[label] = {"measured": abs(gap), "at_most": ALLOWED_LOSS_GAP}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dense", choices=MODELS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--group", choices=GROUPS, help="recipes with a scale for each tensor, or for each tile")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, help="in place of a group's")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    groups = [arguments.group] if arguments.group or arguments.recipes else list(GROUPS)
    return max(compare(arguments, group) for group in groups)


def compare(arguments: argparse.Namespace, group: str | None) -> int:
    """Train by every recipe of the group, or by those asked for; print the losses; 0 where all figures are met."""
    names: Sequence[str] = arguments.recipes or GROUPS[group or "tensor"]
    jobs = [(name, seed, arguments.steps, arguments.model) for seed in range(arguments.seeds) for name in names]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        results = pool.starmap(train, jobs, chunksize=1)
    repeats: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for (name, *_), result in zip(jobs, results, strict=True):
        repeats[name].append(result)
    means = {n: statistics.fmean(r["validation_loss"] for r in rs) for n, rs in repeats.items()}
    passed = True
    for name, mean in means.items():
        gap = mean - means.get("fp32", math.nan)
        ok = name == "fp32" or verdict(name, gap)
        passed &= ok
        spread = max(r["validation_loss"] for r in repeats[name]) - min(r["validation_loss"] for r in repeats[name])
        outcome = "no goal" if name in VARIANTS or name == "fp32" else "ok" if ok else "MISSED"
        print(f"{name:24} loss {mean:.4f}  against fp32 {gap:+.4f}  seeds' range {spread:.4f}  {outcome}")
    if arguments.json:
        text_hash = hashlib.sha256(load_text().numpy().tobytes()).hexdigest()
        result = {"text_sha256": text_hash, "mean_validation_loss": means, "repeats": repeats}
        topic = ["parity", *([arguments.model] if arguments.model != "dense" else [])]
        topic += ["tiles"] if group == "tiles" else []
        print(common.write_result("-".join(topic), {"figures": figures(means, arguments.model), **result}))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
