"""What a recipe is: a table from tensor roles to casts, and a few choices about which layers take part."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics.formats import BF16, FP16, FP32, Format
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.recipes import fields as check
from narrowgauge.recipes.cast_spec import CastSpec
from narrowgauge.recipes.combinations import check_combinations
from narrowgauge.recipes.fields import AUTO, MIN_STATE_SIZE, Emulation, Evaluation, GradAccumulation
from narrowgauge.recipes.layers import LayerFields, LayerFieldValues, check_layers, matching, products_of
from narrowgauge.recipes.roles import (
    COMM_ROLES,
    GEMMS,
    MOMENT_ROLES,
    OPERAND_ROLES,
    OPERANDS,
    PRODUCT_ROLES,
    REQUIRED_ROLES,
    ROLES,
    SECOND_USES,
    STATE_ROLES,
    UNSET,
    check_role,
)
from narrowgauge.recipes.schedule import check_schedule

__all__ = [
    "COMM_ROLES", "FIELDS", "GEMMS", "MOMENT_ROLES", "OPERANDS", "OPERAND_ROLES", "REQUIRED_ROLES", "ROLES",
    "SECOND_USES", "STATE_ROLES", "CastSpec", "Emulation", "Evaluation", "GradAccumulation", "Recipe", "check_fields",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A table from tensor roles to casts. Frozen and hashable: `replace` makes a changed copy.

    GEMM operands (`input`, `weight`, `grad_output`): None means the compute dtype. `activation`: what is saved for
    backward, and multiplied by grad_weight; None means the input operand as it was multiplied.
    `weight_for_grad_input`, `grad_output_for_grad_weight`: the casts of these operands in those products, where they
    are not those of `weight` and `grad_output`. Tiles lie along the dimension that a product sums over: where that is
    the operand's rows, they are turned, e.g. Block(1, 128) to Block(128, 1). `param`, `master`,
    `grad`, `exp_avg`, `exp_avg_sq`: what is stored (`master` None: the parameter itself is updated). The `_comm` roles:
    what travels; None means as stored.

    compute: dtype of all that is no quantized GEMM: FP32, BF16, FP16, or "auto" (see `resolve`).
    override_linear_precision: (output, grad_input, grad_weight); True runs that GEMM in the compute dtype.
    emulation: "fast" or "exact", where the device lacks the format (see `Emulation`).
    include, exclude: globs over module names; a layer is quantized if it matches `include` and not `exclude`. The
        head, `lm_head`, joins only if asked: by an `include` that spells it, e.g. ("*", "*lm_head"), or `exclude=()`.
    first_last: how many of the layers so selected stay in the compute dtype at the (start, end): numbers of layers, or
        shares below 1 of all selected ones, to the nearest number.
    min_size: layers with fewer input or output features stay in the compute dtype.
    embeddings: whether embedding tables take part in `param`, `grad` and the optimizer-state roles.
    evaluation: what quantized layers run in under `model.eval()`: "same", "compute", or a format (E4M3FN, E5M2) for
        input and weight, with current scaling.
    grad_accumulation: "exact" or "stochastic": how a second backward before the step adds to 8-bit gradients, see
        `narrowgauge.accumulate`.
    min_state_size: parameters with fewer values keep float32 moments and gradients as wide as they come.
    tf32: float32 products that remain are rounded to TF32 operands.
    hadamard: transform of both operands of grad_weight along the tokens, before their casts.
    schedule: ((steps, recipe), ...): the recipe in force after so many optimizer steps, see `switch_at`.
    smooth: globs over names of quantized layers whose input channels are each brought to one magnitude, by a power of
        two that the weight takes back (Smooth-SwiGLU, arXiv:2409.12517): for the projection after a gated product.
    layers: ((glob, ((field, value), ...)), ...): how layers multiply that do not as the rest, see `for_layers`.

    Raises RecipeError for an unknown field, naming the closest, and for a value that its field does not take.
    """

    name: str = "custom"
    input: CastSpec | None = None
    weight: CastSpec | None = None
    grad_output: CastSpec | None = None
    weight_for_grad_input: CastSpec | None = None
    grad_output_for_grad_weight: CastSpec | None = None
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
    first_last: tuple[float, float] = (0, 0)
    min_size: int = 16
    embeddings: bool = True
    evaluation: Evaluation | Format | str = Evaluation.SAME
    grad_accumulation: GradAccumulation | str = GradAccumulation.EXACT
    min_state_size: int = MIN_STATE_SIZE
    tf32: bool = False
    hadamard: Hadamard | None = None
    smooth: tuple[str, ...] = ()
    layers: tuple[LayerFields, ...] = ()
    schedule: tuple[tuple[int, Recipe], ...] = ()

    def __new__(cls, **fields: Any) -> Self:
        check_fields(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for role in ROLES:
            check_role(role, getattr(self, role))
        check.name(self.name)
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "compute", check.compute(self.compute))
        set_field(self, "override_linear_precision", check.override(self.override_linear_precision))
        set_field(self, "emulation", check.emulation(self.emulation))
        set_field(self, "evaluation", check.evaluation(self.evaluation))
        set_field(self, "grad_accumulation", check.grad_accumulation(self.grad_accumulation))
        set_field(self, "first_last", check.first_last(self.first_last))
        for field in ("include", "exclude", "smooth"):
            set_field(self, field, check.globs(field, getattr(self, field)))
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise RecipeError(f"hadamard={self.hadamard!r}: expected Hadamard() or None")
        check.count("min_size", self.min_size)
        check.count("min_state_size", self.min_state_size)
        for field in ("embeddings", "tf32"):
            check.flag(field, getattr(self, field))
        set_field(self, "schedule", check_schedule(self, self.schedule))
        check_combinations(self)
        set_field(self, "layers", check_layers(self, self.layers))

    def operand(self, gemm: str, role: str) -> CastSpec | None:
        """The cast of an operand in one product ("output", "grad_input", "grad_weight"); None: the compute dtype.

        Its tiles are those of the role, not yet turned for products that sum over the operand's rows.
        """
        in_compute = self.override_linear_precision[GEMMS.index(gemm)]
        if gemm == "grad_weight" and role == "input" and self.activation is not None:
            return self.activation  # what was saved, in place of the input operand
        second_use = f"{role}_for_{gemm}"
        own = getattr(self, second_use) if second_use in SECOND_USES else None
        return None if in_compute else own or getattr(self, role)

    def replace(self, **fields: Any) -> Self:
        """A copy with other fields. Raises RecipeError for a field that no recipe has, naming the closest."""
        check_fields(fields)
        return dataclasses.replace(self, **fields)

    def for_layers(self, globs: str | Iterable[str], like: str | Recipe | None = None, /, **fields: Any) -> Self:
        """A copy in which the layers that match one of `globs` multiply otherwise than the rest.

        like: a recipe whose products these layers have; left out: this one's. fields: what is changed there: `input`,
        `weight`, `grad_output`, their second uses, `activation`, `override_linear_precision` and `hadamard`. A layer
        whose operands all are None runs in the compute dtype. Where a layer matches several times, the last one wins,
        field by field. Which layers take part at all, `include`, `exclude` and the like say; how parameters and states
        are kept is the same for all layers.

        Raises RecipeError for another field, and for values that do not go together.
        """
        from narrowgauge.recipes.library import recipe  # which is made of this module

        own = fields if like is None else products_of(recipe(like)) | fields
        return self.replace(layers=(*self.layers, *((glob, own) for glob in check.globs("layers", globs))))

    def for_layer(self, name: str) -> Self:
        """The plain recipe of the layer called `name`: with the fields of its own, and none for others."""
        return self.with_own(matching(name, self.layers)) if self.layers else self

    def with_own(self, fields: LayerFieldValues) -> Self:
        """The plain recipe of a layer with these fields of its own."""
        own = dict(fields)
        # channels are smoothed for the input's cast, and these layers may have none
        smooth = self.smooth if own.get("input", self.input) is not None else ()
        return self.replace(layers=(), smooth=smooth, **own)

    def switch_at(self, step: int, other: str | Recipe) -> Self:
        """This recipe with a schedule: after `step` optimizer steps, taken or skipped, `other` is in force.

        May be chained for several switches. What may differ is how linear layers multiply and which of them take part,
        and the compute dtype; what is stored or sent stays: RecipeError where `other` stores or sends otherwise, or
        where one of them needs loss scaling and the other does not. A model and its optimizer prepared by such a recipe
        switch by themselves.
        """
        from narrowgauge.recipes.library import recipe  # which is made of this module

        return self.replace(schedule=(*self.schedule, (step, recipe(other))))

    def at(self, steps: int) -> Self:
        """The plain recipe in force after `steps` optimizer steps; 0: before the first. RecipeError for no count."""
        check.count("steps", steps)
        return [recipe for begin, recipe in self.phases if begin <= steps][-1]

    @property
    def phases(self) -> tuple[tuple[int, Self], ...]:
        """(steps before it, plain recipe) of every recipe of the schedule, in order; the first begins after 0 steps."""
        first = self.replace(schedule=()) if self.schedule else self
        return ((0, first), *self.schedule)  # type: ignore[return-value]

    def resolve(self, device: torch.device | str) -> Self:
        """The same recipe with `compute="auto"` decided: BF16 where the device has it, else FP16 (V100, T4)."""
        schedule = tuple((step, recipe.resolve(device)) for step, recipe in self.schedule)
        if self.compute != AUTO:
            return self if schedule == self.schedule else self.replace(schedule=schedule)
        return self.replace(compute=BF16 if _has_bf16(torch.device(device)) else FP16, schedule=schedule)

    @property
    def compute_format(self) -> Format:
        """`compute` as a Format. Raises RecipeError while it is "auto": call `resolve` first."""
        if not isinstance(self.compute, Format):
            raise RecipeError('compute="auto" is not decided yet: call recipe.resolve(device)')
        return self.compute

    @property
    def compute_dtype(self) -> torch.dtype:
        """The torch dtype of `compute`. Raises RecipeError while it is "auto": call `resolve` first."""
        return self.compute_format.dtype

    @property
    def needs_loss_scaling(self) -> bool:
        """True where gradients pass through FP16. Raises RecipeError while `compute` is "auto"."""
        return self.compute_format == FP16

    @property
    def quantizes_gemms(self) -> bool:
        """True where a GEMM operand, or the saved activation that grad_weight multiplies, has a format of its own.

        In some layers at least: see `for_layer` for one.
        """
        own = (dict(fields).get(role) for _, fields in self.layers for role in PRODUCT_ROLES)
        return any(spec is not None for spec in (*(getattr(self, role) for role in PRODUCT_ROLES), *own))

    def __repr__(self) -> str:
        changed = [f.name for f in dataclasses.fields(self) if f.name == "name" or getattr(self, f.name) != f.default]
        return f"Recipe({', '.join(f'{field}={getattr(self, field)!r}' for field in changed)})"

    def __str__(self) -> str:
        return "\n".join(_lines(self))


FIELDS = tuple(f.name for f in dataclasses.fields(Recipe))  # the name is the first


def check_fields(fields: dict[str, Any]) -> None:
    """Raise RecipeError for the first name that is no field of a recipe."""
    for field in fields:
        if field not in FIELDS:
            raise RecipeError(f"unknown recipe field '{field}'{closest(str(field), FIELDS)}")


def _has_bf16(device: torch.device) -> bool:
    # a CUDA device that is not there (fake tensors, meta builds) is taken for a current one
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def _lines(recipe: Recipe) -> list[str]:
    """All fields of a recipe, and of those that follow it what differs from the one before."""
    lines = [f"recipe {recipe.name}", *_table({field: _cell(field, getattr(recipe, field)) for field in FIELDS[1:]})]
    for (_, before), (step, after) in itertools.pairwise(recipe.phases):
        cells = {field: _cell(field, getattr(after, field)) for field in FIELDS[1:]}
        changed = {field: cell for field, cell in cells.items() if getattr(before, field) != getattr(after, field)}
        lines += [f"after step {step}: recipe {after.name}", *_table(changed)]
    return lines


def _table(cells: dict[str, str]) -> list[str]:
    width = max(len(field) for field in FIELDS)
    return [f"  {field:<{width}}  {cell}" for field, cell in cells.items()]


def _cell(field: str, value: Any) -> str:
    if value is None:
        return UNSET[field]
    if field == "compute" and value == AUTO:
        return "auto: BF16 where the device has it, else FP16 with loss scaling"
    if field == "override_linear_precision":
        return ", ".join(gemm for gemm, flag in zip(GEMMS, value, strict=True) if flag) or "none"
    if field == "schedule":
        return "; ".join(f"after step {step}: {recipe.name}" for step, recipe in value) or "none"
    if field == "layers":
        return "; ".join(f"{glob}: {_own_cells(fields)}" for glob, fields in value) or "all alike"
    if isinstance(value, tuple):
        return ", ".join(f"{v:.1%}" if isinstance(v, float) else str(v) for v in value) or "none"
    return str(value)


def _own_cells(fields: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{field} {_cell(field, value)}" for field, value in fields)
