"""The casts of one linear layer: what its three operands are cast to, and which of its GEMMs take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.formats import FP32, TF32, Format
from narrowgauge.numerics.hadamard import Hadamard
from narrowgauge.numerics.scaling import CURRENT
from narrowgauge.ops import backends
from narrowgauge.ops.backends import Backend, backend_of
from narrowgauge.ops.matmul import GEMMS, GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Gemm
from narrowgauge.recipes.spec import CastSpec, Emulation, Recipe


class OperandCast(NamedTuple):
    """What one product does to one of its operands, given as the matrix that the layer has: [rows, columns].

    hadamard: a transform down the rows before the cast. spec: its tiles lie along the dimension that is summed over.
    stream: the random stream of a stochastic cast, one for each operand of each product.
    """

    spec: CastSpec
    hadamard: Hadamard | None
    stream: int

    def agrees_with(self, other: OperandCast) -> bool:
        """True where one cast serves both uses."""
        return self[:2] == other[:2]


@dataclass(frozen=True)
class LinearCasts:
    """How the operands of a linear layer's GEMMs are cast.

    input, weight, grad_output: the operands' casts; for a layer kept in the compute dtype these are wide and unscaled.
    compute: the format of the GEMMs named by `in_compute` (output, grad_input, grad_weight): FP32, TF32, BF16, FP16.
    activation: what the input is saved as for backward, and multiplied as by grad_weight; None: the input operand.
    weight_for_grad_input, grad_output_for_grad_weight: the casts there, where they are not `weight` and `grad_output`.
    hadamard: of both operands of grad_weight. smooth: every input channel is brought to one magnitude by a power of
    two, which the weight takes back; `of` then scales the weight by what it is, and not by its history.
    """

    input: CastSpec
    weight: CastSpec
    grad_output: CastSpec
    compute: Format
    in_compute: tuple[bool, bool, bool] = (False, False, False)
    emulation: Emulation = Emulation.FAST
    activation: CastSpec | None = None
    weight_for_grad_input: CastSpec | None = None
    grad_output_for_grad_weight: CastSpec | None = None
    hadamard: Hadamard | None = None
    smooth: bool = False

    @classmethod
    def of(cls, recipe: Recipe, quantized: bool, smooth: bool = False) -> Self:
        """The casts that `recipe` gives a layer. quantized False: the layer is kept in the compute dtype.

        Raises RecipeError while the recipe's compute dtype is not decided.
        """
        if not isinstance(recipe.compute, Format):
            raise RecipeError('compute="auto" is not decided yet: call recipe.resolve(device)')
        compute = TF32 if recipe.tf32 and recipe.compute is FP32 else recipe.compute
        wide = CastSpec(compute)
        emulation = Emulation(recipe.emulation)
        if not quantized:
            return cls(wide, wide, wide, compute, emulation=emulation)
        return cls(
            input=recipe.input or wide,
            weight=_current(recipe.weight or wide) if smooth else recipe.weight or wide,
            grad_output=recipe.grad_output or wide,
            compute=compute,
            in_compute=recipe.override_linear_precision,
            emulation=emulation,
            activation=recipe.activation,
            weight_for_grad_input=recipe.weight_for_grad_input,
            grad_output_for_grad_weight=recipe.grad_output_for_grad_weight,
            hadamard=recipe.hadamard,
            smooth=smooth,
        )

    def __post_init__(self) -> None:
        in_compute = {gemm.name: flag for gemm, flag in zip(GEMMS, self.in_compute, strict=True)}
        operands = {gemm.name: self._operands_of(gemm, in_compute[gemm.name]) for gemm in GEMMS}
        # not fields: they follow from the fields, and are looked up several times a call
        object.__setattr__(self, "_in_compute", in_compute)
        object.__setattr__(self, "_operands", operands)
        # torch 2.11 compiles no making of a spec
        object.__setattr__(self, "_along_the_sum", {gemm.name: self._turned(gemm) for gemm in GEMMS})
        stochastic = {gemm for gemm, each in operands.items() if any(o.spec.is_stochastic for o in each.values())}
        object.__setattr__(self, "_stochastic", stochastic)
        object.__setattr__(self, "_on_cpu", {})

    def _operands_of(self, gemm: Gemm, in_compute: bool) -> dict[str, OperandCast]:
        specs = {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}
        if gemm is GRAD_INPUT:
            specs["weight"] = self.weight_for_grad_input or self.weight
        if gemm is GRAD_WEIGHT:
            specs["grad_output"] = self.grad_output_for_grad_weight or self.grad_output
        if in_compute:
            specs = dict.fromkeys(specs, CastSpec(self.compute))
        if gemm is GRAD_WEIGHT and self.activation is not None:
            specs["input"] = self.activation
        hadamard = self.hadamard if gemm is GRAD_WEIGHT and not in_compute else None
        first_stream = 2 * GEMMS.index(gemm)
        return {
            role: OperandCast(specs[role] if along_columns else specs[role].transposed, hadamard, first_stream + at)
            for at, (role, along_columns) in enumerate(
                # summed along the columns of the layer's matrix, or along its rows
                ((gemm.left, not gemm.left_transposed), (gemm.right, gemm.right_transposed))
            )
        }

    def needs_key(self, backward: bool) -> bool:
        """True where an operand is rounded stochastically in forward or, where asked for, in backward."""
        stochastic: set[str] = self._stochastic  # type: ignore[attr-defined]
        return bool(stochastic) if backward else OUTPUT.name in stochastic

    def operand(self, gemm: Gemm, role: str) -> OperandCast:
        """The cast of the operand `role` ("input", "weight", "grad_output") where `gemm` multiplies it."""
        return self._operands[gemm.name][role]  # type: ignore[attr-defined]

    def spec(self, gemm: Gemm, role: str) -> CastSpec:
        """The spec of that cast."""
        return self.operand(gemm, role).spec

    def runs_in_compute(self, gemm: Gemm) -> bool:
        """True where `gemm` multiplies in the compute dtype whatever the operands' own casts are."""
        return self._in_compute[gemm.name]  # type: ignore[attr-defined]

    def backend(self, gemm: Gemm, device: torch.device) -> Backend:
        """What runs `gemm` on `device`, and why."""
        if device.type != "cpu" or torch.compiler.is_compiling():
            return self._backend_of(gemm, device)
        known: dict[tuple[str, str | None], Backend] = self._on_cpu  # type: ignore[attr-defined]
        key = (gemm.name, backends.FAST_BF16)
        if key not in known:
            known[key] = self._backend_of(gemm, device)
        return known[key]

    def along_the_sum(self, gemm: Gemm) -> tuple[CastSpec, CastSpec]:
        """The casts of both operands as matrices [outer dimension, dimension that is summed over]."""
        return self._along_the_sum[gemm.name]  # type: ignore[attr-defined]

    def _turned(self, gemm: Gemm) -> tuple[CastSpec, CastSpec]:
        left, right = self.spec(gemm, gemm.left), self.spec(gemm, gemm.right)
        return left.transposed if gemm.left_transposed else left, right if gemm.right_transposed else right.transposed

    def _backend_of(self, gemm: Gemm, device: torch.device) -> Backend:
        return backend_of(*self.along_the_sum(gemm), device, self.emulation)

    def describe(self, device: torch.device | str) -> Backend:
        """The three GEMMs' backends as one: native only if all are, and the reason names them where they differ."""
        of_gemm = {gemm.name: self.backend(gemm, torch.device(device)) for gemm in GEMMS}
        first = of_gemm[GEMMS[0].name]
        if len({backend.reason for backend in of_gemm.values()}) == 1:
            return first
        names = list(dict.fromkeys(backend.name for backend in of_gemm.values()))
        reason = "; ".join(f"{name}: {backend.reason}" for name, backend in of_gemm.items())
        native = all(backend.native for backend in of_gemm.values())
        return Backend(" + ".join(names), native, reason, first.carrier, first.result)


def _current(spec: CastSpec) -> CastSpec:
    """The cast without delayed scaling: a factor that is new at every step has no history."""
    return replace(spec, scale=CURRENT) if spec.is_delayed else spec
