"""Adam's step of a tile in the formats of the recipe narrow8, in two loops that keep all ports of the core busy.

The same bits as the loops of `numba_parameters`, `numba_rules` and `numba_moments` one after another. There each loop
waits either for roots and divisions or for everything else; here they run beside one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels.numba_bits import INFINITY, INNER, MAGNITUDE, bfloat16_bits, bits_of, float_of
from narrowgauge.optim.kernels.numba_memory import load, standalone, store
from narrowgauge.optim.kernels.numba_moments import (
    INT8_MAX,
    MAGIC,
    TRUSTED,
    UINT8_MAX,
    compress_unsigned,
    scale_of,
    stored,
)
from narrowgauge.optim.kernels.numba_parameters import e4m3, joined, residual_of
from narrowgauge.optim.kernels.numba_rules import quotient

i8, i16, i32, f32, u8, u16 = np.int8, np.int16, np.int32, np.float32, np.uint8, np.uint16


@njit(**INNER, error_model="numpy")
def _update(
    param: int, master: int, grad: int, m_codes: int, v_codes: int, at: int, n: int,
    grad_scale: float, m_scale: float, v_scale: float, h: Any, old: int, new: int, m: int, v: int, root: int,
) -> tuple[int, int]:  # fmt: skip
    """old, new, m, v, root = decoded parameter, new one, new moments, root of v; returns the moments' amax as bits."""
    standalone()
    beta1, rest1, beta2, rest2, correction, step_size, eps, decay = h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]
    inverse = f32(f32(1.0) / correction)
    most_first, most_second = i32(0), i32(0)
    for i in range(n):
        hi = i32(i32(load(0, u16, param, at + i)) << i32(16))
        p = joined(hi, f32(load(1, i8, master, at + i)))
        g = f32(e4m3(i16(load(2, u8, grad, at + i))) * grad_scale)
        c, d = f32(load(3, i8, m_codes, at + i)), f32(load(4, u8, v_codes, at + i))
        first = f32(f32(beta1 * f32(f32(c * abs(c)) * m_scale)) + f32(rest1 * g))
        second = f32(f32(beta2 * f32(f32(d * d) * v_scale)) + f32(rest2 * f32(g * g)))
        size = f32(np.sqrt(second))
        denominator = f32(quotient(size, correction, inverse) + eps)
        most_first = max(most_first, i32(bits_of(first) & MAGNITUDE))
        most_second = max(most_second, i32(bits_of(second) & MAGNITUDE))
        store(5, f32, old, i, p)
        store(6, f32, new, i, f32(f32(p * decay) - f32(step_size * f32(first / denominator))))
        store(7, f32, m, i, first)
        store(8, f32, v, i, second)
        store(9, f32, root, i, size)
    return most_first, most_second


@njit(**INNER, error_model="numpy")
def _write(
    old: int, new: int, m: int, root: int, m_scale: float, factor: float, param: int, master: int, m_codes: int,
    v_codes: int, at: int, n: int,
) -> int:  # fmt: skip
    """Store a tile; returns the farthest from a code that a root came, as bits, see `numba_moments.store_unsigned`."""
    standalone()
    farthest = i32(0)
    for i in range(n):
        x = load(1, f32, new, i)
        is_same = load(0, f32, old, i) == x
        hi = bfloat16_bits(bits_of(x))
        store(4, u16, param, at + i, load(4, u16, param, at + i) if is_same else u16(hi))
        store(5, i8, master, at + i, load(5, i8, master, at + i) if is_same else i8(residual_of(x, hi)))
        first, size = load(2, f32, m, i), load(3, f32, root, i)
        scaled = f32(abs(first) * m_scale)
        y = f32(np.sqrt(scaled if scaled > f32(0.0) else f32(0.0)))
        code = bits_of(f32((y if y < INT8_MAX else INT8_MAX) + MAGIC))
        store(6, i8, m_codes, at + i, i8(i32(-code) if bits_of(first) < i32(0) else code))
        z = f32(size * factor)
        least = f32(1.0) if size > f32(0.0) else f32(0.0)
        z = z if z > least else least
        whole = f32(z + MAGIC)
        farthest = max(farthest, bits_of(abs(f32(z - f32(whole - MAGIC)))))
        store(7, u8, v_codes, at + i, u8(bits_of(whole)))
    return farthest


@njit(**INNER, error_model="numpy")
def step_tile(
    param: int, master: int, grad: int, m_codes: int, m_scales: int, v_codes: int, v_scales: int, at: int, n: int,
    tile: int, grad_scale: float, h: Any, scratch: int, stride: int,
) -> tuple[int, int]:  # fmt: skip
    """Step one tile of n values from `at` on; returns the new moments' amax as bits."""
    old, new, m = scratch, scratch + stride, scratch + 2 * stride
    v, root = scratch + 3 * stride, scratch + 4 * stride
    most_first, most_second = _update(
        param, master, grad, m_codes, v_codes, at, n, grad_scale, load(0, f32, m_scales, tile),
        load(0, f32, v_scales, tile), h, old, new, m, v, root,
    )  # fmt: skip
    first = scale_of(most_first, f32(INT8_MAX * INT8_MAX))
    second = scale_of(most_second, f32(UINT8_MAX * UINT8_MAX))
    store(0, f32, m_scales, tile, stored(most_first, first))
    store(0, f32, v_scales, tile, stored(most_second, second))
    farthest = _write(old, new, m, root, first, f32(np.sqrt(second)), param, master, m_codes, v_codes, at, n)
    if most_second >= INFINITY or float_of(farthest) >= TRUSTED:
        compress_unsigned(v, 0, n, second, v_codes, at)
    return most_first, most_second
