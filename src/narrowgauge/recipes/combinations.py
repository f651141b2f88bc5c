"""What goes together in one recipe, beyond what each of its fields takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.formats import BF16
from narrowgauge.numerics.scaling import ULP
from narrowgauge.recipes.cast_spec import CastSpec
from narrowgauge.recipes.fields import GradAccumulation
from narrowgauge.recipes.roles import GEMMS, OPERANDS

if TYPE_CHECKING:
    from narrowgauge.recipes.spec import Recipe


def check_combinations(recipe: Recipe) -> None:
    """Raise RecipeError, with the remedy, for fields that contradict each other or would act on nothing."""
    _check_transforms(recipe)
    _check_master(recipe)
    _check_accumulation(recipe)


def _check_master(recipe: Recipe) -> None:
    """A master completes or replaces the parameter."""
    master, param = recipe.master, recipe.param
    if master is None:
        return
    if param.is_stochastic:
        raise RecipeError(
            f"master={master!r} with param={param!r}: what rounding leaves over is in the master, and nothing is "
            "left to chance; use NEAREST_EVEN, or master=None"
        )
    if master.scale is ULP:
        if param != CastSpec(BF16):
            raise RecipeError(
                f"master={master!r} with param={param!r}: a residual completes bfloat16; use param=CastSpec(BF16), "
                "or master=None"
            )
    elif master.in_blocks or master.is_stochastic or master.format.is_narrow:
        raise RecipeError(
            f"master={master!r}: expected a copy, CastSpec(FP32), CastSpec(BF16) or CastSpec(FP16, "
            "scale=TENSOR_POW2), or a residual, CastSpec(INT8, scale=ULP) or CastSpec(INT16, scale=ULP)"
        )
    elif master.format.mantissa_bits <= param.format.mantissa_bits:
        raise RecipeError(
            f"master={master!r} with param={param!r}: a copy must hold more digits than the parameter; use a wider "
            "master, or master=None"
        )


def _check_accumulation(recipe: Recipe) -> None:
    """Stochastic accumulation is for gradients that are cast."""
    if recipe.grad_accumulation is GradAccumulation.STOCHASTIC and not recipe.grad.format.is_narrow:
        raise RecipeError(
            f"grad_accumulation='stochastic' with grad={recipe.grad!r}: it is for gradients of at most 8 bits, others "
            "add up as they are; use 'exact', or grad=CastSpec(formats.E4M3FN)"
        )


def _check_transforms(recipe: Recipe) -> None:
    """`hadamard` and `smooth` prepare operands for a cast that follows."""
    if recipe.hadamard is not None:
        operands = {role: recipe.operand("grad_weight", role) for role in OPERANDS["grad_weight"]}
        if recipe.override_linear_precision[GEMMS.index("grad_weight")] or not any(operands.values()):
            raise RecipeError(
                f"hadamard={recipe.hadamard!r}: it prepares the operands of grad_weight for their casts, and this "
                "recipe multiplies them in the compute dtype; use hadamard=None, or cast input and grad_output"
            )
        for role, spec in operands.items():
            if spec is not None and spec.is_delayed:
                raise RecipeError(
                    f"hadamard={recipe.hadamard!r} with {role}={spec!r}: the history has magnitudes of the tensor "
                    "before the transform; use CURRENT scaling, or hadamard=None"
                )
    if recipe.smooth and recipe.input is None:
        raise RecipeError(
            f"smooth={recipe.smooth!r}: it prepares the channels of input for their cast, and this recipe casts no "
            "input; use smooth=(), or cast input"
        )
