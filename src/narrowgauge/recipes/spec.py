"""What a recipe is: a table from tensor roles to casts, and a few choices about which layers take part."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, Self, TypeVar

import torch

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics import formats
from narrowgauge.numerics.formats import BF16, FP16, FP32, Format
from narrowgauge.numerics.rounding import NEAREST_EVEN, Rounding
from narrowgauge.numerics.scaling import CURRENT, NONE, Delayed, Scale, ScaleRule


class Granularity(Enum):
    """The part of a tensor that shares one scale."""

    PER_TENSOR = "per tensor"

    def __repr__(self) -> str:
        return self.name


PER_TENSOR = Granularity.PER_TENSOR


@dataclass(frozen=True)
class CastSpec:
    """How a tensor is cast: format, granularity, scale, rounding.

    Where `scale` is left out, narrow formats (at most 8 bits) take current scaling and wide ones none. A wide format
    with a scale is scaled storage, which saturates; without one it overflows as IEEE 754 does.
    """

    format: Format
    granularity: Granularity = PER_TENSOR
    scale: Scale | None = None
    rounding: Rounding = NEAREST_EVEN

    def __post_init__(self) -> None:
        for field, kinds in (
            ("format", Format),
            ("granularity", Granularity),
            ("scale", ScaleRule | Delayed | None),
            ("rounding", Rounding),
        ):
            value = getattr(self, field)
            if not isinstance(value, kinds):
                raise RecipeError(f"CastSpec {field}={value!r}: expected {getattr(kinds, '__name__', kinds)}")
        if self.scale is None:
            object.__setattr__(self, "scale", CURRENT if self.format.is_narrow else NONE)
        if self.format in (formats.E8M0FNU, formats.TF32) and self.is_scaled:
            raise RecipeError(f"{self.format} holds no scaled values: it is a scale's or a product's format")

    @property
    def is_scaled(self) -> bool:
        return self.scale is not NONE

    @property
    def is_delayed(self) -> bool:
        return isinstance(self.scale, Delayed)

    def __str__(self) -> str:
        parts = [str(self.format)]
        if self.is_scaled:
            parts.append("delayed" if isinstance(self.scale, Delayed) else str(self.scale.value))  # type: ignore[union-attr]
            parts.append(self.granularity.value)
        return ", ".join(parts)


class Emulation(StrEnum):
    """FAST: products of codes carried in bf16 leave one extra bf16 rounding; EXACT: float32 products, no rounding."""

    FAST = "fast"
    EXACT = "exact"


class Evaluation(StrEnum):
    """What quantized layers run in while the model is in eval mode."""

    SAME = "same"
    COMPUTE = "compute"


E = TypeVar("E", bound=StrEnum)
AUTO = "auto"
ROLES = (
    "input", "weight", "grad_output", "activation", "param", "master", "grad", "exp_avg", "exp_avg_sq",
    "grad_comm", "param_comm", "activation_comm", "pipeline_comm",
)  # fmt: skip
GEMMS = ("output", "grad_input", "grad_weight")  # the order of override_linear_precision


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A table from tensor roles to casts. Frozen: `replace` makes a changed copy.

    GEMM operands (`input`, `weight`, `grad_output`): None means the compute dtype. `activation`: what is saved for
    backward; None means the input operand as it was multiplied. `param`, `master`, `grad`, `exp_avg`, `exp_avg_sq`: what
    is stored (`master` None: the parameter is its own master). The `_comm` roles: what travels; None means as stored.

    compute: dtype of all that is no quantized GEMM: FP32, BF16, FP16, or "auto" (see `resolve`).
    override_linear_precision: (output, grad_input, grad_weight); True runs that GEMM in the compute dtype.
    include, exclude: globs over module names; a layer is quantized if it matches `include` and not `exclude`.
    first_last: how many of the selected layers at the (start, end) stay in the compute dtype.
    min_size: layers with fewer input or output features stay in the compute dtype.
    embeddings: whether embedding tables take part in `param`, `grad` and the optimizer-state roles.
    evaluation: what quantized layers run in under `model.eval()`: "same", "compute", or a Format for input and weight.
    tf32: float32 products that remain are rounded to TF32 operands.
    """

    name: str
    input: CastSpec | None = None
    weight: CastSpec | None = None
    grad_output: CastSpec | None = None
    activation: CastSpec | None = None
    param: CastSpec = CastSpec(FP32)
    master: CastSpec | None = None
    grad: CastSpec = CastSpec(FP32)
    exp_avg: CastSpec = CastSpec(FP32)
    exp_avg_sq: CastSpec = CastSpec(FP32)
    grad_comm: CastSpec | None = None
    param_comm: CastSpec | None = None
    activation_comm: CastSpec | None = None
    pipeline_comm: CastSpec | None = None
    compute: Format | str = AUTO
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    emulation: Emulation | str = Emulation.FAST
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ("*lm_head",)
    first_last: tuple[int, int] = (0, 0)
    min_size: int = 16
    embeddings: bool = True
    evaluation: Evaluation | Format | str = Evaluation.SAME
    tf32: bool = False

    def __post_init__(self) -> None:
        for role in ROLES:
            value = getattr(self, role)
            needed = role in ("param", "grad", "exp_avg", "exp_avg_sq")
            if not isinstance(value, CastSpec) and (needed or value is not None):
                raise RecipeError(f"role {role}={value!r}: expected a CastSpec{'' if needed else ' or None'}")
        self._set("compute", _compute(self.compute))
        self._set("emulation", _member(Emulation, "emulation", self.emulation))
        self._set("evaluation", _evaluation(self.evaluation))
        for field in ("include", "exclude"):
            self._set(field, _globs(field, getattr(self, field)))
        self._set("first_last", _first_last(self.first_last))
        self._set("override_linear_precision", _override(self.override_linear_precision))
        if isinstance(self.min_size, bool) or not isinstance(self.min_size, int) or self.min_size < 0:
            raise RecipeError(f"min_size={self.min_size!r}: expected a number of features, at least 0")
        for field in ("embeddings", "tf32"):
            if not isinstance(getattr(self, field), bool):
                raise RecipeError(f"{field}={getattr(self, field)!r}: expected True or False")

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def replace(self, **fields: Any) -> Self:
        """A copy with other fields. Raises RecipeError for a field that no recipe has, naming the closest."""
        check_fields(fields)
        return dataclasses.replace(self, **fields)

    def resolve(self, device: torch.device | str) -> Self:
        """The same recipe with `compute="auto"` decided: BF16 where the device has it, else FP16 (V100, T4)."""
        if self.compute != AUTO:
            return self
        device = torch.device(device)
        lacks_bf16 = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return self.replace(compute=FP16 if lacks_bf16 else BF16)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The torch dtype of `compute`. Raises RecipeError while it is "auto": call `resolve` first."""
        if not isinstance(self.compute, Format):
            raise RecipeError('compute="auto" is not decided yet: call recipe.resolve(device)')
        return self.compute.dtype

    @property
    def needs_loss_scaling(self) -> bool:
        return self.compute is FP16

    @property
    def quantizes_gemms(self) -> bool:
        """True where at least one GEMM operand has a format of its own."""
        return any(spec is not None for spec in (self.input, self.weight, self.grad_output))


FIELDS = tuple(f.name for f in dataclasses.fields(Recipe))


def check_fields(fields: dict[str, Any]) -> None:
    """Raise RecipeError for the first name that is no field of a recipe."""
    for field in fields:
        if field not in FIELDS:
            raise RecipeError(f"unknown recipe field '{field}'{closest(field, FIELDS)}")


def _member(kind: type[E], field: str, value: Any) -> E:
    try:
        return kind(value)
    except ValueError:
        raise RecipeError(f"{field}={value!r}: expected one of {', '.join(kind)}{closest(str(value), kind)}") from None


def _compute(value: Any) -> Format | str:
    names = {"auto": AUTO, "fp32": FP32, "bf16": BF16, "fp16": FP16}
    if isinstance(value, str) and value.lower() in names:
        return names[value.lower()]
    if value not in (FP32, BF16, FP16):
        raise RecipeError(f"compute={value!r}: expected 'auto', FP32, BF16 or FP16{closest(str(value), names)}")
    return value


def _evaluation(value: Any) -> Evaluation | Format:
    if isinstance(value, str) and value.upper() in formats.ALL:
        value = formats.ALL[value.upper()]
    if isinstance(value, Format):
        if value not in (formats.E4M3FN, formats.E5M2):
            raise RecipeError(f"evaluation={value!r}: expected 'same', 'compute', E4M3FN or E5M2")
        return value
    return _member(Evaluation, "evaluation", value)


def _globs(field: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(p, str) and p for p in patterns):
        raise RecipeError(f"{field}={value!r}: expected globs over module names, e.g. '*.mlp.*'")
    return patterns


def _first_last(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or not all(isinstance(n, int) and n >= 0 for n in pair):
        raise RecipeError(f"first_last={value!r}: expected a number of layers, or (first, last)")
    return pair


def _override(value: Any) -> tuple[bool, bool, bool]:
    triple = tuple(value) if isinstance(value, (tuple, list)) else value
    if not isinstance(triple, tuple) or len(triple) != 3 or not all(isinstance(flag, bool) for flag in triple):
        raise RecipeError(f"override_linear_precision={value!r}: expected three booleans (fprop, dgrad, wgrad)")
    return triple
