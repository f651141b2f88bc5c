"""What each field of a recipe accepts: every value is brought into its one form, or refused with the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import torch

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics import formats
from narrowgauge.numerics.formats import BF16, E4M3FN, E5M2, FP16, FP32, Format
from narrowgauge.numerics.scaling import ScaleRule


class Emulation(StrEnum):
    """FAST: products of codes carried in bf16 leave one extra bf16 rounding; EXACT: float32 products, no rounding."""

    FAST = "fast"
    EXACT = "exact"


class Evaluation(StrEnum):
    """What quantized layers run in while the model is in eval mode."""

    SAME = "same"
    COMPUTE = "compute"


class GradAccumulation(StrEnum):
    """How a second backward adds to gradients of at most 8 bits: in float32, cast once, or each time stochastically."""

    EXACT = "exact"
    STOCHASTIC = "stochastic"


AUTO = "auto"
MIN_STATE_SIZE = 4096  # bitsandbytes' threshold for 8-bit states
E = TypeVar("E", bound=StrEnum)
V = TypeVar("V")

_COMPUTE = {"auto": AUTO, "fp32": FP32, "bf16": BF16, "fp16": FP16}
_EVALUATION_FORMATS = {"E4M3": E4M3FN, "E4M3FN": E4M3FN, "E5M2": E5M2}


def name(value: Any) -> str:
    """A recipe's own name: any non-empty string."""
    if not isinstance(value, str) or not value:
        raise RecipeError(f"name={value!r}: expected a non-empty string")
    return value


def compute(value: Any) -> Format | str:
    """FP32, BF16 or FP16 as a Format, its name or a torch dtype; or "auto"."""
    if isinstance(value, str) and value.lower() in _COMPUTE:
        return _COMPUTE[value.lower()]
    if isinstance(value, torch.dtype) and value in (torch.float32, torch.bfloat16, torch.float16):
        return formats.of_dtype(value)
    if not isinstance(value, Format) or value not in (FP32, BF16, FP16):
        hint = closest(value, _COMPUTE) if isinstance(value, str) else ""
        raise RecipeError(f"compute={value!r}: expected 'auto', FP32, BF16 or FP16{hint}")
    return value


def emulation(value: Any) -> Emulation:
    """ "fast" or "exact"."""
    return _member(Emulation, "emulation", value)


def evaluation(value: Any) -> Evaluation | Format:
    """ "same", "compute", or an FP8 format (or its name) for input and weight."""
    if isinstance(value, str) and value.upper() in _EVALUATION_FORMATS:
        return _EVALUATION_FORMATS[value.upper()]
    if isinstance(value, Format):
        if value not in (E4M3FN, E5M2):
            raise RecipeError(f"evaluation={value!r}: expected 'same', 'compute', E4M3FN or E5M2")
        return value
    return _member(Evaluation, "evaluation", value, *_EVALUATION_FORMATS)


def grad_accumulation(value: Any) -> GradAccumulation:
    """ "exact" or "stochastic"."""
    return _member(GradAccumulation, "grad_accumulation", value)


def globs(field: str, value: Any) -> tuple[str, ...]:
    """One glob over module names, or several."""
    patterns: tuple[Any, ...] = (value,)
    if isinstance(value, Iterable) and not isinstance(value, str):
        patterns = tuple(value)
    if not all(isinstance(p, str) and p for p in patterns):
        raise RecipeError(f"{field}={value!r}: expected globs over module names, e.g. ('*.mlp.*', '*.qkv')")
    return patterns


def first_last(value: Any) -> tuple[float, float]:
    """A number of layers for both ends, or (first, last); a float below 1 is a share of the layers."""
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(pair) != 2 or not all(_is_count(n) or (isinstance(n, float) and 0 <= n < 1) for n in pair):
        raise RecipeError(
            f"first_last={value!r}: expected a number of layers, a share of them from 0 to 1, or (first, last)"
        )
    return pair


def override(value: Any) -> tuple[bool, bool, bool]:
    """(output, grad_input, grad_weight), which TransformerEngine calls fprop, dgrad, wgrad."""
    triple = tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(triple) != 3 or not all(isinstance(flag, bool) for flag in triple):
        raise RecipeError(f"override_linear_precision={value!r}: expected three booleans (fprop, dgrad, wgrad)")
    return triple


def scale(value: Any, rules: Sequence[ScaleRule]) -> ScaleRule:
    """One of `rules`, or its name in any case."""
    return choice("scale", value, {rule.name: rule for rule in rules})


def choice(field: str, value: Any, choices: Mapping[str, V]) -> V:
    """A value of `choices`, or the one of that name in any case."""
    for known in choices.values():
        if value is known:
            return known
    if isinstance(value, str) and value.upper() in choices:
        return choices[value.upper()]
    hint = closest(value.upper(), choices) if isinstance(value, str) else ""
    raise RecipeError(f"{field}={value!r}: expected {' or '.join(repr(name) for name in choices)}{hint}")


def count(field: str, value: Any) -> int:
    """A whole number, at least 0."""
    if not _is_count(value):
        raise RecipeError(f"{field}={value!r}: expected a whole number, at least 0")
    return value


def flag(field: str, value: Any) -> bool:
    """True or False, and nothing that merely acts like it."""
    if not isinstance(value, bool):
        raise RecipeError(f"{field}={value!r}: expected True or False")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _member(kind: type[E], field: str, value: Any, *others: str) -> E:
    valid = [*(member.value for member in kind), *others]
    try:
        return kind(value)
    except ValueError:
        hint = closest(value, valid) if isinstance(value, str) else ""
        raise RecipeError(f"{field}={value!r}: expected one of {', '.join(valid)}{hint}") from None
