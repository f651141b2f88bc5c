"""Training the default GPT of `narrowgauge train` by narrow8, against torch's own bfloat16 training.

    python benchmarks/training.py [--full] [--repeats 30] [--json]

The baseline is plain PyTorch: float32 parameters, torch.autocast to bfloat16, torch's fused AdamW and clipping. Steps
of both are interleaved, on the same batches; tokens/s are of the median step. --full takes 2,000 steps of each and
compares the validation losses, too.

Then a few steps of narrow8 and narrow8_sr without clipping, with gradient release and with offload: the weights must be
bitwise those without; bytes a parameter are counted from the storages, between backward and step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import common
import torch
from tables import goal, is_met
from torch import Tensor, nn
from torch.optim import Optimizer

import narrowgauge as ng
from narrowgauge.data.loader import BatchStream
from narrowgauge.data.prepare import Dataset, prepare_data
from narrowgauge.train.assemble import build_model, build_optimizer
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.evaluate import evaluate
from narrowgauge.train.schedule import learning_rate

BASELINE, RECIPE = "torch bf16 autocast, fused AdamW", "narrow8"
FULL_STEPS, WARMUP_STEPS = 2000, 3
LEAST_SPEED, MOST_LOSS = 0.85, 1.005
MEMORY_RECIPES = ("narrow8", "narrow8_sr")
MEMORY_STEPS = 3


class Contender(NamedTuple):
    """What trains, and how its gradients are clipped."""

    model: nn.Module
    optimizer: Optimizer
    clip: Callable[..., Tensor]

    def step(self, batch: tuple[Tensor, Tensor], lr: float, max_norm: float) -> float:
        """One step; the seconds that it took."""
        begin_s = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model(*batch)[1].backward()
        self.clip(self.model.parameters(), max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if batch[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s


class Autocast(nn.Module):
    """A model under torch.autocast to bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        with torch.autocast(ids.device.type, torch.bfloat16):
            return self.model(ids, targets)


def contenders(config: TrainConfig, dataset: Dataset) -> dict[str, Contender]:
    """Both, with the same weights."""
    device = config.torch_device()
    plain = build_model(config, dataset.tokenizer.vocab_size).to(device)
    found = {
        BASELINE: Contender(Autocast(plain), build_optimizer(plain, config.optimizer), torch.nn.utils.clip_grad_norm_)
    }
    model = build_model(config, dataset.tokenizer.vocab_size).to(device)
    model, optimizer = ng.prepare(model, build_optimizer(model, config.optimizer), RECIPE)
    return found | {RECIPE: Contender(model, optimizer, ng.clip_grad_norm_)}


def train(config: TrainConfig, dataset: Dataset, *, validate: bool) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every step after the first few, and the validation losses, nats a token, where they are asked for."""
    device = config.torch_device()
    racing = contenders(config, dataset)
    context = config.model.build(dataset.tokenizer.vocab_size).context
    stream = BatchStream(dataset.train, config.batch_size, context, config.seed)
    seconds: dict[str, list[float]] = {name: [] for name in racing}
    for step in range(config.steps):
        ids, targets = stream.next()
        lr = learning_rate(step, config.steps, config.optimizer.lr, config.schedule)
        for name, contender in racing.items():
            seconds[name].append(contender.step((ids.to(device), targets.to(device)), lr, config.clip))
        if step % 100 == 99 or step == config.steps - 1:
            told = ", ".join(f"{name} {median(times[-100:]):.3f} s" for name, times in seconds.items())
            print(f"step {step + 1} of {config.steps}: {told}", file=sys.stderr, flush=True)
    losses = {
        name: evaluate(
            contender.model, dataset, batch_size=config.batch_size, sequence_length=context, batches=None,
            device=device,
        ).loss
        for name, contender in racing.items()
        if validate
    }  # fmt: skip
    return {name: times[WARMUP_STEPS:] for name, times in seconds.items()}, losses


class Kept(NamedTuple):
    """What a few steps left: bits of all parameters, and bytes a parameter by role before the last step."""

    bits: dict[str, Tensor]
    bytes_per_parameter: dict[str, float]


def few_steps(config: TrainConfig, recipe: str, way: str, batches: list[tuple[Tensor, Tensor]]) -> Kept:
    """A few steps of the default GPT without clipping. way: "plain", "gradient release" or "offload"."""
    torch.manual_seed(0)
    model = build_model(config, config.data.vocab_size)
    optimizer = build_optimizer(model, config.optimizer)
    model, ours = ng.prepare(model, optimizer, recipe, offload="cpu" if way == "offload" else None)
    if way == "gradient release":
        ng.optim.release_gradients(ours)
    size: dict[str, float] = {}
    for batch in batches:
        model(*batch)[1].backward()
        count = ng.ledger(model, ours)
        size = {role: share for role, _, share in count.rows()}
        ours.step()
        ours.zero_grad()
    bits = {name: _raw(ours.full_values(p)) for name, p in model.named_parameters()}
    return Kept(bits | {f"{name}, stored": _raw(p.detach()) for name, p in model.named_parameters()}, size)


def _raw(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def memory_figures(config: TrainConfig) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """(figures: bytes that differ from plain steps; bytes a parameter by role, of every recipe and way)."""
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(config.data.vocab_size, (MEMORY_STEPS, 2, 65), generator=generator)
    batches = [(window[:, :-1], window[:, 1:]) for window in windows]
    figures, sizes = {}, {}
    for recipe in MEMORY_RECIPES:
        plain = few_steps(config, recipe, "plain", batches)
        sizes[recipe] = plain.bytes_per_parameter
        for way in ("gradient release", "offload"):
            other = few_steps(config, recipe, way, batches)
            differing = sum(int((other.bits[name] != bits).sum()) for name, bits in plain.bits.items())
            figures[f"bytes of parameters that {way} changes, {recipe}"] = {"measured": differing, "at_most": 0}
            sizes[f"{recipe}, {way}"] = other.bytes_per_parameter
    return figures, sizes


def main() -> int:
    """Print both tables, write the result file with --json; exit 1 where a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help=f"{FULL_STEPS} steps of each, and the validation losses")
    parser.add_argument("--repeats", type=int, default=30, help="steps measured without --full")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    config = TrainConfig(steps=FULL_STEPS if arguments.full else arguments.repeats + WARMUP_STEPS)
    dataset = prepare_data(config.data.build(), config.cache_dir)
    seconds, losses = train(config, dataset, validate=arguments.full)
    steps_s = common.medians(seconds)
    tokens = config.batch_size * config.model.build(config.data.vocab_size).context
    rows = [
        [name, f"{1e3 * s:.1f}", f"{tokens / s:.0f}", f"{losses[name]:.4f}" if losses else "-"]
        for name, s in steps_s.items()
    ]
    print(common.table(["training", "ms a step", "tokens/s", "validation loss"], rows))
    figures: dict[str, dict[str, float]] = {
        f"tokens/s of the default GPT: {RECIPE} / {BASELINE}": {
            "measured": steps_s[BASELINE] / steps_s[RECIPE], "at_least": LEAST_SPEED,
        }
    }  # fmt: skip
    if arguments.full:
        ratio = losses[RECIPE] / losses[BASELINE]
        label = f"validation loss of the default GPT after {FULL_STEPS} steps: {RECIPE} / {BASELINE}"
        figures[label] = {"measured": ratio, "at_most": MOST_LOSS, "at_least": 2 - MOST_LOSS}
    of_memory, sizes = memory_figures(config)
    figures |= of_memory
    print(common.table(["state", "bytes a parameter"], [[name, _line(size)] for name, size in sizes.items()]))
    for label, figure in figures.items():
        print(f"{label}: {figure['measured']:.4f}, goal {goal(figure)}  {'ok' if is_met(figure) else 'MISSED'}")
    if arguments.json:
        raw = {name: [round(s, 5) for s in times] for name, times in seconds.items()}
        result = {"figures": figures, "validation_loss": losses, "bytes_per_parameter": sizes, "seconds": raw}
        print(common.write_result("training", result))
    return int(not all(is_met(figure) for figure in figures.values()))


def _line(size: dict[str, float]) -> str:
    return ", ".join(f"{role} {share:.3f}" for role, share in size.items())


if __name__ == "__main__":
    sys.exit(main())
