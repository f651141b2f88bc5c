"""The random words of `numerics.philox` inside Triton kernels.

`tl.philox` runs the same rounds, but `tl.rand` and its kin count otherwise: here value i takes word i % 4 of counter
(i // 4, stream).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def four_words(quad, key, stream):  # type: ignore[no-untyped-def]
    """Words 4 * quad to 4 * quad + 3 of a stream, each uint32 of the shape of `quad` (int64); key: int64 scalar."""
    word_0 = quad.to(tl.uint32)
    word_1 = (quad >> 32).to(tl.uint32)
    word_2 = tl.zeros_like(word_0) + stream.to(tl.uint32)
    word_3 = tl.zeros_like(word_0)
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        wide_0 = word_0.to(tl.uint64) * 0xD2511F53
        wide_2 = word_2.to(tl.uint64) * 0xCD9E8D57
        word_0 = (wide_2 >> 32).to(tl.uint32) ^ word_1 ^ low
        word_2 = (wide_0 >> 32).to(tl.uint32) ^ word_3 ^ high
        word_1 = wide_2.to(tl.uint32)
        word_3 = wide_0.to(tl.uint32)
        low = tl.add(low, 0x9E3779B9, sanitize_overflow=False)
        high = tl.add(high, 0xBB67AE85, sanitize_overflow=False)
    return word_0, word_1, word_2, word_3


@triton.jit
def words_of(place, key, stream):  # type: ignore[no-untyped-def]
    """One word for each place (int64), in any order: a whole counter is worked out for each."""
    word_0, word_1, word_2, word_3 = four_words(place >> 2, key, stream)
    lane = place & 3
    return tl.where(lane < 2, tl.where(lane == 0, word_0, word_1), tl.where(lane == 2, word_2, word_3))


@triton.jit
def words_of_quads(quad, key, stream):  # type: ignore[no-untyped-def]
    """The words of all four places of each quad, side by side in the last dimension, which becomes 4 times as long."""
    word_0, word_1, word_2, word_3 = four_words(quad, key, stream)
    return tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
