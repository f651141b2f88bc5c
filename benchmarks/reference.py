"""The reference model, its text and its training, which `parity.py` and `ablations.py` share.

A byte-level GPT on the text of `pydoc_data.topics` (first 90 % for training), width 96, 3 blocks, context 64, AdamW
with warm-up and cosine. The text differs between Python versions, so losses compare only within one run; its hash is in
every result.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import Any

import common  # noqa: F401  # before torch: it says how threads wait
import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import narrowgauge as ng
from narrowgauge.errors import DivergenceError
from narrowgauge.models.gpt import GPT, GPTConfig

BATCH, CONTEXT, WARMUP_STEPS, PEAK_LR = 16, 64, 50, 2e-3
VALIDATION_BATCHES, VALIDATION_BATCH = 20, 32
ALLOWED_LOSS_GAP = 0.03  # of means of three seeds; single runs scatter by a standard deviation of 0.016

# what differs from the reference model
MODELS = {
    "dense": {},
    "moe": {"experts": 4, "experts_per_token": 2, "ffn_width": 192, "swiglu_limit": 7.0},
}
# Lion's rate is AdamW's divided by this, its decay AdamW's times it: 3 to 10 (Chen et al. 2023, arXiv:2302.06675,
# section 5); 3 has the lowest loss of 2, 3, 5 and 10 here
LION_FACTOR = 3


@dataclass(frozen=True)
class Setting:
    """How the reference model is trained.

    optimizer: "AdamW" (torch's, which the recipe may replace), or an optimizer of narrowgauge.optim that keeps its
    state in `formats`, with the recipe for the model alone: "own AdamW", "Lion" or "Muon", which is for the blocks'
    matrices, beside torch's AdamW for the rest. A `prepare`d optimizer keeps what can be trained; the others, any.
    """

    recipe: ng.Recipe
    optimizer: str = "AdamW"
    formats: Mapping[str, Any] = field(default_factory=dict)
    peak_lr: float = PEAK_LR
    model: str = "dense"


@dataclass(frozen=True)
class Job:
    """One training: of a setting, by its name, with one seed."""

    name: str
    setting: Setting
    seed: int
    steps: int


def load_text() -> torch.Tensor:
    """The bytes of the text: uint8 [bytes]."""
    return torch.from_numpy(np.frombuffer("\n".join(topics[k] for k in sorted(topics)).encode(), np.uint8).copy())


def text_sha256() -> str:
    """The hash of the text, by which results are told apart that do not compare."""
    return hashlib.sha256(load_text().numpy().tobytes()).hexdigest()


def unscaled() -> ng.Recipe:
    """fp8_current without its scales: far worse, or a comparison of scaled recipes proves nothing."""
    scaled = ng.recipe("fp8_current")
    bare = {r: dataclasses.replace(getattr(scaled, r), scale=ng.NONE) for r in ("input", "weight", "grad_output")}
    return scaled.replace(name="unscaled", **bare)


def make_model(kind: str = "dense") -> GPT:
    """The reference model, with weights from torch's random state."""
    reference = GPTConfig(
        vocab_size=256, layers=3, width=96, heads=4, context=CONTEXT, ffn_width=384, positions="learned",
        activation="swiglu", tied_embeddings=False, init_std=0.02,
    )  # fmt: skip
    return GPT(reference.replace(**MODELS[kind]))


def learning_rate(step: int, steps: int, peak: float = PEAK_LR) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def sample(data: torch.Tensor, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text: ids and targets, int64 [batch, CONTEXT] each."""
    start = torch.randint(len(data) - CONTEXT - 1, (batch,), generator=generator)
    windows = data[start[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def build_optimizers(model: nn.Module, setting: Setting) -> list[Optimizer]:
    """The optimizers of all parameters of a model, not prepared: matrices decay, vectors do not."""
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.ndim >= 2]
    vectors = [p for p in named.values() if p.ndim < 2]
    adam: dict[str, Any] = {"lr": setting.peak_lr, "betas": (0.9, 0.95), "eps": 1e-8}
    plain = {"params": vectors, "weight_decay": 0.0}
    if setting.optimizer == "Lion":
        groups = [{"params": matrices, "weight_decay": 0.1 * LION_FACTOR}, plain]
        return [ng.optim.Lion(groups, lr=setting.peak_lr / LION_FACTOR, **setting.formats)]
    if setting.optimizer == "Muon":
        hidden = [p for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")]
        others = [p for p in matrices if not any(p is other for other in hidden)]
        muon = ng.optim.Muon(
            hidden, lr=setting.peak_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **setting.formats
        )
        return [muon, torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, plain], **adam)]
    groups = [{"params": matrices, "weight_decay": 0.1}, plain]
    if setting.optimizer == "own AdamW":
        return [ng.optim.AdamW(groups, **adam, **setting.formats)]
    return [torch.optim.AdamW(groups, **adam)]


def build(setting: Setting, seed: int) -> tuple[GPT, list[Optimizer]]:
    """The model, with the weights of the seed, and its optimizers, ready to train."""
    torch.manual_seed(seed)
    model = make_model(setting.model)
    optimizers = build_optimizers(model, setting)
    if setting.optimizer == "AdamW":
        model, optimizers[0] = ng.prepare(model, optimizers[0], setting.recipe)
    else:
        ng.prepare(model, None, setting.recipe)
    return model, optimizers


def train(job: Job) -> dict[str, float]:
    """Train and validate: {"validation_loss": nats a byte, "train_s": seconds, "bytes_per_parameter": all of them}.

    A run that is stopped for its gradients is validated as it is then. Sets the number of threads to one.
    """
    torch.set_num_threads(1)  # the model is too small for two, and one repeats bitwise
    model, optimizers = build(job.setting, job.seed)
    text = load_text()
    start = time.perf_counter()
    try:
        size = _take_steps(job, model, optimizers, text[: len(text) * 9 // 10])
    except DivergenceError:
        size = 0.0
    train_s = time.perf_counter() - start
    loss = validation_loss(model, text[len(text) * 9 // 10 :])
    return {"validation_loss": loss, "train_s": train_s, "bytes_per_parameter": size}


def _take_steps(job: Job, model: nn.Module, optimizers: list[Optimizer], training: torch.Tensor) -> float:
    """All steps of a training; returns the bytes a parameter of the last, from the storages."""
    batches = torch.Generator().manual_seed(1000 + job.seed)
    scaler = ng.LossScaler(job.setting.recipe)
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    size = 0.0
    for step in range(job.steps):
        for group, peak in peaks:
            group["lr"] = learning_rate(step, job.steps, peak)
        _, loss = model(*sample(training, BATCH, batches))
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        ng.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if step == job.steps - 1:
            size = bytes_per_parameter(model, optimizers)
        model.zero_grad()
    return size


def bytes_per_parameter(model: nn.Module, optimizers: list[Optimizer]) -> float:
    """Bytes of parameters, their gradients, and the states of all optimizers, for each parameter."""
    bare = ng.ledger(model)
    states = sum(ng.ledger(model, optimizer).total - bare.total for optimizer in optimizers)
    return (bare.total + states) / bare.parameters


@torch.no_grad()
def validation_loss(model: nn.Module, validation: torch.Tensor) -> float:
    """The mean loss of fixed batches, nats a byte; NaN where the model gives such."""
    model.eval()
    fixed = torch.Generator().manual_seed(7)
    batches = [sample(validation, VALIDATION_BATCH, fixed) for _ in range(VALIDATION_BATCHES)]
    return statistics.fmean(model(*batch)[1].item() for batch in batches)


def train_all(jobs: list[Job], workers: int) -> dict[str, list[dict[str, float]]]:
    """Train in `workers` processes of one thread each: setting's name -> the results of its seeds, as they are listed.

    Each result is told on standard error as it arrives.
    """
    repeats: dict[str, list[dict[str, float]]] = {job.name: [] for job in jobs}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for done, (job, result) in enumerate(zip(jobs, pool.imap(train, jobs), strict=True), start=1):
            repeats[job.name].append(result)
            told = f"{job.name}, seed {job.seed}: loss {result['validation_loss']:.4f} in {result['train_s']:.0f} s"
            print(f"{done}/{len(jobs)}  {told}", file=sys.stderr, flush=True)
    return repeats


def mean_losses(repeats: Mapping[str, list[dict[str, float]]]) -> dict[str, float]:
    """The mean validation loss of every setting."""
    return {name: statistics.fmean(r["validation_loss"] for r in results) for name, results in repeats.items()}


def spread(results: list[dict[str, float]]) -> float:
    """How far apart the losses of one setting's seeds are."""
    losses = [result["validation_loss"] for result in results]
    return max(losses) - min(losses)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that all scripts have which train this model."""
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
