"""What the guard does about faults of precision, and that it leaves healthy runs alone.

    python benchmarks/guard.py [--steps N] [--seeds N] [--repeats N] [--faults NAME ...] [--workers N] [--json]

Each fault is trained by `narrowgauge.train` clean, with the fault and the guard off, and with the fault and the guard
acting, from --repeats seeds each, all else the same bits. A fault touches precision alone: in exact arithmetic the
faulty model is the clean one. It begins at step 101, the first after a sample of the guard's default period, so that
the guard sees it 24 steps late. Compared are the means over the seeds of the validation loss after the last step. The
rate, 4e-3, is one at which clean runs of a seed agree: at 1e-2 they spread by 0.1 nats, and no distance of 0.03 means
anything. The model: one block of width 64, on text of a Markov chain of order two, whose next symbol follows from the
last two together: that takes the feed-forward network.

activations x 1000: the layer gate_up reads 1000 x, and its output is divided by 1000. Its input is cast to E4M3 without
    a scale, as unit scaling does (arXiv:2303.11257), which 1000 x exceeds: two thirds of the values are cut off at 448.
    (Where the scale follows from the tensor the fault is none: every scale is a thousandth. The benchmark runs that,
    too: fp8_current, guard off.)
stale scale: fp8_delayed; in step 101 alone gate_up reads 2^30 x, and its output is divided by 2^30. That amax stays the
    largest of the history, 1024 steps long: the scale is that of a tensor which is no more, and all inputs of later
    steps become zero.
flushed v: narrow8; from step 101 on the second moments of the block's matrices are kept in UINT8 with one scale for the
    tensor, rounded to nearest: v of all but the largest gradients becomes zero (the zero-point problem of
    arXiv:2309.01507), and their next step is divided by the root of one gradient's share instead of the mean's.
NaN batches: fp8_current; the embedding gives NaN for 60 batches of the data from the 101st on, as a damaged part of a
    data set would. Every recipe skips such steps, whether there is a guard or not (one NaN batch alone is run as well,
    guard off): with the guard off the run ends in an error, after the 50th skip in a row.
SwiGLU aligned: fp8_current; in step 101 the rows of gate and up of one hidden channel become one large vector
    (arXiv:2409.12517): their product is its square, a million times the other channels. The column of `down` that reads
    the channel is held at zero, in the clean run as well, so that nothing but the cast of `down`'s input knows of it:
    its scale per tensor makes the other channels zero.

Healthy runs: by recipes of all kinds of scales, on the running Python's own text, guard acting, each with another seed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import common
import numpy as np
import torch
from tables import goal, is_met

import narrowgauge as ng
from narrowgauge.errors import DivergenceError
from narrowgauge.observe.journal import Journal
from narrowgauge.train.assemble import Parts, assemble
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.events import ignore
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.session import Session
from narrowgauge.train.signals import Interruption

START = 101
WITHIN = 0.03
SYMBOLS, DOCUMENTS, LENGTH = 10, 20, 30_000
HEALTHY = (
    "fp8_current", "fp8_delayed", "narrow8", "fp8_rowwise", "fp8_block", "mxfp8", "fp8_lm_o2", "fp8_delayed",
    "narrow8", "nvfp4",
)  # fmt: skip
GATE_UP, DOWN = "blocks.0.mlp.gate_up", "blocks.0.mlp.down"

Install = Callable[[Session], None]


def write_chain(folder: Path) -> None:
    """Text of a Markov chain: two symbols are followed by any third one, with probabilities of normal logits."""
    random = np.random.default_rng(0)
    chances = np.exp(1.75 * random.normal(size=(SYMBOLS, SYMBOLS, SYMBOLS)))
    cumulative = (chances / chances.sum(2, keepdims=True)).cumsum(2)
    folder.mkdir(parents=True)
    for document in range(DOCUMENTS):
        before, symbol, text = 0, 0, []
        for draw in random.random(LENGTH):
            following = min(int(np.searchsorted(cumulative[before, symbol], draw)), SYMBOLS - 1)
            before, symbol = symbol, following
            text.append(chr(ord("a") + symbol))
        (folder / f"{document:02}.txt").write_text("".join(text))


def nothing(session: Session) -> None:
    """No fault."""


def scale_input(session: Session, factor: float, steps: range) -> None:
    """GATE_UP reads `factor` times its input, and its output is divided by it, in those training steps and after."""
    layer = session.parts.model.get_submodule(GATE_UP)

    def is_on() -> bool:
        return session.step in steps

    layer.register_forward_pre_hook(lambda _, args: (args[0] * factor, *args[1:]) if is_on() else None)
    layer.register_forward_hook(lambda _, args, out: out / factor if is_on() else None)


def flush_second_moments(session: Session) -> None:
    """Second moments of the block's matrices in UINT8 with one scale, from START on."""
    optimizer: Any = session.parts.optimizer

    def change(*_: Any) -> None:
        if session.parts.model.training and session.step == START:
            handle.remove()
            optimizer.override(
                "blocks.*", exp_avg_sq=ng.CastSpec(ng.formats.UINT8), keep_nonzero=False, min_state_size=4096
            )

    handle = session.parts.model.register_forward_pre_hook(change)


def poison(session: Session, batches: int) -> None:
    """NaN from the embedding for so many batches of the data, from the one of step START on."""
    stream, model = session.parts.stream, session.parts.model
    bad = range(START, START + batches)

    def spoil(_: Any, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        return out * float("nan") if model.training and stream.position // stream.batch_size in bad else None

    model.get_submodule("embedding").register_forward_hook(spoil)


def align(session: Session, is_aligned: bool) -> None:
    """One hidden channel that nothing reads; aligned: its gate and up become one large vector in step START."""
    model = session.parts.model
    gate_up, down = model.get_submodule(GATE_UP).weight, model.get_submodule(DOWN).weight
    large = 60.0 * torch.randn(gate_up.shape[1], generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def hold(*_: Any) -> None:
        down[:, 0] = 0.0
        if is_aligned and model.training and session.step == START:
            gate_up[0] = gate_up[gate_up.shape[0] // 2] = large

    model.register_forward_pre_hook(hold)
    down.register_hook(lambda grad: torch.cat([torch.zeros_like(grad[:, :1]), grad[:, 1:]], 1))


def unscaled() -> ng.Recipe:
    """fp8_current, whose GATE_UP casts its input without a scale."""
    return ng.recipe("fp8_current").for_layers(GATE_UP, input=ng.CastSpec(ng.formats.E4M3FN, scale=ng.NONE))


FOREVER = range(START, 1 << 40)
# fault -> recipe, what is done to the clean run, what to the faulty ones
FAULTS: dict[str, tuple[str | Callable[[], ng.Recipe], Install, Install]] = {
    "activations x 1000": (unscaled, nothing, partial(scale_input, factor=1000.0, steps=FOREVER)),
    "stale scale": ("fp8_delayed", nothing, partial(scale_input, factor=2.0**30, steps=range(START, START + 1))),
    "flushed v": ("narrow8", nothing, flush_second_moments),
    "NaN batches": ("fp8_current", nothing, partial(poison, batches=60)),
    "SwiGLU aligned": ("fp8_current", partial(align, is_aligned=False), partial(align, is_aligned=True)),
}
# what is no fault, and has to be none: as a run of its own beside the fault's clean one
HARMLESS: dict[str, tuple[str, str, Install]] = {
    "activations x 1000 under current scaling": (
        "SwiGLU aligned", "fp8_current", partial(scale_input, factor=1000.0, steps=FOREVER),
    ),
    "one NaN batch": ("NaN batches", "fp8_current", partial(poison, batches=1)),
}  # fmt: skip


def config_of(folder: Path, recipe: str, steps: int, mode: str, seed: int, chain: bool) -> TrainConfig:
    """The configuration of a run."""
    shape = {"layers": 1 if chain else 2, "width": 64, "heads": 2, "kv_heads": 2, "ffn_width": 192, "context": 32}
    data: dict[str, Any] = {"tokenizer": "bytes", "max_bytes": 2_000_000}
    return TrainConfig.from_dict(
        {
            "model": shape,
            "data": data | ({"corpus": str(folder / "chain" / "*.txt")} if chain else {}),
            "optimizer": {"lr": 4e-3 if chain else 2e-3},
            "guard": {"mode": mode},
            "recipe": recipe,
            "batch_size": 32 if chain else 16,
            "steps": steps,
            "eval_every": 0,
            "eval_batches": 40,
            "save_every": 50,
            "statistics_every": 0,
            "seed": seed,
            "threads": 1,
            "sample_tokens": 0,
            "cache_dir": str(folder / "cache"),
            "runs_dir": tempfile.mkdtemp(dir=folder),
            "name": "run",
        }
    )


def train(
    folder: Path, recipe: str | Callable[[], ng.Recipe], install: Install, steps: int, mode: str, seed: int, chain: bool
) -> dict[str, Any]:
    """One run: its last validation loss, NaN where it ended in an error, and the guard's rows."""
    begin_s = time.perf_counter()
    config = config_of(folder, recipe if isinstance(recipe, str) else "fp8_current", steps, mode, seed, chain)
    config.check()
    with opened(config) as run_folder:
        parts = assemble(config, lambda _: None) if isinstance(recipe, str) else with_recipe(config, recipe())
        session = Session(config, run_folder, ignore, parts)
        install(session)
        try:
            session.begin(None)
            with Interruption(session.on_signal) as interruption:
                result = session.train(interruption)
            loss = result.evaluation.loss if result.evaluation else float("nan")
            ended = ""
        except DivergenceError as error:
            loss, ended = float("nan"), str(error)
        finally:
            session.close()
        rows = list(Journal(run_folder.journal).of_kind("guard"))
    return {"loss": loss, "ended": ended, "guard": rows, "seconds": time.perf_counter() - begin_s}


@contextlib.contextmanager
def opened(config: TrainConfig) -> Iterator[RunFolder]:
    """A new run folder, unlocked at the end."""
    folder = RunFolder.create(config)
    try:
        yield folder
    finally:
        folder.unlock()


def with_recipe(config: TrainConfig, recipe: ng.Recipe) -> Parts:
    """The parts of a run by a recipe that has no name."""
    changed = replace(config, recipe_fields={"layers": recipe.layers})
    return assemble(changed, lambda _: None)


def run_name(fault: str, kind: str, seed: int) -> str:
    """What a run of a fault is called; kind: clean, off or act."""
    return f"{fault}: {kind}, seed {seed}"


def jobs_of(names: list[str], seeds: int, repeats: int) -> dict[str, tuple[Any, ...]]:
    """What is to be trained: name -> arguments of `train` but folder and steps."""
    jobs: dict[str, tuple[Any, ...]] = {}
    for name in names:
        recipe, clean, faulty = FAULTS[name]
        for seed in range(repeats):
            jobs[run_name(name, "clean", seed)] = (recipe, clean, "off", seed, True)
            for mode in ("off", "act"):
                jobs[run_name(name, mode, seed)] = (recipe, faulty, mode, seed, True)
    for name, (beside, recipe, install) in HARMLESS.items():
        if beside in names:
            jobs[name] = (recipe, install, "off", 0, True)
    for seed in range(seeds):
        recipe = HEALTHY[seed % len(HEALTHY)]
        jobs[f"healthy {recipe}, seed {seed}"] = (recipe, nothing, "act", seed, False)
    return jobs


def run_job(folder: Path, steps: int, job: tuple[Any, ...]) -> dict[str, Any]:
    """`train` of one of `jobs_of`, by its name."""
    recipe, install, mode, seed, chain = job
    return train(folder, recipe, install, steps, mode, seed, chain)


def named_job(folder: Path, steps: int, names: list[str], seeds: int, repeats: int, name: str) -> dict[str, Any]:
    """The same in another process, which knows functions by their names only."""
    return run_job(folder, steps, jobs_of(names, seeds, repeats)[name])


def measure(
    folder: Path, names: list[str], steps: int, seeds: int, repeats: int, workers: int
) -> dict[str, dict[str, Any]]:
    """All runs, by name."""
    write_chain(folder / "chain")
    jobs = jobs_of(names, seeds, repeats)
    one = partial(named_job, folder, steps, names, seeds, repeats)
    first = next(iter(jobs))
    results = {first: one(first)}  # which fills the cache of tokens
    rest = [name for name in jobs if name != first]
    if workers == 1:
        found = map(one, rest)
        results |= dict(zip(rest, found, strict=True))
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            results |= dict(zip(rest, pool.map(one, rest), strict=True))
    return results


def promotions(result: dict[str, Any]) -> int:
    """How often the guard went wider or back to a checkpoint."""
    return sum(row["action"] in ("promote", "rollback") for row in result["guard"])


def figures(
    results: dict[str, dict[str, Any]], names: list[str], seeds: int, repeats: int
) -> dict[str, dict[str, float]]:
    """Goals and what was measured."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        runs = {
            kind: [results[run_name(name, kind, seed)] for seed in range(repeats)] for kind in ("clean", "off", "act")
        }
        clean, off, act = (
            mean(float("inf") if run["ended"] else run["loss"] for run in each) for each in runs.values()
        )
        found[f"guard, {name}: |loss under act - clean|, nats"] = {"measured": abs(act - clean), "at_most": WITHIN}
        lost = abs(off - clean)
        found[f"guard, {name}: |loss under off - clean|, nats"] = {"measured": lost, "at_least": WITHIN}
    if seeds:
        healthy = [results[name] for name in results if name.startswith("healthy")]
        found[f"guard, {seeds} healthy runs: promotions and rollbacks"] = {
            "measured": float(sum(map(promotions, healthy))),
            "at_most": 0.0,
        }
    return found


def main() -> int:
    """Print runs and figures, write the result file with --json; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=10, help="healthy runs")
    parser.add_argument("--repeats", type=int, default=3, help="seeds of each fault")
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(
            Path(folder), arguments.faults, arguments.steps, arguments.seeds, arguments.repeats, arguments.workers
        )
    rows = [
        [name, f"{each['loss']:.4f}", str(promotions(each)), f"{each['seconds']:.0f} s", each["ended"][:60]]
        for name, each in results.items()
    ]
    print(common.table(["run", "validation loss", "promotions", "took", "ended by"], rows))
    for name, each in results.items():
        for row in each["guard"]:
            print(f"{name}: step {row['step']} {row['action']}: {row['message']}")
    found = figures(results, arguments.faults, arguments.seeds, arguments.repeats)
    for name, figure in found.items():
        print(f"{name}: {figure['measured']:.4f}, goal {goal(figure)}  {'ok' if is_met(figure) else 'MISSED'}")
    if arguments.json:
        print(common.write_result("guard", {"figures": found, "runs": results}))
    return int(not all(is_met(figure) for figure in found.values()))


if __name__ == "__main__":
    sys.exit(main())
