"""Update rules as pure functions: parameter, gradient and moments in, new parameter and moments out.

Every rule works in the dtype of its tensors, float32 in training and float64 in tests, with the numbers of a step
computed on the host in double precision. Nothing is changed in place, and no storage format is known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import root


class Adam(NamedTuple):
    """The numbers of one step of Adam (Kingma, Ba 2015, arXiv:1412.6980) or AdamW (Loshchilov, Hutter 2019,
    arXiv:1711.05101).

    decay: the factor 1 - lr * weight_decay of AdamW. l2: Adam's weight_decay, which joins the gradient.
    """

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    sqrt_bias_correction2: float
    step_size: float
    eps: float
    decay: float
    l2: float

    @classmethod
    def at(
        cls, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool
    ) -> Adam:
        """The numbers of the `step`-th step, counted from 1."""
        beta1, beta2 = betas
        return cls(
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            lr / (1 - beta1**step),
            eps,
            1 - lr * weight_decay if decoupled else 1.0,
            0.0 if decoupled else weight_decay,
        )


class Sgd(NamedTuple):
    """The numbers of one step of SGD with momentum, as torch.optim.SGD. first: the momentum is the gradient."""

    lr: float
    momentum: float
    one_minus_dampening: float
    nesterov: bool
    l2: float
    first: bool


class Lion(NamedTuple):
    """The numbers of one step of Lion (Chen et al. 2023, arXiv:2302.06675), with decoupled weight decay."""

    lr: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    decay: float

    @classmethod
    def at(cls, lr: float, betas: tuple[float, float], weight_decay: float) -> Lion:
        """The numbers of a step."""
        beta1, beta2 = betas
        return cls(lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay)


class Muon(NamedTuple):
    """The numbers of one step of Muon (Jordan et al. 2024), as torch.optim.Muon.

    lr: adjusted to the matrix's shape. coefficients, ns_steps, eps: of the Newton-Schulz iteration.
    """

    lr: float
    momentum: float
    one_minus_momentum: float
    nesterov: bool
    decay: float
    coefficients: tuple[float, float, float]
    ns_steps: int
    eps: float


Hyper = Adam | Sgd | Lion | Muon
Moments = tuple[Tensor, ...]


def adam(p: Tensor, g: Tensor, moments: Moments, h: Adam) -> tuple[Tensor, Moments]:
    """One step of Adam or AdamW. moments: (exp_avg, exp_avg_sq)."""
    m, v = moments
    if h.l2:
        g = g + h.l2 * p
    m = h.beta1 * m + h.one_minus_beta1 * g
    v = h.beta2 * v + h.one_minus_beta2 * (g * g)
    # tensor by tensor: by a scalar it may run as a product with the reciprocal
    denominator = root(v) / torch.full_like(v, h.sqrt_bias_correction2) + h.eps
    return p * h.decay - h.step_size * (m / denominator), (m, v)


def sgd(p: Tensor, g: Tensor, moments: Moments, h: Sgd) -> tuple[Tensor, Moments]:
    """One step of SGD. moments: (momentum,), or () without momentum."""
    if h.l2:
        g = g + h.l2 * p
    if not moments:
        return p - h.lr * g, ()
    b = g if h.first else h.momentum * moments[0] + h.one_minus_dampening * g
    return p - h.lr * (g + h.momentum * b if h.nesterov else b), (b,)


def lion(p: Tensor, g: Tensor, moments: Moments, h: Lion) -> tuple[Tensor, Moments]:
    """One step of Lion. moments: (exp_avg,)."""
    (m,) = moments
    update = (h.beta1 * m + h.one_minus_beta1 * g).sign()
    return p * h.decay - h.lr * update, (h.beta2 * m + h.one_minus_beta2 * g,)


def muon(p: Tensor, g: Tensor, moments: Moments, h: Muon) -> tuple[Tensor, Moments]:
    """One step of Muon on a matrix. moments: (momentum,)."""
    (b,) = moments
    b = h.momentum * b + h.one_minus_momentum * g
    update = h.one_minus_momentum * g + h.momentum * b if h.nesterov else b
    return p * h.decay - h.lr * orthogonalized(update, h), (b,)


def orthogonalized(update: Tensor, h: Muon) -> Tensor:
    """The matrix with singular values brought near 1 by Newton-Schulz, in bfloat16 whatever the dtype."""
    a, b, c = h.coefficients
    x = update.to(torch.bfloat16)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=h.eps)
    for _ in range(h.ns_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(update.dtype)


class Rule(Enum):
    """The rules, each with its function (parameter, gradient, moments, numbers) -> (parameter, moments)."""

    ADAM = "adam"
    SGD = "sgd"
    LION = "lion"
    MUON = "muon"

    @property
    def update(self) -> Callable[[Tensor, Tensor, Moments, Hyper], tuple[Tensor, Moments]]:
        """The pure function."""
        return _UPDATES[self]


_UPDATES: dict[Rule, Callable[..., tuple[Tensor, Moments]]] = {
    Rule.ADAM: adam, Rule.SGD: sgd, Rule.LION: lion, Rule.MUON: muon,
}  # fmt: skip
