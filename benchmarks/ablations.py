"""What narrow formats do to the reference model, change by change: which are free, which cost, which break it.

    python benchmarks/ablations.py [--rows "exp_avg E4M3" ...] [--seeds 3] [--steps 600] [--workers 2] [--json]

A row trains the reference model (`reference.py`) with one thing changed and compares its validation loss with that of
its yardstick in the same run: the mean of three seeds; a change that breaks the model needs one. One row is measured
directly: the error of a product after one channel grew tenfold. Sums over ranks are in `reduction.py`.

Expected figures are a prototype's, in plain PyTorch, on the text of Python 3.11: float32 had 1.627 there. Single runs
scatter by a standard deviation of up to 0.016, so the distance of two means of three by 0.013: what is free is expected
within 0.03. What costs is expected between half and twice the prototype's distance: how much a failure costs depends on
chance and details, but not what it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

import common
import reference
import torch
from reference import ALLOWED_LOSS_GAP, Job, Setting
from tables import goal, is_met
from torch import nn

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E4M3FN, FP16, FP32, INT8

PLAIN = ng.recipe("fp32")
MOMENTUM_8 = ng.recipe("narrow8").exp_avg
TENSOR_E4M3 = ng.CastSpec(E4M3FN, scale=ng.TENSOR_POW2)
SCALED_FP16 = ng.CastSpec(FP16, scale=ng.TENSOR_POW2)
ROW_TILES, WHOLE = ng.Block(1, 128), ng.Block(1 << 20, 1 << 20)  # WHOLE: one tile, larger than any tensor here
LOW_LR = 2e-4  # where most updates are below half a unit in the last place of a bfloat16 parameter

# what rows are compared with
YARDSTICKS = {
    "fp32": Setting(PLAIN),
    "fp32 at lr 2e-4": Setting(PLAIN, peak_lr=LOW_LR),
    "Lion": Setting(PLAIN, "Lion"),
    "Muon": Setting(PLAIN, "Muon"),
}


class Row(NamedTuple):
    """A change. gap: how far from its yardstick the prototype's loss was. breaks: one seed is enough."""

    setting: Setting
    gap: float
    yardstick: str = "fp32"
    breaks: bool = False

    @property
    def window(self) -> tuple[float, float]:
        """The least and the largest distance that is expected."""
        if self.gap <= ALLOWED_LOSS_GAP:
            return -ALLOWED_LOSS_GAP, ALLOWED_LOSS_GAP
        return round(self.gap / 2, 3), round(self.gap * 2, 3)


def _with(**fields: ng.CastSpec) -> Setting:
    return Setting(PLAIN.replace(name="ablation", **fields))


def _flushing(spec: ng.CastSpec) -> Setting:
    """exp_avg_sq by `spec`, whose small values become zero."""
    return Setting(PLAIN, "own AdamW", {"exp_avg_sq": spec, "keep_nonzero": False})


ROWS = {
    "exp_avg E4M3": Row(_with(exp_avg=ng.CastSpec(E4M3FN)), 1.624 - 1.627),
    # single seeds are 0.08 to 0.46 above: it needs the mean of three
    "exp_avg_sq E4M3 per tensor": Row(_flushing(ng.CastSpec(E4M3FN)), 1.815 - 1.627),
    "exp_avg_sq E4M3, blocks of 128": Row(_with(exp_avg_sq=ng.CastSpec(E4M3FN, ROW_TILES)), 1.633 - 1.627),
    "square root of exp_avg_sq E4M3 per tensor": Row(
        _with(exp_avg_sq=ng.CastSpec(E4M3FN, WHOLE, companding=ng.SQUARE_ROOT)), 1.633 - 1.627
    ),
    "exp_avg_sq FP16, unscaled": Row(_flushing(ng.CastSpec(FP16)), 3.203 - 1.627, breaks=True),
    "parameters E4M3 per tensor, no master": Row(_with(param=TENSOR_E4M3), 2.083 - 1.627, breaks=True),
    "parameters and exp_avg_sq scaled FP16, exp_avg E4M3": Row(
        _with(param=SCALED_FP16, exp_avg=TENSOR_E4M3, exp_avg_sq=SCALED_FP16), 1.624 - 1.627
    ),
    "parameters BF16 with an 8-bit residual": Row(
        _with(param=ng.CastSpec(BF16), master=ng.CastSpec(INT8, scale=ng.ULP)), 1.622 - 1.627
    ),
    "parameters BF16, updates rounded to nearest, lr 2e-4": Row(
        Setting(PLAIN.replace(param=ng.CastSpec(BF16)), peak_lr=LOW_LR), 2.673 - 2.395, "fp32 at lr 2e-4"
    ),
    "parameters BF16, updates rounded stochastically, lr 2e-4": Row(
        Setting(PLAIN.replace(param=ng.CastSpec(BF16, rounding=ng.STOCHASTIC)), peak_lr=LOW_LR),
        2.397 - 2.395, "fp32 at lr 2e-4",
    ),
    "GEMMs E4M3 and E5M2, current scales": Row(Setting(ng.recipe("fp8_current")), 1.630 - 1.627),
    "GEMMs E4M3, blocks of 128": Row(Setting(ng.recipe("fp8_block")), 1.629 - 1.627),
    "GEMMs E4M3 and E5M2, delayed scales, history of 16": Row(
        Setting(ng.recipe("fp8_delayed", amax_history_len=16)), 1.629 - 1.627
    ),
    "GEMMs E4M3 and E5M2, unscaled": Row(Setting(reference.unscaled()), 3.229 - 1.627, breaks=True),
    "Lion with 8-bit momentum": Row(Setting(PLAIN, "Lion", {"exp_avg": MOMENTUM_8}), 0.0, "Lion"),
    "Muon with 8-bit momentum": Row(Setting(PLAIN, "Muon", {"exp_avg": MOMENTUM_8}), 0.0, "Muon"),
}  # fmt: skip


class Figure(NamedTuple):
    """What was measured, what the prototype had, and the window for it."""

    measured: float
    expected: float
    window: tuple[float, float]

    def record(self) -> dict[str, float]:
        """As result files have it."""
        return {
            "measured": self.measured, "expected": self.expected, "at_least": self.window[0], "at_most": self.window[1],
        }  # fmt: skip


# what is measured directly: (expected, window)
CHANNELS = 512
# E4M3's relative error of values over many binades is 2.4 to 2.7 %, by where in them most lie. A delayed scale
# cuts the channel off at the amax a of earlier normal inputs, 4.6 to 5.4: sqrt(100 E[(|z| - a/10)+^2] / (511 + 100)).
GEMM_ERRORS: dict[str, tuple[ng.CastSpec, float, tuple[float, float]]] = {
    "delayed": (ng.CastSpec(E4M3FN, scale=ng.Delayed(history_length=16)), 26.6, (24.0, 29.0)),
    "current": (ng.CastSpec(E4M3FN), 2.6, (2.3, 2.8)),
    "blocks of 128": (ng.CastSpec(E4M3FN, ROW_TILES), 2.4, (2.3, 2.8)),
}


def gemm_errors() -> dict[str, Figure]:
    """||y - y_exact|| / ||y_exact|| in % of a linear layer whose input alone is E4M3, one of its channels times ten."""
    found = {}
    for name, (spec, expected, window) in GEMM_ERRORS.items():
        generator = torch.Generator().manual_seed(0)
        layer = nn.Linear(CHANNELS, CHANNELS, bias=False)
        model = nn.Sequential(layer)
        ng.prepare(model, None, ng.Recipe(input=spec, compute=FP32))
        for _ in range(17):  # the history of 16, and the roll that follows it
            model(torch.randn(1024, CHANNELS, generator=generator)).sum().backward()
        x = torch.randn(1024, CHANNELS, generator=generator)
        x[:, 7] *= 10
        with torch.no_grad():
            exact = x.double() @ layer.weight.double().t()
            error = float((model(x) - exact).norm() / exact.norm())
        label = f"error of a product with one channel times ten, E4M3 input, {name}, %"
        found[label] = Figure(100 * error, expected, window)
    return found


DIRECT = {"product with one channel times ten": gemm_errors}


def jobs_of(names: list[str], seeds: int, steps: int) -> list[Job]:
    """The trainings that rows need, yardsticks first, seed by seed."""
    rows = {name: ROWS[name] for name in names if name in ROWS}
    settings = {y: YARDSTICKS[y] for y in YARDSTICKS if any(row.yardstick == y for row in rows.values())}
    settings |= {name: row.setting for name, row in rows.items()}
    once = {name for name, row in rows.items() if row.breaks}
    return [
        Job(name, setting, seed, steps)
        for seed in range(seeds)
        for name, setting in settings.items()
        if seed == 0 or name not in once
    ]


def loss_figures(means: Mapping[str, float]) -> dict[str, Figure]:
    """The distance of every row that was trained from its yardstick."""
    return {
        f"validation loss of {name}, above {row.yardstick}'s": Figure(
            means[name] - means[row.yardstick], row.gap, row.window
        )
        for name, row in ROWS.items()
        if name in means
    }


def main() -> int:
    """Train, measure, print the table; exit 1 where a figure is outside its window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS, *DIRECT], default=[*ROWS, *DIRECT], metavar="ROW",
                        help=f"all of: {'; '.join([*ROWS, *DIRECT])}")  # fmt: skip
    reference.add_options(parser)
    arguments = parser.parse_args()
    figures: dict[str, Figure] = {}
    for name in arguments.rows:
        figures |= DIRECT[name]() if name in DIRECT else {}
    repeats = reference.train_all(jobs_of(arguments.rows, arguments.seeds, arguments.steps), arguments.workers)
    figures = loss_figures(reference.mean_losses(repeats)) | figures
    found = {label: figure.record() for label, figure in figures.items()}
    rows = [
        [label, f"{f['expected']:.3f}", goal(f), f"{f['measured']:.3f}", "ok" if is_met(f) else "MISSED"]
        for label, f in found.items()
    ]
    print(common.table(["figure", "expected", "goal", "measured", ""], rows))
    if arguments.json:
        record = {"text_sha256": reference.text_sha256(), "seeds": arguments.seeds, "steps": arguments.steps}
        print(common.write_result("ablations", {"figures": found, **record, "repeats": repeats}))
    return int(not all(is_met(figure) for figure in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
