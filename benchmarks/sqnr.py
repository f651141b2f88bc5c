"""Signal to noise of one linear layer's three products under every recipe, beside what follows from the formats.

    python benchmarks/sqnr.py [--size 1024] [--recipe NAME ...] [--json]

Input, weight and grad_output are normal, size x size each. The ratio of quantization is that of the float64 products of
the uncast tensors to their difference from what the layer returns (float32 products of the cast operands). It is
expected inside a window on both sides: docs/numerics.md derives it.
"""

from __future__ import annotations

import argparse
import functools
import math
from statistics import NormalDist
from typing import NamedTuple

import common
import numpy as np
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.numerics import formats, measure, rounding
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, Format
from narrowgauge.numerics.scaling import CURRENT, E8M0_FLOOR, NVFP4
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.matmul import GEMMS, Gemm

RECIPES: dict[str, ng.Recipe] = {
    "fp8_current": ng.recipe("fp8_current"),
    "fp8_rowwise": ng.recipe("fp8_rowwise"),
    "fp8_rowwise, float32 scales": ng.recipe("fp8_rowwise", scale="CURRENT"),
    "fp8_rowwise_gw_hp": ng.recipe("fp8_rowwise_gw_hp"),
    "fp8_block": ng.recipe("fp8_block"),
    "mxfp8": ng.recipe("mxfp8"),
    "mxfp8, HYBRID": ng.recipe("mxfp8", fp8_format="HYBRID"),
    "mxfp6, E3M2": ng.recipe("mxfp6"),
    "mxfp6, E2M3": ng.recipe("mxfp6", fp6_format="E2M3"),
    "mxfp4": ng.recipe("mxfp4"),
    "nvfp4": ng.recipe("nvfp4", first_last=(0, 0)),
}
GRID = 200  # points over the distribution of a tile's amax
TOLERANCE_DB = 0.06  # products of 10^6 random values: three standard deviations of the ratio of two such sums


class Noise(NamedTuple):
    """Energy of a cast's error over that of the values: its mean, and the standard deviation of one tensor's."""

    mean: float
    sd: float


@functools.cache
def cast_noise(spec: ng.CastSpec, rows: int, columns: int) -> Noise:
    """What a cast does to a matrix of standard normal values: the mean over the amax that its tiles may have.

    A tile of n values has amax a with P(amax <= a) = (2 Phi(a) - 1)^n; the others are normal values cut off at a.
    """
    if not spec.format.is_narrow:
        return Noise(wide_noise(spec.format), 0.0)
    height, width = spec.granularity.size_in(rows, columns)
    tiles = math.prod(spec.granularity.grid_of(rows, columns))
    wholes = _amax_quantiles(rows * columns, 16) if spec.scale is NVFP4 else np.array([math.nan])
    means, sds = [], []
    for whole in wholes:
        amax = _amax_quantiles(height * width, GRID)
        noise = [_tile_noise(spec, a, height * width, float(whole)) for a in amax]
        means.append(np.mean(noise))
        sds.append(np.std(noise) / math.sqrt(tiles))
    return Noise(float(np.mean(means)), float(np.hypot(np.std(means), np.mean(sds))))


def _amax_quantiles(count: int, points: int) -> np.ndarray:
    shares = (np.arange(points) + 0.5) / points
    return np.array([NormalDist().inv_cdf((1 + share ** (1 / count)) / 2) for share in shares])


def _tile_noise(spec: ng.CastSpec, amax: float, count: int, whole: float) -> float:
    """The mean squared error of one of `count` values of a tile whose largest is `amax`."""
    grid = _grid(spec.format) / _scale(spec, amax, whole)
    stochastic = spec.rounding is rounding.STOCHASTIC
    others = (_cells_stochastic if stochastic else _cells_nearest)(grid, amax) / math.erf(amax / math.sqrt(2))
    above = np.searchsorted(grid, amax)
    if above == len(grid):  # saturates, or is the maximum but for rounding
        largest = (amax - grid[-1]) ** 2
    else:
        down, up = amax - grid[above - 1], grid[above] - amax
        largest = down * up if stochastic else min(down, up) ** 2
    return ((count - 1) * others + largest) / count


def _scale(spec: ng.CastSpec, amax: float, whole: float) -> float:
    """The multiplier of a tile, as real numbers give it."""
    if spec.scale is NVFP4:
        tensor_scale = E4M3FN.max * E2M1FN.max / whole
        byte = rounding.round_to(torch.tensor(amax * tensor_scale / E2M1FN.max), E4M3FN).item()
        return tensor_scale / byte
    if spec.scale is E8M0_FLOOR:
        return 2.0 ** (math.floor(math.log2(spec.format.max)) - math.floor(math.log2(amax)))
    return spec.format.max / amax if spec.scale is CURRENT else 2.0 ** math.floor(math.log2(spec.format.max / amax))


def _grid(fmt: Format) -> np.ndarray:
    """The values of a narrow format that are not negative, in rising order."""
    codes = torch.arange(1 << (fmt.bits - 1), dtype=torch.uint8).view(fmt.dtype)
    values = rounding.decode(codes, fmt).double()
    return np.unique(values[values <= fmt.max].numpy())


def _moments(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integrals of 1, z and z^2 times the normal density, from low to high."""
    density = [np.exp(-z * z / 2) / math.sqrt(2 * math.pi) for z in (low, high)]
    below = [np.array([0.5 * math.erf(z / math.sqrt(2)) for z in ends]) for ends in (low, high)]
    zeroth, first = below[1] - below[0], density[0] - density[1]
    return zeroth, first, zeroth + low * density[0] - high * density[1]


def _cells_nearest(grid: np.ndarray, amax: float) -> float:
    """E (Q(z) - z)^2 for |z| <= amax: every value of the grid takes what is nearest to it, the last all beyond."""
    edges = np.concatenate([[0.0], (grid[1:] + grid[:-1]) / 2, [np.inf]]).clip(max=amax)
    zeroth, first, second = _moments(edges[:-1], edges[1:])
    return float(2 * (grid * grid * zeroth - 2 * grid * first + second).sum())


def _cells_stochastic(grid: np.ndarray, amax: float) -> float:
    """E (high - z) (z - low) for |z| <= amax: the variance between two neighbours; beyond the last, as to nearest."""
    edges = grid.clip(max=amax)
    zeroth, first, second = _moments(edges[:-1], edges[1:])
    inside = 2 * ((grid[1:] + grid[:-1]) * first - grid[1:] * grid[:-1] * zeroth - second).sum()
    zeroth, first, second = _moments(edges[-1:], np.array([amax]))
    return float(inside + 2 * (grid[-1] ** 2 * zeroth - 2 * grid[-1] * first + second)[0])


def wide_noise(fmt: Format, sd: float = 1.0) -> float:
    """E gap^2 / 12 over sd^2 of normal values in a format whose range plays no part."""
    sd = 2.0 ** (math.log2(sd) % 1)  # gaps grow with the values
    exponents = np.arange(-30, 5, dtype=np.float64)
    share = 2 * _moments(2.0**exponents / sd, 2.0 ** (exponents + 1) / sd)[0]
    return float((share * 4.0 ** (exponents - fmt.mantissa_bits)).sum() / 12 / sd**2)


def window_db(casts: LinearCasts, gemm: Gemm, size: int) -> tuple[float, float]:
    """The SQNR of a product of two cast operands: noise over signal is r + s + r s, four deviations either way.

    What the product itself is rounded to, where that is not float32, adds its own noise.
    """
    operands = [cast_noise(casts.spec(gemm, role), size, size) for role in (gemm.left, gemm.right)]
    (r, s), slack = (noise.mean for noise in operands), 4 * math.hypot(*(noise.sd for noise in operands))
    both = r + s + r * s
    result = casts.backend(gemm, torch.device("cpu")).result
    if result not in (None, torch.float32):
        both += wide_noise(formats.of_dtype(result), math.sqrt(size))
    return -10 * math.log10(both + slack) - TOLERANCE_DB, -10 * math.log10(max(both - slack, 1e-15)) + TOLERANCE_DB


def measured_db(layer: nn.Module, size: int, seed: int = 0) -> dict[str, float]:
    """The SQNR of each of a layer's products on normal tensors, by the product's name."""
    generator = torch.Generator().manual_seed(seed)
    x, weight, grad = (torch.randn(size, size, generator=generator) for _ in range(3))
    with torch.no_grad():
        layer.weight.copy_(weight)
    x.requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        y = layer(x)
        y.backward(grad)
    assert x.grad is not None and layer.weight.grad is not None
    exact: dict[str, Tensor] = {
        "output": x.detach().double() @ weight.double().t(),
        "grad_input": grad.double() @ weight.double(),
        "grad_weight": grad.double().t() @ x.detach().double(),
    }
    found = {"output": y.detach(), "grad_input": x.grad, "grad_weight": layer.weight.grad}
    return {name: measure.sqnr_db(exact[name], found[name]) for name in exact}


def prepared_layer(recipe: ng.Recipe, size: int) -> RecipeLayer:
    """A layer under the recipe, its products exact in float32."""
    layer, _ = ng.prepare(nn.Linear(size, size, bias=False), None, recipe.replace(emulation="exact", compute=BF16))
    assert isinstance(layer, RecipeLayer)
    return layer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of every tensor")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="only these")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    rows, figures = [], {}
    for name in arguments.recipe or RECIPES:
        layer = prepared_layer(RECIPES[name], arguments.size)
        found = measured_db(layer, arguments.size)
        for gemm in GEMMS:
            low, high = window_db(layer.training_casts, gemm, arguments.size)
            casts = [layer.training_casts.spec(gemm, role) for role in (gemm.left, gemm.right)]
            ok = low <= found[gemm.name] <= high
            operands = " x ".join(str(cast) for cast in casts)
            rows.append([name, gemm.name, f"{found[gemm.name]:.2f}", f"{low:.2f} to {high:.2f}", "ok" if ok else "OFF"])
            rows[-1].append(operands)
            middle = (low + high) / 2
            figures[f"SQNR of {gemm.name} off its derivation, {name}, dB"] = {
                "measured": abs(found[gemm.name] - middle),
                "at_most": (high - low) / 2,
                "sqnr_db": found[gemm.name],
            }
        print(f"{name}: {ng.report(layer)[''].reason}")
    print(common.table(["recipe", "product", "SQNR, dB", "window", "", "operands"], rows))
    if arguments.json:
        print(common.write_result("sqnr", {"figures": figures, "size": arguments.size}))
    return int(any(row[4] == "OFF" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
