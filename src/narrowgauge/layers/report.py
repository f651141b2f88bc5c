"""What every layer runs in, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from narrowgauge.layers.foreign import Experts, weight_names
from narrowgauge.layers.grouped import GroupedLinear
from narrowgauge.layers.kinds import NORMS, NOTES, Kind, class_of, kind_of, root_of, skip_reason
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.ops.matmul import GEMMS
from narrowgauge.recipes.spec import OPERAND_ROLES
from narrowgauge.tensors.quantized import QuantizedTensor

CONVERTED = "converted"  # the recipe's own arithmetic
KEPT = "kept"  # the compute dtype, or as it was
SKIPPED = "skipped"  # could not be converted
COLUMNS = ("name", "module", "status", "backend", "reason")


@dataclass(frozen=True)
class Row:
    """One layer. name: dotted, "" for the root. module: its class. status: converted, kept or skipped.

    backend: scaled_mm, native or emulated for a linear layer that narrowgauge runs (several joined by "+" where its
    GEMMs differ), "torch" for a module that runs its own code. reason: why, in words.
    """

    name: str
    module: str
    status: str
    backend: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """Rows in the model's order, and notes on what was done beside converting. `str()` is a table."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, name: str) -> Row:
        """The row of the layer of that name; KeyError where there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def counts(self) -> dict[str, int]:
        """Number of rows by status."""
        return {status: sum(row.status == status for row in self.rows) for status in (CONVERTED, KEPT, SKIPPED)}

    def to_dict(self) -> dict[str, Any]:
        """{"rows": [{column: text}], "notes": [text]}, of plain types that `json` writes."""
        return {"rows": [asdict(row) for row in self.rows], "notes": list(self.notes)}

    def __str__(self) -> str:
        cells = [COLUMNS, *((row.name or "(root)", *list(asdict(row).values())[1:]) for row in self.rows)]
        widths = [max(len(row[at]) for row in cells) for at in range(len(COLUMNS) - 1)]
        lines = []
        for row in cells:
            fixed = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
            lines.append("  ".join([*fixed, row[-1]]).rstrip())
        lines.insert(1, "-" * max(len(line) for line in lines))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def report(model: nn.Module) -> ConversionReport:
    """What every layer of `model` runs in now: linear layers, norms, and other modules with parameters of their own.

    A module that is registered under several names has one row, under the first.
    """
    model = root_of(model)
    notes: tuple[str, ...] = getattr(model, NOTES, ())
    rows = []
    for name, module in model.named_modules():
        row = _row(name, module)
        if row is not None:
            rows.append(replace(row, reason="; ".join([row.reason, *_storage(module)])))
    return ConversionReport(tuple(rows), notes)


def _row(name: str, module: nn.Module) -> Row | None:
    label = class_of(module).__name__
    kind = kind_of(module)
    if isinstance(module, RecipeLayer) and module.recipe is not None:  # whatever was registered on it since
        backend = module.training_casts.describe(_device(module))
        experts = (
            f"{module.describe_products(_device(module))}; " if isinstance(module, (GroupedLinear, Experts)) else ""
        )
        reason = f"{module.reason}; {experts}{_products(module)}"
        return Row(name, label, CONVERTED if module.quantized else KEPT, backend.name, reason)
    if kind is Kind.SKIPPED:
        return Row(name, label, SKIPPED, "torch", skip_reason(module) or "")
    if kind is Kind.LINEAR:
        return Row(name, label, KEPT, "torch", "runs in its own dtype: nothing to convert, or not converted yet")
    if isinstance(module, tuple(NORMS.values())):
        return Row(name, label, CONVERTED, "torch", "statistics in float32")
    if kind is Kind.NORM or module._parameters:
        return Row(
            name, label, KEPT, "torch", "no torch.nn.Linear: runs as it is" if kind is Kind.OTHER else "as it is"
        )
    return None


def _storage(module: nn.Module) -> list[str]:
    """How a weight is stored, where it is no plain tensor."""
    weight = module._parameters.get(weight_names(module)[0])
    if weight is None or not isinstance(weight.data, QuantizedTensor):
        return []
    return [f"weight stored as {weight.data.spec.short}{'' if weight.requires_grad else ', frozen'}"]


def _products(module: RecipeLayer) -> str:
    """What a layer multiplies and how: one reason where one backend runs all three products, else all reasons."""
    casts, device = module.training_casts, _device(module)
    backends = [casts.backend(gemm, device) for gemm in GEMMS]
    one = len({backend.name for backend in backends}) == 1
    how = backends[0].reason if one else casts.describe(device).reason
    if not module.quantized:
        return how
    stochastic = [role for role in OPERAND_ROLES if getattr(casts, role).is_stochastic]
    details = [
        f"{casts.input.short} x {casts.weight.short}, grad_output {casts.grad_output.short}",
        *([f"{' and '.join(stochastic)} rounded stochastically"] if stochastic else []),
        *(["Hadamard transform in grad_weight"] if casts.hadamard is not None else []),
        *(["smoothed input"] if casts.smooth else []),
    ]
    return f"{', '.join(details)}; {how}"


def _device(module: nn.Module) -> torch.device:
    # not by its weight, which a parametrization computes anew at every look
    stored = next(module.parameters())
    # a layer that is still on the meta device is described as for the device that it will most likely get
    if not stored.is_meta:
        return stored.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
