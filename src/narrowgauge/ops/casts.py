"""The casts of one linear layer: what its three operands are cast to, and which of its GEMMs take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.formats import FP32, TF32, Format
from narrowgauge.ops.backends import Backend, backend_of
from narrowgauge.ops.matmul import GEMMS, GRAD_WEIGHT, Gemm
from narrowgauge.recipes.spec import CastSpec, Emulation, Recipe


@dataclass(frozen=True)
class LinearCasts:
    """How the operands of a linear layer's GEMMs are cast.

    input, weight, grad_output: the operands' casts; for a layer kept in the compute dtype these are wide and unscaled.
    compute: the format of the GEMMs named by `in_compute` (output, grad_input, grad_weight): FP32, TF32, BF16, FP16.
    activation: what the input is saved as for backward, and multiplied as by grad_weight; None: the input operand.
    """

    input: CastSpec
    weight: CastSpec
    grad_output: CastSpec
    compute: Format
    in_compute: tuple[bool, bool, bool] = (False, False, False)
    emulation: Emulation = Emulation.FAST
    activation: CastSpec | None = None

    @classmethod
    def of(cls, recipe: Recipe, quantized: bool) -> Self:
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
            weight=recipe.weight or wide,
            grad_output=recipe.grad_output or wide,
            compute=compute,
            in_compute=recipe.override_linear_precision,
            emulation=emulation,
            activation=recipe.activation,
        )

    def spec(self, gemm: Gemm, role: str) -> CastSpec:
        """The cast of the operand `role` ("input", "weight", "grad_output") where `gemm` multiplies it."""
        if self.activation is not None and role == "input" and gemm.name == GRAD_WEIGHT.name:
            return self.activation
        if self.runs_in_compute(gemm):
            return CastSpec(self.compute)
        return {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}[role]

    def runs_in_compute(self, gemm: Gemm) -> bool:
        """True where `gemm` multiplies in the compute dtype whatever the operands' own casts are."""
        return any(flag and gemm.name == other.name for flag, other in zip(self.in_compute, GEMMS, strict=True))

    def backend(self, gemm: Gemm, device: torch.device) -> Backend:
        """What runs `gemm` on `device`, and why."""
        left, right = self.spec(gemm, gemm.left).format, self.spec(gemm, gemm.right).format
        return backend_of(left, right, device, self.emulation)

    def describe(self, device: torch.device | str) -> Backend:
        """The three GEMMs' backends as one: native only if all are, and the reason names them where they differ."""
        backends = {gemm.name: self.backend(gemm, torch.device(device)) for gemm in GEMMS}
        first = backends[GEMMS[0].name]
        if len({backend.reason for backend in backends.values()}) == 1:
            return first
        names = list(dict.fromkeys(backend.name for backend in backends.values()))
        reason = "; ".join(f"{name}: {backend.reason}" for name, backend in backends.items())
        native = all(backend.native for backend in backends.values())
        return Backend(" + ".join(names), native, reason, first.carrier, first.result)
