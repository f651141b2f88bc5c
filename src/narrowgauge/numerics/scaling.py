"""Scales: how a tensor's scale follows from its largest magnitude (amax).

`codes = cast(x * quant_scale)` and `x ~ codes * dequant_scale`, with `dequant_scale = fl(1 / quant_scale)`. All scales
are float32 tensors on the tensor's device; nothing here synchronizes with the host.

Every division is tensor by tensor: `scalar / tensor` runs as `reciprocal * scalar` on a CPU and is one ulp off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics.formats import FP32, Format

FLT_MAX = FP32.max
MAX_MARGIN = 64


class ScaleRule(Enum):
    """A scale that follows from the tensor being cast (current scaling)."""

    NONE = "unscaled"
    CURRENT = "current, float32"  # TransformerEngine, Float8CurrentScaling
    CURRENT_POW2 = "current, power of two"  # the above with the mantissa cleared
    TENSOR_POW2 = "power of two per tensor"  # FP8-LM (MS-AMP)
    E8M0_UP = "E8M0, rounded up"  # NVIDIA's MXFP8 recipe

    def __repr__(self) -> str:
        return self.name


# history (L values, slot 0 live, the last slot the newest finished) -> the amax that sets the next scale
AmaxAlgorithm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class Delayed:
    """A scale that follows from the amax values of earlier steps (TransformerEngine's DelayedScaling).

    margin: powers of two of headroom. interval: the scale is renewed at every interval-th roll of the history.
    history_length: steps remembered. algorithm: "max", "most_recent", or a function from the history before the roll,
    its slot 0 holding the amax of the step just finished, to an amax (a 0-dimensional tensor).
    """

    margin: float = 0
    interval: int = 1
    history_length: int = 1024
    algorithm: str | AmaxAlgorithm = "max"

    def __post_init__(self) -> None:
        # bool is an int to Python; a margin beyond float32's exponents would make the scale 0 or inf
        margin = self.margin
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not abs(margin) <= MAX_MARGIN:
            raise RecipeError(f"margin={margin!r}: expected powers of two, between -{MAX_MARGIN} and {MAX_MARGIN}")
        for option, steps in (("interval", self.interval), ("amax_history_len", self.history_length)):
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise RecipeError(f"{option}={steps!r}: expected a whole number of steps, at least 1")
        algorithm = self.algorithm
        if not callable(algorithm) and algorithm not in ("max", "most_recent"):
            hint = closest(algorithm, ("max", "most_recent")) if isinstance(algorithm, str) else ""
            raise RecipeError(
                f"amax_compute_algo={algorithm!r}: expected 'max', 'most_recent' or a function of the history{hint}"
            )

    def __repr__(self) -> str:
        changed = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Delayed({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


Scale = ScaleRule | Delayed

NONE = ScaleRule.NONE
CURRENT = ScaleRule.CURRENT
CURRENT_POW2 = ScaleRule.CURRENT_POW2
TENSOR_POW2 = ScaleRule.TENSOR_POW2
E8M0_UP = ScaleRule.E8M0_UP


def tensor_amax(x: Tensor) -> Tensor:
    """The largest magnitude of `x` as a 0-dimensional float32 tensor: 0 for an empty one, NaN where `x` holds NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.detach().abs().amax().float()


def quant_scale_of(amax: Tensor, fmt: Format, rule: ScaleRule) -> Tensor:
    """The multiplier applied before the cast, float32, of the shape of `amax` (float32)."""
    if rule is ScaleRule.NONE:
        return torch.ones_like(amax)
    if rule is ScaleRule.TENSOR_POW2:
        return _tensor_pow2(amax, fmt)
    if rule is ScaleRule.E8M0_UP:
        # 2^(127-e) of byte e, exact down to e = 254; byte 255 means NaN
        byte = e8m0_byte_up(amax, fmt).int()
        return torch.where(byte == 255, torch.nan, torch.ldexp(torch.ones_like(amax), 127 - byte))
    scale = torch.full_like(amax, fmt.max) / amax
    scale = torch.where(scale.isinf(), FLT_MAX, scale)
    scale = torch.where(amax.isfinite() & (amax > 0), scale, 1.0)
    if rule is ScaleRule.CURRENT_POW2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def dequant_scale_of(quant_scale: Tensor) -> Tensor:
    """fl(1 / quant_scale), the factor that turns codes back into values."""
    return torch.ones_like(quant_scale) / quant_scale


def e8m0_byte_up(amax: Tensor, fmt: Format) -> Tensor:
    """The OCP MX scale byte (uint8) of a block, rounded up so that amax / 2^(byte-127) never exceeds the maximum."""
    # fl(1/max) is rounded once, as NVIDIA's recipe does
    ratio = amax * (torch.ones_like(amax) / torch.full_like(amax, fmt.max))
    bits = ratio.view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # a subnormal ratio of at most 2^-127 keeps byte 0, which already means 2^-127
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    byte = exponent + up.int()
    byte = torch.where(ratio.isinf(), 0xFE, byte)
    return torch.where(ratio.isnan(), 0xFF, byte).to(torch.uint8)


def _tensor_pow2(amax: Tensor, fmt: Format) -> Tensor:
    """2^min(floor(log2(max/amax)), 126); where amax is zero or not finite: 1."""
    ratio = torch.full_like(amax, fmt.max) / amax
    exponent = torch.where(ratio.isinf(), 127, ratio.frexp().exponent - 1).clamp(max=126)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    return torch.where(amax.isfinite() & (amax > 0), scale, 1.0)


def roll(history: Tensor, scale: Tensor, fmt: Format, rule: Delayed, rolls_before: int) -> tuple[Tensor, Tensor]:
    """One roll of delayed scaling: the live slot becomes the newest entry, and the scale may follow.

    history: float32 [..., L] with the live amax in slot 0; scale: float32 [...]. rolls_before counts the rolls so far:
    the first roll rescales, then every interval-th. Returns the new history and scale. A live amax that is not finite
    leaves both as they were, but for the slot, which is cleared.
    """
    last = history[..., 0]
    finite = last.isfinite()
    rolled = torch.cat([history[..., 1:], last.unsqueeze(-1)], dim=-1)
    rolled = torch.where(finite.unsqueeze(-1), rolled, history)
    rolled[..., 0] = 0.0
    if rolls_before % rule.interval:
        return rolled, scale
    amax = _chosen_amax(history, rule)
    renewed = torch.full_like(amax, fmt.max * 2.0**-rule.margin) / amax
    renewed = torch.where(renewed.isinf(), FLT_MAX, renewed)
    return rolled, torch.where(finite & amax.isfinite() & (amax > 0), renewed, scale)


def _chosen_amax(history: Tensor, rule: Delayed) -> Tensor:
    if rule.algorithm == "max":
        return history.amax(dim=-1)
    if rule.algorithm == "most_recent":
        return history[..., 0]
    assert callable(rule.algorithm)
    rows = [_amax_by(rule.algorithm, row) for row in history.reshape(-1, history.shape[-1])]
    return torch.stack(rows).reshape(history.shape[:-1])


def _amax_by(algorithm: AmaxAlgorithm, history: Tensor) -> Tensor:
    amax = algorithm(history)
    if not isinstance(amax, Tensor) or amax.ndim:
        found = f"a tensor of shape {list(amax.shape)}" if isinstance(amax, Tensor) else type(amax).__name__
        raise RecipeError(
            f"amax_compute_algo: expected the function to return a 0-dimensional tensor, e.g. history.max(), found "
            f"{found}"
        )
    return amax
