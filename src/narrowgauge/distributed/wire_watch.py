"""What encoding for the wire did to values, on sampled steps: by parameter where one is sent alone, else by role."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from narrowgauge.numerics import scaling
from narrowgauge.numerics.formats import FP32
from narrowgauge.numerics.kernels.wire import WireFormat
from narrowgauge.numerics.tally import Tally
from narrowgauge.recipes.spec import CastSpec


class WireWatch:
    """Tallies by what travels: a parameter, or the name of a communication role.

    place: what is encoded next. has_bins: whether exponents are counted, too.
    """

    def __init__(self, has_bins: bool = False) -> None:
        self.has_bins = has_bins
        self.place: Tensor | str = "collective"
        self.tallies: dict[Tensor | str, Tally] = {}

    def sent(self, values: Tensor, arrives: Tensor, scale: Tensor | None) -> None:
        """Add values, flat float32, and what arrives of them."""
        tally = self.tallies.setdefault(self.place, Tally(self.has_bins))
        tally.raise_to(amax=scaling.tensor_amax(values), scale=scale)
        tally.add(values=values.numel(), flushed=((values != 0) & (arrives == 0)).sum())
        tally.add_error(values, arrives)
        tally.add_bins(values)


_watches: tuple[WireWatch, ...] = ()


@contextmanager
def watching(has_bins: bool = False) -> Iterator[WireWatch]:
    """Look at all that this process encodes inside; several may look at once."""
    global _watches
    watch = WireWatch(has_bins)
    _watches = (*_watches, watch)
    try:
        yield watch
    finally:
        _watches = tuple(each for each in _watches if each is not watch)


def looks() -> bool:
    """Whether anybody looks."""
    return bool(_watches)


def sends(place: Tensor | str) -> None:
    """Say what is encoded next: a parameter, or a communication role."""
    for watch in _watches:
        watch.place = place


def before(values: Tensor, residual: Tensor | None, spec: CastSpec) -> Tensor | None:
    """What is to be encoded, flat in float32, a copy where `encode` changes it; None where nobody looks at it."""
    if not _watches or spec.format is FP32:
        return None
    wanted = values.detach().reshape(-1).float()
    return wanted if residual is None else wanted + residual.reshape(-1)[: wanted.numel()]


def after(wanted: Tensor, arrives: Callable[[], Tensor], scale: Callable[[], Tensor | None]) -> None:
    """Tell what arrives of the values that `before` gave."""
    if not _watches or not wanted.numel():
        return
    arrived, largest = arrives(), scale()
    for watch in _watches:
        watch.sent(wanted, arrived, largest)


def largest_scale(rows: Tensor, n: int, wire: WireFormat) -> Tensor:
    """The largest scale of blocks in the bytes of rows of `n` values."""
    stored = rows[:, wire.code_bytes(n) :].contiguous()
    return scaling.block_factors(stored.view(scaling.stored_dtype(wire.rule)).view(-1)).nan_to_num(0.0).max().float()
