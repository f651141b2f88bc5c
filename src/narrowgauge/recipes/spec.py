"""What a recipe is: a table from tensor roles to casts, and a few choices about which layers take part."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics.formats import BF16, E2M1FN, E8M0FNU, FP16, FP32, TF32, Format
from narrowgauge.numerics.granularity import PER_TENSOR, Block
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.numerics.rounding import NEAREST_EVEN, Rounding
from narrowgauge.numerics.scaling import (
    CURRENT,
    E8M0_RULES,
    NONE,
    NVFP4,
    POW2_RULES,
    TENSOR_POW2,
    Delayed,
    Scale,
    ScaleRule,
)
from narrowgauge.recipes import fields as check
from narrowgauge.recipes.fields import AUTO, Emulation, Evaluation

GEMMS = ("output", "grad_input", "grad_weight")  # the order of override_linear_precision
OPERANDS = {"output": ("input", "weight"), "grad_input": ("grad_output", "weight"),
            "grad_weight": ("grad_output", "input")}  # fmt: skip
OPERAND_ROLES = ("input", "weight", "grad_output")
# the second use of an operand, in the product named, where its cast is not that of the first; input's is `activation`
SECOND_USES = ("weight_for_grad_input", "grad_output_for_grad_weight")
STATE_ROLES = ("param", "master", "grad", "exp_avg", "exp_avg_sq")
COMM_ROLES = ("grad_comm", "param_comm", "activation_comm", "pipeline_comm")
ROLES = (*OPERAND_ROLES, *SECOND_USES, "activation", *STATE_ROLES, *COMM_ROLES)
REQUIRED_ROLES = ("param", "grad", "exp_avg", "exp_avg_sq")

# what a role without a cast of its own means, as tables print it
UNSET = {
    "input": "as compute", "weight": "as compute", "grad_output": "as compute", "activation": "as input",
    "weight_for_grad_input": "as weight", "grad_output_for_grad_weight": "as grad_output", "hadamard": "none",
    "master": "none: the parameter itself is updated", "grad_comm": "as grad", "param_comm": "as param",
    "activation_comm": "as compute", "pipeline_comm": "as compute",
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class CastSpec:
    """How a tensor is cast: format, granularity, scale, rounding.

    Where `scale` is left out, narrow formats (at most 8 bits) take current scaling and wide ones none. FP16 with a
    scale is scaled storage, which saturates; without one it overflows as IEEE 754 does. `granularity` is PER_TENSOR,
    PER_ROW, PER_COLUMN or Block(rows, columns). Raises RecipeError for values of the wrong kind, and for what does not
    go together: a scale on a format that has float32's range, blocks without a scale or with a scale that is defined
    for whole tensors, NVFP4's scales on another format.
    """

    format: Format
    granularity: Block = PER_TENSOR
    scale: Scale | None = None
    rounding: Rounding = NEAREST_EVEN

    def __post_init__(self) -> None:
        for field, kind, example in (
            ("format", Format, "a Format, e.g. formats.E4M3FN"),
            ("granularity", Block, "PER_TENSOR, PER_ROW, PER_COLUMN or Block(rows, columns)"),
            ("scale", ScaleRule | Delayed | None, f"{', '.join(ScaleRule.__members__)} or Delayed(...)"),
            ("rounding", Rounding, "NEAREST_EVEN or STOCHASTIC"),
        ):
            if not isinstance(getattr(self, field), kind):
                raise RecipeError(f"CastSpec {field}={getattr(self, field)!r}: expected {example}")
        if self.format is E8M0FNU:
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
        if scale is NVFP4 and (self.format is not E2M1FN or None in (granularity.rows, granularity.columns)):
            raise RecipeError(
                f"scale NVFP4 with {self.format}, {granularity!r}: it is defined for blocks of E2M1FN; use "
                "CastSpec(formats.E2M1FN, Block(1, 16), NVFP4), or another scale"
            )
        if scale in E8M0_RULES and not self.format.is_narrow:
            raise RecipeError(f"scale {scale!r} with {self.format}: E8M0 scales are for formats of at most 8 bits")
        if self.is_stochastic and self.format in (FP32, TF32):
            raise RecipeError(f"{self.format} with STOCHASTIC rounding: expected a format of at most 16 bits")

    @property
    def in_blocks(self) -> bool:
        """True where parts of the tensor have scales of their own."""
        return self.granularity != PER_TENSOR

    @property
    def is_stochastic(self) -> bool:
        return self.rounding is not NEAREST_EVEN

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

    def __repr__(self) -> str:
        parts = [repr(self.format)]
        if self.in_blocks:
            parts.append(repr(self.granularity))
        if self.scale is not (CURRENT if self.format.is_narrow else NONE):
            parts.append(f"scale={self.scale!r}")
        if self.rounding is not NEAREST_EVEN:
            parts.append(f"rounding={self.rounding!r}")
        return f"CastSpec({', '.join(parts)})"

    def __str__(self) -> str:
        parts = [str(self.format)]
        if isinstance(self.scale, Delayed):
            parts += [_describe(self.scale), str(self.granularity)]
        elif isinstance(self.scale, ScaleRule) and self.is_scaled:
            parts += [f"scale {self.scale.value}", str(self.granularity)]
        elif self.format.is_narrow:
            parts.append("unscaled")
        if self.rounding is not NEAREST_EVEN:
            parts.append(str(self.rounding.value))
        return ", ".join(parts)


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
    first_last: how many of the layers so selected stay in the compute dtype at the (start, end).
    min_size: layers with fewer input or output features stay in the compute dtype.
    embeddings: whether embedding tables take part in `param`, `grad` and the optimizer-state roles.
    evaluation: what quantized layers run in under `model.eval()`: "same", "compute", or a format (E4M3FN, E5M2) for
        input and weight, with current scaling.
    tf32: float32 products that remain are rounded to TF32 operands.
    hadamard: transform of both operands of grad_weight along the tokens, before their casts.
    smooth: globs over names of quantized layers whose input channels are each brought to one magnitude, by a power of
        two that the weight takes back (Smooth-SwiGLU, arXiv:2409.12517): for the projection after a gated product.

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
    first_last: tuple[int, int] = (0, 0)
    min_size: int = 16
    embeddings: bool = True
    evaluation: Evaluation | Format | str = Evaluation.SAME
    tf32: bool = False
    hadamard: Hadamard | None = None
    smooth: tuple[str, ...] = ()

    def __new__(cls, **fields: Any) -> Self:
        check_fields(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for role in ROLES:
            _check_role(role, getattr(self, role))
        check.name(self.name)
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "compute", check.compute(self.compute))
        set_field(self, "override_linear_precision", check.override(self.override_linear_precision))
        set_field(self, "emulation", check.emulation(self.emulation))
        set_field(self, "evaluation", check.evaluation(self.evaluation))
        set_field(self, "first_last", check.first_last(self.first_last))
        for field in ("include", "exclude", "smooth"):
            set_field(self, field, check.globs(field, getattr(self, field)))
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise RecipeError(f"hadamard={self.hadamard!r}: expected Hadamard() or None")
        check.count("min_size", self.min_size)
        for field in ("embeddings", "tf32"):
            check.flag(field, getattr(self, field))

    def replace(self, **fields: Any) -> Self:
        """A copy with other fields. Raises RecipeError for a field that no recipe has, naming the closest."""
        check_fields(fields)
        return dataclasses.replace(self, **fields)

    def resolve(self, device: torch.device | str) -> Self:
        """The same recipe with `compute="auto"` decided: BF16 where the device has it, else FP16 (V100, T4)."""
        if self.compute != AUTO:
            return self
        return self.replace(compute=BF16 if _has_bf16(torch.device(device)) else FP16)

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
        """True where a GEMM operand, or the saved activation that grad_weight multiplies, has a format of its own."""
        return any(getattr(self, role) is not None for role in (*OPERAND_ROLES, *SECOND_USES, "activation"))

    def __repr__(self) -> str:
        changed = [f.name for f in dataclasses.fields(self) if f.name == "name" or getattr(self, f.name) != f.default]
        return f"Recipe({', '.join(f'{field}={getattr(self, field)!r}' for field in changed)})"

    def __str__(self) -> str:
        rows = [(field, _cell(field, getattr(self, field))) for field in FIELDS if field != "name"]
        width = max(len(field) for field in FIELDS)
        return "\n".join([f"recipe {self.name}", *(f"  {field:<{width}}  {cell}" for field, cell in rows)])


FIELDS = tuple(f.name for f in dataclasses.fields(Recipe))


def check_fields(fields: dict[str, Any]) -> None:
    """Raise RecipeError for the first name that is no field of a recipe."""
    for field in fields:
        if field not in FIELDS:
            raise RecipeError(f"unknown recipe field '{field}'{closest(str(field), FIELDS)}")


def _check_role(role: str, spec: Any) -> None:
    if spec is None and role not in REQUIRED_ROLES:
        return
    if not isinstance(spec, CastSpec):
        expected = "a CastSpec" if role in REQUIRED_ROLES else "a CastSpec or None"
        raise RecipeError(f"{role}={spec!r}: expected {expected}, e.g. CastSpec(formats.E4M3FN)")
    if role in OPERAND_ROLES:
        return
    if spec.is_delayed:
        raise RecipeError(
            f"{role}={spec!r}: only {', '.join(OPERAND_ROLES)} keep a history of amax values; use CURRENT here"
        )
    if spec.format is TF32:
        raise RecipeError(f"{role}={spec!r}: TF32 is a format of products and stores nothing; use FP32 here")


def _has_bf16(device: torch.device) -> bool:
    # a CUDA device that is not there (fake tensors, meta builds) is taken for a current one
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


def _describe(scale: Delayed) -> str:
    rule = scale.algorithm
    rule = rule if isinstance(rule, str) else getattr(rule, "__name__", "function")
    return f"delayed ({rule} of {scale.history_length}, margin {scale.margin:g}, every {scale.interval})"


def _cell(field: str, value: Any) -> str:
    if value is None:
        return UNSET[field]
    if field == "compute" and value == AUTO:
        return "auto: BF16 where the device has it, else FP16 with loss scaling"
    if field == "override_linear_precision":
        return ", ".join(gemm for gemm, flag in zip(GEMMS, value, strict=True) if flag) or "none"
    if isinstance(value, tuple):
        return ", ".join(str(v) for v in value) or "none"
    return str(value)
