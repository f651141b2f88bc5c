"""Bandwidth of every recipe's casts on this machine against a torch copy: `python benchmarks/casts.py [--json]`.

Bytes are counted as what a cast must move: 5 a value where amax, scale and cast take one pass (one read of float32, one
write of a code; the scales of tiles are left out), 9 where the scale follows from the whole tensor, which is read twice
(per tensor, and NVFP4). dequantize is 5 bytes (one read of a code, one write of float32) and writes into a given
tensor, as the copy does, which is counted as 8 bytes. The last column counts 9 bytes a value for all casts alike. A
figure is the ratio of median bandwidths of one interleaved run.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import common
import torch
from torch import Tensor

from narrowgauge.numerics import hadamard, kernels, philox
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN
from narrowgauge.numerics.granularity import PER_COLUMN, PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_UP, NVFP4, dequant_scale_of, quant_scale_of
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.cast import cast_operand

VALUES = 1 << 24
ONE_READ, TWO_READS = 5, 9

# the casts of the recipes, by name; those with turned tiles are operands of products that sum over the rows
SPECS = {
    "per row": CastSpec(E4M3FN, PER_ROW),
    "per column": CastSpec(E4M3FN, PER_COLUMN),
    "1x128": CastSpec(E4M3FN, Block(1, 128), CURRENT_POW2),
    "128x1": CastSpec(E4M3FN, Block(128, 1), CURRENT_POW2),
    "128x128": CastSpec(E4M3FN, Block(128, 128), CURRENT_POW2),
    "mxfp8 1x32": CastSpec(E4M3FN, Block(1, 32), E8M0_UP),
    "mxfp8 32x1": CastSpec(E4M3FN, Block(32, 1), E8M0_UP),
    "mxfp4 1x32": CastSpec(E2M1FN, Block(1, 32), E8M0_UP),
    "nvfp4 1x16": CastSpec(E2M1FN, Block(1, 16), NVFP4),
    "nvfp4 16x16": CastSpec(E2M1FN, Block(16, 16), NVFP4),
    "nvfp4 1x16 stochastic": CastSpec(E2M1FN, Block(1, 16), NVFP4, STOCHASTIC),
    "per tensor stochastic": CastSpec(E4M3FN, PER_TENSOR, CURRENT, STOCHASTIC),
    "bf16 stochastic": CastSpec(BF16, rounding=STOCHASTIC),
}
BYTES_PER_VALUE = {
    "copy": 8,
    "quantize": TWO_READS,
    "dequantize": 5,
    **{name: TWO_READS if "nvfp4" in name or "per tensor" in name else ONE_READ for name in SPECS},
    "bf16 stochastic": 6,
    "hadamard": 8,
}
# least share of the copy's bandwidth
FIGURES = {"quantize": 0.6, "dequantize": 0.9, "per row": 0.4, "1x128": 0.4}


def measure(values: int, repeats: int, device: str) -> dict[str, list[float]]:
    """Raw seconds of copy, quantize and dequantize of `values` float32 values, and of the casts of `SPECS`."""
    x = torch.randn(values, generator=torch.Generator().manual_seed(0)).to(device)
    matrix = x.view(-1, _columns(values))
    target = torch.empty_like(x)
    scale = quant_scale_of(kernels.amax(x), E4M3FN, CURRENT)
    codes = kernels.quantize(x, scale, E4M3FN).codes
    assert codes is not None
    inverse = dequant_scale_of(scale)
    key = philox.draw_key(x.device, torch.Generator(x.device).manual_seed(0))
    return common.interleaved(
        {
            "copy": lambda: target.copy_(x),
            "quantize": lambda: kernels.quantize(x, quant_scale_of(kernels.amax(x), E4M3FN, CURRENT), E4M3FN),
            "dequantize": lambda: kernels.dequantize(codes, inverse, E4M3FN, out=target),
            **{name: _cast(matrix, spec, key) for name, spec in SPECS.items()},
            "hadamard": lambda: kernels.transform(matrix, hadamard.SIGNS),
        },
        repeats,
    )


def _columns(values: int) -> int:
    """Columns of a matrix of so many values, near to a square one."""
    return next(columns for columns in range(math.isqrt(values), 0, -1) if values % columns == 0)


def _cast(x: Tensor, spec: CastSpec, key: Tensor) -> Callable[[], object]:
    return lambda: cast_operand(x, spec, keep_codes=True, carrier=None, key=key)


def main() -> int:
    """Print the table, write the result file with --json; exit 1 where a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write a file under benchmarks/results")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--values", type=int, default=VALUES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    raw = measure(arguments.values, arguments.repeats, arguments.device)
    seconds = common.medians(raw)
    bandwidth = {name: BYTES_PER_VALUE[name] * arguments.values / seconds[name] / 1e9 for name in raw}
    rows, ratios = [], {}
    for name in raw:
        ratios[name] = bandwidth[name] / bandwidth["copy"]
        figure = f">= {FIGURES[name]}" if name in FIGURES else ""
        alike = (
            f"{TWO_READS * seconds['copy'] / (8 * seconds[name]):.2f}" if name in SPECS or name == "quantize" else ""
        )
        milliseconds, share = f"{seconds[name] * 1e3:.2f}", f"{ratios[name]:.2f}"
        rows.append([name, str(BYTES_PER_VALUE[name]), milliseconds, f"{bandwidth[name]:.1f}", share, figure, alike])
    print(common.table(["cast", "bytes", "ms", "GB/s", "x copy", "figure", "x copy at 9 bytes"], rows))
    if arguments.json:
        figures = {_title(name): {"measured": ratios[name], "at_least": least} for name, least in FIGURES.items()}
        specs = {name: str(spec) for name, spec in SPECS.items()}
        result = {"values": arguments.values, "format": E4M3FN.name, "casts": specs, "bytes_per_value": BYTES_PER_VALUE}
        print(common.write_result("casts", {**result, "figures": figures, "seconds": raw}))
    return int(any(ratios[name] < least for name, least in FIGURES.items()))


def _title(name: str) -> str:
    cast = f"quantize {name}" if name in SPECS else name
    return f"bandwidth of {cast} (FP8) / torch copy"


if __name__ == "__main__":
    sys.exit(main())
