"""The fused step for CUDA devices in Triton: one launch a parameter, one program for a few tiles.

Where a tensor has one scale for all of its values there are two launches: the first one, MEASURE, takes the step and
keeps its largest magnitudes, the second takes it again and stores it under the scales that follow from them.

FP fusion is off, so that no product is contracted into the sum that follows; quotients and roots are those of IEEE 754.
Kinds and rules are the numbers of `table`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.numerics.kernels.triton_philox import words_of
from narrowgauge.numerics.kernels.triton_round import (
    decode,
    decode_integer,
    encode_integer,
    lift,
    narrow,
    widen,
)
from narrowgauge.optim.kernels.triton_scaled import decoded, raise_to, read_scaled, write_scaled


@triton.jit
def _read_param(  # type: ignore[no-untyped-def]
    param, master, param_scale, master_scale, place, mask, PARAM: tl.constexpr, PARAM_CODE: tl.constexpr,
    MASTER_CODE: tl.constexpr,
):  # fmt: skip
    """float32 values, and the stored bits: those of the parameter and of its master."""
    if PARAM == 5:  # SCALED
        return read_scaled(param, param_scale, place, mask, PARAM_CODE), 0, 0
    elif PARAM == 6:  # COPIED
        return read_scaled(master, master_scale, place, mask, MASTER_CODE), 0, 0
    else:
        return _read_unscaled(param, master, place, mask, PARAM)


@triton.jit
def _read_unscaled(param, master, place, mask, PARAM: tl.constexpr):  # type: ignore[no-untyped-def]
    stored = tl.load(param + place, mask=mask, other=0.0)
    values = widen(stored)
    rest = 0
    if PARAM == 3:  # RESIDUAL
        rest = tl.load(master + place, mask=mask, other=0)
        share = tl.div_rn(rest.to(tl.float32), tl.full(place.shape, 127.0, tl.float32))
        power = tl.minimum(_power_of(values.to(tl.int32, bitcast=True)), 0x7F000000)
        # half a unit in the last place, which may be subnormal: in two exact steps
        values = values + share * (power.to(tl.float32, bitcast=True) * 0.00390625)
    if PARAM == 4:  # REMAINDER
        rest = tl.load(master + place, mask=mask, other=0)
        values = (values.to(tl.int32, bitcast=True) + rest.to(tl.int32)).to(tl.float32, bitcast=True)
    return values, stored, rest


@triton.jit
def _power_of(bits):  # type: ignore[no-untyped-def]
    """Bits of the power of two of float32 values, of subnormals the smallest normal one."""
    return tl.maximum(bits & 0x7F800000, 0x00800000)


@triton.jit
def _write_param(  # type: ignore[no-untyped-def]
    param, master, place, mask, old, stored, rest, new, key, stream, PARAM: tl.constexpr
):
    """Store the new values; of a pair, where they equal the old ones, the bits stay."""
    bits = new.to(tl.int32, bitcast=True)
    if PARAM == 2:  # STOCHASTIC
        upwards = (words_of(place, tl.load(key), stream) >> 16).to(tl.int32) < (bits & 0xFFFF)
        up = tl.where(upwards, bits + 0x10000, bits)
        is_beyond = (bits & 0x7FFFFFFF) > 0x7F7F0000
        up = tl.where(is_beyond, bits + 0x7FFF + ((bits >> 16) & 1), up)
        up = tl.where(new == new, up, 0x7FC00000) >> 16
        tl.store(param + place, up.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=mask)
    elif PARAM < 2:
        tl.store(param + place, narrow(new, param.dtype.element_ty), mask=mask)
    else:
        changed = mask & (old != new)
        if PARAM == 3:
            hi = narrow(new, tl.bfloat16)
            wide = widen(hi)
            power = _power_of(wide.to(tl.int32, bitcast=True))
            # exact: in units of 2^-16 of half an ulp, and times 127
            steps = (new - wide) * (0x7F800000 - power).to(tl.float32, bitcast=True) * 16256.0
            r = (steps + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
            r = tl.where(power == 0x7F800000, 0, r)
        else:
            upper = ((bits + 0x8000) >> 16).to(tl.int16)
            hi = upper.to(tl.bfloat16, bitcast=True)
            r = bits - (upper.to(tl.int32) << 16)
        tl.store(param + place, hi, mask=changed)
        tl.store(master + place, r.to(master.dtype.element_ty), mask=changed)


@triton.jit
def _write_scaled_param(  # type: ignore[no-untyped-def]
    param, master, place, mask, new, scales, found, PARAM: tl.constexpr, PARAM_CODE: tl.constexpr,
    MASTER_CODE: tl.constexpr,
):  # fmt: skip
    """Store the new values, the parameter after its master's; where none of the whole has changed, the bits stay."""
    changed = mask & (tl.load(found + 3) + tl.zeros_like(place) != 0)
    if PARAM == 6:
        code = write_scaled(master, new, tl.load(scales + 1), place, changed, MASTER_CODE)
        new = decoded(code, MASTER_CODE) * tl.load(scales + 4)
    write_scaled(param, new, tl.load(scales), place, changed, PARAM_CODE)


@triton.jit
def _read_grad(grad, scale, place, mask, GRAD: tl.constexpr):  # type: ignore[no-untyped-def]
    if GRAD < 2 or GRAD == 4:  # FLOAT, BFLOAT, HALF
        return widen(tl.load(grad + place, mask=mask, other=0.0))
    else:
        code = tl.load(grad + place, mask=mask, other=0).to(tl.int32)
        return (decode(code, 4, 3) if GRAD == 2 else decode(code, 5, 2)) * tl.load(scale)


@triton.jit
def _read_moment(  # type: ignore[no-untyped-def]
    codes, scales, place, tile, mask, real, KIND: tl.constexpr, CODE: tl.constexpr
):
    if KIND == 5:  # SCALED
        return read_scaled(codes, scales, place, mask, CODE)
    elif KIND < 3:
        return widen(tl.load(codes + place, mask=mask, other=0.0))
    else:
        code = tl.load(codes + place, mask=mask, other=0).to(tl.int32)
        return decode_integer(code, KIND == 3, True) * tl.load(scales + tile, mask=real, other=1.0)[:, None]


@triton.jit
def _write_moment(  # type: ignore[no-untyped-def]
    codes, scales, amax, values, place, tile, mask, real, quant_scale, KIND: tl.constexpr, CODE: tl.constexpr
):
    """Store a new moment with fresh scales; amax (int32 bits, zero before) is raised to its largest magnitude.

    quant_scale: of a SCALED one, whose scale and amax are written elsewhere.
    """
    if KIND == 5:
        write_scaled(codes, values, tl.load(quant_scale), place, mask, CODE)
    elif KIND < 3:
        tl.store(codes + place, narrow(values, codes.dtype.element_ty), mask=mask)
    else:
        limit: tl.constexpr = 16129.0 if KIND == 3 else 65025.0
        top: tl.constexpr = 0x467C0400 if KIND == 3 else 0x477E0100  # limit's bits
        largest = tl.max(tl.where(mask, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), axis=1)
        tl.atomic_max(amax, tl.max(largest, axis=0))
        magnitude = largest.to(tl.float32, bitcast=True)
        usable = (largest > 0) & (largest < 0x7F800000)
        ratio = tl.div_rn(tl.full(magnitude.shape, limit, tl.float32), tl.where(usable, magnitude, 1.0))
        ratio = tl.where(ratio.to(tl.int32, bitcast=True) < 0x7F800000, ratio, 3.4028234663852886e38)
        scale = tl.where(usable, ratio, 1.0)
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        nan = tl.full(scale.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
        tl.store(scales + tile, tl.where(largest > 0x7F800000, nan, inverse), mask=real)
        scaled = values * scale[:, None]
        if KIND == 4:
            scaled = lift(scaled, values, 0x3F800000)
        code = encode_integer(scaled, KIND == 3, True, top)
        tl.store(codes + place, code.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def _rule(  # type: ignore[no-untyped-def]
    p, g, m, v, h0, h1, h2, h3, h4, h5, h6, h7, h8, RULE: tl.constexpr, L2: tl.constexpr, MOMENT: tl.constexpr
):
    """The new parameter and moments: `optim.rules` in float32, h0 to h8 being the numbers of the step in its order."""
    new = p
    if RULE == 0:  # ADAM
        if L2:
            g = g + h8 * p
        m = h0 * m + h1 * g
        v = h2 * v + h3 * (g * g)
        denominator = tl.div_rn(tl.sqrt_rn(v), tl.zeros_like(v) + h4) + h6
        new = p * h7 - h5 * tl.div_rn(m, denominator)
    elif RULE == 1:  # SGD
        if L2:
            g = g + h4 * p
        if MOMENT:
            m = tl.where(h5 != 0.0, g, h1 * m + h2 * g)
            new = p - h0 * tl.where(h3 != 0.0, g + h1 * m, m)
        else:
            new = p - h0 * g
    elif RULE == 2:  # LION
        between = h1 * m + h2 * g
        sign = tl.where(between > 0.0, 1.0, tl.where(between < 0.0, -1.0, 0.0))
        new = p * h5 - h0 * sign
        m = h3 * m + h4 * g
    elif RULE == 3:  # MUON, its momentum
        m = h1 * m + h2 * g
        new = tl.where(h3 != 0.0, h2 * g + h1 * m, m)
    else:  # DESCEND
        new = p * h4 - h0 * g
    return new, m, v


@triton.jit(do_not_specialize=["stream"])
def step_kernel(  # type: ignore[no-untyped-def]
    param, master, grad, grad_scale, first, first_scale, first_amax, second, second_scale, second_amax, param_scale,
    master_scale, scales, found, key, stream, columns, width, across, tiles, h0, h1, h2, h3, h4, h5, h6, h7, h8,
    RULE: tl.constexpr, L2: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, PARAM_CODE: tl.constexpr, MASTER_CODE: tl.constexpr, FIRST_CODE: tl.constexpr,
    SECOND_CODE: tl.constexpr, MEASURE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Step TILES tiles of a parameter, each `width` (at most WIDTH) columns of a row, the last of a row maybe fewer.

    scales: float32 [5], the new ones of what has one for the whole: quant_scale of parameter, master, first and second
    moment, and the master's dequant_scale. found: int32 [4], which measuring raises from zeros to the largest
    magnitudes, as bits, of the new first and second moment and the parameter, and to 1 where a value of it changes.
    """
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    real = tile < tiles
    inside = tl.arange(0, WIDTH)
    column = (tile % across * width)[:, None] + inside[None, :]
    mask = real[:, None] & (inside < width)[None, :] & (column < columns)
    place = (tile // across * columns)[:, None] + column
    p, stored, rest = _read_param(param, master, param_scale, master_scale, place, mask, PARAM, PARAM_CODE, MASTER_CODE)
    g = _read_grad(grad, grad_scale, place, mask, GRAD)
    m, v = g, g
    if FIRST:
        m = _read_moment(first, first_scale, place, tile, mask, real, FIRST, FIRST_CODE)
    if SECOND:
        v = _read_moment(second, second_scale, place, tile, mask, real, SECOND, SECOND_CODE)
    new, m, v = _rule(p, g, m, v, h0, h1, h2, h3, h4, h5, h6, h7, h8, RULE, L2, FIRST != 0)
    if MEASURE:
        if FIRST == 5:
            raise_to(found, m, mask)
        if SECOND == 5:
            raise_to(found + 1, v, mask)
        if PARAM >= 5:
            raise_to(found + 2, new, mask)
            differs = tl.where(mask & (p != new), 1, 0)
            tl.atomic_max(found + 3, tl.max(tl.max(differs, axis=1), axis=0))
    else:
        if FIRST:
            _write_moment(first, first_scale, first_amax, m, place, tile, mask, real, scales + 2, FIRST, FIRST_CODE)
        if SECOND:
            _write_moment(
                second, second_scale, second_amax, v, place, tile, mask, real, scales + 3, SECOND, SECOND_CODE
            )
        if PARAM >= 5:
            _write_scaled_param(param, master, place, mask, new, scales, found, PARAM, PARAM_CODE, MASTER_CODE)
        else:
            _write_param(param, master, place, mask, p, stored, rest, new, key, stream, PARAM)
