"""From a tensor and a cast to the factor of a product, and from what was saved back to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import kernels, rounding
from narrowgauge.numerics.formats import TF32, Format
from narrowgauge.ops.backends import Backend
from narrowgauge.ops.matmul import Factor
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.cast import cast_operand
from narrowgauge.tensors.quantized import QuantizedTensor


class DelayedSlots(NamedTuple):
    """Views of one role's delayed-scaling state: the scale in force, and the amax history with its live slot 0."""

    quant_scale: Tensor  # 0-dimensional float32
    history: Tensor  # float32 [L]


class Counter(Protocol):
    """Takes what the casts of a sampled step did to each role's tensor."""

    def add(
        self, role: str, numel: int, saturated: int | Tensor, flushed: int | Tensor, amax: Tensor | None
    ) -> None:
        """Count one cast of `numel` values. Counts may be tensors, so that no device is waited for."""
        ...


class Recording(NamedTuple):
    """What a cast reads and leaves behind beside its result."""

    delayed: Mapping[str, DelayedSlots]
    record: bool
    counter: Counter | None


class Cast(NamedTuple):
    """A tensor cast for a product: its codes, its values in a carrier dtype, or both; x ~ value * dequant_scale."""

    codes: Tensor | None
    carrier: Tensor | None
    dequant_scale: Tensor | None
    amax: Tensor | None
    format: Format

    def factor(self, backend: Backend) -> Factor:
        """The factor of a product on `backend`: codes for scaled_mm, else the values in its carrier dtype."""
        if backend.carrier is None:
            assert self.codes is not None
            return Factor(self.codes, self.dequant_scale, self.format)
        if self.carrier is None or self.carrier.dtype is not backend.carrier:
            assert self.codes is not None
            values = carried(self.codes, self.format, backend.carrier)
        else:
            values = self.carrier
        return Factor(values, self.dequant_scale, self.format)


def carried(codes: Tensor, fmt: Format, dtype: torch.dtype) -> Tensor:
    """The values of codes in a carrier dtype that holds them exactly."""
    return kernels.dequantize(codes, None, fmt, dtype) if fmt.is_narrow else codes.to(dtype)


def cast(
    role: str, x: Tensor, spec: CastSpec, recording: Recording, *, keep_codes: bool, carrier: torch.dtype | None
) -> Cast:
    """Cast the operand `role` (2-dimensional, any floating dtype) by `spec`.

    A delayed scale is read from the role's slots, and with `recording.record` its live slot is raised to the amax.
    Raises RecipeError where a delayed cast has no slots.
    """
    if isinstance(x, QuantizedTensor):
        if x.spec.format is spec.format and (x.spec == spec or not spec.is_scaled):
            # the stored codes are the operand: casting their values again could only lose
            return Cast(x.codes, None, x.dequant_scale, None, spec.format)
        x = x.dequantize()
    if not spec.is_scaled and not spec.format.is_narrow:
        return _cast_wide(role, x, spec.format, recording.counter)
    quant_scale = None
    if spec.is_delayed:
        if role not in recording.delayed:
            raise RecipeError(f"{role} has a delayed scale: expected its slots in `delayed`, found none")
        quant_scale = recording.delayed[role].quant_scale
    counter = recording.counter
    done = cast_operand(
        x, spec, quant_scale, keep_codes=keep_codes or carrier is None, carrier=carrier, count=counter is not None
    )
    if counter is not None:
        counter.add(role, x.numel(), done.saturated, done.flushed, done.amax)
    return Cast(done.codes, done.carrier, done.dequant_scale, done.amax, spec.format)


def raise_live_slot(role: str, amax: Tensor | None, recording: Recording) -> None:
    """Raise the live amax of `role` to at least `amax`; NaN and infinity stay visible there. Idempotent."""
    if recording.record and amax is not None and role in recording.delayed:
        live = recording.delayed[role].history[:1]
        live.copy_(torch.maximum(live, amax))


def _cast_wide(role: str, x: Tensor, fmt: Format, counter: Counter | None) -> Cast:
    """Cast to an unscaled wide format: by torch's own cast, which overflows as IEEE 754 does."""
    codes = rounding.encode(x, fmt) if fmt is TF32 else x.to(fmt.dtype)
    if counter is not None:
        saturated = (x.float().abs() > fmt.max).sum()
        counter.add(role, x.numel(), saturated, ((x != 0) & (codes == 0)).sum(), x.abs().amax() if x.numel() else None)
    return Cast(codes, None, None, None, fmt)
