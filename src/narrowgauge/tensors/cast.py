"""Casting a tensor by its `CastSpec`, without making an object of it: the hot path of `ops.linear`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics import kernels, scaling
from narrowgauge.numerics.formats import FP16
from narrowgauge.numerics.kernels.tracing import is_traced
from narrowgauge.numerics.rounding import NONZERO
from narrowgauge.numerics.scaling import CURRENT, NONE, NVFP4, TENSOR_POW2, ULP, Delayed, ScaleRule
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors import parted_amax, tiles

# a float16 code, at least 2^-24, times a power of two within 2^+-90 is a normal number of float32, or zero
_MOST_FOLDED = 90
HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)


class Operand(NamedTuple):
    """What a cast leaves: `x ~ codes * block_scale * dequant_scale`, and what it met on the way.

    codes: of the format's dtype, None where not asked for. dequant_scale: 0-dimensional float32, the factor of the
    whole tensor; None for an unscaled spec, and for tiles whose scales say all (all but NVFP4's). carrier: the values
    of the codes, times block_scale but not times dequant_scale, in the dtype asked for; None where not asked for. amax:
    0-dimensional float32, NaN or infinite where `x` holds such values; None for an unscaled spec that is not counted.
    saturated, flushed: number of values beyond the format's maximum, and of non-zero values cast to zero, as
    0-dimensional int64 tensors; None where not counted. block_scale: one for each tile, as `kernels.quantize_blocks`
    stores it; None for a spec per tensor.
    """

    codes: Tensor | None
    dequant_scale: Tensor | None
    carrier: Tensor | None
    amax: Tensor | None
    saturated: Tensor | None
    flushed: Tensor | None
    block_scale: Tensor | None = None


def cast_operand(
    x: Tensor,
    spec: CastSpec,
    quant_scale: Tensor | None = None,
    *,
    keep_codes: bool,
    carrier: torch.dtype | None,
    count: bool = False,
    key: Tensor | None = None,
    stream: int = 0,
    amax: Tensor | None = None,
) -> Operand:
    """Cast `x` by `spec`.

    x: float16, bfloat16, float32 or float64 (rounded to float32 first), any shape and strides: the result is that of
    `x.contiguous()`. A QuantizedTensor is read as the values that it stands for; one that already has the spec's format
    and a scale of its own gives its codes as they are. quant_scale: 0-dimensional float32, the multiplier to use; left
    out, it follows from `x` (current scaling). keep_codes, carrier, count: which fields of the Operand to fill. key,
    stream: source of the random bits of a stochastic spec, see `philox`; others ignore them. For a spec of blocks `x`
    is a matrix. amax: of what `x` is a part of, where scales span more than `x`, as `parted_amax.amax_of_part` gives it
    for the parts; left out, it is that of `x`.

    Raises RecipeError for a spec with delayed scaling and no `quant_scale`, or a stochastic one and no `key`.
    """
    factor = None
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        kept = None if amax is not None else _codes_as_they_are(x, spec, quant_scale, carrier, count)
        if kept is not None:
            return kept
        factor = None if count or amax is not None or quant_scale is not None else _foldable_scale(x, spec)
        x = _plain(x) if factor is None else x.codes  # type: ignore[attr-defined]
    if x.dtype is torch.float64:
        x = x.float()
    key = _key_for(spec, key)
    if spec.in_blocks:
        whole = x if amax is None else parted_amax.extended(x, spec, amax)
        done = _cast_blocks(whole, spec, keep_codes, carrier, count, key, stream)
        return done if amax is None else parted_amax.cut(done, x, spec)
    if amax is None and (spec.is_scaled or count):
        amax = kernels.amax(x) if factor is None else kernels.amax(x) * factor
    if quant_scale is None and spec.is_scaled:
        assert amax is not None
        quant_scale = scaling.quant_scale_of(amax, spec.format, _current_rule(spec))
    dequant_scale = None if quant_scale is None else scaling.dequant_scale_of(quant_scale)
    result = kernels.quantize(
        x,
        quant_scale if quant_scale is None or factor is None else quant_scale * factor,
        spec.format,
        saturating=saturates(spec),
        codes=keep_codes,
        carrier=carrier,
        count=count,
        key=key,
        stream=stream,
        nonzero=spec.rounding is NONZERO,
    )
    return Operand(result.codes, dequant_scale, result.carrier, amax, result.saturated, result.flushed)


def _key_for(spec: CastSpec, key: Tensor | None) -> Tensor | None:
    if spec.is_stochastic and key is None:
        raise RecipeError(
            f"{spec}: stochastic rounding needs random bits, and no key was given: draw one from a generator"
        )
    return key if spec.is_stochastic else None


def _cast_blocks(
    x: Tensor,
    spec: CastSpec,
    keep_codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    key: Tensor | None,
    stream: int,
) -> Operand:
    done = kernels.quantize_blocks(
        x,
        spec.format,
        spec.granularity,
        _current_rule(spec),
        codes=keep_codes,
        carrier=carrier,
        count=count,
        key=key,
        stream=stream,
        companding=spec.companding,
        nonzero=spec.rounding is NONZERO,
    )
    factor = scaling.nvfp4_tensor_factor(done.amax) if spec.scale is NVFP4 else None
    return Operand(done.codes, factor, done.carrier, done.amax, done.saturated, done.flushed, done.dequant_scale)


def saturates(spec: CastSpec) -> bool:
    """True where values beyond the maximum become +-max: narrow formats, and wide ones that store scaled values."""
    return spec.format.saturating or spec.is_scaled


def cast_storage(
    x: Tensor, spec: CastSpec, old_scale: Tensor | None = None, key: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast `x` for storage with fresh scales: (codes, dequant_scale, amax).

    dequant_scale: 0-dimensional float32 for a spec per tensor, else one a tile as `scaling.block_scales` stores them,
    of shape `tiles.scale_shape`. amax: 0-dimensional float32. x: a plain floating tensor, any shape and strides.
    old_scale: the dequant_scale before; TENSOR_POW2 keeps it where amax is zero or not finite, and delayed scaling,
    whose history is elsewhere, falls back to current scaling. key: random bits of a stochastic spec, see `philox`. A
    NaN in a scaled format without NaN makes the scale of its tile NaN; in an unscaled one it raises RecipeError, and so
    does a stochastic spec without a key.
    """
    x = x.detach()
    if x.dtype is torch.float64:
        x = x.float()
    key = _key_for(spec, key)
    if spec.in_blocks:
        return tiles.quantize(x, spec, key)
    amax, nonzero = kernels.amax(x), spec.rounding is NONZERO
    rule = CURRENT if isinstance(spec.scale, Delayed) else _current_rule(spec)
    if rule is NONE:
        codes = kernels.quantize(x, None, spec.format, saturating=saturates(spec), key=key, nonzero=nonzero).codes
        assert codes is not None
        return codes, torch.ones_like(amax), amax
    quant_scale = scaling.quant_scale_of(amax, spec.format, rule)
    dequant_scale = scaling.dequant_scale_of(quant_scale)
    if rule is TENSOR_POW2 and old_scale is not None:
        usable = amax.isfinite() & (amax > 0)
        dequant_scale = torch.where(usable, dequant_scale, old_scale)
        quant_scale = scaling.dequant_scale_of(dequant_scale)  # exact: powers of two
    if not spec.format.has_nan:
        dequant_scale = torch.where(amax.isnan(), torch.nan, dequant_scale)
        x = x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        quant_scale = torch.where(amax.isnan(), 1.0, quant_scale)  # some rules give NaN, which has no code
    codes = kernels.quantize(x, quant_scale, spec.format, saturating=True, key=key, nonzero=nonzero).codes
    assert codes is not None
    return codes, dequant_scale, amax


def _current_rule(spec: CastSpec) -> ScaleRule:
    if isinstance(spec.scale, Delayed):
        raise RecipeError(
            f"{spec}: delayed scaling takes its scale from earlier steps, and none was given: pass quant_scale, "
            "or use CURRENT"
        )
    assert isinstance(spec.scale, ScaleRule)
    if spec.scale is ULP:
        raise RecipeError(
            f"{spec}: its unit is that of the parameter which a residual completes: use numerics.residual.split"
        )
    return spec.scale


def check_castable(x: Tensor) -> None:
    """Raise NarrowgaugeError unless `x` is a strided tensor of a floating dtype of 16 bits or more."""
    if not isinstance(x, Tensor):
        raise NarrowgaugeError(f"expected a tensor to cast, found {type(x).__name__}: use torch.as_tensor")
    if x.dtype not in FLOATING:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in FLOATING)
        raise NarrowgaugeError(f"expected a tensor of {wanted}, found {x.dtype}: convert it first, e.g. with x.float()")
    if x.layout is not torch.strided:
        raise NarrowgaugeError(f"expected a dense tensor, found layout {x.layout}: use x.to_dense()")


def _plain(x: Tensor) -> Tensor:
    from narrowgauge.tensors.quantized import QuantizedTensor

    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _foldable_scale(x: Tensor, spec: CastSpec) -> Tensor | None:
    """The scale of float16 codes that may join the cast's own: casting the codes gives the bits of casting the values.

    A power of two, by which no code overflows or loses a digit, and no scale of the cast either: the two products, with
    one and then the other, are then one, and no float32 copy of the values is made. None: they are to be decoded.
    """
    from narrowgauge.tensors.quantized import QuantizedTensor

    if not isinstance(x, QuantizedTensor) or x.spec.format != FP16 or x.spec.in_blocks or x.dtype is not torch.float32:
        return None
    if not spec.is_scaled or spec.in_blocks or not spec.format.is_narrow or isinstance(spec.scale, Delayed):
        return None
    if is_traced(x.codes) or not x.codes.is_cpu or not x.codes.is_contiguous():
        return None  # whose scale cannot be looked at, or not without waiting
    mantissa, exponent = math.frexp(x.dequant_scale.item())
    return x.dequant_scale if mantissa == 0.5 and abs(exponent) <= _MOST_FOLDED else None


def _codes_as_they_are(
    x: Tensor, spec: CastSpec, quant_scale: Tensor | None, carrier: torch.dtype | None, count: bool
) -> Operand | None:
    from narrowgauge.tensors.quantized import QuantizedTensor

    if not isinstance(x, QuantizedTensor) or quant_scale is not None or count or x.spec != spec or not spec.is_scaled:
        return None
    if spec.in_blocks or spec.is_stochastic:
        return None
    values = None if carrier is None else kernels.dequantize(x.codes, None, spec.format, carrier)
    return Operand(x.codes, x.dequant_scale, values, x.amax, None, None)
