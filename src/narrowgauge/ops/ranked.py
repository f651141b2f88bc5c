"""Rows of all processes of a group below one another: how a sequence-parallel layer orders and gathers them.

A sequence of T tokens is parted into T / ranks tokens on each process. The rows of all processes, those of rank 0
first, are called ranked. Every product of a sequence-parallel layer takes ranked rows, so that what is gathered and
what is summed and scattered need no other order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.errors import ConversionError
from narrowgauge.numerics import packing
from narrowgauge.ops.casts import OperandCast
from narrowgauge.ops.operands import Cast
from narrowgauge.ops.parted import Exchange
from narrowgauge.ops.shared import SharedInputs
from narrowgauge.ops.uses import MakeCast


def ranked_rows(x: Tensor, ranks: int) -> Tensor:
    """The ranked rows [tokens of all, n] of whole sequences x [..., T, n]."""
    *lead, tokens, features = x.shape
    parts = x.reshape(-1, ranks, tokens // ranks, features).transpose(0, 1)
    return parts.reshape(-1, features) if lead else x


def from_ranked_rows(rows: Tensor, part: torch.Size, ranks: int) -> Tensor:
    """Whole sequences [..., T, n] of ranked rows [tokens of all, n]; part: the shape [..., T / ranks, any] of one's."""
    *lead, tokens, _ = part
    if not lead:
        return rows
    parts = rows.view(ranks, -1, tokens, rows.shape[1]).transpose(0, 1)
    return parts.reshape(*lead, ranks * tokens, rows.shape[1])


def codes_only(make: MakeCast[Cast]) -> MakeCast[Cast]:
    """`make`, for casts that are gathered before they are multiplied."""

    def made(how: OperandCast, *, keep_codes: bool, carrier: torch.dtype | None, counted: bool) -> Cast:
        return make(how, keep_codes=True, carrier=None, counted=counted)

    return made


def gather_rows(
    cast: Cast, exchange: Exchange, shared: SharedInputs[Cast] | None = None, source: Tensor | None = None
) -> Cast:
    """The cast of the ranked rows of all processes, from those of one: codes and scales in one collective.

    A cast to at most 8 bits arrives as it is. A wide one travels by the recipe's cast for communication. shared,
    source: where layers that read the same tensor find what one of them has gathered. Raises ConversionError where
    tiles of several rows would hold rows of two processes.
    """
    if shared is None or source is None:
        return _gather(cast, exchange)
    key = ("gathered", cast.spec, id(cast.codes))  # the store of casts holds these codes as long as the entry lives
    found = shared.get(source, key)
    if found is None:
        found = _gather(cast, exchange)
        shared.put(source, key, found)
    return found


def _gather(cast: Cast, exchange: Exchange) -> Cast:
    codes, spec, ranks = cast.codes, cast.spec, exchange.ranks
    assert codes is not None
    if not spec.format.is_narrow:
        return cast._replace(codes=exchange.gather_values(codes), carrier=None)
    rows, columns = codes.shape
    height = spec.granularity.rows if spec.in_blocks else None
    if height is not None and rows % height:
        raise ConversionError(
            f"sequence parallel with a cast to {spec}: expected a multiple of {height} tokens on each of {ranks} "
            f"processes, found {rows}: change batch size or sequence length, or leave sequence parallelism out"
        )
    packed = packing.pack_codes(codes, spec.format) if spec.format.bits < 8 else codes
    parts = [packed, cast.dequant_scale, cast.block_scale]
    gathered = _gather_parts([part for part in parts if part is not None], exchange)
    codes = gathered.pop(0).flatten(0, 1)
    codes = packing.unpack_codes(codes, spec.format, columns) if spec.format.bits < 8 else codes
    scale, block_scale = None, None
    if cast.dequant_scale is not None:
        scale = gathered.pop(0).amax(dim=0)  # one for all, but for an overflow that one process has seen
    if cast.block_scale is not None:
        of_ranks = gathered.pop(0)
        block_scale = of_ranks[0] if height is None else of_ranks.flatten(0, 1)
    return cast._replace(codes=codes, carrier=None, dequant_scale=scale, block_scale=block_scale)


def _gather_parts(parts: list[Tensor], exchange: Exchange) -> list[Tensor]:
    """Tensors of any dtypes, in one collective: each [ranks, *shape]."""
    flat = [part.contiguous().view(-1).view(torch.uint8) for part in parts]
    received = exchange.gather_bytes(torch.cat(flat)).split([len(part) for part in flat], dim=1)
    return [
        some.contiguous().view(-1).view(part.dtype).view(exchange.ranks, *part.shape)
        for some, part in zip(received, parts, strict=True)
    ]
