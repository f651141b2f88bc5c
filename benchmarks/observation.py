"""What looking at precision costs a training run, and that it changes no bit of it.

    python benchmarks/observation.py [--rounds N] [--recipes NAME ...] [--json]

Cost: steps of the default GPT at its default batch, of `narrowgauge train`'s own loop, in rounds of four kinds, one
after the other: a plain step, one with an observation that is off, a sampled one, a sampled one that counts exponents,
too. The first recipe's. What sampling adds to a plain step's median, divided by how often the default configuration
samples, over that median. Off: what an observation that is switched off adds to a step, timed by itself a great many
times: a step's own time varies by far more.

Bits: runs of so many steps from one seed, by each recipe, never sampled and sampled at every second step; whether all
weights, all optimizer state and all losses are the same bits.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from contextlib import nullcontext
from typing import Any

import common
import torch
from tables import goal, is_met
from torch import Tensor

from narrowgauge.observe.observation import Observation
from narrowgauge.tensors.packed import PackedTensor
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.train.assemble import Parts, assemble
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.step import optimizer_step

RECIPES = ("narrow8", "fp8_delayed", "fp8_lm_o2", "bf16")
AT_MOST, OFF_AT_MOST, ROUNDS, BIT_STEPS = 0.03, 5e-5, 20, 8  # 0.00 % to two digits


def parts_of(recipe: str) -> tuple[TrainConfig, Parts]:
    """The default run by a recipe, before its first step."""
    config = TrainConfig(recipe=recipe)
    return config, assemble(config, lambda what: None)


def step(config: TrainConfig, parts: Parts) -> float:
    """One step as a run takes it; its loss."""
    batches = [parts.stream.next() for _ in range(config.accumulation)]
    return optimizer_step(parts.model, parts.optimizer, parts.scaler, batches, config.clip).loss


def seconds(recipe: str, rounds: int) -> dict[str, list[float]]:
    """Of every kind of step, in rounds."""
    config, parts = parts_of(recipe)
    off = Observation(parts.model, parts.optimizer, 0)
    sampled = Observation(parts.model, parts.optimizer, 1, 0)
    counted = Observation(parts.model, parts.optimizer, 1, 1)

    def under(observation: Observation | None) -> None:
        with nullcontext() if observation is None else observation.step(1):
            step(config, parts)
        if observation is not None:
            observation.read()

    kinds = {"plain": None, "off": off, "sampled": sampled, "with exponents": counted}
    runs = {name: lambda each=each: under(each) for name, each in kinds.items()}
    return common.interleaved(runs, rounds)


def seconds_off(steps: int = 100_000) -> float:
    """What an observation that is off adds to a step."""
    observation = Observation(torch.nn.Linear(1, 1), None, 0)

    def look() -> None:
        with observation.step(1):
            pass
        observation.read()

    return timeit.timeit(look, number=steps) / steps


def end_of(recipe: str, every: int, steps: int) -> list[Tensor]:
    """Losses, weights, state and the random state after so many steps, as bytes."""
    config, parts = parts_of(recipe)
    observation = Observation(parts.model, parts.optimizer, every)
    losses = []
    for number in range(1, steps + 1):
        with observation.step(number):
            losses.append(step(config, parts))
        observation.read()
    state = [value for each in parts.optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    found = [torch.tensor(losses, dtype=torch.float64), torch.get_rng_state()]
    for tensor in (*parts.model.state_dict().values(), *state):
        is_coded = isinstance(tensor, QuantizedTensor | PackedTensor)
        names = tensor.__tensor_flatten__()[0] if is_coded else []
        found += [getattr(tensor, name) for name in names] if is_coded else [tensor]
    return [each.detach().contiguous().view(-1).view(torch.uint8) for each in found]


def same_bits(recipe: str, steps: int) -> bool:
    """Whether a sampled run ends as one that is not."""
    torch.manual_seed(0)
    plain = end_of(recipe, 0, steps)
    torch.manual_seed(0)
    looked_at = end_of(recipe, 2, steps)
    return len(plain) == len(looked_at) and all(map(torch.equal, plain, looked_at))


def figures(times: dict[str, list[float]], off_s: float, bits: dict[str, bool]) -> dict[str, dict[str, float]]:
    """Goals and what was measured, as the README's table reads them."""
    config, median = TrainConfig(), common.medians(times)
    samples = 1 / config.statistics_every
    counting = 1 / config.histograms_every
    added = (samples - counting) * (median["sampled"] - median["plain"])
    added += counting * (median["with exponents"] - median["plain"])
    return {
        "observation at default sampling: share of step time": {
            "measured": added / median["plain"],
            "at_most": AT_MOST,
        },
        "observation that is off: share of step time": {"measured": off_s / median["plain"], "at_most": OFF_AT_MOST},
        f"observation: recipes of {len(bits)} with other bits than unobserved": {
            "measured": float(sum(not same for same in bits.values())),
            "at_most": 0.0,
        },
    }


def main() -> int:
    """Print the figures, write the result file with --json; exit 1 where a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of one step of each kind")
    parser.add_argument("--steps", type=int, default=BIT_STEPS, help="of the runs whose bits are compared")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results/")
    arguments = parser.parse_args()
    times = seconds(arguments.recipes[0], arguments.rounds)
    median, off_s = common.medians(times), seconds_off()
    rows = [[name, f"{value * 1e3:.1f}", f"{value / median['plain']:.3f}"] for name, value in median.items()]
    print(common.table([f"step by {arguments.recipes[0]}", "ms", "over plain"], rows))
    bits = {recipe: same_bits(recipe, arguments.steps) for recipe in arguments.recipes}
    print(
        common.table(["recipe", "bits, observed"], [[name, "same" if same else "OTHER"] for name, same in bits.items()])
    )
    found = figures(times, off_s, bits)
    for name, figure in found.items():
        print(f"{name}: {figure['measured']:.6f}, goal {goal(figure)}  {'ok' if is_met(figure) else 'MISSED'}")
    result: dict[str, Any] = {"figures": found, "seconds": times, "seconds_off": off_s, "same_bits": bits}
    if arguments.json:
        print(common.write_result("observation", result))
    return int(not all(is_met(figure) for figure in found.values()))


if __name__ == "__main__":
    sys.exit(main())
