"""Fast casts of whole tensors and of tiles, equal in bits to `numerics.rounding` and `twin` on every device."""

from narrowgauge.numerics.kernels import operators  # noqa: F401 - registers them
from narrowgauge.numerics.kernels.dispatch import (
    BlockQuantized,
    Quantized,
    amax,
    dequantize,
    dequantize_blocks,
    quantize,
    quantize_blocks,
    transform,
)

__all__ = [
    "BlockQuantized", "Quantized", "amax", "dequantize", "dequantize_blocks", "quantize", "quantize_blocks",
    "transform",
]  # fmt: skip
