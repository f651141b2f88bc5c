"""Writes the tables of docs/numerics.md from the code.

    python benchmarks/numerics_page.py [--check]

--check writes nothing and fails where the page says something else than the code. A table stands between the comments
`<!-- NAME: begin -->` and `<!-- NAME: end -->`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path

import sqnr
import torch

import narrowgauge as ng
from narrowgauge.numerics import companding, formats, rounding, scaling
from narrowgauge.numerics.companding import Companding
from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E5M2, E8M0FNU, UINT8, Format
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.rounding import Rounding
from narrowgauge.numerics.scaling import NVFP4, ScaleRule
from narrowgauge.ops.matmul import GEMMS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "numerics.md"
ROLES = ("input", "weight", "grad_output", "weight_for_grad_input", "grad_output_for_grad_weight", "activation")
BLOCKS = (
    PER_TENSOR, PER_ROW, PER_COLUMN, Block(1, 128), Block(128, 128), Block(1, 32), Block(32, 32), Block(1, 16),
    Block(16, 16),
)  # fmt: skip
# what the code does in words; every rule must have its own
RULES = {
    ScaleRule.NONE: "1",
    ScaleRule.CURRENT: "`max / amax`; 1 where amax is 0, infinite or NaN; the largest float32 where it overflows",
    ScaleRule.CURRENT_POW2: "the above with the mantissa cleared: rounded down to a power of two",
    ScaleRule.TENSOR_POW2: "`2^min(floor(log2(max / amax)), 126)`; where amax is 0 or not finite the old scale, or 1",
    ScaleRule.E8M0_UP: "`2^(127 - byte)`, the byte from `amax * fl(1 / max)` rounded up to a power of two",
    ScaleRule.E8M0_FLOOR: "`2^(127 - byte)`, the byte from the power of two of amax less that of max: a block "
    "saturates where the mantissa of its amax is above that of max",
    ScaleRule.NVFP4: "`min(1 / (byte * fl(1/S)), FLT_MAX)` with `S = 2688 / amax of the tensor` and "
    "`byte = E4M3(amax * (S * fl(1/6)))`",
    ScaleRule.ULP: "`127 / (half a unit in the last place of the bfloat16 parameter)`: of a residual, see "
    "`numerics.residual`",
}
ROUNDINGS = {
    Rounding.NEAREST_EVEN: "the nearest value; of two equally near ones that with the even code",
    Rounding.STOCHASTIC: "one of the two neighbours, the nearer the likelier, so that the mean is the value itself",
    Rounding.NONZERO: "the nearest value, but never zero for another: the smallest code of its sign",
}

# what each curve does, who runs it at speed, and a format for an example
CURVES = {
    Companding.LINEAR: ("`round(x * quant_scale)`", "Numba, Triton", UINT8),
    Companding.SQUARE_ROOT: ("`round(sign(x) * sqrt(fl(abs(x) * quant_scale)))`", "Numba, Triton: integers", UINT8),
    Companding.DYNAMIC: ("the place of the nearest value in the code book", "-", UINT8),
    Companding.RANGE_EXPANSION: (
        "`E4M3(sign(x) * 448 * (abs(x) / amax)^k)`, k = floor(16 log2(448^2 / 2) / log2(amax / smallest)) / 16",
        "-",
        E4M3FN,
    ),
}


def number(value: float) -> str:
    """A figure as people write it: powers of two beyond a few digits as such."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 2**-3 <= value <= 2**10:
        return f"2^{exponent - 1}"
    return f"{value:g}" if value < 1e6 else f"{value:.4g}"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def formats_table() -> str:
    header = [
        "name",
        "bits",
        "exponent, mantissa",
        "max",
        "smallest normal",
        "smallest",
        "infinity",
        "NaN",
        "beyond max",
    ]
    return table(header, [_format_row(fmt) for fmt in formats.ALL.values()])


def _format_row(fmt: Format) -> list[str]:
    parts = "integer" if fmt.is_integer else f"{fmt.exponent_bits}, {fmt.mantissa_bits}"
    smallest = [number(fmt.smallest_normal), number(fmt.smallest_subnormal)]
    special = ["yes" if has else "no" for has in (fmt.has_inf, fmt.has_nan)]
    beyond = "-" if fmt is E8M0FNU else "saturates" if fmt.saturating else "infinity"
    return [fmt.name, str(fmt.bits), parts, number(fmt.max), *smallest, *special, beyond]


def rules_table() -> str:
    rows = []
    for rule, words in ((rule, RULES[rule]) for rule in ScaleRule):
        fmt = E2M1FN if rule is NVFP4 else E4M3FN
        amax = torch.tensor(3.75)
        if rule in (ScaleRule.NONE, ScaleRule.ULP):
            example = "1" if rule is ScaleRule.NONE else "-"
        else:
            quant_scale, stored = scaling.block_scales(amax, fmt, rule, torch.tensor(24.0))
            example = f"{number(quant_scale.item())}; {number(scaling.block_factors(stored).item())}"
        dtype = str(scaling.stored_dtype(rule)).removeprefix("torch.")
        rows.append([f"`{rule.name}`", words, "-" if rule in (ScaleRule.NONE, ScaleRule.ULP) else dtype, example])
    return table(["rule", "`quant_scale`", "stored as", "of amax 3.75"], rows)


def granularities_table() -> str:
    rows = []
    for block in BLOCKS:
        down, across = block.grid_of(100, 300)
        rows.append([f"`{block!r}`", f"{down} x {across}", ", ".join(_recipes_with(block)) or "-"])
    return table(["granularity", "scales of a 100 x 300 matrix", "in the recipes"], rows)


def _recipes_with(block: Block) -> list[str]:
    """The recipes that scale an operand so."""
    found = []
    for name in ng.recipe_names():
        specs = [getattr(ng.recipe(name), role) for role in ROLES]
        if any(spec is not None and spec.is_scaled and spec.granularity == block for spec in specs):
            found.append(name)
    return found


def roundings_table() -> str:
    words = torch.arange(1 << 16, dtype=torch.int64) << 16  # evenly spread
    rows = []
    for mode in Rounding:
        given = words if mode is Rounding.STOCHASTIC else None
        shares = []
        for value in (2.25, 0.125):
            x = torch.full((len(words),), value)
            nonzero = x != 0 if mode is Rounding.NONZERO else None
            values = companding.decode(companding.encode(x, E2M1FN, nonzero=nonzero, words=given), E2M1FN)
            found = [f"{number(v)} ({(values == v).double().mean().item():.0%})" for v in values.unique().tolist()]
            shares.append(", ".join(found))
        rows.append([f"`{mode.name}`", ROUNDINGS[mode], *shares])
    return table(["rounding", "picks", "2.25 in E2M1", "0.125 in E2M1"], rows)


def companding_table() -> str:
    x = torch.tensor([[1.0, 0.5, 0.01, 1e-4]])
    rows = []
    for curve, (words, kernels_of, fmt) in CURVES.items():
        q = ng.quantize(x, ng.CastSpec(fmt, Block(1, 128), companding=curve))
        values = ", ".join(f"{value:.3g}" for value in q.tolist()[0])
        rows.append([f"`{curve.name}`", words, kernels_of, number(companding.limit_of(fmt, curve)), fmt.name, values])
    header = ["curve", "code", "kernels", "the largest code stands for", "example in", "1, 0.5, 0.01 and 0.0001 become"]
    return table(header, rows)


def overflow_table() -> str:
    x = [448.0, 464.0, 480.0, 57344.0, 61440.0, float("inf"), float("nan")]
    rows = []
    for fmt in (E4M3FN, E5M2):
        values = rounding.decode(rounding.encode(torch.tensor(x), fmt), fmt).tolist()
        rows.append([fmt.name, *(number(v) if math.isfinite(v) else str(v) for v in values)])
    return table(["cast of", *(number(v) if math.isfinite(v) else str(v) for v in x)], rows)


def noise_table() -> str:
    rows = []
    for name, recipe in sqnr.RECIPES.items():
        casts = sqnr.prepared_layer(recipe, 16).training_casts
        windows = [sqnr.window_db(casts, gemm, 1024) for gemm in GEMMS]
        rows.append([name, *(f"{(low + high) / 2:.1f}" for low, high in windows)])
    return table(["recipe", *(gemm.name for gemm in GEMMS)], rows)


TABLES: dict[str, Callable[[], str]] = {
    "formats": formats_table,
    "overflow": overflow_table,
    "rules": rules_table,
    "granularities": granularities_table,
    "roundings": roundings_table,
    "companding": companding_table,
    "noise": noise_table,
}


def filled(text: str) -> str:
    """The page with every table as the code has it now."""
    for name, make in TABLES.items():
        text, count = re.subn(
            rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)",
            lambda found, make=make: f"{found[1]}\n{make()}\n{found[2]}",
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise SystemExit(f"{PAGE}: expected one place for the table '{name}', found {count}")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    wanted = filled(text)
    if arguments.check:
        print("page and code agree" if wanted == text else "stale: run python benchmarks/numerics_page.py")
        return int(wanted != text)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
