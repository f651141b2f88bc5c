"""How one tensor is cast."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.companding import DYNAMIC, LINEAR, RANGE_EXPANSION, Companding
from narrowgauge.numerics.formats import BF16, E2M1FN, E4M3FN, E8M0FNU, FP32, INT8, INT16, TF32, UINT8, Format
from narrowgauge.numerics.granularity import PER_TENSOR, Block
from narrowgauge.numerics.rounding import NEAREST_EVEN, NONZERO, STOCHASTIC, Rounding
from narrowgauge.numerics.scaling import (
    CURRENT,
    E8M0_RULES,
    NONE,
    NVFP4,
    POW2_RULES,
    TENSOR_POW2,
    ULP,
    Delayed,
    Scale,
    ScaleRule,
)


@dataclass(frozen=True, repr=False)
class CastSpec:
    """How a tensor is cast: format, granularity, scale, rounding.

    Where `scale` is left out, narrow formats (at most 8 bits) take current scaling and wide ones none. FP16 with a
    scale is scaled storage, which saturates; without one it overflows as IEEE 754 does. `granularity` is PER_TENSOR,
    PER_ROW, PER_COLUMN or Block(rows, columns). `companding` bends values before the cast, tile by tile. Raises
    RecipeError for values of the wrong kind, and for what does not go together: a scale on a format that has float32's
    range, blocks without a scale or with a scale that is defined for whole tensors, NVFP4's scales on another format,
    companding without tiles of CURRENT scaling or in a format that its curve is not made for.
    """

    format: Format
    granularity: Block = PER_TENSOR
    scale: Scale | None = None
    rounding: Rounding = NEAREST_EVEN
    companding: Companding = LINEAR

    def __post_init__(self) -> None:
        for field, kind, example in (
            ("format", Format, "a Format, e.g. formats.E4M3FN"),
            ("granularity", Block, "PER_TENSOR, PER_ROW, PER_COLUMN or Block(rows, columns)"),
            ("scale", ScaleRule | Delayed | None, f"{', '.join(ScaleRule.__members__)} or Delayed(...)"),
            ("rounding", Rounding, "NEAREST_EVEN, STOCHASTIC or NONZERO"),
            ("companding", Companding, ", ".join(Companding.__members__)),
        ):
            if not isinstance(getattr(self, field), kind):
                raise RecipeError(f"CastSpec {field}={getattr(self, field)!r}: expected {example}")
        if self.format == E8M0FNU:  # a compiler may make formats anew: they are equal, not the same
            raise RecipeError("E8M0FNU is the format of a block's scale: no tensor is cast to it")
        if self.scale is None:
            object.__setattr__(self, "scale", CURRENT if self.format.is_narrow else NONE)
        if self.is_scaled and self.format in (BF16, TF32, FP32):
            raise RecipeError(f"{self.format} with a scale: it has float32's range and needs none; leave scale out")
        self._check_combination()

    def _check_combination(self) -> None:
        granularity, scale = self.granularity, self.scale
        if self.in_blocks and isinstance(scale, Delayed):
            raise RecipeError(f"{granularity!r} with {scale!r}: a history is kept of whole tensors; use PER_TENSOR")
        if self.in_blocks and scale in (NONE, TENSOR_POW2):
            raise RecipeError(
                f"{granularity!r} with {scale!r}: parts of a tensor need scales of their own; use CURRENT, CURRENT_POW2"
            )
        if scale is NVFP4 and (self.format != E2M1FN or None in (granularity.rows, granularity.columns)):
            raise RecipeError(
                f"scale NVFP4 with {self.format}, {granularity!r}: it is defined for blocks of E2M1FN; use "
                "CastSpec(formats.E2M1FN, Block(1, 16), NVFP4), or another scale"
            )
        if scale is ULP and (self.format not in (INT8, INT16) or self.in_blocks or self.rounding is not NEAREST_EVEN):
            raise RecipeError(
                f"scale ULP with {self.format}, {granularity!r}: it is that of a residual of bfloat16 parameters; use "
                "CastSpec(formats.INT8, scale=ULP), or INT16 for all of float32"
            )
        if self.format == INT16 and scale is not ULP:
            raise RecipeError(f"scale {scale!r} with INT16: it holds residuals of bfloat16 parameters; use scale=ULP")
        if self.rounding is NONZERO and self.format in (BF16, TF32, FP32):
            raise RecipeError(f"{self.format} with NONZERO rounding: it has float32's range and makes no zeros")
        self._check_companding()
        if scale in E8M0_RULES and not self.format.is_narrow:
            raise RecipeError(f"scale {scale!r} with {self.format}: E8M0 scales are for formats of at most 8 bits")
        if self.is_stochastic and self.format in (FP32, TF32):
            raise RecipeError(f"{self.format} with STOCHASTIC rounding: expected a format of at most 16 bits")

    def _check_companding(self) -> None:
        if self.companding is LINEAR:
            return
        what = f"companding {self.companding!r}"
        if not self.in_blocks or self.scale is not CURRENT:
            raise RecipeError(
                f"{what} with {self.granularity!r}, scale {self.scale!r}: it bends tiles that CURRENT scaling has "
                "brought to one magnitude; use Block(1, 128) and leave scale out"
            )
        if self.is_stochastic:
            raise RecipeError(f"{what} with STOCHASTIC rounding: it would be unbiased on the curve only; leave it out")
        made_for = {DYNAMIC: (INT8, UINT8), RANGE_EXPANSION: (E4M3FN,)}.get(self.companding)
        if not self.format.is_narrow or (made_for is not None and self.format not in made_for):
            expected = "a format of at most 8 bits" if made_for is None else " or ".join(map(str, made_for))
            raise RecipeError(f"{what} with {self.format}: expected {expected}")

    @property
    def in_blocks(self) -> bool:
        """True where parts of the tensor have scales of their own."""
        return self.granularity != PER_TENSOR

    @property
    def is_stochastic(self) -> bool:
        return self.rounding is STOCHASTIC

    @property
    def has_pow2_scale(self) -> bool:
        """True where multiplying codes by their scale rounds nothing, within float32's range."""
        return self.scale in POW2_RULES

    @property
    def transposed(self) -> CastSpec:
        """The cast of the transposed matrix: the same, its tiles turned."""
        if self.granularity.is_square:
            return self
        return dataclasses.replace(self, granularity=self.granularity.transposed)

    @property
    def is_scaled(self) -> bool:
        return self.scale is not NONE

    @property
    def is_delayed(self) -> bool:
        return isinstance(self.scale, Delayed)

    @property
    def short(self) -> str:
        """Format, tile and kind of scale, as short as they are unmistakable: E4M3FN 1x32 E8M0."""
        tile = "" if not self.in_blocks else f" {self.granularity}".removesuffix(" blocks")
        scale = " E8M0" if self.scale in E8M0_RULES else " NVFP4" if self.scale == NVFP4 else ""
        return f"{self.format}{tile}{scale}"

    def __repr__(self) -> str:
        parts = [repr(self.format)]
        if self.in_blocks:
            parts.append(repr(self.granularity))
        if self.scale is not (CURRENT if self.format.is_narrow else NONE):
            parts.append(f"scale={self.scale!r}")
        if self.rounding is not NEAREST_EVEN:
            parts.append(f"rounding={self.rounding!r}")
        if self.companding is not LINEAR:
            parts.append(f"companding={self.companding!r}")
        return f"CastSpec({', '.join(parts)})"

    def __str__(self) -> str:
        parts = [str(self.format)]
        if isinstance(self.scale, Delayed):
            parts += [_describe(self.scale), str(self.granularity)]
        elif isinstance(self.scale, ScaleRule) and self.is_scaled:
            parts += [f"scale {self.scale.value}", str(self.granularity)]
        elif self.format.is_narrow:
            parts.append("unscaled")
        if self.companding is not LINEAR:
            parts.append(str(self.companding.value))
        if self.rounding is not NEAREST_EVEN:
            parts.append(str(self.rounding.value))
        return ", ".join(parts)


def _describe(scale: Delayed) -> str:
    rule = scale.algorithm
    rule = rule if isinstance(rule, str) else getattr(rule, "__name__", "function")
    warmup = f", current for the first {scale.warmup}" if scale.warmup else ""
    return f"delayed ({rule} of {scale.history_length}, margin {scale.margin:g}, every {scale.interval}{warmup})"
