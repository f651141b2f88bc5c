"""Weight gradients put off: a zero-bubble pipeline takes them in the gaps that its other passes leave.

A linear layer that runs inside `putting_off` leaves the product of its weight gradient, when backward reaches it, with
a `WeightGradients`. The caller runs what is there when it likes. What was saved for the product lives until then.
Source: Qi et al. 2023, arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class WeightGradients:
    """What backward passes have put off."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def of(self, weight: Tensor) -> Callable[[Callable[[], Tensor]], None]:
        """What takes the product for `weight`. The gradient goes where autograd would have brought it, through the same
        hooks."""
        edge = get_gradient_edge(weight)
        return lambda product: self._waiting.append(lambda: _backward(edge, product()))

    def take(self) -> Callable[[], None]:
        """All that was put off since the last call, as a function that runs it once, in the order in which it came."""
        taken, self._waiting = self._waiting, []

        def run() -> None:
            while taken:
                taken.pop(0)()

        return run


_stack: list[WeightGradients] = []  # backward runs in other threads, forward in the one that opens the context


@contextmanager
def putting_off(gradients: WeightGradients) -> Iterator[None]:
    """Linear layers whose forward runs inside leave their weight gradients to `gradients`."""
    _stack.append(gradients)
    try:
        yield
    finally:
        _stack.pop()


def current() -> WeightGradients | None:
    """Where the weight gradients of a call go that is made now; None: autograd takes them within backward."""
    return None if torch.compiler.is_compiling() or not _stack else _stack[-1]


def _backward(edge: GradientEdge, gradient: Tensor) -> None:
    torch.autograd.backward([edge], [gradient])
