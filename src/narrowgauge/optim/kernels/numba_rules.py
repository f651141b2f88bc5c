"""The update rules of `optim.rules` over a run of values in float32 scratch memory, each one loop.

p, g: parameter and gradient. m, v: moments, replaced by the new ones. new: the new parameter. h: the numbers of the
step, in the order of the rule's tuple in `optim.rules`, in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.kernels.numba_bits import INNER
from narrowgauge.optim.kernels.numba_memory import fused, load, standalone, store

f32 = np.float32

# the least bias correction that `quotient` is for
LEAST_CORRECTION = f32(2.0**-16)


@njit(**INNER, error_model="numpy")
def join_decay(p: int, g: int, n: int, l2: float) -> None:
    """g = g + l2 * p."""
    standalone()
    for i in range(n):
        store(1, f32, g, i, f32(load(1, f32, g, i) + f32(l2 * load(0, f32, p, i))))


@njit(nogil=True, cache=True, error_model="numpy")
def quotient(a: float, b: float, inverse: float) -> float:
    """a / b, correctly rounded, by the rounded inverse of b: several times as many a cycle as divisions.

    For b from 2^-16 to 1 and a that is 0, infinite or from 2^-75 to 2^64, as roots of float32 are. The second step
    starts within a unit in the last place, and is then exact (Markstein 1990; Muller et al., "Handbook of
    Floating-Point Arithmetic", on division with a correctly rounded reciprocal).
    """
    rough = f32(a * inverse)
    near = fused(fused(-rough, b, a), inverse, rough)
    exact = fused(fused(-near, b, a), inverse, near)
    return exact if a < f32(np.inf) else a


@njit(**INNER, error_model="numpy")
def adam(p: int, g: int, m: int, v: int, root: int, new: int, n: int, h: Any) -> None:
    """Adam and AdamW, after `join_decay`. root: set to the square root of the new v."""
    standalone()
    beta1, rest1, beta2, rest2, correction, step_size, eps, decay = h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]
    inverse = f32(f32(1.0) / correction)
    for i in range(n):
        grad = load(1, f32, g, i)
        first = f32(f32(beta1 * load(2, f32, m, i)) + f32(rest1 * grad))
        second = f32(f32(beta2 * load(3, f32, v, i)) + f32(rest2 * f32(grad * grad)))
        size = f32(np.sqrt(second))
        denominator = f32(quotient(size, correction, inverse) + eps)
        store(2, f32, m, i, first)
        store(3, f32, v, i, second)
        store(4, f32, root, i, size)
        store(5, f32, new, i, f32(f32(load(0, f32, p, i) * decay) - f32(step_size * f32(first / denominator))))


@njit(**INNER, error_model="numpy")
def adam_dividing(p: int, g: int, m: int, v: int, root: int, new: int, n: int, h: Any) -> None:
    """`adam` for bias corrections that `quotient` is not for."""
    standalone()
    beta1, rest1, beta2, rest2, correction, step_size, eps, decay = h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]
    for i in range(n):
        grad = load(1, f32, g, i)
        first = f32(f32(beta1 * load(2, f32, m, i)) + f32(rest1 * grad))
        second = f32(f32(beta2 * load(3, f32, v, i)) + f32(rest2 * f32(grad * grad)))
        size = f32(np.sqrt(second))
        denominator = f32(f32(size / correction) + eps)
        store(2, f32, m, i, first)
        store(3, f32, v, i, second)
        store(4, f32, root, i, size)
        store(5, f32, new, i, f32(f32(load(0, f32, p, i) * decay) - f32(step_size * f32(first / denominator))))


@njit(**INNER, error_model="numpy")
def sgd(p: int, g: int, new: int, n: int, h: Any) -> None:
    """SGD without momentum, after `join_decay`."""
    standalone()
    lr = h[0]
    for i in range(n):
        store(2, f32, new, i, f32(load(0, f32, p, i) - f32(lr * load(1, f32, g, i))))


@njit(**INNER, error_model="numpy")
def sgd_momentum(p: int, g: int, m: int, new: int, n: int, h: Any) -> None:
    """SGD with momentum, after `join_decay`."""
    standalone()
    lr, momentum, rest, is_nesterov, is_first = h[0], h[1], h[2], h[3] != f32(0.0), h[5] != f32(0.0)
    for i in range(n):
        grad = load(1, f32, g, i)
        first = grad if is_first else f32(f32(momentum * load(2, f32, m, i)) + f32(rest * grad))
        update = f32(grad + f32(momentum * first)) if is_nesterov else first
        store(2, f32, m, i, first)
        store(3, f32, new, i, f32(load(0, f32, p, i) - f32(lr * update)))


@njit(**INNER, error_model="numpy")
def lion(p: int, g: int, m: int, new: int, n: int, h: Any) -> None:
    """Lion."""
    standalone()
    lr, beta1, rest1, beta2, rest2, decay = h[0], h[1], h[2], h[3], h[4], h[5]
    for i in range(n):
        grad, old = load(1, f32, g, i), load(2, f32, m, i)
        between = f32(f32(beta1 * old) + f32(rest1 * grad))
        step = lr if between > f32(0.0) else (-lr if between < f32(0.0) else f32(0.0))
        store(2, f32, m, i, f32(f32(beta2 * old) + f32(rest2 * grad)))
        store(3, f32, new, i, f32(f32(load(0, f32, p, i) * decay) - step))


@njit(**INNER, error_model="numpy")
def muon(g: int, m: int, new: int, n: int, h: Any) -> None:
    """Muon's momentum; new: the update, which is to be made orthogonal."""
    standalone()
    momentum, rest, is_nesterov = h[1], h[2], h[3] != f32(0.0)
    for i in range(n):
        grad = load(0, f32, g, i)
        first = f32(f32(momentum * load(1, f32, m, i)) + f32(rest * grad))
        store(1, f32, m, i, first)
        store(2, f32, new, i, f32(f32(rest * grad) + f32(momentum * first)) if is_nesterov else first)


@njit(**INNER, error_model="numpy")
def descend(p: int, g: int, new: int, n: int, h: Any) -> None:
    """new = p * decay - lr * g: the rest of Muon's step."""
    standalone()
    lr, decay = h[0], h[4]
    for i in range(n):
        store(2, f32, new, i, f32(f32(load(0, f32, p, i) * decay) - f32(lr * load(1, f32, g, i))))
