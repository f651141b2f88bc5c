"""When a call must show itself to torch as one operator."""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN = (Tensor, torch.nn.Parameter)


def is_traced(x: Tensor) -> bool:
    """True where something watches the operators: a compiler, a dispatch mode, a tensor subclass."""
    if torch.compiler.is_compiling():
        return True
    return type(x) not in _PLAIN or torch._C._len_torch_dispatch_stack() > 0
