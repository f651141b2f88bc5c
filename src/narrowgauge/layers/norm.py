"""Normalization with statistics in float32, whatever the dtype of the input.

Made from nn.LayerNorm and nn.RMSNorm by `convert`, which swaps the class in place. The output has the input's dtype;
for float32 input it is bitwise that of the original.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


def _float32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimensions; weight and bias may be None."""

    def forward(self, input: Tensor) -> Tensor:
        y = F.layer_norm(input.float(), self.normalized_shape, _float32(self.weight), _float32(self.bias), self.eps)
        return y.to(input.dtype)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimensions; weight may be None.

    An eps of None is float32's, as the statistics are float32: nn.RMSNorm takes the input dtype's.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, _float32(self.weight), self.eps).to(x.dtype)
