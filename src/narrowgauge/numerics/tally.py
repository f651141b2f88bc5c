"""What casts did to the values of one role: sums and maxima that add up over casts, devices and processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_SMALLEST = -149  # floor(log2) of the smallest float32, a subnormal
_BINS = 127 - _SMALLEST + 1
_BIAS = 127  # of float32's exponent
_CACHED, _ON_DEVICE = 1 << 15, 1 << 24  # values: 256 KiB in float64, of a cache of 1 MiB or more; and 128 MiB

VALUES, SATURATED, FLUSHED = "values", "saturated", "flushed"
SIGNAL, NOISE = "signal", "noise"
HELD, ZEROS = "held", "zeros"
UPDATES, LOST = "updates", "lost"
AMAX, SCALE = "amax", "scale"


class Figures(NamedTuple):
    """A tally as plain numbers. sums, maxima: those that are known. bins: see `Tally.bins`, and zeros beside them."""

    sums: dict[str, float]
    maxima: dict[str, float]
    bins: list[int] | None = None
    zeros: int = 0

    def merged(self, other: Figures) -> Figures:
        """The figures of both together."""
        sums = {key: self.sums.get(key, 0.0) + other.sums.get(key, 0.0) for key in {**self.sums, **other.sums}}
        maxima = {**self.maxima, **other.maxima}
        for key in self.maxima.keys() & other.maxima.keys():
            found = self.maxima[key], other.maxima[key]
            maxima[key] = math.nan if any(map(math.isnan, found)) else max(found)
        bins = self.bins or other.bins
        if self.bins is not None and other.bins is not None:
            bins = [a + b for a, b in zip(self.bins, other.bins, strict=True)]
        return Figures(sums, maxima, bins, self.zeros + other.zeros)

    def measures(self) -> dict[str, float]:
        """amax, scale, saturated, flushed, sqnr_db, zero, lost: those that are known.

        Shares are in [0, 1]. sqnr_db: 10 log10(signal / noise), infinite where the cast was exact; not there where a
        value was not finite.
        """
        sums, found = self.sums, dict(self.maxima)
        for share, of in ((SATURATED, VALUES), (FLUSHED, VALUES), (ZEROS, HELD), (LOST, UPDATES)):
            if share in sums and sums[of]:
                found["zero" if share is ZEROS else share] = sums[share] / sums[of]
        if NOISE in sums and math.isfinite(sums[NOISE]) and math.isfinite(sums[SIGNAL]):
            noise, signal = sums[NOISE], sums[SIGNAL]
            found["sqnr_db"] = math.inf if noise == 0 else _decibel(signal / noise)
        return found

    def histogram(self) -> dict[str, object] | None:
        """{"low": exponent, "counts": [...], "zeros": n}: counts[i] values have floor(log2|x|) == low + i."""
        if self.bins is None:
            return None
        there = [i for i, count in enumerate(self.bins) if count]
        first, last = (there[0], there[-1] + 1) if there else (-_SMALLEST, -_SMALLEST)  # nothing, from exponent 0 on
        return {"low": first + _SMALLEST, "counts": self.bins[first:last], "zeros": self.zeros}


class Tally:
    """Sums over the values of one role. Tensors stay on their device until `read`.

    bins: values by floor(log2|x|), from that of float32's smallest value on; None: not counted.
    """

    def __init__(self, has_bins: bool = False) -> None:
        self.sums: dict[str, float | Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.bins: Tensor | None = None
        self.zeros: int | Tensor = 0
        self.has_bins = has_bins

    def add(self, **sums: float | Tensor) -> None:
        """Add to sums."""
        for key, value in sums.items():
            before = self.sums.get(key)
            self.sums[key] = value if before is None else before + value

    def raise_to(self, **maxima: Tensor | None) -> None:
        """Raise maxima, 0-dimensional; None changes nothing. A NaN stays."""
        for key, value in maxima.items():
            if value is not None:
                value = value.detach().float()
                before = self.maxima.get(key)
                self.maxima[key] = value if before is None else torch.maximum(before, value)

    def add_error(self, x: Tensor, approximation: Tensor, factor: Tensor | None = None) -> None:
        """Add the squares of `x` and of what `approximation`, of as many values, lacks of it.

        In float64: squares of small values vanish in float32. factor: 0-dimensional, of the approximation.
        """
        flat, other = x.detach().reshape(-1), approximation.detach().reshape(-1)
        for part in pieces(flat):
            values, kept = flat[part].float(), other[part].float()
            self.add(signal=_squares(values), noise=_squares(values - (kept if factor is None else kept * factor)))

    def add_bins(self, x: Tensor) -> None:
        """Add the values of `x`, of which zeros and those that are not finite have no bin. Waits for the device."""
        if not self.has_bins or not x.numel():
            return
        x = x.detach().float().reshape(-1)
        stored = (x.view(torch.int32) >> 23) & 255
        by_exponent = torch.bincount(stored, minlength=256)
        bins = by_exponent.new_zeros(_BINS)
        normal = 1 - _BIAS - _SMALLEST  # the bin of stored exponent 1
        bins[normal:] = by_exponent[1:255]
        small = x[stored == 0]
        zeros = (small == 0).sum()
        if int(zeros) < small.numel():
            exponents = torch.frexp(small[small != 0]).exponent - 1
            bins += torch.bincount(exponents - _SMALLEST, minlength=_BINS)
        self.bins = bins if self.bins is None else self.bins + bins
        self.zeros = self.zeros + zeros

    def take(self, other: Tally) -> None:
        """Add another tally."""
        self.add(**other.sums)
        self.raise_to(**other.maxima)
        if other.bins is not None:
            self.bins = other.bins if self.bins is None else self.bins + other.bins
            self.zeros = self.zeros + other.zeros

    def read(self) -> Figures:
        """Plain numbers; waits for the device, once."""
        numbers = [*self.sums.values(), *self.maxima.values(), self.zeros]
        tensors = [t for t in numbers if isinstance(t, Tensor)]
        plain = iter(torch.stack([t.double() for t in tensors]).tolist() if tensors else [])
        values = [next(plain) if isinstance(number, Tensor) else float(number) for number in numbers]
        sums = dict(zip(self.sums, values[: len(self.sums)], strict=True))
        maxima = dict(zip(self.maxima, values[len(self.sums) : -1], strict=True))
        return Figures(sums, maxima, None if self.bins is None else self.bins.tolist(), int(values[-1]))


def pieces(flat: Tensor) -> Iterator[slice]:
    """Parts of a flat tensor that are looked at at once: on a CPU so small that their temporaries stay in its cache."""
    size = _CACHED if flat.device.type == "cpu" else _ON_DEVICE
    for start in range(0, flat.numel(), size):
        yield slice(start, start + size)


def _squares(x: Tensor) -> Tensor:
    wide = x.double()
    return torch.dot(wide, wide)


def _decibel(ratio: float) -> float:
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf
