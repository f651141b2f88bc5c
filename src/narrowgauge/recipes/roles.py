"""The roles of tensors in training, and which casts each of them takes."""

from __future__ import annotations

from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.companding import LINEAR
from narrowgauge.numerics.formats import TF32
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.numerics.scaling import ULP
from narrowgauge.recipes.cast_spec import CastSpec

GEMMS = ("output", "grad_input", "grad_weight")  # the order of override_linear_precision
OPERANDS = {"output": ("input", "weight"), "grad_input": ("grad_output", "weight"),
            "grad_weight": ("grad_output", "input")}  # fmt: skip
OPERAND_ROLES = ("input", "weight", "grad_output")
# the second use of an operand, in the product named, where its cast is not that of the first; input's is `activation`
SECOND_USES = ("weight_for_grad_input", "grad_output_for_grad_weight")
PRODUCT_ROLES = (*OPERAND_ROLES, *SECOND_USES, "activation")
STATE_ROLES = ("param", "master", "grad", "exp_avg", "exp_avg_sq")
MOMENT_ROLES = ("exp_avg", "exp_avg_sq")  # an optimizer with one moment, momentum, keeps it as exp_avg
COMM_ROLES = ("grad_comm", "param_comm", "activation_comm", "pipeline_comm")
ROLES = (*PRODUCT_ROLES, *STATE_ROLES, *COMM_ROLES)
REQUIRED_ROLES = ("param", "grad", "exp_avg", "exp_avg_sq")

# what a role without a cast of its own means, as tables print it
UNSET = {
    "input": "as compute", "weight": "as compute", "grad_output": "as compute", "activation": "as input",
    "weight_for_grad_input": "as weight", "grad_output_for_grad_weight": "as grad_output", "hadamard": "none",
    "master": "none: the parameter itself is updated", "grad_comm": "as grad", "param_comm": "as param",
    "activation_comm": "as compute", "pipeline_comm": "as compute",
}  # fmt: skip


def check_role(role: str, spec: Any) -> None:
    """Raise RecipeError where `spec` is no cast, or one whose values cannot play the role."""
    if spec is None and role not in REQUIRED_ROLES:
        return
    if not isinstance(spec, CastSpec):
        expected = "a CastSpec" if role in REQUIRED_ROLES else "a CastSpec or None"
        raise RecipeError(f"{role}={spec!r}: expected {expected}, e.g. CastSpec(formats.E4M3FN)")
    if not spec.format.signed and role != "exp_avg_sq":
        raise RecipeError(
            f"{role}={spec!r}: {spec.format} has no negative values, and only exp_avg_sq needs none; use INT8 here"
        )
    if spec.companding is not LINEAR and role not in MOMENT_ROLES:
        raise RecipeError(
            f"{role}={spec!r}: companding is for moments, which are read and written whole; leave it out here"
        )
    if spec.rounding is NONZERO and role != "exp_avg_sq":
        raise RecipeError(f"{role}={spec!r}: NONZERO is for exp_avg_sq, which is divided by; use NEAREST_EVEN here")
    if spec.scale is ULP and role != "master":
        raise RecipeError(f"{role}={spec!r}: ULP is the scale of a master's residual; use CURRENT here")
    if role in OPERAND_ROLES:
        return
    if spec.is_delayed:
        raise RecipeError(
            f"{role}={spec!r}: only {', '.join(OPERAND_ROLES)} keep a history of amax values; use CURRENT here"
        )
    if spec.format is TF32:
        raise RecipeError(f"{role}={spec!r}: TF32 is a format of products and stores nothing; use FP32 here")
    if role in STATE_ROLES and role not in MOMENT_ROLES and spec.format.bits < 8:
        # half a unit in the last place of E2M1 is a quarter of the value: no update would ever move it
        raise RecipeError(
            f"{role}={spec!r}: what is kept from step to step takes small updates, which {spec.format} with its "
            f"{spec.format.mantissa_bits} mantissa bits rounds away; use a format of at least 8 bits here, and "
            f"{spec.format} for the operands of products"
        )
