"""The named recipes: each a few lines, with its source.

A new recipe is a function with a docstring, entered in `_NAMED`; whatever parameters it has are its options.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, ParamSpec

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from narrowgauge.numerics.scaling import CURRENT, TENSOR_POW2, AmaxAlgorithm, Delayed, Scale
from narrowgauge.recipes.spec import FIELDS, CastSpec, Recipe

P = ParamSpec("P")

# what TransformerEngine calls fp8_format: the formats of (input and weight, grad_output)
FP8_FORMATS = {"HYBRID": (E4M3FN, E5M2), "E4M3": (E4M3FN, E4M3FN)}


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
def fp8_current(fp8_format: str | Format = "HYBRID") -> Recipe:
    """FP8 GEMMs scaled by the tensor at hand: torchao's tensorwise recipe, TransformerEngine's Float8CurrentScaling.

    fp8_format: "HYBRID" (input and weight E4M3, grad_output E5M2) or "E4M3" (all three).
    """
    return Recipe(name="fp8_current", **_operands(fp8_format, CURRENT))


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
        **_operands(fp8_format, scale),
    )


DelayedScaling = fp8_delayed  # TransformerEngine's name for it

_NAMED: dict[str, Callable[..., Recipe]] = {
    build.__name__: build for build in (fp32, tf32, bf16, fp16, fp16_pure, fp8_current, fp8_delayed)
}


def recipe_names() -> list[str]:
    """The names that `recipe` knows."""
    return list(_NAMED)


def recipe(name: str | Recipe, **fields: Any) -> Recipe:
    """The recipe of that name, or the given one, with `fields` replaced.

    A name also takes the options of its own function: `recipe("fp8_delayed", amax_history_len=16, tf32=True)`.
    Raises RecipeError for an unknown name or field, naming the closest valid one, and for a value that a field does
    not take.
    """
    if isinstance(name, Recipe):
        _check_names(fields, ())
        return name.replace(**fields) if fields else name
    if not isinstance(name, str):
        raise RecipeError(f"recipe {name!r}: expected a name ({', '.join(_NAMED)}) or a Recipe")
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


def _operands(fp8_format: str | Format, scale: Scale) -> dict[str, Any]:
    key = "E4M3" if fp8_format == E4M3FN else fp8_format.upper() if isinstance(fp8_format, str) else None
    if key not in FP8_FORMATS:
        hint = closest(key, FP8_FORMATS) if key else ""
        raise RecipeError(f"fp8_format={fp8_format!r}: expected 'HYBRID' or 'E4M3'{hint}")
    forward, backward = FP8_FORMATS[key]
    return {
        "input": CastSpec(forward, scale=scale),
        "weight": CastSpec(forward, scale=scale),
        "grad_output": CastSpec(backward, scale=scale),
    }
