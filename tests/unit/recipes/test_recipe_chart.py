"""The precision chart: the guide's rows, and cells that follow from the recipes."""

import dataclasses
import json

import pytest

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, FP16, INT8, INT16, UINT8
from narrowgauge.recipes.chart import HEADERS, ChartRow, chart_json, chart_markdown, chart_rows

# huggingface/accelerate, docs/source/concept_guides/low_precision_training.md, "A Quick Chart"
GUIDE = """\
Optimization Level | Computation(GEMM) | Comm | Weight | Master Weight | Weight Gradient | Optimizer States
FP16 AMP | FP16 | FP32 | FP32 | N/A | FP32 | FP32+FP32
Nvidia TE | FP8 | FP32 | FP32 | N/A | FP32 | FP32+FP32
MS-AMP O1 | FP8 | FP8 | FP16 | N/A | FP8 | FP32+FP32
MS-AMP O2 | FP8 | FP8 | FP16 | N/A | FP8 | FP8+FP16
MS-AMP O3 | FP8 | FP8 | FP8 | FP16 | FP8 | FP8+FP16"""
E4M3 = ng.CastSpec(E4M3FN)
FP16_SCALED = ng.CastSpec(FP16, scale=ng.TENSOR_POW2)


def cells(recipe):
    return dataclasses.astuple(chart_rows([recipe])[0])


def test_the_guides_chart_comes_first():
    guide = [tuple(line.split(" | ")) for line in GUIDE.splitlines()]
    rows = [dataclasses.astuple(row) for row in chart_rows()]
    assert HEADERS[:-1] == guide[0]
    assert [row[:-1] for row in rows[:5]] == guide[1:]
    assert [row[-1] for row in rows[:5]] == ["FP16", "FP8", "FP8", "FP8", "FP8"]
    assert [row[0] for row in rows[5:]] == ng.recipe_names()


@pytest.mark.parametrize(
    ("name", "gemm", "weight", "activations"),
    [
        ("fp32", "FP32", "FP32", "FP32"),
        ("tf32", "TF32", "FP32", "FP32"),
        ("bf16", "BF16", "FP32", "BF16"),
        ("fp16", "FP16", "FP32", "FP16"),
        ("fp16_pure", "FP16", "FP16", "FP16"),
        ("fp8_current", "FP8", "FP32", "FP8"),
        ("fp8_delayed", "FP8", "FP32", "FP8"),
        ("fp8_rowwise", "FP8", "FP32", "FP8"),
        (
            "fp8_rowwise_gw_hp",
            "FP8 (output, grad_input), BF16 or FP16 (grad_weight)",
            "FP32",
            "BF16 or FP16",
        ),
        ("fp8_block", "FP8", "FP32", "FP8"),
        ("mxfp8", "MXFP8", "FP32", "MXFP8"),
        ("mxfp6", "MXFP6", "FP32", "MXFP6"),
        ("mxfp4", "MXFP4", "FP32", "MXFP4"),
        ("nvfp4", "NVFP4", "FP32", "NVFP4"),
    ],
)
def test_named_recipes(name, gemm, weight, activations):
    assert cells(name) == (name, gemm, "FP32", weight, "N/A", "FP32", "FP32+FP32", activations)


@pytest.mark.parametrize(
    ("fields", "column", "cell"),
    [
        ({"grad": E4M3}, "weight_gradient", "FP8"),
        ({"grad": E4M3}, "communication", "FP8"),  # sent as stored
        ({"grad_comm": E4M3}, "communication", "FP8"),
        ({"grad_comm": E4M3}, "weight_gradient", "FP32"),
        ({"param": E4M3}, "weight", "FP8"),
        ({"param": E4M3, "master": FP16_SCALED}, "master_weight", "FP16"),
        ({"param": ng.CastSpec(BF16), "master": ng.CastSpec(INT8, scale=ng.ULP)}, "master_weight", "+INT8"),
        ({"param": ng.CastSpec(BF16), "master": ng.CastSpec(INT16, scale=ng.ULP)}, "master_weight", "+INT16"),
        ({"exp_avg": E4M3, "exp_avg_sq": FP16_SCALED}, "optimizer_states", "FP8+FP16"),
        ({"exp_avg": ng.CastSpec(INT8), "exp_avg_sq": ng.CastSpec(UINT8)}, "optimizer_states", "INT8+UINT8"),
        ({"input": ng.CastSpec(E2M1FN), "weight": ng.CastSpec(E2M1FN)}, "activations", "FP4"),
        ({"activation": ng.CastSpec(E2M1FN)}, "activations", "FP4"),
        ({"activation": ng.CastSpec(E2M1FN)}, "gemm", "FP8 (output, grad_input), FP8 x FP4 (grad_weight)"),
        ({"override_linear_precision": (True, True, True), "compute": "bf16"}, "gemm", "BF16"),
        ({"override_linear_precision": (True, True, True), "compute": "fp32", "tf32": True}, "gemm", "TF32"),
        ({"override_linear_precision": (True, True, True)}, "gemm", "BF16 or FP16"),
        (
            {"override_linear_precision": (False, False, True), "compute": "bf16"},
            "gemm",
            "FP8 (output, grad_input), BF16 (grad_weight)",
        ),
        ({"override_linear_precision": (False, False, True), "compute": "bf16"}, "activations", "BF16"),
        ({"weight_for_grad_input": ng.CastSpec(E2M1FN)}, "gemm", "FP8 (output, grad_weight), FP8 x FP4 (grad_input)"),
        (
            {"grad_output_for_grad_weight": ng.CastSpec(E2M1FN, ng.Block(1, 32), ng.E8M0_UP)},
            "gemm",
            "FP8 (output, grad_input), MXFP4 x FP8 (grad_weight)",
        ),
        ({"exp_avg": ng.CastSpec(E4M3FN, ng.Block(1, 32), ng.E8M0_UP)}, "optimizer_states", "MXFP8+FP32"),
        ({"weight": None, "compute": "bf16"}, "gemm", "FP8 x BF16 (output, grad_input), FP8 (grad_weight)"),
    ],
)
def test_each_cell_follows_its_role(fields, column, cell):
    assert getattr(chart_rows([ng.recipe("fp8_current", **fields)])[0], column) == cell


def test_bf16_pure_stores_and_sends_bfloat16():
    assert cells("bf16_pure") == ("bf16_pure", "BF16", "BF16", "BF16", "N/A", "BF16", "FP32+FP32", "BF16")


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("narrow8", {}, ("FP8", "FP8", "BF16", "+INT8", "FP8", "INT8+UINT8", "FP8")),
        ("narrow8", {"moment_bits": 4}, ("FP8", "FP8", "BF16", "+INT8", "FP8", "INT4+UINT4", "FP8")),
        ("narrow8_sr", {}, ("FP8", "FP8", "BF16", "N/A", "FP8", "INT8+UINT8", "FP8")),
        ("bf16_pure", {"moment_bits": 8}, ("BF16", "BF16", "BF16", "N/A", "BF16", "INT8+UINT8", "BF16")),
    ],
)
def test_recipes_of_8_bit_state(name, options, expected):
    assert cells(ng.recipe(name, **options)) == (name, *expected)


def test_markdown_is_an_aligned_table_of_the_rows():
    rows = chart_rows(["bf16", ng.DelayedScaling()])
    lines = chart_markdown(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    parsed = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert parsed[0] == HEADERS
    assert set("".join(parsed[1])) == {"-"}
    assert parsed[2:] == [dataclasses.astuple(row) for row in rows]


def test_json_holds_the_same_rows():
    rows = chart_rows()
    assert [ChartRow(**row) for row in json.loads(chart_json(rows))] == rows


def test_unknown_recipes_are_errors():
    with pytest.raises(ng.RecipeError, match="did you mean 'bf16'"):
        chart_rows(["bf61"])
