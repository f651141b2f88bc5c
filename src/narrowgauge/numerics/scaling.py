"""Scales: how a tensor's scale follows from its largest magnitude (amax).

`codes = cast(x * quant_scale)` and `x ~ codes * dequant_scale`, with `dequant_scale = fl(1 / quant_scale)`. All scales
are float32 tensors on the tensor's device; nothing here synchronizes with the host.

Every division is tensor by tensor: `scalar / tensor` runs as `reciprocal * scalar` on a CPU and is one ulp off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError, closest
from narrowgauge.numerics import rounding
from narrowgauge.numerics.companding import LINEAR, Companding, limit_of
from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E8M0FNU, FP32, Format

FLT_MAX = FP32.max
MAX_MARGIN = 64


class ScaleRule(Enum):
    """A scale that follows from the tensor being cast (current scaling)."""

    NONE = "unscaled"
    CURRENT = "current, float32"  # TransformerEngine, Float8CurrentScaling
    CURRENT_POW2 = "current, power of two"  # the above with the mantissa cleared
    TENSOR_POW2 = "power of two per tensor"  # FP8-LM (MS-AMP)
    E8M0_UP = "E8M0, rounded up"  # NVIDIA's MXFP8 recipe
    E8M0_FLOOR = "E8M0, rounded down: saturates"  # OCP MX v1.0, section 6.3
    NVFP4 = "NVFP4: E4M3 per block, float32 per tensor"  # TransformerEngine, arXiv:2509.25149
    ULP = "units in the last place of the parameter"  # of a residual; FlashOptim

    def __repr__(self) -> str:
        return self.name


# history (L values, slot 0 live, the last slot the newest finished) -> the amax that sets the next scale
AmaxAlgorithm = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class Delayed:
    """A scale that follows from the amax values of earlier steps (TransformerEngine's DelayedScaling).

    margin: powers of two of headroom. interval: the scale is renewed at every interval-th roll of the history.
    history_length: steps remembered. algorithm: "max", "most_recent", or a function from the history before the roll,
    its slot 0 holding the amax of the step just finished, to an amax (a 0-dimensional tensor). warmup: until so many
    rolls the scale follows from the tensor at hand, as there is no history to speak of (FP8-LM).
    """

    margin: float = 0
    interval: int = 1
    history_length: int = 1024
    algorithm: str | AmaxAlgorithm = "max"
    warmup: int = 0

    def __post_init__(self) -> None:
        # bool is an int to Python; a margin beyond float32's exponents would make the scale 0 or inf
        margin = self.margin
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not abs(margin) <= MAX_MARGIN:
            raise RecipeError(f"margin={margin!r}: expected powers of two, between -{MAX_MARGIN} and {MAX_MARGIN}")
        for option, steps in (("interval", self.interval), ("amax_history_len", self.history_length)):
            if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
                raise RecipeError(f"{option}={steps!r}: expected a whole number of steps, at least 1")
        if isinstance(self.warmup, bool) or not isinstance(self.warmup, int) or self.warmup < 0:
            raise RecipeError(f"warmup={self.warmup!r}: expected a whole number of steps, at least 0")
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
E8M0_FLOOR = ScaleRule.E8M0_FLOOR
NVFP4 = ScaleRule.NVFP4
ULP = ScaleRule.ULP
E8M0_RULES = (E8M0_UP, E8M0_FLOOR)
POW2_RULES = (CURRENT_POW2, TENSOR_POW2, *E8M0_RULES)


def tensor_amax(x: Tensor) -> Tensor:
    """The largest magnitude of `x` as a 0-dimensional float32 tensor: 0 for an empty one, NaN where `x` holds NaN."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return x.detach().abs().amax().float()


def quant_scale_of(amax: Tensor, fmt: Format, rule: ScaleRule, companding: Companding = LINEAR) -> Tensor:
    """The multiplier applied before the cast, float32, of the shape of `amax` (float32).

    companding: with CURRENT, whose scale then brings amax to what the curve's largest code stands for.
    """
    if rule is ScaleRule.NONE:
        return torch.ones_like(amax)
    if rule is ScaleRule.TENSOR_POW2:
        return _tensor_pow2(amax, fmt)
    if rule in E8M0_RULES:
        # 2^(127-e) of byte e, exact down to e = 254; byte 255 means NaN
        byte = e8m0_byte(amax, fmt, rule).int()
        return torch.where(byte == 255, torch.nan, torch.ldexp(torch.ones_like(amax), 127 - byte))
    if rule is ScaleRule.NVFP4:
        raise RecipeError("NVFP4 has two levels of scales: use block_scales")
    scale = torch.full_like(amax, limit_of(fmt, companding)) / amax
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


def e8m0_byte_floor(amax: Tensor, fmt: Format) -> Tensor:
    """The OCP MX scale byte (uint8) by the standard's own rule: floor(log2(amax)) less the exponent of the maximum.

    Values up to twice the largest power of two of the format are mapped below it only if they fit: the block's maximum
    saturates where its mantissa exceeds that of the format's maximum.
    """
    emax = math.frexp(fmt.max)[1] - 1
    exponent = torch.where(amax > 0, amax.frexp().exponent - 1, -127 + emax) - emax
    byte = (exponent + 127).clamp(0, 254)
    byte = torch.where(amax.isinf(), 0xFE, byte)
    return torch.where(amax.isnan(), 0xFF, byte).to(torch.uint8)


def e8m0_byte(amax: Tensor, fmt: Format, rule: ScaleRule) -> Tensor:
    """The scale byte (uint8) of an amax by E8M0_UP or E8M0_FLOOR."""
    return e8m0_byte_floor(amax, fmt) if rule is ScaleRule.E8M0_FLOOR else e8m0_byte_up(amax, fmt)


def block_scales(
    amax: Tensor, fmt: Format, rule: ScaleRule, tensor_amax: Tensor | None = None, companding: Companding = LINEAR
) -> tuple[Tensor, Tensor]:
    """The scales of blocks: (quant_scale in float32, dequant_scale as it is stored), both of the shape of `amax`.

    amax: float32, of every block. tensor_amax: 0-dimensional float32, for NVFP4 only. Stored are float32 factors, the
    bytes of E8M0 (float8_e8m0fnu), or those of E4M3 (float8_e4m3fn) that stand for byte * tensor_amax / 2688.
    A block with NaN has the stored scale NaN, unless it is float32 and the codes can say it; its quant_scale is 1.
    """
    if rule is ScaleRule.NVFP4:
        assert tensor_amax is not None
        return _nvfp4_scales(amax, tensor_amax)
    quant_scale = quant_scale_of(amax, fmt, rule, companding)
    if rule in E8M0_RULES:
        byte = e8m0_byte(amax, fmt, rule)
        return torch.where(byte == 255, 1.0, quant_scale), byte.view(E8M0FNU.dtype)
    stored = dequant_scale_of(quant_scale)
    return quant_scale, stored if fmt.has_nan else torch.where(amax.isnan(), torch.nan, stored)


def stored_dtype(rule: ScaleRule) -> torch.dtype:
    """The dtype of the scales that `block_scales` stores."""
    if rule is ScaleRule.NVFP4:
        return E4M3FN.dtype
    return E8M0FNU.dtype if rule in E8M0_RULES else torch.float32


def _nvfp4_scales(amax: Tensor, tensor_amax: Tensor) -> tuple[Tensor, Tensor]:
    """The two levels of NVFP4, in the order of operations of TransformerEngine's reference."""
    tensor_scale = (torch.full_like(tensor_amax, E2M1FN.max * E4M3FN.max) / tensor_amax).clamp(max=FLT_MAX)
    tensor_scale = torch.where(tensor_scale == 0, 1.0, tensor_scale)  # of an infinite amax
    sixth = torch.ones_like(tensor_amax) / torch.full_like(tensor_amax, E2M1FN.max)
    # (amax * scale) * sixth gives another byte in one of a thousand tiles of bf16 values
    byte = rounding.encode(amax * (tensor_scale * sixth), E4M3FN)
    inverse = rounding.decode(byte, E4M3FN) * (torch.ones_like(tensor_scale) / tensor_scale)
    quant_scale = (torch.ones_like(inverse) / inverse).clamp(max=FLT_MAX)
    return torch.where(quant_scale.isnan(), 1.0, quant_scale), byte


def nvfp4_tensor_factor(tensor_amax: Tensor) -> Tensor:
    """amax * fl(1/2688), what an E4M3 scale byte of 1 stands for: 0-dimensional float32."""
    return tensor_amax * _nvfp4_inverse(tensor_amax)


def _nvfp4_inverse(like: Tensor) -> Tensor:
    """fl(1/2688), the inverse of the largest code times the largest scale byte: float32 of the shape of `like`."""
    return torch.ones_like(like) / torch.full_like(like, E2M1FN.max * E4M3FN.max)


def block_factors(dequant_scale: Tensor, tensor_amax: Tensor | None = None) -> Tensor:
    """What the codes of each block are multiplied by, float32, from stored scales.

    tensor_amax: for the bytes of NVFP4; left out, the factors lack the tensor's part, see `nvfp4_tensor_factor`.
    """
    factors = dequant_scale if dequant_scale.dtype is torch.float32 else _byte_values(dequant_scale)
    if tensor_amax is None or dequant_scale.dtype is not E4M3FN.dtype:
        return factors
    return factors * tensor_amax * _nvfp4_inverse(tensor_amax)


def _byte_values(stored: Tensor) -> Tensor:
    """Float32 values of scale bytes; E8M0 by integer arithmetic: its byte 0 is a subnormal, which casts may flush."""
    if stored.dtype is E4M3FN.dtype:
        return rounding.decode(stored, E4M3FN)
    byte = stored.view(torch.uint8).int()
    bits = torch.where(byte == 0, 0x400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)


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
    return rolled, torch.where(finite, delayed_scale_of(_chosen_amax(history, rule), scale, fmt, rule), scale)


def delayed_scale_of(amax: Tensor, old_scale: Tensor, fmt: Format, rule: Delayed) -> Tensor:
    """The scale by `rule` of an amax, all float32 [...]; the old one where the amax is zero or not finite."""
    scale = torch.full_like(amax, fmt.max * 2.0**-rule.margin) / amax
    scale = torch.where(scale.isinf(), FLT_MAX, scale)
    return torch.where(amax.isfinite() & (amax > 0), scale, old_scale)


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
