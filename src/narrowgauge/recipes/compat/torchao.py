"""Recipes from torchao's configurations for training: torchao.float8, and its prototypes of MX, NVFP4 and blocks.

Source: torchao 0.18, torchao/float8/config.py and torchao/prototype/moe_training/.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics.formats import E4M3FN, E5M2, Format
from narrowgauge.numerics.granularity import PER_ROW, PER_TENSOR
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, ScaleRule
from narrowgauge.recipes import library
from narrowgauge.recipes.compat.options import Option, fields_of, plain, read, unknown_kind
from narrowgauge.recipes.fields import Emulation
from narrowgauge.recipes.spec import CastSpec, Recipe

BOTH = (False, True)
NEVER_NEEDED = "nothing: sizes of any kind are taken as they are"

CAST = {
    "scaling_type": Option("dynamic", "dynamic: a cast; disabled: that product runs in the compute dtype",
                           only=("dynamic", "disabled"), remedy="delayed scaling is ng.DelayedScaling(...)"),
    "scaling_granularity": Option("tensorwise", "tensorwise: PER_TENSOR; axiswise: PER_ROW",
                                  only=("tensorwise", "axiswise")),
    "target_dtype": Option(None, "E4M3FN or E5M2", only=(None, torch.float8_e4m3fn, torch.float8_e5m2),
                           remedy="the fnuz formats of AMD's MI300 are none of ours"),
}  # fmt: skip
GEMM = {"use_fast_accum": Option(False, "nothing: sums are in float32 at full precision, fast or not", only=BOTH)}
FLOAT8_LINEAR = {
    "cast_config_input": Option({}, "`input`"),
    "cast_config_input_for_grad_weight": Option(None, "`activation`"),
    "cast_config_weight": Option({}, "`weight`"),
    "cast_config_weight_for_grad_input": Option(None, "`weight_for_grad_input`"),
    "cast_config_grad_output": Option({}, "`grad_output`"),
    "cast_config_grad_output_for_grad_weight": Option(None, "`grad_output_for_grad_weight`"),
    "gemm_config_output": Option({}, "see `use_fast_accum`"),
    "gemm_config_grad_input": Option({}, "see `use_fast_accum`"),
    "gemm_config_grad_weight": Option({}, "see `use_fast_accum`"),
    "enable_fsdp_float8_all_gather": Option(False, "a warning: this version shards no parameters, so none is gathered",
                                            only=BOTH),
    "pad_inner_dim": Option(False, NEVER_NEEDED, only=BOTH),
    "emulate": Option(False, "`emulation=\"exact\"`, where the device lacks FP8; one that has it multiplies natively",
                      only=BOTH),
    "force_recompute_fp8_weight_in_bwd": Option(False, "refused if true", only=(False,),
                                                remedy="torchao has deprecated it, and it does nothing: leave it out"),
    "round_scales_to_power_of_2": Option(False, "`scale`: CURRENT_POW2, else CURRENT", only=BOTH),
}  # fmt: skip
OUT_DTYPE = Option(torch.bfloat16, "nothing: outputs are bfloat16 inside `autocast`", only=(torch.bfloat16, None),
                   remedy="outputs have the compute dtype: ng.recipe(recipe, compute=...)")  # fmt: skip
VERSION = Option(1, "refused unless 1", only=(1,), remedy="later versions of this configuration are not known")
KERNELS = "nothing: `ng.report` says what runs on this device"
MXFP8 = {
    "kernel_preference": Option("auto", f"emulated: `emulation=\"exact\"`; auto: {KERNELS}", only=("auto", "emulated"),
                                remedy="kernels follow from the device"),
    "out_dtype": OUT_DTYPE,
    "wgrad_with_hp": Option(False, "`override_linear_precision=(False, False, True)`", only=BOTH),
    "scale_calculation_mode": Option("rceil", "rceil: E8M0_UP; floor: E8M0_FLOOR", only=("rceil", "floor"),
                                     remedy="ceil and even are none of ours: rceil never saturates"),
    "pad_token_groups_for_grouped_mm": Option(False, NEVER_NEEDED, only=BOTH),
    "version": VERSION,
}  # fmt: skip
FLOAT8_OP = {
    "float8_dtype": Option(torch.float8_e4m3fn, "E4M3FN", only=(torch.float8_e4m3fn,),
                           remedy="the fnuz formats of AMD's MI300 are none of ours"),
    "out_dtype": OUT_DTYPE,
    "pad_token_groups_for_grouped_mm": Option(False, NEVER_NEEDED, only=BOTH),
    "float8_linear_recipe": Option("rowwise", "a recipe name, as above",
                                   only=("tensorwise", "rowwise", "rowwise_with_gw_hp")),
    "version": VERSION,
}  # fmt: skip
NVFP4 = {
    "kernel_preference": Option("triton", KERNELS, only=("triton",), remedy="torchao itself takes no other"),
    "process_group": Option(None, "refused unless None", only=(None,),
                            remedy="tensor parallel layers are not a part of this version"),
    "world_size": Option(None, "refused unless None", only=(None,),
                         remedy="tensor parallel layers are not a part of this version"),
    "rht_sign_vector": Option(None, "`hadamard`: these signs; None: one fixed set, not one a layer"),
    "version": VERSION,
}  # fmt: skip
# class of torchao -> its options
CONFIGS = {
    "Float8LinearConfig": FLOAT8_LINEAR,
    "MXFP8TrainingOpConfig": MXFP8,
    "Float8TrainingOpConfig": FLOAT8_OP,
    "NVFP4TrainingConfig": NVFP4,
    "Float8BlockwiseLinearConfig": {"version": VERSION},
}
_EXACT = {"emulation": Emulation.EXACT}
# recipe names of Float8LinearConfig, Float8TrainingOpConfig and MXFP8TrainingOpConfig -> name and fields of ours
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensorwise": ("fp8_current", {}),
    "rowwise": ("fp8_rowwise", {}),
    "rowwise_with_gw_hp": ("fp8_rowwise_gw_hp", {}),
    "fp8_rowwise": ("fp8_rowwise", {}),
    "mxfp8_rceil": ("mxfp8", {}),
    "mxfp8_rceil_wgrad_with_hp": ("mxfp8", {"override_linear_precision": (False, False, True)}),
    "mxfp8_emulated_rceil": ("mxfp8", _EXACT),
}


def from_torchao(config: Any) -> Recipe:
    """The recipe of a torchao configuration for training.

    config: a recipe name ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8_rceil", ...), a member of torchao's
    enums of them, a Float8LinearConfig (or a mapping of its fields), MXFP8TrainingOpConfig, Float8TrainingOpConfig,
    NVFP4TrainingConfig or Float8BlockwiseLinearConfig. Which layers take part is no matter of these: see `include`.

    Raises RecipeError for an unknown name, option or class, naming the closest, and for a value that cannot be
    honoured, with the remedy. Warns where an option has nothing to act on.
    """
    config = plain(config)
    if isinstance(config, str):
        if config not in NAMES:
            raise RecipeError(f"torchao: unknown recipe name '{config}'{closest(config, NAMES)}")
        name, fields = NAMES[config]
        return library.recipe(name, **fields)
    kind = "Float8LinearConfig" if isinstance(config, Mapping) else type(config).__name__
    if kind not in CONFIGS:
        raise unknown_kind("torchao", config, CONFIGS, "a recipe name")
    return _READERS[kind](read(kind, fields_of(config), CONFIGS[kind]))


def _float8_linear(values: dict[str, Any]) -> Recipe:
    for role in ("output", "grad_input", "grad_weight"):
        name = f"gemm_config_{role}"
        read(f"Float8LinearConfig.{name}", fields_of(values[name]), GEMM)
    if values["enable_fsdp_float8_all_gather"]:
        warnings.warn(
            "enable_fsdp_float8_all_gather=True: this version shards no parameters, so there is nothing to gather",
            stacklevel=3,
        )
    rule = CURRENT_POW2 if values["round_scales_to_power_of_2"] else CURRENT
    input_, activation = _both_uses(values, "input", "for_grad_weight", E4M3FN, rule)
    weight, for_grad_input = _both_uses(values, "weight", "for_grad_input", E4M3FN, rule)
    grad_output, for_grad_weight = _both_uses(values, "grad_output", "for_grad_weight", E5M2, rule)
    products = {"output": (input_, weight), "grad_input": (grad_output, for_grad_input),
                "grad_weight": (activation, for_grad_weight)}  # fmt: skip
    for product, operands in products.items():
        if (operands[0] is None) != (operands[1] is None):
            raise RecipeError(f"Float8LinearConfig: one operand of {product} is disabled and the other is not: do both")
    recipe = Recipe(
        name="torchao",
        override_linear_precision=tuple(operands[0] is None for operands in products.values()),  # type: ignore[arg-type]
        # where the first use is disabled its product does not ask, and the second is the operand's cast
        input=input_ or activation,
        weight=weight or for_grad_input,
        grad_output=grad_output or for_grad_weight,
        activation=_if_other(activation, input_),
        weight_for_grad_input=_if_other(for_grad_input, weight),
        grad_output_for_grad_weight=_if_other(for_grad_weight, grad_output),
        emulation=Emulation.EXACT if values["emulate"] else Emulation.FAST,
    )
    return _named(recipe)


def _both_uses(
    values: dict[str, Any], operand: str, second: str, default: Format, rule: ScaleRule
) -> tuple[CastSpec | None, CastSpec | None]:
    """The casts of an operand in its first product and in its second; None where that use is disabled."""
    first_name = f"cast_config_{operand}"
    second_name = f"{first_name}_{second}"
    second_config = values[first_name] if values[second_name] is None else values[second_name]
    return _cast(first_name, values[first_name], default, rule), _cast(second_name, second_config, default, rule)


def _cast(name: str, config: Any, default: Format, rule: ScaleRule) -> CastSpec | None:
    values = read(f"Float8LinearConfig.{name}", fields_of(config), CAST)
    if values["scaling_type"] == "disabled":
        return None
    formats: dict[Any, Format] = {None: default, torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}
    granularity = PER_ROW if values["scaling_granularity"] == "axiswise" else PER_TENSOR
    return CastSpec(formats[values["target_dtype"]], granularity, rule)


def _if_other(second: CastSpec | None, first: CastSpec | None) -> CastSpec | None:
    return None if first is None or second == first else second


def _named(recipe: Recipe) -> Recipe:
    """The recipe of ours that differs in nothing but the name, or the given one."""
    for name in ("fp8_current", "fp8_rowwise", "fp8_rowwise_gw_hp"):
        if library.recipe(name).replace(name=recipe.name, emulation=recipe.emulation) == recipe:
            return recipe.replace(name=name)
    return recipe


def _mxfp8(values: dict[str, Any]) -> Recipe:
    emulated = values["kernel_preference"] == "emulated"
    return library.mxfp8(scale=E8M0_UP if values["scale_calculation_mode"] == "rceil" else E8M0_FLOOR).replace(
        override_linear_precision=(False, False, values["wgrad_with_hp"]),
        emulation=Emulation.EXACT if emulated else Emulation.FAST,
    )


def _nvfp4(values: dict[str, Any]) -> Recipe:
    signs = values["rht_sign_vector"]
    if isinstance(signs, torch.Tensor):
        signs = signs.tolist()
    hadamard = Hadamard() if signs is None else Hadamard(tuple(signs))
    return library.nvfp4(hadamard=hadamard, first_last=0)


_READERS: dict[str, Callable[[dict[str, Any]], Recipe]] = {
    "Float8LinearConfig": _float8_linear,
    "MXFP8TrainingOpConfig": _mxfp8,
    "Float8TrainingOpConfig": lambda values: from_torchao(values["float8_linear_recipe"]),
    "NVFP4TrainingConfig": _nvfp4,
    "Float8BlockwiseLinearConfig": lambda values: library.fp8_block(scale=CURRENT),
}
