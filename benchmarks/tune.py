"""`narrowgauge tune` on the default GPT: how long it takes, and whether what it chooses loses less at equal bytes.

    python benchmarks/tune.py [--seeds 3] [--base-steps 400] [--steps 20] [--small] [--json]

Three parts. First the command as it comes, from nothing to a recipe: seconds of the whole.

Then a model that has learnt: the default GPT after --base-steps steps with all layers in bf16. It is tuned within the
bytes of the hand rule, the first and last layers wide and all others in NVFP4, once for layers and once for blocks.
Two comparisons of hand rule and tuned recipe on held-out text that tuning has not read: of the weights as they are, run
by either recipe; and after --steps more steps of training by either, at a low rate, from the same weights and on the
same batches, for each seed. The difference is the mean over the seeds, beside its standard error.

Last a planted layer: every 16th input channel of one layer in the middle is made 2^17 times as large, in the norm
before it, and its weights as much smaller. The function is bitwise the same in bf16. Tune must keep that layer in bf16,
which the hand rule, that knows no layer but by its place, casts.

--small: a tiny model and few steps, which show that the script works.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from statistics import fmean, stdev
from typing import Any

import common
from tables import goal, is_met

from narrowgauge.data.prepare import Dataset, prepare_data
from narrowgauge.train.config import TrainConfig
from narrowgauge.tune.choices import wide
from narrowgauge.tune.measure import slope_of
from narrowgauge.tune.options import HAND_RULES, Options, Progress
from narrowgauge.tune.result import HAND, TUNED, Tuned
from narrowgauge.tune.tuner import Start, tune
from narrowgauge.tune.verify import for_short_runs, short_run

MOST_SECONDS = 600.0
LOW_RATE = 3e-4  # of the training that goes on: a seventh of the default
HELD_OUT_BATCHES = 40
PLANTED, PLANTED_NORM = "blocks.{}.attention.qkv", "blocks.{}.attention_norm"
FACTOR, EVERY = 2.0**17, 16
SMALL = {
    "model": {"layers": 3, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 64, "context": 32},
    "data": {"tokenizer": "bytes", "max_bytes": 200_000},
    "batch_size": 2,
}


def say(told: Progress) -> None:
    """Each stage once, on standard error."""
    if told.done == 0:
        print(f"{told.text} ...", file=sys.stderr, flush=True)


def base_model(config: TrainConfig, dataset: Dataset, steps: int) -> Start:
    """The model that has learnt, with all layers wide."""
    print(f"training {steps} steps, all layers wide ...", file=sys.stderr, flush=True)
    recipe = wide(config.build_recipe().resolve(config.torch_device()))
    run, weights = short_run(for_short_runs(config, steps, config.seed), dataset, recipe)
    return Start(weights, slope_of(run.losses))


def planted(start: Start, block: int) -> Start:
    """The same function with outliers in the inputs of one layer."""
    weights = {name: value.clone() for name, value in start.weights.items()}
    weights[f"{PLANTED_NORM.format(block)}.weight"][::EVERY] *= FACTOR
    weights[f"{PLANTED.format(block)}.weight"][:, ::EVERY] /= FACTOR
    return Start(weights, start.slope)


def told(found: Tuned) -> dict[str, Any]:
    """A tuning in the result file: less the recipe, which follows from the choices, the front, and single batches."""
    result = {key: value for key, value in found.to_dict().items() if key not in ("recipe", "front")}
    lists = ("loss_changes", "errors")
    effects = [{key: value for key, value in row.items() if key not in lists} for row in result["sensitivity"]]
    return result | {"sensitivity": effects}


def saved_by_tuning(found: Tuned) -> list[float]:
    """Held-out loss of the hand rule less that of the tuned recipe, of each seed, nats a token."""
    pairs = zip(found.contenders[HAND].runs, found.contenders[TUNED].runs, strict=True)
    return [hand.held_out - tuned.held_out for hand, tuned in pairs]


def compare(found: Tuned, label: str) -> tuple[dict[str, dict[str, float]], list[list[str]]]:
    """(figures, rows of the table) of one tuning."""
    reference = next(iter(found.contenders.values()))
    rows = []
    for each in found.contenders.values():
        above, error = each.above(reference)
        told = f"{1e3 * above:+.2f}" + ("" if math.isnan(error) else f" +- {1e3 * error:.2f}")
        expected = found.expected(each.assignment)
        foretold = f"{1e3 * expected.value:.2f} +- {1e3 * expected.error:.2f}"
        rows.append([label, each.name, f"{each.bytes_per_token:,.0f}", f"{1e3 * each.cost:.2f}", foretold, told])
    saved = saved_by_tuning(found)
    figures = {
        f"held-out loss, hand rule less tuned at equal bytes: {label}": {"measured": fmean(saved), "at_least": 0.0}
    }
    if len(saved) > 1:
        error = stdev(saved) / math.sqrt(len(saved))
        key = f"the same in standard errors over {len(saved)} seeds: {label}"
        figures[key] = {"measured": fmean(saved) / max(error, 1e-12), "at_least": 2.0}
    return figures, rows


def compare_planted(found: Tuned, layer: str) -> tuple[dict[str, dict[str, float]], list[list[str]]]:
    """(figures, rows of the table) of the model with the planted layer."""
    reference = next(iter(found.contenders.values()))
    hand, tuned = (found.contenders[name].above(reference)[0] for name in (HAND, TUNED))
    kept = float(found.tuned.assignment[layer] == found.wide)
    figures = {
        "planted layer kept in bf16 by tune": {"measured": kept, "at_least": 1.0},
        "planted layer: held-out loss of the hand rule less tuned": {"measured": hand - tuned, "at_least": 0.0},
    }
    return figures, compare(found, "planted layer, weights as they are")[1]


def main() -> int:
    """Print tables and figures, write the result file with --json; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="of the training that goes on")
    parser.add_argument("--base-steps", type=int, default=400, help="of the model that has learnt")
    parser.add_argument("--steps", type=int, default=20, help="of the training that goes on")
    parser.add_argument("--small", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    config = TrainConfig.from_dict(SMALL if arguments.small else {})
    options = Options(steps=2, batches=2, probe_batch_size=1) if arguments.small else Options()
    base_steps, steps = (4, 2) if arguments.small else (arguments.base_steps, arguments.steps)
    dataset = prepare_data(config.data.build(), config.cache_dir)

    begin_s = time.perf_counter()
    whole = tune(config, options, say)
    seconds = time.perf_counter() - begin_s
    figures: dict[str, dict[str, float]] = {
        "tune of the default GPT, seconds": {"measured": seconds, "at_most": MOST_SECONDS}
    }
    rows = compare(whole, f"from nothing, {options.steps} steps")[1]

    start = base_model(config, dataset, base_steps)
    low = dataclasses.replace(
        config, eval_batches=HELD_OUT_BATCHES, optimizer=dataclasses.replace(config.optimizer, lr=LOW_RATE)
    )
    results: dict[str, Any] = {"from nothing": told(whole)}
    for rule in HAND_RULES:
        for label, changes in (
            (f"{rule}, weights as they are", {"steps": 0, "seeds": 1}),
            (f"{rule}, {steps} steps more", {"steps": steps, "seeds": arguments.seeds}),
        ):
            found = tune(low, dataclasses.replace(options, hand_rule=rule, **changes), say, start)
            some_figures, some_rows = compare(found, label)
            figures, rows, results = figures | some_figures, rows + some_rows, results | {label: told(found)}
    block = (config.model.build(dataset.tokenizer.vocab_size).layers - 1) // 2
    found = tune(low, dataclasses.replace(options, steps=0), say, planted(start, block))
    some_figures, some_rows = compare_planted(found, PLANTED.format(block))
    figures, rows, results = figures | some_figures, rows + some_rows, results | {"planted": told(found)}

    header = ["", "layers", "bytes a token", "cost", "expected", "held-out loss above all wide, 1/1000 nat"]
    print(common.table(header, rows))
    for name, figure in figures.items():
        print(f"{name}: {figure['measured']:.4f}, goal {goal(figure)}  {'ok' if is_met(figure) else 'MISSED'}")
    if arguments.json:
        print(common.write_result("tune", {"figures": figures, "tunings": results}))
    return int(not all(is_met(figure) for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
