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

    def __post_init__(self) -> None:
        in_compute = {gemm.name: flag for gemm, flag in zip(GEMMS, self.in_compute, strict=True)}
        specs = {gemm.name: self._specs_of(gemm, in_compute[gemm.name]) for gemm in GEMMS}
        # not fields: they follow from the fields, and are looked up several times a call
        object.__setattr__(self, "_in_compute", in_compute)
        object.__setattr__(self, "_specs", specs)

    def _specs_of(self, gemm: Gemm, in_compute: bool) -> dict[str, CastSpec]:
        own = {"input": self.input, "weight": self.weight, "grad_output": self.grad_output}
        specs = {role: CastSpec(self.compute) if in_compute else own[role] for role in (gemm.left, gemm.right)}
        if self.activation is not None and gemm.name == GRAD_WEIGHT.name:
            specs["input"] = self.activation
        return specs

    def spec(self, gemm: Gemm, role: str) -> CastSpec:
        """The cast of the operand `role` ("input", "weight", "grad_output") where `gemm` multiplies it."""
        return self._specs[gemm.name][role]  # type: ignore[attr-defined]

    def runs_in_compute(self, gemm: Gemm) -> bool:
        """True where `gemm` multiplies in the compute dtype whatever the operands' own casts are."""
        return self._in_compute[gemm.name]  # type: ignore[attr-defined]

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
