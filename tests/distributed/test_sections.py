"""Which part of a parameter each tensor-parallel rank has."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.distributed.sections import Sections


def test_each_rank_has_a_part_of_every_section():
    sections = Sections(0, (8, 4, 4), 2)  # q, k and v
    whole = torch.arange(16)
    assert sections.take(whole, 0).tolist() == [0, 1, 2, 3, 8, 9, 12, 13]
    assert sections.ranges(1) == [(4, 8), (10, 12), (14, 16)]


@pytest.mark.parametrize(("sizes", "ranks"), [((8, 4, 4), 2), ((7,), 2), ((5,), 4), ((2,), 4)])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_parts_join_to_the_whole(sizes: tuple[int, ...], ranks: int, dim: int) -> None:
    sections = Sections(dim, sizes, ranks)
    shape = (sum(sizes), 3) if dim == 0 else (3, sum(sizes))
    whole = torch.randn(shape)
    parts = [sections.take(whole, rank) for rank in range(ranks)]
    assert torch.equal(sections.join(parts), whole)
    if len(sizes) == 1:  # as a DTensor's shards are
        expected = whole.chunk(ranks, dim=dim)
        assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=False))


def test_ranges_of_a_dtensor_are_found_in_the_whole():
    sections = Sections(0, (8, 4, 4), 2)
    own_order = [at for rank in range(2) for begin, end in sections.ranges(rank) for at in range(begin, end)]
    for begin in range(16):
        for end in range(begin, 17):
            found = [at for start, stop in sections.in_whole(begin, end) for at in range(start, stop)]
            assert found == own_order[begin:end]
