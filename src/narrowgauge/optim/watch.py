"""What a sampled step did to an optimizer's state: what storing moments cost, and which updates were lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from narrowgauge.numerics import scaling
from narrowgauge.numerics.tally import Tally
from narrowgauge.optim import storage
from narrowgauge.optim.rules import Moments, Rule
from narrowgauge.optim.update import Item, read, values_of_gradient
from narrowgauge.tensors.local import has_no_values
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.tensors.tallies import add_storage, in_pieces, largest_scale

PARAM, GRAD = "param", "grad"


class UpdateWatch:
    """Tallies by parameter and role, of the steps that it sees. has_bins: whether exponents are counted, too.

    The exact step of one parameter at a time is taken beside the real one, in float64 and out of place, from the state
    before it: nothing that the real step reads is touched.
    """

    def __init__(self, has_bins: bool = False) -> None:
        self.has_bins = has_bins
        self.tallies: dict[Tensor, dict[str, Tally]] = {}

    @contextmanager
    def step(self, p: Tensor, rule: Rule, item: Item, roles: Sequence[str]) -> Iterator[None]:
        """Around the step of `item`, the parameter `p`. roles: of its moments."""
        if has_no_values(item.param):
            yield
            return
        self.see_gradient(p, item.grad)
        tallies = self.tallies[p]
        old = read(item.param, item.master).clone()
        new, moves, exact = _exact(rule, item, old)
        yield
        self._see_parameter(tallies.setdefault(PARAM, Tally()), item, old, new, moves)
        for role, values, stored in zip(roles, exact, item.moments, strict=True):
            if not _is_wide(stored):
                add_storage(tallies.setdefault(role, Tally(self.has_bins)), values, stored)

    def see_gradient(self, p: Tensor, grad: Tensor) -> None:
        """Add the gradient that the step of `p` reads: its magnitude and zeros."""
        tally = self.tallies.setdefault(p, {}).setdefault(GRAD, Tally(self.has_bins))
        values = values_of_gradient(grad, torch.float32)
        tally.raise_to(amax=grad.amax if isinstance(grad, QuantizedTensor) else scaling.tensor_amax(values))
        tally.add(held=values.numel(), zeros=(values == 0).sum())
        tally.add_bins(values)

    def _see_parameter(self, tally: Tally, item: Item, old: Tensor, new: Tensor, moves: Tensor) -> None:
        after = read(item.param, item.master)
        tally.add(updates=moves.sum(), lost=(moves & (after == old)).sum())
        tally.raise_to(amax=scaling.tensor_amax(after), scale=largest_scale(item.param.detach()))
        if item.master is not None or not _is_wide(item.param.detach()):
            tally.add_error(new, after)


def _exact(rule: Rule, item: Item, old: Tensor) -> tuple[Tensor, Tensor, Moments]:
    """The parameter after the exact step, where it is another number than before, and the moments."""
    moments = tuple(storage.decode(stored, old.shape) for stored in item.moments)
    grad = values_of_gradient(item.grad, old.dtype)
    # contiguous, so that their flat pieces are views
    new, *after = (torch.empty(old.shape, dtype=old.dtype, device=old.device) for _ in (old, *moments))
    moves = torch.empty(old.shape, dtype=torch.bool, device=old.device)

    def take(*parts: Tensor) -> None:
        old, grad, new, moves, *rest = parts
        before, out = rest[: len(moments)], rest[len(moments) :]
        found, exact = rule.update(old.double(), grad.double(), tuple(m.double() for m in before), item.hyper)
        new.copy_(found)
        moves.copy_(found != old)
        for kept, values in zip(out, exact, strict=True):
            kept.copy_(values)

    everything = (old, grad, new, moves, *moments, *after)
    if rule is Rule.MUON:  # of a whole matrix
        take(*everything)
    else:
        in_pieces(take, *everything)
    return new, moves, tuple(after)


def _is_wide(stored: Tensor) -> bool:
    """True for what holds a step's numbers as they are."""
    return stored.dtype in (torch.float32, torch.float64) and not isinstance(stored, storage.Encoded)
