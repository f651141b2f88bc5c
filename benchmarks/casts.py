"""Bandwidth of the FP8 casts on this machine against a torch copy: `python benchmarks/casts.py [--json]`.

quantize is amax and cast, counted as 9 bytes a value (two reads of float32, one write of a code); dequantize is counted
as 5 bytes (one read of a code, one write of float32) and writes into a given tensor, as the copy does, which is counted
as 8 bytes. A figure is the ratio of median bandwidths of one interleaved run.
"""

from __future__ import annotations

import argparse
import sys

import common
import torch

from narrowgauge.numerics import kernels
from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.numerics.scaling import CURRENT, dequant_scale_of, quant_scale_of

VALUES = 1 << 24
BYTES_PER_VALUE = {"copy": 8, "quantize": 9, "dequantize": 5}
FIGURES = {"quantize": 0.6, "dequantize": 0.9}  # least share of the copy's bandwidth


def measure(values: int, repeats: int, device: str) -> dict[str, list[float]]:
    """Raw seconds of copy, quantize and dequantize of `values` float32 values."""
    x = torch.randn(values, generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.empty_like(x)
    scale = quant_scale_of(kernels.amax(x), E4M3FN, CURRENT)
    codes = kernels.quantize(x, scale, E4M3FN).codes
    assert codes is not None
    inverse = dequant_scale_of(scale)
    return common.interleaved(
        {
            "copy": lambda: target.copy_(x),
            "quantize": lambda: kernels.quantize(x, quant_scale_of(kernels.amax(x), E4M3FN, CURRENT), E4M3FN),
            "dequantize": lambda: kernels.dequantize(codes, inverse, E4M3FN, out=target),
        },
        repeats,
    )


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
        rows.append([name, f"{seconds[name] * 1e3:.2f}", f"{bandwidth[name]:.1f}", f"{ratios[name]:.2f}", figure])
    print(common.table(["cast", "ms", "GB/s", "x copy", "figure"], rows))
    if arguments.json:
        figures = {
            f"bandwidth of {name} (FP8) / torch copy": {"measured": ratios[name], "at_least": least}
            for name, least in FIGURES.items()
        }
        result = {"values": arguments.values, "format": E4M3FN.name, "bytes_per_value": BYTES_PER_VALUE}
        print(common.write_result("casts", {**result, "figures": figures, "seconds": raw}))
    return int(any(ratios[name] < least for name, least in FIGURES.items()))


if __name__ == "__main__":
    sys.exit(main())
