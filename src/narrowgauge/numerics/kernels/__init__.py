"""Fast casts: `amax`, `quantize`, `dequantize`, equal in bits to `numerics.rounding` on every device."""

from narrowgauge.numerics.kernels import operators  # noqa: F401 - registers them
from narrowgauge.numerics.kernels.dispatch import Quantized, amax, dequantize, quantize

__all__ = ["Quantized", "amax", "dequantize", "quantize"]
