"""The named recipes of rows and blocks: casts of every operand, options, and what their sources say."""

import dataclasses

import pytest

import narrowgauge as ng
from narrowgauge.numerics.formats import BF16, E2M1FN, E2M3FN, E3M2FN, E4M3FN, E5M2
from narrowgauge.recipes.select import Candidate, select
from narrowgauge.recipes.spec import GEMMS, OPERANDS

ROW = ng.CastSpec(E4M3FN, ng.PER_ROW, ng.CURRENT_POW2)
MX = ng.Block(1, 32)


def operands(recipe):
    return recipe.input, recipe.weight, recipe.grad_output


def test_rowwise():
    assert operands(ng.recipe("fp8_rowwise")) == (ROW, ROW, ROW)
    float32 = dataclasses.replace(ROW, scale=ng.CURRENT)
    assert operands(ng.recipe("fp8_rowwise", scale="current")) == (float32, float32, float32)


def test_rowwise_with_a_wide_grad_weight():
    recipe = ng.recipe("fp8_rowwise_gw_hp")
    assert operands(recipe) == (ROW, ROW, ROW)
    assert recipe.operand("grad_input", "weight") == ng.CastSpec(E4M3FN, scale=ng.CURRENT_POW2)
    assert [recipe.operand("grad_weight", role) for role in OPERANDS["grad_weight"]] == [None, None]
    assert ng.recipe("fp8_rowwise_gw_hp", scale=ng.CURRENT).weight_for_grad_input == ng.CastSpec(E4M3FN)


def test_torchaos_configurations_say_the_same():
    config = pytest.importorskip("torchao.float8.config")
    granularity = {"axiswise": ng.PER_ROW, "tensorwise": ng.PER_TENSOR}
    for theirs, ours in (("rowwise", "fp8_rowwise"), ("rowwise_with_gw_hp", "fp8_rowwise_gw_hp")):
        found = config.Float8LinearConfig.from_recipe_name(theirs)
        assert found.round_scales_to_power_of_2
        recipe = ng.recipe(ours)
        for gemm in GEMMS:
            for role in OPERANDS[gemm]:
                second = f"cast_config_{role}_for_{gemm}"
                cast = getattr(found, second, None) or getattr(found, f"cast_config_{role}")
                spec = recipe.operand(gemm, role)
                if cast.scaling_type.value == "disabled":
                    assert spec is None
                else:
                    assert spec == ng.CastSpec(E4M3FN, granularity[cast.scaling_granularity.value], ng.CURRENT_POW2)
                    assert cast.target_dtype == E4M3FN.dtype


def test_deepseek_blocks():
    tile = ng.CastSpec(E4M3FN, ng.Block(1, 128), ng.CURRENT_POW2)
    assert operands(ng.recipe("fp8_block")) == (tile, ng.CastSpec(E4M3FN, ng.Block(128, 128), ng.CURRENT_POW2), tile)
    assert {spec.scale for spec in operands(ng.recipe("fp8_block", scale="CURRENT"))} == {ng.CURRENT}


def test_mx_recipes():
    e4m3, e5m2 = (ng.CastSpec(fmt, MX, ng.E8M0_UP) for fmt in (E4M3FN, E5M2))
    assert operands(ng.recipe("mxfp8")) == (e4m3, e4m3, e4m3)
    assert operands(ng.recipe("mxfp8", fp8_format="HYBRID")) == (e4m3, e4m3, e5m2)
    for options, fmt in (({}, E3M2FN), ({"fp6_format": "E2M3"}, E2M3FN), ({"fp6_format": E2M3FN}, E2M3FN)):
        assert operands(ng.recipe("mxfp6", **options)) == (ng.CastSpec(fmt, MX, ng.E8M0_UP),) * 3
    for name in ("mxfp8", "mxfp6", "mxfp4"):
        assert {spec.scale for spec in operands(ng.recipe(name, scale="E8M0_FLOOR"))} == {ng.E8M0_FLOOR}


def test_mxfp4_and_its_ablations():
    plain = ng.CastSpec(E2M1FN, MX, ng.E8M0_UP)
    random = dataclasses.replace(plain, rounding=ng.STOCHASTIC)
    recipe = ng.recipe("mxfp4")
    assert operands(recipe) == (plain, plain, random)
    assert recipe.hadamard == ng.Hadamard()
    assert operands(ng.recipe("mxfp4", stochastic=False)) == (plain, plain, plain)
    assert ng.recipe("mxfp4", hadamard=False).hadamard is None


def test_nvfp4():
    recipe = ng.recipe("nvfp4")
    row = ng.CastSpec(E2M1FN, ng.Block(1, 16), ng.NVFP4)
    random = dataclasses.replace(row, rounding=ng.STOCHASTIC)
    assert operands(recipe) == (row, ng.CastSpec(E2M1FN, ng.Block(16, 16), ng.NVFP4), random)
    assert recipe.operand("grad_input", "grad_output") == recipe.operand("grad_weight", "grad_output") == random
    assert recipe.operand("grad_weight", "input") == row
    assert recipe.hadamard == ng.Hadamard()


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({"hadamard": False}, {"hadamard"}),
        ({"hadamard": None}, {"hadamard"}),
        ({"hadamard": ng.Hadamard.seeded(1)}, {"hadamard"}),
        ({"stochastic": False}, {"grad_output"}),
        ({"first_last": 0}, {"first_last"}),
        ({"first_last": (1, 2)}, {"first_last"}),
    ],
)
def test_each_ablation_of_nvfp4_is_one_argument(options, changed):
    full, ablated = ng.recipe("nvfp4"), ng.recipe("nvfp4", **options)
    fields = [f.name for f in dataclasses.fields(full)]
    assert {field for field in fields if getattr(full, field) != getattr(ablated, field)} == changed


def test_nvfp4_keeps_the_papers_layers():
    # 62 blocks of two linear layers each: the first 2 and the last 8 blocks stay, 16 % of the layers
    layers = [Candidate(f"{block}.{name}", 64, 64) for block in range(62) for name in ("up", "down")]
    kept = [s.name for s in select(layers, ng.recipe("nvfp4")) if not s.quantized]
    assert kept == [c.name for c in (*layers[:4], *layers[-16:])]
    assert round(len(kept) / len(layers), 2) == 0.16


def test_bf16_pure():
    recipe = ng.recipe("bf16_pure")
    assert not recipe.quantizes_gemms
    assert recipe.compute is BF16
    assert recipe.param == ng.CastSpec(BF16, rounding=ng.STOCHASTIC)
    assert recipe.grad == ng.CastSpec(BF16)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("fp8_rowwise", {"scale": "E8M0_UP"}, "scale='E8M0_UP': expected 'CURRENT_POW2' or 'CURRENT'"),
        ("fp8_block", {"scale": "CURENT"}, "scale='CURENT'.*did you mean 'CURRENT'"),
        ("fp8_block", {"scale": ng.NVFP4}, "scale=NVFP4: expected"),
        ("mxfp8", {"scale": "CURRENT"}, "expected 'E8M0_UP' or 'E8M0_FLOOR'"),
        ("mxfp8", {"fp8_format": "E5M2"}, "expected 'HYBRID' or 'E4M3'"),
        ("mxfp6", {"fp6_format": "E3M3"}, "fp6_format='E3M3': expected 'E3M2' or 'E2M3'"),
        ("nvfp4", {"stochastic": 1}, "stochastic=1: expected True or False"),
        ("nvfp4", {"hadamard": "yes"}, "hadamard='yes': expected True or False"),
        ("nvfp4", {"first_last": 1.5}, "first_last=1.5: expected a number of layers, a share"),
        ("nvfp4", {"override_linear_precision": (False, False, True)}, "use hadamard=None"),
    ],
)
def test_bad_options_say_what_is_expected(name, options, expected):
    with pytest.raises(ng.RecipeError, match=expected):
        ng.recipe(name, **options)
