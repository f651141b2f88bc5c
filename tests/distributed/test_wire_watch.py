"""Samples see what arrives of what is sent: its error, scale and zeros, under the name of what was sent."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from narrowgauge.distributed import codec, wire_watch
from narrowgauge.numerics.measure import sqnr_db

MX = ng.CastSpec(ng.formats.E4M3FN, ng.Block(1, 32), ng.E8M0_UP)
FLOAT32_SCALES = ng.CastSpec(ng.formats.E5M2, ng.Block(1, 128))
BF16 = ng.CastSpec(ng.formats.BF16)


@pytest.mark.parametrize("spec", [MX, FLOAT32_SCALES, BF16], ids=str)
def test_what_is_encoded_is_compared_with_what_arrives(spec: ng.CastSpec) -> None:
    values = torch.randn(3, 200) * torch.logspace(-12, 0, 200)
    residual = torch.randn(3, 200) * 1e-3
    wanted = values + residual
    with wire_watch.watching(has_bins=True) as watch:
        wire_watch.sends("grad_comm")
        plain = codec.encode(values, spec)
        wire_watch.sends("with feedback")
        codec.encode(values, spec, residual=residual)
    arrived = codec.decode(plain, 200, spec)
    measures = watch.tallies["grad_comm"].read().measures()
    assert measures["sqnr_db"] == pytest.approx(sqnr_db(values, arrived), abs=1e-6) and 20 < measures["sqnr_db"] < 60
    assert measures["amax"] == values.abs().max().item()
    assert measures["flushed"] == ((values != 0) & (arrived == 0)).sum().item() / 600
    if spec.in_blocks:
        scales = [
            block.abs().max().item() / spec.format.max for block in values.split(spec.granularity.columns or 1, 1)
        ]
        assert max(scales) * (1 - 1e-6) <= measures["scale"] <= 2 * max(scales)
    assert watch.tallies["with feedback"].read().maxima["amax"] == wanted.abs().max().item()
    assert sum(watch.tallies["grad_comm"].read().bins or []) == 600


def test_what_was_zero_is_not_flushed() -> None:
    values = torch.tensor([[0.0] * 48 + [1.0] * 15 + [1e-9]])
    with wire_watch.watching(has_bins=True) as watch:
        codec.encode(values, ng.CastSpec(ng.formats.E4M3FN, ng.Block(1, 64), ng.E8M0_UP))
    found = watch.tallies["collective"].read()
    assert found.measures()["flushed"] == 1 / 64 and found.zeros == 48


def test_means_are_compared_before_and_after_their_rounding() -> None:
    rows = torch.randn(4, 256)
    sent = codec.encode(rows, MX)
    with wire_watch.watching() as watch:
        mean = codec.reduce_and_encode(sent, 256, MX, 4)
    exact, arrives = codec.reduce(sent, 256, MX, 4), codec.decode(mean.view(1, -1), 256, MX)[0]
    (tally,) = watch.tallies.values()
    assert tally.read().measures()["sqnr_db"] == pytest.approx(sqnr_db(exact, arrives), abs=1e-6)


def test_looking_changes_no_byte_and_float32_is_not_looked_at() -> None:
    values = torch.randn(2, 300)
    fp32 = ng.CastSpec(ng.formats.FP32)
    expected = [codec.encode(values, spec) for spec in (MX, BF16, fp32)]
    with wire_watch.watching() as watch:
        found = [codec.encode(values, spec) for spec in (MX, BF16)]
        count = watch.tallies["collective"].read().sums["values"]
        found.append(codec.encode(values, fp32))
    assert all(map(torch.equal, expected, found))
    assert watch.tallies["collective"].read().sums["values"] == count == 1200
    assert not wire_watch.looks()


def test_several_look_at_once_each_from_its_own_beginning() -> None:
    first, second = torch.randn(1, 64), torch.randn(1, 128)
    with wire_watch.watching(has_bins=True) as outer:
        wire_watch.sends("a")
        codec.encode(first, MX)
        with wire_watch.watching() as inner:
            wire_watch.sends("b")
            codec.encode(second, MX)
        codec.encode(first, MX)
        assert wire_watch.looks()
    found = {name: tally.read() for name, tally in outer.tallies.items()}
    assert {name: each.sums["values"] for name, each in found.items()} == {"a": 64, "b": 128 + 64}
    assert sum(found["b"].bins or []) == 192
    (seen,) = (tally.read() for tally in inner.tallies.values())
    assert seen.sums["values"] == 128 and seen.bins is None and list(inner.tallies) == ["b"]
    assert not wire_watch.looks()


def test_the_largest_scale_is_of_blocks_that_are_finite() -> None:
    values = torch.ones(1, 96)
    values[0, 40], values[0, 70] = torch.nan, 448.0 * 4
    with wire_watch.watching() as watch:
        codec.encode(values, MX)
    found = watch.tallies["collective"].read().measures()
    assert found["scale"] == 4.0 and "sqnr_db" not in found
