"""How exactly Adam's moments are kept by each code: signal to noise ratio on the states of a trained GPT, and bytes.

    python benchmarks/state_error.py [--steps 80] [--json]

Trains the default GPT of `narrowgauge train` in float32 with torch's AdamW, then casts the moments of every parameter
that a recipe would quantize. The ratio pools all of them: the sum of their squares over that of the errors. Bytes are
those that the tensors hold, codes, scales and amax, a value, for both moments. The code book runs over the flattened
tensor in blocks of 256, as bitsandbytes does; all others along rows, as the optimizers here do.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NamedTuple

import common
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.numerics.companding import DYNAMIC, RANGE_EXPANSION, SQUARE_ROOT
from narrowgauge.numerics.formats import E4M3FN, FP16, INT8, UINT8
from narrowgauge.numerics.measure import sqnr_db
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.numerics.scaling import CURRENT, TENSOR_POW2
from narrowgauge.optim import storage
from narrowgauge.train.assemble import assemble
from narrowgauge.train.config import TrainConfig
from narrowgauge.train.schedule import learning_rate
from narrowgauge.train.step import optimizer_step

OURS, FOUR_BITS = ng.recipe("narrow8"), ng.recipe("narrow8", moment_bits=4)
NARROW8 = "narrow8: square root, INT8 and UINT8"
B128 = ng.Block(1, 128)
LEAST_SQNR_DB, MOST_BYTES = {"exp_avg_sq": 48.0, "exp_avg": 42.0}, 2.1


class Code(NamedTuple):
    """How both moments are cast. flat: as one long row."""

    exp_avg: ng.CastSpec
    exp_avg_sq: ng.CastSpec
    flat: bool = False


CODES = {
    NARROW8: Code(OURS.exp_avg, OURS.exp_avg_sq),
    "dynamic code book, 256": Code(
        ng.CastSpec(INT8, ng.Block(1, 256), companding=DYNAMIC),
        ng.CastSpec(UINT8, ng.Block(1, 256), CURRENT, NONZERO, DYNAMIC),
        flat=True,
    ),
    "COAT: range expansion, E4M3, 128": Code(*[ng.CastSpec(E4M3FN, B128, companding=RANGE_EXPANSION)] * 2),
    "plain E4M3, 128": Code(*[ng.CastSpec(E4M3FN, B128)] * 2),
    "square root, E4M3, 128": Code(*[ng.CastSpec(E4M3FN, B128, companding=SQUARE_ROOT)] * 2),
    "FP8-LM: E4M3 and scaled fp16": Code(ng.CastSpec(E4M3FN), ng.CastSpec(FP16, scale=TENSOR_POW2)),
    "narrow8 with 4-bit moments": Code(FOUR_BITS.exp_avg, FOUR_BITS.exp_avg_sq),
}


def trained_states(steps: int) -> dict[str, list[Tensor]]:
    """The moments, float32, of the default GPT's parameters after so many steps: those of `min_state_size` or more."""
    config = TrainConfig(recipe="fp32", steps=steps)
    parts = assemble(config, print)
    parts.model.train()
    for step in range(steps):
        rate = learning_rate(step, steps, config.optimizer.lr, config.schedule)
        for group in parts.optimizer.param_groups:
            group["lr"] = rate
        result = optimizer_step(parts.model, parts.optimizer, parts.scaler, [parts.stream.next()], config.clip)
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: loss {result.loss:.3f}", flush=True)
    kept = [state for p, state in parts.optimizer.state.items() if p.numel() >= OURS.min_state_size]
    return {name: [state[name] for state in kept] for name in LEAST_SQNR_DB}


def pooled(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def measure(code: Code, states: dict[str, list[Tensor]]) -> dict[str, float]:
    """The ratio of both moments in dB, that of the median tensor, and bytes a value for both."""
    found: dict[str, float] = {}
    held = 0
    for name, tensors in states.items():
        spec = getattr(code, name)
        stored = [storage.encode(x.reshape(1, -1) if code.flat else x, spec) for x in tensors]
        values = [storage.decode(q, x.shape) for q, x in zip(stored, tensors, strict=True)]
        found[f"{name}_sqnr_db"] = sqnr_db(pooled(tensors), pooled(values))
        ratios = torch.tensor([sqnr_db(x, y) for x, y in zip(tensors, values, strict=True)])
        found[f"{name}_median_sqnr_db"] = ratios.median().item()
        vanished = [(y == 0) & (x != 0) for x, y in zip(tensors, values, strict=True)]
        found[f"{name}_flushed"] = pooled(vanished).double().mean().item()
        held += sum(q.nbytes for q in stored)
    return found | {"bytes": held / sum(x.numel() for x in states["exp_avg"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps before the moments are taken")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    states = trained_states(arguments.steps)
    found = {name: measure(code, states) for name, code in CODES.items()}
    rows = [
        [name, *(f"{one[f'{moment}_{what}']:.1f}" for moment in states for what in ("sqnr_db", "median_sqnr_db")),
         *(f"{one[f'{moment}_flushed']:.2%}" for moment in states), f"{one['bytes']:.3f}"]
        for name, one in found.items()
    ]  # fmt: skip
    header = ["code", *(f"{moment}, {what}" for moment in states for what in ("dB", "median")),
              *(f"{moment} flushed" for moment in states), "bytes"]  # fmt: skip
    print(common.table(header, rows))
    figures = {
        f"SQNR of {moment} in narrow8's codes, default GPT, dB": {
            "measured": found[NARROW8][f"{moment}_sqnr_db"],
            "at_least": least,
        }
        for moment, least in LEAST_SQNR_DB.items()
    }
    figures["bytes a parameter of narrow8's two moments"] = {
        "measured": found[NARROW8]["bytes"],
        "at_most": MOST_BYTES,
    }
    if arguments.json:
        result = {"figures": figures, "codes": found, "steps": arguments.steps}
        print(common.write_result("state_error", result))
    met = [
        f["measured"] >= f["at_least"] if "at_least" in f else f["measured"] <= f["at_most"] for f in figures.values()
    ]
    return int(not all(met))


if __name__ == "__main__":
    raise SystemExit(main())
