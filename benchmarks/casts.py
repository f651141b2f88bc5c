"""Bandwidth of every recipe's casts on this machine against a torch copy: `python benchmarks/casts.py [--json]`.

Bytes are counted as what a cast must move: 5 a value where amax, scale and cast take one pass (one read of float32, one
write of a code; the scales of tiles are left out), 9 where the scale follows from the whole tensor, which is read twice
(per tensor, and NVFP4). dequantize is 5 bytes (one read of a code, one write of float32) and writes into a given
tensor, as the copy does, which is counted as 8 bytes. The last column counts 9 bytes a value for all casts alike. A
figure is the ratio of median bandwidths of one interleaved run.

A second run times the casts that others have, too, beside ours: torch's operations written out, torchao's as its layers
call them, without compilation, and bitsandbytes' blocks of 8 bits, which are a code of its own. Nothing was asked of
these: they are shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import warnings
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


# title -> (our cast, those of others); the first word of a name is the library
PEERS = {
    "one scale": ("per tensor", ("torch per tensor", "torchao per tensor", "bitsandbytes blocks of 4096")),
    "tiles of 1x128": ("1x128", ("torchao 1x128",)),
    "tiles of 1x32, E8M0 scales": ("mxfp8 1x32", ("torchao mxfp8 1x32",)),
    "4 bits in tiles of 1x32, E8M0 scales": ("mxfp4 1x32", ("torchao mxfp4 1x32",)),
    "4 bits in tiles of 1x16, NVFP4": ("nvfp4 1x16", ("torchao nvfp4 1x16",)),
}
OURS = "narrowgauge "


def peer(name: str, x: Tensor) -> Callable[[], object]:
    """The cast of a matrix as another library makes it."""
    if name == "torch per tensor":
        return lambda: (x * (E4M3FN.max / x.abs().max())).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype)
    if name.startswith("bitsandbytes"):
        import bitsandbytes.functional  # type: ignore[import-not-found]

        return lambda: bitsandbytes.functional.quantize_blockwise(x, blocksize=4096)
    if name == "torchao per tensor":
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig

        return lambda: hp_tensor_to_float8_dynamic(x, E4M3FN.dtype, LinearMMConfig())
    if name == "torchao 1x128":
        from torchao.prototype.blockwise_fp8_training.kernels import torch_blockwise_scale_act_quant_lhs

        return lambda: torch_blockwise_scale_act_quant_lhs(x, 128)
    if name == "torchao nvfp4 1x16":
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

        return lambda: nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    dtype = torch.float4_e2m1fn_x2 if "mxfp4" in name else E4M3FN.dtype
    return lambda: to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)


def compare(values: int, repeats: int, device: str) -> tuple[dict[str, list[float]], list[dict[str, object]]]:
    """Raw seconds of our casts beside others', and the same as bars."""
    x = torch.randn(values, generator=torch.Generator().manual_seed(0)).to(device).view(-1, _columns(values))
    key = philox.draw_key(x.device, torch.Generator(x.device).manual_seed(0))
    runs: dict[str, Callable[[], object]] = {}
    absent = {}
    for ours, others in PEERS.values():
        runs[OURS + ours] = _cast(x, CastSpec(E4M3FN) if ours == "per tensor" else SPECS[ours], key)
        for name in others:
            if importlib.util.find_spec(name.split()[0]) is None:
                absent[name] = "not installed"
            else:
                runs[name] = peer(name, x)
    raw = common.interleaved(runs, repeats)
    milliseconds = {name: seconds * 1e3 for name, seconds in common.medians(raw).items()}
    bars = [
        common.bars(
            f"cast of {values / 1e6:.1f}M float32 values, {title}", "ms, median",
            {name: milliseconds[name] for name in (OURS + ours, *others) if name in milliseconds}, (OURS + ours,),
            absent={name: absent[name] for name in others if name in absent},
        )
        for title, (ours, others) in PEERS.items()
    ]  # fmt: skip
    return raw, bars


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
    parser.add_argument("--peer-repeats", type=int, default=7, help="of the run beside others; 0: none")
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
    compared, bars = {}, []
    if arguments.peer_repeats:
        warnings.filterwarnings("ignore", module="torchao|bitsandbytes")
        compared, bars = compare(arguments.values, arguments.peer_repeats, arguments.device)
        for each in bars:
            cells = [[r["name"], r["absent"] if r["value"] is None else f"{r['value']:.2f}"] for r in each["rows"]]
            print(f"\n{each['title']}\n{common.table(['', each['unit']], cells)}")
    if arguments.json:
        figures = {_title(name): {"measured": ratios[name], "at_least": least} for name, least in FIGURES.items()}
        specs = {name: str(spec) for name, spec in SPECS.items()}
        result = {"values": arguments.values, "format": E4M3FN.name, "casts": specs, "bytes_per_value": BYTES_PER_VALUE}
        print(
            common.write_result(
                "casts", {**result, "figures": figures, "seconds": raw, "compared_s": compared, "bars": bars}
            )
        )
    return int(any(ratios[name] < least for name, least in FIGURES.items()))


def _title(name: str) -> str:
    cast = f"quantize {name}" if name in SPECS else name
    return f"bandwidth of {cast} (FP8) / torch copy"


if __name__ == "__main__":
    sys.exit(main())
