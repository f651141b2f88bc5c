"""Validation loss of the reference model on several processes against one: the mean of three seeds, all in one run.

    python benchmarks/parallel.py [--layouts "data 2" "tensor 2" ...] [--recipes fp32 ...] [--steps 200] [--json]

Every layout reads the same sequences as one process: replicas and shards take turns, pipelines cut a batch into
micro-batches. gloo on loopback, one thread a process; the model and its training are in `reference.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import reference
import torch
import torch.distributed as dist
from reference import ALLOWED_LOSS_GAP, BATCH, Setting

import narrowgauge as ng
from narrowgauge.train.ranks import Ranks
from narrowgauge.train.sections import ParallelConfig
from narrowgauge.train.spread import spread
from narrowgauge.train.step import optimizer_step

ONE = "one process"
LAYOUTS = {
    ONE: {},
    "data 2": {"data": 2},
    "shard 2": {"shard": 2},
    "data 2 x shard 2": {"data": 2, "shard": 2},
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "data 2 x tensor 2": {"data": 2, "tensor": 2},
    "tensor 2 x pipeline 2": {"tensor": 2, "pipeline": 2},
}
RECIPES = ("fp32", "fp8_current", "fp8_lm_o2", "narrow8")
EXACT = 1e-3  # of float32, where only the order of sums differs
MICROBATCHES = 4  # of a pipeline's step


def train(rank: int, layout: str, store: str, jobs: list[tuple[str, int]], steps: int, results: Any) -> None:
    """One process of a layout: all jobs, (recipe, seed) each, one after the other; the first puts its results down."""
    torch.set_num_threads(1)
    config = ParallelConfig(**LAYOUTS[layout])
    if config.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=config.ranks)
    ranks = Ranks.of(config, torch.device("cpu"))
    for name, seed in jobs:
        begin_s = time.perf_counter()
        losses = run(config, ranks, name, seed, steps)
        if rank == 0:
            results.put((name, seed, {**losses, "train_s": time.perf_counter() - begin_s}))
    if config.ranks > 1:
        dist.destroy_process_group()


def run(config: ParallelConfig, ranks: Ranks, name: str, seed: int, steps: int) -> dict[str, float]:
    """Train the reference model by a recipe from a seed: {"validation_loss", "first_loss", "first_norm"}."""
    setting = Setting(ng.recipe(name))
    torch.manual_seed(seed)
    model, pipeline = spread(reference.make_model(), config, ranks)
    (optimizer,) = reference.build_optimizers(model, setting)
    model, optimizer = ng.prepare(model, optimizer, setting.recipe)
    scaler = ng.LossScaler(setting.recipe)
    text = reference.load_text()
    training, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    batches = torch.Generator().manual_seed(1000 + seed)
    first = None
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = reference.learning_rate(step, steps)
        ids, targets = (t[ranks.batch_rank :: ranks.batch_ranks] for t in reference.sample(training, BATCH, batches))
        count = MICROBATCHES if pipeline else 1
        parts = list(zip(ids.chunk(count), targets.chunk(count), strict=True))
        result = optimizer_step(model, optimizer, scaler, parts, 1.0, ranks=ranks, pipeline=pipeline)
        first = first or result
    assert first is not None
    model.eval()
    loss_of = pipeline.loss if pipeline else lambda ids, targets: model(ids, targets)[1]
    fixed = torch.Generator().manual_seed(7)
    size = reference.VALIDATION_BATCH
    with torch.no_grad():
        losses = [float(loss_of(*reference.sample(held_out, size, fixed))) for _ in range(reference.VALIDATION_BATCHES)]
    return {"validation_loss": statistics.fmean(losses), "first_loss": first.loss, "first_norm": first.grad_norm}


def train_all(layout: str, jobs: list[tuple[str, int]], steps: int) -> dict[str, list[dict[str, float]]]:
    """All jobs on the processes of a layout: recipe -> the results of its seeds."""
    context = multiprocessing.get_context("spawn")
    results: dict[str, list[dict[str, float]]] = {name: [] for name, _ in jobs}
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = ParallelConfig(**LAYOUTS[layout]).ranks
        arguments = (layout, store, jobs, steps, queue)
        processes = [context.Process(target=train, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for _ in jobs:
            while queue.empty() and all(process.exitcode in (None, 0) for process in processes):
                time.sleep(0.1)
            if any(process.exitcode not in (None, 0) for process in processes):
                raise SystemExit(f"{layout}: a process failed")
            name, seed, found = queue.get()
            results[name].append(found)
            told = f"{layout}, {name}, seed {seed}: loss {found['validation_loss']:.4f} in {found['train_s']:.0f} s"
            print(told, file=sys.stderr, flush=True)
        for process in processes:
            process.join()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS)[1:], default=list(LAYOUTS)[1:])
    parser.add_argument("--recipes", nargs="+", choices=ng.recipe_names(), default=RECIPES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    jobs = [(name, seed) for seed in range(arguments.seeds) for name in arguments.recipes]
    repeats = {layout: train_all(layout, jobs, arguments.steps) for layout in (ONE, *arguments.layouts)}
    means = {layout: reference.mean_losses(found) for layout, found in repeats.items()}
    figures, passed = {}, True
    for layout in arguments.layouts:
        for name in arguments.recipes:
            gap, allowed = means[layout][name] - means[ONE][name], EXACT if name == "fp32" else ALLOWED_LOSS_GAP
            ok = abs(gap) <= allowed
            passed &= ok
            figures[f"validation loss of {name} on {layout}, distance from one process"] = {
                "measured": abs(gap),
                "at_most": allowed,
            }
            spread_of_seeds = reference.spread(repeats[layout][name])
            print(
                f"{layout:24} {name:12} loss {means[layout][name]:.4f}  against one process {gap:+.4f}  "
                f"seeds' range {spread_of_seeds:.4f}  {'ok' if ok else 'MISSED'}"
            )
    if arguments.json:
        result = {"text_sha256": reference.text_sha256(), "mean_validation_loss": means, "repeats": repeats}
        print(common.write_result("parallel", {"figures": figures, **result}))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
