"""Recipes from those of TransformerEngine, of the same names.

Source: TransformerEngine 2.x, transformer_engine/common/recipe/__init__.py; `interval` and `override_linear_precision`
are those of 1.x, which later versions drop without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, ScaleRule
from narrowgauge.recipes import library
from narrowgauge.recipes.compat.options import Option, fields_of, read, unknown_kind
from narrowgauge.recipes.spec import CastSpec, Recipe

BOTH = (False, True)
FORMATS = ("HYBRID", "E4M3")
ATTENTION = Option(False, "refused if true", only=(False,), remedy="attention is not quantized: leave it out")
BACKWARD = Option(
    None, "None; high_precision: `override_linear_precision=(False, True, True)`", only=(None, "high_precision"),
    remedy="'dequantized' multiplies rounded operands at full cost: high_precision multiplies exact ones",
)  # fmt: skip
COMMON = {"fp8_dpa": ATTENTION, "fp8_mha": ATTENTION, "backward_override": BACKWARD}
SCALES = "`scale`: CURRENT_POW2 where true, else CURRENT"
QUANT = {
    "power_2_scale": Option(None, SCALES, only=(None, *BOTH)),
    "amax_epsilon": Option(0.0, "refused unless 0", only=(0.0, 0), remedy="an amax of 0 has the scale 1"),
    "random_hadamard_transform": Option(None, "NVFP4: `hadamard`", only=(None, *BOTH)),
    "stochastic_rounding": Option(None, "NVFP4: `rounding` of `grad_output`", only=(None, *BOTH)),
    "fp4_2d_quantization": Option(None, "NVFP4: blocks of 16x16 for `weight`", only=(None, *BOTH)),
}
MATMUL = {
    "use_split_accumulator": Option(True, "nothing: sums are in float32 at full precision, split or not", only=BOTH)
}
_QUANTS = {
    f"fp8_quant_{name}": Option({}, f"{SCALES}, of `{role}`")
    for name, role in (("fwd_inp", "input"), ("fwd_weight", "weight"), ("bwd_grad", "grad_output"))
}
_MATMULS = {f"fp8_gemm_{name}": Option({}, "see `use_split_accumulator`") for name in ("fprop", "dgrad", "wgrad")}
_FP8_FORMAT = "HYBRID: `grad_output` E5M2; E4M3: all E4M3"
_NO_E5M2 = "TransformerEngine, too, refuses E5M2 in the forward pass"
_BLOCKS = "1: blocks of 1x128, 2: of 128x128, of `{}`"


def _format(default: str) -> Option:
    return Option(default, _FP8_FORMAT, only=FORMATS, remedy=_NO_E5M2)


DELAYED = {
    "margin": Option(0, "`margin`"),
    "fp8_format": _format("HYBRID"),
    "amax_history_len": Option(1024, "`amax_history_len`"),
    "amax_compute_algo": Option("max", "`amax_compute_algo`, also a function"),
    "scaling_factor_compute_algo": Option(None, "refused unless None", only=(None,),
                                          remedy="the scale is max / amax / 2^margin; shape it by amax_compute_algo"),
    "reduce_amax": Option(True, "refused if false", only=(True,), remedy="scales of ranks would drift apart"),
    "interval": Option(1, "`interval`"),
    "override_linear_precision": Option((False, False, False), "`override_linear_precision`"),
    **COMMON,
    "backward_override": replace(BACKWARD, only=(None,), ours="refused unless None",
                                 remedy="as in TransformerEngine; use override_linear_precision=(False, True, True)"),
}  # fmt: skip
CURRENT_SCALING = {
    "use_power_2_scales": Option(False, f"{SCALES}, of all three", only=BOTH),
    "fp8_format": _format("HYBRID"), **_QUANTS, **_MATMULS, **COMMON,
}  # fmt: skip
BLOCK_SCALING = {
    "use_f32_scales": Option(False, "`scale`: CURRENT where true, else CURRENT_POW2", only=BOTH),
    "fp8_format": _format("E4M3"), **_QUANTS, **_MATMULS,
    "x_block_scaling_dim": Option(1, _BLOCKS.format("input"), only=(1, 2)),
    "w_block_scaling_dim": Option(2, _BLOCKS.format("weight"), only=(1, 2)),
    "grad_block_scaling_dim": Option(1, _BLOCKS.format("grad_output"), only=(1, 2)),
    **COMMON,
}  # fmt: skip
MXFP8 = {
    "margin": Option(0, "refused unless 0", only=(0,), remedy="it does nothing in TransformerEngine either"),
    "fp8_format": _format("E4M3"), **COMMON,
}  # fmt: skip
_SCOPES = ("none", "weights", "activations", "all")
NVFP4 = {
    "disable_rht": Option(False, "`hadamard=None`", only=BOTH),
    "disable_stochastic_rounding": Option(False, "`rounding` of `grad_output`: NEAREST_EVEN", only=BOTH),
    "disable_2d_quantization": Option(False, "blocks of 1x16 for `weight`, too", only=BOTH),
    "row_scaled_activation": Option(False, "refused if true", only=(False,),
                                    remedy="an amax is taken of the whole tensor: leave it out"),
    "nvfp4_4over6": Option("none", "refused unless none", only=("none",),
                           remedy="blocks are scaled to 6 only: leave it out"),
    "nvfp4_4over6_e4m3_use_256": Option("all", "nothing, without nvfp4_4over6", only=_SCOPES),
    "nvfp4_4over6_err_mode": Option("MAE", "nothing, without nvfp4_4over6", only=("MAE", "MSE")),
    "fp4_format": Option("E2M1", "E2M1FN", only=("E2M1",)),
    "fp8_format": Option("E4M3", "scales in E4M3FN", only=("E4M3",)),
    "fp4_quant_fwd_inp": Option({}, "see `disable_rht`"),
    "fp4_quant_fwd_weight": Option({}, "see `disable_2d_quantization`"),
    "fp4_quant_bwd_grad": Option({}, "see `disable_rht`, `disable_stochastic_rounding`"),
    **COMMON,
}  # fmt: skip
# class of TransformerEngine -> its options
RECIPES = {
    "DelayedScaling": DELAYED,
    "Float8CurrentScaling": CURRENT_SCALING,
    "Float8BlockScaling": BLOCK_SCALING,
    "MXFP8BlockScaling": MXFP8,
    "NVFP4BlockScaling": NVFP4,
}


def from_transformer_engine(recipe: Any, kind: str | None = None) -> Recipe:
    """The recipe of a TransformerEngine recipe.

    recipe: an object of its DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling or
    NVFP4BlockScaling; or a mapping of the fields of one. kind: for a mapping, the name of its class; left out, the one
    that has all the fields. Which layers take part is no matter of these: see `include` and `first_last`.

    Raises RecipeError for an unknown class or field, naming the closest, and for a value that cannot be honoured, with
    the remedy.
    """
    fields = fields_of(recipe)
    if isinstance(recipe, Mapping):
        kind = _kind_of(fields) if kind is None else kind
        if not isinstance(kind, str) or kind not in RECIPES:
            raise RecipeError(f"TransformerEngine: unknown recipe '{kind}'{closest(str(kind), RECIPES)}")
    elif kind is not None or type(recipe).__name__ not in RECIPES:
        raise unknown_kind("TransformerEngine", recipe, RECIPES, "a mapping of fields, with kind,")
    else:
        kind = type(recipe).__name__
    values = read(kind, fields, RECIPES[kind])
    made = _READERS[kind](values)
    if values["backward_override"] == "high_precision":
        # a product in the compute dtype casts no operands, and so has none to transform
        made = made.replace(override_linear_precision=(False, True, True), hadamard=None)
    return made


def _kind_of(fields: Mapping[str, Any]) -> str:
    kinds = [kind for kind, options in RECIPES.items() if all(name in options for name in fields)]
    if len(kinds) == 1:
        return kinds[0]
    known = {name for options in RECIPES.values() for name in options}
    for name in fields:
        if name not in known:
            raise RecipeError(f"TransformerEngine: no recipe has an option '{name}'{closest(name, known)}")
    if not kinds:
        raise RecipeError(
            f"TransformerEngine: no recipe has all the options {', '.join(fields)}: give those of one of "
            f"{', '.join(RECIPES)}"
        )
    raise RecipeError(
        f"TransformerEngine: options {', '.join(fields) or '(none)'} are not those of one recipe alone: say which with "
        f"kind=, one of {', '.join(kinds)}"
    )


@dataclass(frozen=True)
class AmaxOfOne:
    """A function for TransformerEngine, which takes the histories of many tensors at once, for one.

    function: from float32 [history, tensors] to [tensors]. Called with [history], returns a 0-dimensional tensor.
    """

    function: Callable[[Tensor], Tensor]

    def __call__(self, history: Tensor) -> Tensor:
        amax = self.function(history[:, None])
        # what is no amax is left to the caller, who says what was expected
        return amax.reshape(()) if isinstance(amax, Tensor) and amax.numel() == 1 else amax

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "function")


def _delayed(values: dict[str, Any]) -> Recipe:
    algorithm: Any = values["amax_compute_algo"]
    if callable(algorithm):
        algorithm = AmaxOfOne(values["amax_compute_algo"])
    return library.fp8_delayed(
        margin=values["margin"],
        interval=values["interval"],
        fp8_format=values["fp8_format"],
        amax_history_len=values["amax_history_len"],
        amax_compute_algo=algorithm,
        override_linear_precision=values["override_linear_precision"],
    )


def _current(values: dict[str, Any]) -> Recipe:
    rules = _rules("Float8CurrentScaling", values, default=values["use_power_2_scales"], set_to=True)
    recipe = library.fp8_current(values["fp8_format"])
    return recipe.replace(**{role: replace(getattr(recipe, role), scale=rule) for role, rule in rules.items()})


def _block(values: dict[str, Any]) -> Recipe:
    rules = _rules("Float8BlockScaling", values, default=not values["use_f32_scales"], set_to=False)
    formats = library.fp8_current(values["fp8_format"])  # the same choice of formats
    tiles = {1: Block(1, 128), 2: Block(128, 128)}
    dims = {"input": "x", "weight": "w", "grad_output": "grad"}
    casts = {
        role: CastSpec(getattr(formats, role).format, tiles[values[f"{dim}_block_scaling_dim"]], rules[role])
        for role, dim in dims.items()
    }
    return library.fp8_block().replace(**casts)


def _rules(kind: str, values: dict[str, Any], *, default: bool, set_to: bool) -> dict[str, ScaleRule]:
    """The scale of each operand: what its own QParams say, where they differ from the class's default, else `default`.

    TransformerEngine makes the default QParams before it sees the recipe's own flag, and then reads the QParams alone:
    here either of the two acts.
    """
    rules = {}
    for name, role in (("fwd_inp", "input"), ("fwd_weight", "weight"), ("bwd_grad", "grad_output")):
        quant = read(f"{kind}.fp8_quant_{name}", fields_of(values[f"fp8_quant_{name}"]), QUANT)
        for option in ("random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization"):
            if quant[option]:
                raise RecipeError(f"{kind}.fp8_quant_{name}: {option}=True cannot be honoured: it is for NVFP4")
        pow2 = set_to if quant["power_2_scale"] is set_to else default
        rules[role] = CURRENT_POW2 if pow2 else CURRENT
    for name in _MATMULS:
        read(f"{kind}.{name}", fields_of(values[name]), MATMUL)
    return rules


def _mxfp8(values: dict[str, Any]) -> Recipe:
    return library.mxfp8(values["fp8_format"])


def _nvfp4(values: dict[str, Any]) -> Recipe:
    flags = {
        "random_hadamard_transform": not values["disable_rht"],
        "stochastic_rounding": not values["disable_stochastic_rounding"],
        "fp4_2d_quantization": not values["disable_2d_quantization"],
    }
    acting = {"fwd_inp": ("random_hadamard_transform",), "fwd_weight": ("fp4_2d_quantization",),
              "bwd_grad": ("random_hadamard_transform", "stochastic_rounding")}  # fmt: skip
    for name, options in acting.items():
        what = f"NVFP4BlockScaling.fp4_quant_{name}"
        quant = read(what, fields_of(values[f"fp4_quant_{name}"]), QUANT)
        wanted = {option: flag if option in options else False for option, flag in flags.items()}
        for option, expected in {**wanted, "power_2_scale": False}.items():
            if quant[option] not in (None, expected):
                raise RecipeError(
                    f"{what}: {option}={quant[option]} cannot be honoured: expected {expected}, as the disable_ flags "
                    "say; set those instead"
                )
    recipe = library.nvfp4(
        hadamard=flags["random_hadamard_transform"], stochastic=flags["stochastic_rounding"], first_last=0
    )
    return recipe if flags["fp4_2d_quantization"] else recipe.replace(weight=recipe.input)


_READERS: dict[str, Callable[[dict[str, Any]], Recipe]] = {
    "DelayedScaling": _delayed,
    "Float8CurrentScaling": _current,
    "Float8BlockScaling": _block,
    "MXFP8BlockScaling": _mxfp8,
    "NVFP4BlockScaling": _nvfp4,
}
