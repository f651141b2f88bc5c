"""Signal to quantization noise of a linear layer's products: inside windows that follow from the formats.

The windows are derived in docs/numerics.md and computed by benchmarks/sqnr.py, a tenth of a dB wide: a product that was
not quantized, or one whose rounding, scale or tile is another than the recipe says, falls outside.
"""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.numerics import kernels, measure
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, E5M2
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, NVFP4
from narrowgauge.ops.matmul import GEMMS
from narrowgauge.recipes.spec import CastSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
sqnr = importlib.import_module("sqnr")
sys.path.pop(0)

SIZE = 512


@pytest.mark.parametrize(
    ("spec", "low", "high"),
    [
        # one cast alone, in dB: 3, 2, 1 mantissa bits, 6 dB a bit
        (CastSpec(E4M3FN), 31.3, 31.8),
        (CastSpec(E5M2), 25.2, 25.7),
        (CastSpec(E4M3FN, Block(1, 128), CURRENT_POW2), 31.3, 31.8),
        (CastSpec(E4M3FN, Block(1, 32), E8M0_UP), 31.3, 31.8),
        (CastSpec(BF16), 55.3, 55.9),
    ],
    ids=str,
)
def test_the_derived_noise_is_that_of_half_a_gap(spec: CastSpec, low: float, high: float) -> None:
    noise = sqnr.cast_noise(spec, SIZE, SIZE).mean
    assert low <= -10 * math.log10(noise) <= high
    # the gap^2 / 12 of a value at a random place of its binade: 4^-m (1 - 1/4) / (2 ln 2) / 12
    assert noise == pytest.approx(4.0**-spec.format.mantissa_bits * 0.75 / (2 * math.log(2)) / 12, rel=0.05)


SPECS = [
    *(CastSpec(fmt, block, rule) for fmt in (E4M3FN, E2M1FN, ng.formats.E3M2FN, ng.formats.E2M3FN)
      for block, rule in ((Block(1, 32), E8M0_UP), (Block(1, 32), E8M0_FLOOR), (ng.PER_ROW, CURRENT))),
    CastSpec(E2M1FN, Block(1, 16), NVFP4),
    CastSpec(E2M1FN, Block(16, 16), NVFP4),
    CastSpec(E2M1FN, Block(1, 16), NVFP4, ng.STOCHASTIC),
    CastSpec(E2M1FN, Block(1, 32), E8M0_UP, ng.STOCHASTIC),
    CastSpec(E4M3FN, Block(1, 32), CURRENT, ng.STOCHASTIC),
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_derived_noise_is_the_noise_of_the_cast(spec: CastSpec) -> None:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1))
    key = torch.tensor(5) if spec.is_stochastic else None
    q = kernels.quantize_blocks(x, spec.format, spec.granularity, spec.scale, key=key)
    assert q.codes is not None
    found = kernels.dequantize_blocks(q.codes, q.dequant_scale, spec.format, spec.granularity, tensor_amax=q.amax)
    noise = sqnr.cast_noise(spec, 1024, 1024)
    window = [-10 * math.log10(noise.mean + sign * 4 * noise.sd) for sign in (1, -1)]
    assert window[0] - sqnr.TOLERANCE_DB <= measure.sqnr_db(x, found) <= window[1] + sqnr.TOLERANCE_DB


@pytest.mark.parametrize("name", sqnr.RECIPES)
def test_every_product_has_the_noise_of_its_operands_formats(name: str) -> None:
    recipe = sqnr.RECIPES[name]
    layer = sqnr.prepared_layer(recipe, SIZE)
    found = sqnr.measured_db(layer, SIZE)
    for gemm in GEMMS:
        low, high = sqnr.window_db(layer.training_casts, gemm, SIZE)
        assert high - low < 0.4
        assert low <= found[gemm.name] <= high, gemm.name
    # and these are the products that ran quantized
    (row,) = ng.report(layer)
    assert row.status == "converted"
    assert str(recipe.input and recipe.input.format) in row.reason
    formats = {
        gemm.name: tuple(layer.training_casts.spec(gemm, role).format for role in (gemm.left, gemm.right))
        for gemm in GEMMS
    }
    assert recipe.input is not None and recipe.weight is not None and recipe.grad_output is not None
    x, w, g = (spec.format for spec in (recipe.input, recipe.weight, recipe.grad_output))
    in_compute = recipe.override_linear_precision[2]
    assert formats == {"output": (x, w), "grad_input": (g, w), "grad_weight": (BF16, BF16) if in_compute else (g, x)}


def test_the_figures_of_current_scaling_at_full_size() -> None:
    found = sqnr.measured_db(sqnr.prepared_layer(sqnr.RECIPES["fp8_current"], 1024), 1024)
    assert 28.0 <= found["output"] <= 29.2
    assert 24.0 <= found["grad_input"] <= 25.2
    assert 24.0 <= found["grad_weight"] <= 25.2


def test_a_layer_that_is_not_quantized_falls_outside_every_window() -> None:
    layer, _ = ng.prepare(nn.Linear(SIZE, SIZE, bias=False), None, "fp32")
    assert all(value > 100 for value in sqnr.measured_db(layer, SIZE).values())
    layer, _ = ng.prepare(nn.Linear(SIZE, SIZE, bias=False), None, "bf16")
    assert all(49 < value < 54 for value in sqnr.measured_db(layer, SIZE).values())
