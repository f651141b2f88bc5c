"""Normalization with statistics in float32, whatever the dtype of the input.

Made from torch's norms by `convert`, which swaps the class in place. The output has the input's dtype; for float32
input and parameters it is bitwise that of the original. Torch's own refuse parameters in 16 bits beside an input or
running statistics in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
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


def _takes_any_input(norm: nn.Module) -> bool:
    """True where parameters and running statistics are wide, beside which torch's own norms take inputs in 16 bits."""
    tensors = (*norm._parameters.values(), *norm._buffers.values())
    return all(x is None or not x.is_floating_point() or x.dtype in (torch.float32, torch.float64) for x in tensors)


class GroupNorm(nn.GroupNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias over groups of channels; weight and bias may be None."""

    def forward(self, input: Tensor) -> Tensor:
        if _takes_any_input(self):
            return super().forward(input)
        y = F.group_norm(input.float(), self.num_groups, _float32(self.weight), _float32(self.bias), self.eps)
        return y.to(input.dtype)


class _Running(nn.modules.batchnorm._NormBase):
    """What keeps running statistics: they are updated in float32, and kept in the dtype that they have."""

    def _normalize(self, norm: Callable[..., Tensor], input: Tensor, by_batch: bool, momentum: float) -> Tensor:
        """`norm` of torch.nn.functional, on float32."""
        used = not self.training or self.track_running_stats
        held = (self.running_mean, self.running_var) if used else (None, None)
        mean, var = map(_float32, held)
        weight, bias = _float32(self.weight), _float32(self.bias)
        y = norm(input.float(), mean, var, weight, bias, by_batch, momentum, self.eps)
        if self.training:
            for old, new in zip(held, (mean, var), strict=True):
                if old is not None and new is not None and old is not new:
                    old.copy_(new)
        return y.to(input.dtype)


class _BatchNorm(_Running, nn.modules.batchnorm._BatchNorm):
    """Over the batch while training, else by running statistics; weight and bias may be None."""

    def forward(self, input: Tensor) -> Tensor:
        if _takes_any_input(self):
            return super().forward(input)
        self._check_input_dim(input)
        momentum = self.momentum or 0.0
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean over all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        return self._normalize(F.batch_norm, input, self.training or self.running_mean is None, momentum)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """[N, C] or [N, C, L]."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """[N, C, H, W]."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """[N, C, D, H, W]."""


class _InstanceNorm(_Running, nn.modules.instancenorm._InstanceNorm):
    """Over each sample's channels; weight and bias may be None."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        if _takes_any_input(self):
            return super()._apply_instance_norm(input)
        by_batch = self.training or not self.track_running_stats
        return self._normalize(F.instance_norm, input, by_batch, self.momentum or 0.0)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """[N, C, L] or [C, L]."""


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """[N, C, H, W] or [C, H, W]."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """[N, C, D, H, W] or [C, D, H, W]."""
