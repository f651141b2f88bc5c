"""Random bits by counter: Philox4x32-10, so that every backend draws the same ones for the same value.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3". A key (64 bits) is drawn from a
torch.Generator for each cast; value i of the tensor, in logical order, takes word i % 4 of the block with counter
(i // 4, stream). Streams part the casts that share a key.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def draw_key(device: torch.device | str, generator: torch.Generator | None = None) -> Tensor:
    """A fresh key: int64, 0-dimensional, on `device`.

    generator: its source; None: torch's default one of the device.
    """
    lowest, highest = -(1 << 63), (1 << 63) - 1
    source = torch.device(device) if generator is None else generator.device
    return torch.randint(lowest, highest, (), dtype=torch.int64, device=source, generator=generator).to(device)


def random_words(key: Tensor, stream: int, count: int) -> Tensor:
    """The first `count` words of a stream: int64 [count], each in [0, 2^32), on the key's device."""
    block = torch.arange(-(-count // 4), dtype=torch.int64, device=key.device)
    counter = [block & _MASK, block >> 32, torch.full_like(block, stream), torch.zeros_like(block)]
    low, high = key & _MASK, (key >> 32) & _MASK
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply(counter[0], MULTIPLIERS[0])
        high_1, low_1 = _multiply(counter[2], MULTIPLIERS[1])
        counter = [high_1 ^ counter[1] ^ low, low_1, high_0 ^ counter[3] ^ high, low_0]
        low, high = (low + KEY_STEPS[0]) & _MASK, (high + KEY_STEPS[1]) & _MASK
    return torch.stack(counter, dim=-1).reshape(-1)[:count]


def _multiply(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two 32-bit words; halves of `by`, so that int64 does not overflow."""
    upper, lower = x * (by >> 16), x * (by & 0xFFFF)
    low = (((upper & 0xFFFF) << 16) + lower) & _MASK
    high = ((upper >> 16) + ((((upper & 0xFFFF) << 16) + lower) >> 32)) & _MASK
    return high, low
