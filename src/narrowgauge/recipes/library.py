"""The named recipes: each a few lines, with its source.

A new recipe is a function with a docstring, entered in `_NAMED`; whatever parameters it has are its options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, ParamSpec

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, FP16, FP32, INT8, Format
from narrowgauge.numerics.granularity import PER_ROW, PER_TENSOR, Block
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.numerics.rounding import STOCHASTIC
from narrowgauge.numerics.scaling import (
    CURRENT,
    CURRENT_POW2,
    E8M0_UP,
    NVFP4,
    TENSOR_POW2,
    ULP,
    AmaxAlgorithm,
    Delayed,
    ScaleRule,
)
from narrowgauge.recipes import casts
from narrowgauge.recipes import fields as check
from narrowgauge.recipes.files import is_file_name, read_recipe
from narrowgauge.recipes.spec import FIELDS, CastSpec, Recipe

P = ParamSpec("P")


def _named_options(build: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """Let `build` refuse an unknown keyword with the closest valid one. Its signature stays what it is."""

    @functools.wraps(build)
    def checked(*args: P.args, **options: P.kwargs) -> Recipe:
        valid = inspect.signature(build).parameters
        for option in options:
            if option not in valid:
                raise RecipeError(f"{build.__name__} has no option '{option}'{closest(option, valid)}")
        return build(*args, **options)

    return checked


def fp32() -> Recipe:
    """Everything in float32: the yardstick."""
    return Recipe(name="fp32", compute=FP32)


def tf32() -> Recipe:
    """float32 storage, products of operands rounded to TF32 (NVIDIA A100 whitepaper, 2020)."""
    return Recipe(name="tf32", compute=FP32, tf32=True)


def bf16() -> Recipe:
    """Mixed precision in bfloat16 with float32 parameters (Kalamkar et al. 2019, arXiv:1905.12322)."""
    return Recipe(name="bf16", compute=BF16)


def fp16() -> Recipe:
    """Mixed precision in float16: loss scaling, float32 parameters (Micikevicius et al. 2018, arXiv:1710.03740)."""
    return Recipe(name="fp16", compute=FP16)


def fp16_pure() -> Recipe:
    """As fp16, with the parameters stored in float16 under a power-of-two scale (FP8-LM, arXiv:2310.18313)."""
    return Recipe(name="fp16_pure", compute=FP16, param=CastSpec(FP16, scale=TENSOR_POW2))


@_named_options
def bf16_pure(moment_bits: int = 32) -> Recipe:
    """All in bfloat16 but the moments; updates are rounded stochastically (Zamirai et al. 2020, arXiv:2010.06192).

    moment_bits: 32, 8 or 4 for each of the two moments.
    """
    return Recipe(
        name="bf16_pure",
        compute=BF16,
        param=CastSpec(BF16, rounding=STOCHASTIC),
        grad=CastSpec(BF16),
        **casts.moments(moment_bits),
    )


@_named_options
def fp8_current(fp8_format: str | Format = "HYBRID") -> Recipe:
    """FP8 GEMMs scaled by the tensor at hand: torchao's tensorwise recipe, TransformerEngine's Float8CurrentScaling.

    fp8_format: "HYBRID" (input and weight E4M3, grad_output E5M2) or "E4M3" (all three).
    """
    return Recipe(name="fp8_current", **casts.operands(fp8_format, CURRENT))


@_named_options
def fp8_delayed(
    margin: float = 0,
    interval: int = 1,
    fp8_format: str | Format = "HYBRID",
    amax_history_len: int = 1024,
    amax_compute_algo: str | AmaxAlgorithm = "max",
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
) -> Recipe:
    """FP8 GEMMs scaled by the amax history of earlier steps (TransformerEngine's DelayedScaling, and its defaults).

    margin: the scale leaves 2^margin of headroom. interval: steps between two renewals of the scale.
    fp8_format: "HYBRID" (input and weight E4M3, grad_output E5M2) or "E4M3" (all three).
    amax_history_len: steps remembered. amax_compute_algo: "max" or "most_recent" of the history, or a function from
    it (float32 [amax_history_len], slot 0 the newest) to an amax (0-dimensional).
    override_linear_precision: (fprop, dgrad, wgrad); True runs that GEMM in the compute dtype.
    """
    scale = Delayed(margin, interval, amax_history_len, amax_compute_algo)
    return Recipe(
        name="fp8_delayed",
        override_linear_precision=override_linear_precision,
        **casts.operands(fp8_format, scale),
    )


DelayedScaling = fp8_delayed  # TransformerEngine's name for it


@_named_options
def fp8_rowwise(scale: str | ScaleRule = CURRENT_POW2) -> Recipe:
    """FP8 GEMMs, all E4M3, a scale for each row or column along what a product sums over (torchao's rowwise recipe).

    scale: CURRENT_POW2 (torchao's) or CURRENT (float32).
    """
    spec = CastSpec(E4M3FN, PER_ROW, check.scale(scale, casts.FLOAT_SCALES))
    return Recipe(name="fp8_rowwise", input=spec, weight=spec, grad_output=spec)


@_named_options
def fp8_rowwise_gw_hp(scale: str | ScaleRule = CURRENT_POW2) -> Recipe:
    """As fp8_rowwise, with grad_weight in the compute dtype and the weight of grad_input scaled per tensor.

    torchao's rowwise_with_gw_hp: input, weight and grad_output are each cast along one dimension only. scale:
    CURRENT_POW2 (torchao's) or CURRENT (float32).
    """
    rule = check.scale(scale, casts.FLOAT_SCALES)
    return fp8_rowwise(rule).replace(
        name="fp8_rowwise_gw_hp",
        weight_for_grad_input=CastSpec(E4M3FN, PER_TENSOR, rule),
        override_linear_precision=(False, False, True),
    )


@_named_options
def fp8_block(scale: str | ScaleRule = CURRENT_POW2) -> Recipe:
    """FP8 GEMMs, all E4M3: blocks of 1x128 for input and grad_output, 128x128 for weights (DeepSeek-V3,
    arXiv:2412.19437, section 3.3.2).

    scale: CURRENT_POW2, whose products round once, or CURRENT (float32).
    """
    rule = check.scale(scale, casts.FLOAT_SCALES)
    row = CastSpec(E4M3FN, Block(1, 128), rule)
    return Recipe(name="fp8_block", input=row, weight=CastSpec(E4M3FN, Block(128, 128), rule), grad_output=row)


@_named_options
def mxfp8(fp8_format: str | Format = "E4M3", scale: str | ScaleRule = E8M0_UP) -> Recipe:
    """MXFP8 GEMMs, E4M3 in blocks of 1x32 with scales rounded up (OCP MX v1.0; Mishra et al. 2025, arXiv:2506.08027).

    fp8_format: "E4M3" or "HYBRID" (grad_output E5M2). scale: E8M0_UP, or E8M0_FLOOR, OCP's rule, which saturates.
    """
    forward, backward = casts.fp8_formats(fp8_format)
    return Recipe(name="mxfp8", **casts.mx(forward, backward, scale))


@_named_options
def mxfp6(fp6_format: str | Format = "E3M2", scale: str | ScaleRule = E8M0_UP) -> Recipe:
    """MXFP6 GEMMs, in blocks of 1x32 (OCP MX v1.0; E3M2 in training: Rouhani et al. 2023, arXiv:2310.10537).

    fp6_format: "E3M2" or "E2M3". scale: as in mxfp8.
    """
    fmt = check.choice("fp6_format", fp6_format, casts.FP6_FORMATS)
    return Recipe(name="mxfp6", **casts.mx(fmt, fmt, scale))


@_named_options
def mxfp4(scale: str | ScaleRule = E8M0_UP, hadamard: bool | Hadamard | None = True, stochastic: bool = True) -> Recipe:
    """MXFP4 GEMMs, E2M1 in blocks of 1x32 (OCP MX v1.0); Hadamard transform and stochastic rounding as in Tseng et al.
    2025, arXiv:2502.20586.

    scale: as in mxfp8. hadamard, stochastic: as in nvfp4.
    """
    return Recipe(name="mxfp4", hadamard=casts.transform(hadamard), **casts.mx(E2M1FN, E2M1FN, scale, stochastic))


@_named_options
def nvfp4(
    hadamard: bool | Hadamard | None = True,
    stochastic: bool = True,
    first_last: float | tuple[float, float] = (0.032, 0.129),
) -> Recipe:
    """NVFP4 GEMMs, E2M1 in blocks of 1x16, weights 16x16 (NVIDIA 2025, arXiv:2509.25149).

    hadamard: transform the operands of grad_weight; or which signs. stochastic: round grad_output so.
    first_last: layers kept in the compute dtype at the (start, end); the paper keeps the first 2 and the last 8 of 62
    blocks, which have as many layers each.
    """
    row = CastSpec(E2M1FN, Block(1, 16), NVFP4)
    return Recipe(
        name="nvfp4",
        input=row,
        weight=CastSpec(E2M1FN, Block(16, 16), NVFP4),
        grad_output=casts.rounded(row, stochastic),
        hadamard=casts.transform(hadamard),
        first_last=check.first_last(first_last),
    )


def fp8_lm_o1() -> Recipe:
    """FP8-LM's first level: scaled FP16 weights, FP8 gradients (Peng et al. 2023, arXiv:2310.18313; MS-AMP)."""
    return Recipe(name="fp8_lm_o1", param=casts.SCALED_FP16, **casts.FP8_LM)


def fp8_lm_o2() -> Recipe:
    """As fp8_lm_o1, with the first moment in FP8 and the second in scaled FP16: 6 bytes a parameter."""
    return Recipe(name="fp8_lm_o2", param=casts.SCALED_FP16, **casts.FP8_LM, **casts.FP8_LM_MOMENTS)


def fp8_lm_o3() -> Recipe:
    """As fp8_lm_o2, with FP8 weights beside a scaled FP16 master: 7 bytes a parameter, weights gathered in one."""
    return Recipe(
        name="fp8_lm_o3", param=casts.TENSOR_E4M3, master=casts.SCALED_FP16, **casts.FP8_LM, **casts.FP8_LM_MOMENTS
    )


@_named_options
def narrow8(moment_bits: int = 8) -> Recipe:
    """Ours: FP8 GEMMs, bfloat16 parameters with an 8-bit residual, 8-bit gradients and moments: 6.1 bytes a parameter.

    moment_bits: 8, 4 or 32 for each of the two moments; 4 saves one byte more.
    """
    return Recipe(name="narrow8", param=CastSpec(BF16), master=CastSpec(INT8, scale=ULP), **casts.narrow(moment_bits))


@_named_options
def narrow8_sr(moment_bits: int = 8) -> Recipe:
    """As narrow8, without the residual: updates are rounded to bfloat16 stochastically; 5.1 bytes a parameter.

    moment_bits: as in narrow8.
    """
    return Recipe(name="narrow8_sr", param=CastSpec(BF16, rounding=STOCHASTIC), **casts.narrow(moment_bits))


_NAMED: dict[str, Callable[..., Recipe]] = {
    build.__name__: build
    for build in (
        fp32, tf32, bf16, bf16_pure, fp16, fp16_pure, fp8_current, fp8_delayed, fp8_rowwise, fp8_rowwise_gw_hp,
        fp8_block, mxfp8, mxfp6, mxfp4, nvfp4, fp8_lm_o1, fp8_lm_o2, fp8_lm_o3, narrow8, narrow8_sr,
    )
}  # fmt: skip


def recipe_names() -> list[str]:
    """The names that `recipe` knows."""
    return list(_NAMED)


def recipe(name: str | Recipe, **fields: Any) -> Recipe:
    """The recipe of that name, or in the file of that name (.yaml, .yml, .json), or the given one; `fields` replaced.

    A name also takes the options of its own function: `recipe("fp8_delayed", amax_history_len=16, tf32=True)`.
    Raises RecipeError for an unknown name or field, naming the closest valid one, and for a value that a field does
    not take.
    """
    if isinstance(name, Recipe):
        _check_names(fields, ())
        return name.replace(**fields) if fields else name
    if not isinstance(name, str):
        raise RecipeError(f"recipe {name!r}: expected a name ({', '.join(_NAMED)}), a file's, or a Recipe")
    if is_file_name(name):
        return recipe(read_recipe(name), **fields)
    if name not in _NAMED:
        raise RecipeError(f"unknown recipe '{name}'{closest(name, _NAMED)}")
    build = _NAMED[name]
    own = inspect.signature(build).parameters
    _check_names(fields, own)
    built = build(**{field: value for field, value in fields.items() if field in own})
    return built.replace(**{field: value for field, value in fields.items() if field not in own})


def _check_names(fields: dict[str, Any], own: Collection[str]) -> None:
    """Refuse an option of another named recipe by saying whose it is, and any other unknown field by the closest."""
    for field in fields:
        if field in own or field in FIELDS:
            continue
        for other, build in _NAMED.items():
            if field in inspect.signature(build).parameters:
                raise RecipeError(f"'{field}' is an option of '{other}' by name: recipe('{other}', {field}=...)")
        raise RecipeError(f"unknown recipe field '{field}'{closest(field, [*own, *FIELDS])}")
