"""Torch's averages of models, which are kept in the parameters' own format."""

from __future__ import annotations

import sys
import warnings

from torch import nn
from torch.optim.swa_utils import AveragedModel

from narrowgauge.tensors.quantized import QuantizedTensor


def warn_of_rounding(model: nn.Module) -> None:
    """Warn where `model`, with trainable parameters in 16 or 8 bits, is being copied by torch's AveragedModel."""
    stored = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    narrow = [(name, p) for name, p in stored if p.element_size() < 4 or isinstance(p.data, QuantizedTensor)]
    if narrow and _is_copied_for_averages():
        name, p = narrow[0]
        form = p.data.spec.short if isinstance(p.data, QuantizedTensor) else str(p.dtype).removeprefix("torch.")
        warnings.warn(
            f"AveragedModel keeps its averages as the parameters are stored ('{name}': {form}), where what an update "
            "adds may be below the rounding step and is lost then: use narrowgauge.optim.EMA(model, optimizer), whose "
            "averages are float32",
            stacklevel=2,
        )


def _is_copied_for_averages() -> bool:
    frame = sys._getframe()  # a copy is not told what it is for
    while frame is not None:
        if frame.f_code is AveragedModel.__init__.__code__:
            return True
        frame = frame.f_back
    return False
