"""What an optimizer refuses: groups, parameters and gradients that its rules cannot work with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics.formats import FP32
from narrowgauge.optim.formats import StateFormats
from narrowgauge.tensors.local import local
from narrowgauge.tensors.quantized import QuantizedTensor

# below it, gradients whose square float32 cannot hold would be divided by less than themselves
SMALLEST_EPS = math.sqrt(FP32.smallest_subnormal)

# arguments of torch's optimizers that change what a step means, and why they cannot be had here
_REFUSED = {
    "amsgrad": "the maximum of past second moments is not kept",
    "differentiable": "a step is taken outside of autograd",
    "capturable": "the numbers of a step are computed on the host, and a captured graph would repeat them",
}


def check_distinct(params: Iterable[Tensor], taken: Iterable[Tensor], name_of: Callable[[Tensor], str]) -> None:
    """Raise NarrowgaugeError for a parameter that is there twice: it would be stepped twice."""
    seen = set(taken)
    for p in params:
        if p in seen:
            raise NarrowgaugeError(
                f"expected every parameter once, found {name_of(p)}, shape {list(p.shape)}, twice, in one group or in "
                "two: leave it out of one, or build the groups from model.parameters(), which gives shared ones once"
            )
        seen.add(p)


def check_floating(params: Iterable[Tensor]) -> None:
    """Raise NarrowgaugeError for a parameter that is not of a real floating dtype."""
    for p in params:
        if not p.is_floating_point():
            raise NarrowgaugeError(
                f"expected parameters of a real floating dtype, found {p.dtype} of shape {list(p.shape)}: leave "
                "them to an optimizer of their own, or use torch.view_as_real"
            )


def check_group(group: Mapping[str, Any], optimizer: str) -> None:
    """Raise NarrowgaugeError for numbers and flags of a group that no step can be taken with."""
    for name in ("lr", "weight_decay"):
        value = group[name]
        if isinstance(value, Tensor) and value.numel() != 1:
            raise NarrowgaugeError(f"{name}: expected a number or a tensor of one, found shape {list(value.shape)}")
        check_number(name, float(value), lambda x: x >= 0, "at least 0")
    for flag, why in _REFUSED.items():
        if group.get(flag):
            raise NarrowgaugeError(f"{flag}=True: {optimizer} has no such mode, as {why}; leave {flag} out")


def check_number(name: str, value: float, holds: Callable[[float], bool], expected: str) -> None:
    """Raise NarrowgaugeError where `value` is not finite or does not hold what is expected of it."""
    if not (math.isfinite(value) and holds(value)):
        raise NarrowgaugeError(f"expected {name} of {expected}, found {name}={value}")


def check_betas(betas: Any) -> None:
    """Raise NarrowgaugeError unless `betas` are two numbers in [0, 1)."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise NarrowgaugeError(f"expected betas=(beta1, beta2), found betas={betas!r}")
    for at, beta in enumerate(betas, 1):
        check_number(f"beta{at}", float(beta), lambda x: 0 <= x < 1, "at least 0 and below 1")


def check_eps(eps: float) -> None:
    """Raise NarrowgaugeError for an eps that leaves 0 / 0, or a step without bound, where float32's v is 0."""
    if not (math.isfinite(eps) and eps >= SMALLEST_EPS):
        raise NarrowgaugeError(
            f"expected eps of at least {SMALLEST_EPS:.2g}, found eps={eps}: where a gradient's square is below "
            "float32's smallest number the step is m / eps, and 0 / 0 for a gradient of 0; use 1e-8"
        )


def check_gradient(p: Tensor, grad: Tensor | None, name_of: Callable[[Tensor], str]) -> None:
    """Raise NarrowgaugeError for a gradient of `p` that is sparse or not floating."""
    assert grad is not None
    if grad.layout is not torch.strided:
        raise NarrowgaugeError(
            f"'{name_of(p)}': expected a dense gradient, found layout {grad.layout}: build the embedding with "
            "sparse=False, or give it an optimizer of its own, torch.optim.SparseAdam"
        )
    if not grad.is_floating_point():
        raise NarrowgaugeError(f"'{name_of(p)}': expected a floating gradient, found {grad.dtype}")


def warn_of_lost_updates(
    params: Iterable[Tensor], formats_of: Callable[[Tensor], StateFormats], name_of: Callable[[Tensor], str]
) -> None:
    """Warn of parameters that most updates leave where they are, since rounding to the nearest takes them back."""
    losing = [p for p in params if _loses_updates(p, formats_of(p))]
    if losing:
        first, others = losing[0], f" and {len(losing) - 1} more" if len(losing) > 1 else ""
        held = local(first)
        kind = str(held.spec) if isinstance(held, QuantizedTensor) else str(held.dtype)
        warnings.warn(
            f"'{name_of(first)}'{others}: {kind} parameters without a master or stochastic rounding do not move where "
            "an update is below half a unit in their last place; pass master=CastSpec(formats.INT8, scale=ULP) or "
            "stochastic_rounding=True",
            stacklevel=6,  # the caller of AdamW(...)
        )


def _loses_updates(p: Tensor, formats: StateFormats) -> bool:
    held = local(p)
    if isinstance(held, QuantizedTensor):
        spec = held.spec
        return formats.master is None and spec.format.bits <= 8 and not spec.is_stochastic
    return held.dtype is torch.bfloat16 and formats.master is None and not formats.stochastic_rounding
