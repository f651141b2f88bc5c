"""The precision chart: what each recipe computes, sends and stores, in how many bits.

Columns and the first rows are those of the MS-AMP documentation's chart, which Hugging Face Accelerate's guide to low
precision training prints; the last column is ours. Every cell follows from a recipe's roles.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowgauge.numerics import formats
from narrowgauge.numerics.formats import FP32, TF32, Format
from narrowgauge.numerics.scaling import E8M0_RULES, NVFP4, ULP
from narrowgauge.recipes.casts import MX_BLOCK
from narrowgauge.recipes.fields import AUTO
from narrowgauge.recipes.library import recipe, recipe_names
from narrowgauge.recipes.spec import GEMMS, OPERANDS, CastSpec, Recipe

# the guide's row -> the recipe that it describes
GUIDE_ROWS = {
    "FP16 AMP": "fp16", "Nvidia TE": "fp8_delayed", "MS-AMP O1": "fp8_lm_o1", "MS-AMP O2": "fp8_lm_o2",
    "MS-AMP O3": "fp8_lm_o3",
}  # fmt: skip

HEADERS = (
    "Optimization Level", "Computation(GEMM)", "Comm", "Weight", "Master Weight", "Weight Gradient",
    "Optimizer States", "Activations",
)  # fmt: skip


@dataclass(frozen=True)
class ChartRow:
    """One recipe in the chart: formats by their width, e.g. FP8 for both E4M3FN and E5M2, MXFP8 under E8M0 scales.

    gemm: operands of the linear layers' three products. communication: the reduction of gradients. weight,
    master_weight, weight_gradient: what is stored; a master with a plus sign completes the weight, others replace it at
    the update. optimizer_states: first + second moment. activations: what a quantized linear layer saves for backward.
    """

    name: str
    gemm: str
    communication: str
    weight: str
    master_weight: str
    weight_gradient: str
    optimizer_states: str
    activations: str


def chart_rows(recipes: Iterable[str | Recipe] | None = None) -> list[ChartRow]:
    """One row for each of the `titled` recipes; none named: the guide's rows, then all named recipes.

    Raises RecipeError for an unknown name.
    """
    guide = [] if recipes is not None else [_row(recipe(name), title) for title, name in GUIDE_ROWS.items()]
    return guide + [_row(each, title) for title, each in titled(recipes)]


def titled(recipes: Iterable[str | Recipe] | None = None) -> list[tuple[str, Recipe]]:
    """(title, recipe without a schedule or layers that differ): for each recipe, each of its schedule, and each glob
    of layers that multiply otherwise. None named: all named recipes.

    Raises RecipeError for an unknown name.
    """
    rows = []
    for of in map(recipe, recipe_names() if recipes is None else recipes):
        for step, each in of.phases:
            title = f"{each.name} after step {step}" if step else each.name
            rows.append((title, each.replace(layers=())))
            rows += [(f"{title}: {glob}", each.with_own(own)) for glob, own in each.layers]
    return rows


def chart_markdown(rows: Sequence[ChartRow]) -> str:
    """The chart as a Markdown table, its columns padded to equal width."""
    table = [HEADERS, *(dataclasses.astuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADERS))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in table]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)


def chart_json(rows: Sequence[ChartRow]) -> str:
    """The chart as a JSON list of objects, keyed by the fields of `ChartRow`."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)


def _row(of: Recipe, title: str | None = None) -> ChartRow:
    return ChartRow(
        name=title or of.name,
        gemm=_gemm(of),
        communication=_stored(of.grad_comm or of.grad),
        weight=_stored(of.param),
        master_weight=_master(of.master),
        weight_gradient=_stored(of.grad),
        optimizer_states=f"{_stored(of.exp_avg)}+{_stored(of.exp_avg_sq)}",
        activations=_activations(of),
    )


def _gemm(of: Recipe) -> str:
    """One label where the three products agree, else one each: "FP8 (output, grad_input), BF16 (grad_weight)"."""
    products: dict[str, list[str]] = {}
    for gemm in GEMMS:
        specs = [of.operand(gemm, role) for role in OPERANDS[gemm]]
        operands = dict.fromkeys(_label(spec) if spec else _compute(of) for spec in specs)
        products.setdefault(" x ".join(operands), []).append(gemm)
    if len(products) == 1:
        return next(iter(products))
    return ", ".join(f"{label} ({', '.join(gemms)})" for label, gemms in products.items())


def _activations(of: Recipe) -> str:
    saved = of.operand("grad_weight", "input")
    # TF32 is how float32 is multiplied, not how it is kept
    return _stored(saved) if saved else _compute(of).replace("TF32", "FP32")


def _compute(of: Recipe) -> str:
    if not isinstance(of.compute, Format):
        return "BF16 or FP16" if of.compute == AUTO else str(of.compute)
    return (TF32 if of.tf32 and of.compute == FP32 else of.compute).name


def _stored(spec: CastSpec) -> str:
    return formats.of_dtype(spec.format.dtype).name if spec.format is TF32 else _label(spec)


def _master(spec: CastSpec | None) -> str:
    """A residual is written as what it adds to the weight: "+INT8"."""
    if spec is None:
        return "N/A"
    return f"+{_stored(spec)}" if spec.scale is ULP else _stored(spec)


def _label(spec: CastSpec) -> str:
    """FP8 for E4M3FN and E5M2, MXFP8 in MX's blocks, NVFP4: the chart speaks of widths; others by their own name."""
    fmt = spec.format
    if not fmt.is_narrow or fmt.is_integer:
        return fmt.name
    if spec.scale is NVFP4:
        return "NVFP4"
    is_mx = spec.scale in E8M0_RULES and MX_BLOCK in (spec.granularity.rows, spec.granularity.columns)
    return f"{'MX' if is_mx else ''}FP{fmt.bits}"
