"""What of a distributed tensor this process holds: the memory that optimizers, norms and checks work on.

torch.distributed.tensor is loaded by whoever makes such a tensor, and not by this module: where it is not loaded, there
are none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import NarrowgaugeError

_MODULE = "torch.distributed.tensor"
_FAKE = "torch._subclasses.fake_tensor"


def is_distributed(t: Tensor) -> bool:
    """True for a DTensor, also one that is a parameter."""
    if type(t) in (Tensor, nn.Parameter) or _MODULE not in sys.modules:
        return False
    return isinstance(t, sys.modules[_MODULE].DTensor)


def has_no_values(t: Tensor) -> bool:
    """True for torch's stand-ins for plain tensors, with shapes but no memory, which simulations are made of."""
    return _FAKE in sys.modules and type(t) is sys.modules[_FAKE].FakeTensor


def is_plain(t: Tensor) -> bool:
    """True for tensors of torch's own class, and for what stands for them in a simulation."""
    return type(t) in (Tensor, nn.Parameter) or has_no_values(t)


def local(t: Tensor) -> Tensor:
    """The part of `t` that this process holds: a plain tensor or a QuantizedTensor, the very object, maybe empty.

    A DTensor gives its local tensor, any other tensor itself. No gradient flows through it. Raises NarrowgaugeError
    where this version of torch hides the local tensor.
    """
    if not is_distributed(t):
        return t
    # to_local would make another object of it each time, and mark it as a parameter
    held = getattr(t, "_local_tensor", None)
    if held is None:
        raise NarrowgaugeError(
            "expected a DTensor's local part as `_local_tensor`, as in torch 2.11 to 2.14, found none in torch "
            f"{torch.__version__}: install one of these"
        )
    return held.wait() if hasattr(held, "trigger_wait") else held  # of a collective that is still under way


def local_grad(p: Tensor) -> Tensor | None:
    """The gradient of what this process holds of `p`, laid out as `p` is; None where there is none.

    Of a DTensor whose gradient torch left laid out otherwise, as sums over a dimension that are still to be made, it is
    brought into p's layout first, and stays so: all ranks of its mesh must ask for it.
    """
    grad = p.grad
    if grad is None:
        return None
    if is_distributed(grad):
        wanted: Any = p
        if tuple(grad.placements) != tuple(wanted.placements):  # type: ignore[attr-defined]
            grad = p.grad = grad.redistribute(placements=wanted.placements)  # type: ignore[attr-defined]
        return local(grad)
    return grad


def as_part_of(p: Tensor, values: Tensor) -> Tensor:
    """`values`, which this process has for its part of `p`, as a tensor laid out as `p` is: a DTensor where `p` is."""
    if not is_distributed(p) or is_distributed(values):
        return values
    whole: Any = p
    return sys.modules[_MODULE].DTensor.from_local(
        values, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
