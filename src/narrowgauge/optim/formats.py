"""In which formats an optimizer keeps its state."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics.formats import BF16, FP16, FP32
from narrowgauge.numerics.rounding import NEAREST_EVEN, NONZERO, STOCHASTIC
from narrowgauge.recipes import fields as check
from narrowgauge.recipes.roles import check_role
from narrowgauge.recipes.spec import CastSpec, Recipe

FLOAT32 = CastSpec(FP32)


@dataclass(frozen=True)
class StateFormats:
    """The formats of an optimizer's state, for all of its parameters or for one.

    exp_avg, exp_avg_sq: of the moments; an optimizer with one moment keeps it as exp_avg. master: what completes or
    replaces the parameter at the update. stochastic_rounding: of bfloat16 parameters without a master. min_state_size:
    parameters with fewer values keep float32 moments. keep_nonzero: exp_avg_sq is rounded so that no value but zero
    becomes zero, since a step divides by it; False is for measuring what happens then.

    Raises RecipeError for a cast that cannot play its role.
    """

    exp_avg: CastSpec = FLOAT32
    exp_avg_sq: CastSpec = FLOAT32
    master: CastSpec | None = None
    stochastic_rounding: bool = False
    min_state_size: int = check.MIN_STATE_SIZE
    keep_nonzero: bool = True

    def __post_init__(self) -> None:
        for role in ("exp_avg", "exp_avg_sq", "master"):
            check_role(role, getattr(self, role))
        check.count("min_state_size", self.min_state_size)
        for field in ("stochastic_rounding", "keep_nonzero"):
            check.flag(field, getattr(self, field))
        if (
            self.keep_nonzero
            and self.exp_avg_sq.rounding is NEAREST_EVEN
            and self.exp_avg_sq.format not in (FP32, BF16)
        ):
            object.__setattr__(self, "exp_avg_sq", dataclasses.replace(self.exp_avg_sq, rounding=NONZERO))
        for role in ("exp_avg", "exp_avg_sq"):
            spec = getattr(self, role)
            if spec.format is FP16 and not spec.is_scaled and self.keep_nonzero:
                raise RecipeError(
                    f"{role}={spec!r}: unscaled float16 loses most of a moment's range; use "
                    "CastSpec(FP16, scale=TENSOR_POW2)"
                )

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """What `recipe` says."""
        return cls(
            exp_avg=recipe.exp_avg,
            exp_avg_sq=recipe.exp_avg_sq,
            master=recipe.master,
            stochastic_rounding=recipe.param.rounding is STOCHASTIC,
            min_state_size=recipe.min_state_size,
        )

    def replace(self, **fields: Any) -> Self:
        """A copy with other fields. Raises RecipeError for an unknown one, naming the closest."""
        known = [field.name for field in dataclasses.fields(self)]
        for field in fields:
            if field not in known:
                raise RecipeError(f"unknown state format '{field}'{closest(field, known)}")
        return dataclasses.replace(self, **fields)

    def of_moment(self, role: str, size: int) -> CastSpec:
        """The format of the moment `role` of a parameter with `size` values."""
        return FLOAT32 if size < self.min_state_size else getattr(self, role)
