"""Where compiled code leaves its graph: sizes that follow from values would be compiled anew for every split of tokens.

Imported on first use in compiled code only: torch.compiler.disable loads the compiler, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo import config

from narrowgauge.ops import experts, grouped

grouped_linear: Callable[..., Tensor] = torch.compiler.disable(grouped.grouped_linear)  # type: ignore[assignment]
of_all_experts: Callable[..., Tensor] = torch.compiler.disable(experts.of_all_experts)  # type: ignore[assignment]


def takes_sizes_from_values() -> bool:
    """True where torch.compile is told to trace sizes that follow from values."""
    return bool(config.capture_scalar_outputs)
