"""Validation loss of the reference model under each recipe: the mean of three seeds, all in one run.

    python benchmarks/parity.py [--model moe] [--group state] [--recipes fp32 bf16 ...] [--seeds 3] [--steps 600] ...

The model and its training are in `reference.py`. `unscaled` is fp8_current without scales: it must be far worse, or the
comparison proves nothing. NVFP4 has no goal: it is measured with and without its Hadamard transform and its stochastic
rounding. `--model moe` has four experts of half the width in place of each feed-forward network, two of which every
token visits, and a clamped SwiGLU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import common
import reference
from reference import ALLOWED_LOSS_GAP, Job, Setting

import narrowgauge as ng

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
    "state": ("fp32", "fp8_lm_o1", "fp8_lm_o2", "fp8_lm_o3", "narrow8", "narrow8_sr"),
}
RECIPES = tuple(dict.fromkeys(name for group in GROUPS.values() for name in group))
UNSCALED_LOSS_GAP = 1.0


def make_recipe(name: str) -> ng.Recipe:
    if name in VARIANTS:
        base, fields = VARIANTS[name]
        return ng.recipe(base, **fields)
    return reference.unscaled() if name == "unscaled" else ng.recipe(name)


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
    parser.add_argument("--model", default="dense", choices=reference.MODELS)
    parser.add_argument(
        "--group", choices=GROUPS, help="recipes with a scale for each tensor or each tile, or with 8-bit state"
    )
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, help="in place of a group's")
    reference.add_options(parser)
    arguments = parser.parse_args()
    groups = [arguments.group] if arguments.group or arguments.recipes else list(GROUPS)
    return max(compare(arguments, group) for group in groups)


def compare(arguments: argparse.Namespace, group: str | None) -> int:
    """Train by every recipe of the group, or by those asked for; print the losses; 0 where all figures are met."""
    names: Sequence[str] = arguments.recipes or GROUPS[group or "tensor"]
    jobs = [
        Job(name, Setting(make_recipe(name), model=arguments.model), seed, arguments.steps)
        for seed in range(arguments.seeds)
        for name in names
    ]
    repeats = reference.train_all(jobs, arguments.workers)
    means = reference.mean_losses(repeats)
    passed = True
    for name, mean in means.items():
        gap = mean - means.get("fp32", math.nan)
        ok = name == "fp32" or verdict(name, gap)
        passed &= ok
        outcome = "no goal" if name in VARIANTS or name == "fp32" else "ok" if ok else "MISSED"
        spread, size = reference.spread(repeats[name]), repeats[name][0]["bytes_per_parameter"]
        print(
            f"{name:24} loss {mean:.4f}  against fp32 {gap:+.4f}  seeds' range {spread:.4f}  "
            f"{size:5.2f} bytes a parameter  {outcome}"
        )
    if arguments.json:
        result = {"text_sha256": reference.text_sha256(), "mean_validation_loss": means, "repeats": repeats}
        topic = ["parity", *([arguments.model] if arguments.model != "dense" else [])]
        topic += [group] if group not in (None, "tensor") else []
        print(common.write_result("-".join(topic), {"figures": figures(means, arguments.model), **result}))
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
