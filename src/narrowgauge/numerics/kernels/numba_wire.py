"""Numba kernels of the CPU for rows of values on the wire: `twin_wire`, a part of a row at a time, in one pass.

A wire is (values of a block, rule of its scales, bits of a code, *layout of its codes). All arrays are flat and hold
bits, see `numba_rows`; those that are not wanted are empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from narrowgauge.numerics.formats import E4M3FN
from narrowgauge.numerics.kernels import numba_packing, numba_rows, numba_scales, numba_tiles
from narrowgauge.numerics.kernels import numba_wire_rows as rows
from narrowgauge.numerics.kernels.numba_bits import INFINITY, INNER, borrow, hold, layout, stream_line
from narrowgauge.numerics.kernels.numba_vectors import LANES

f32 = np.float32

_E4M3 = layout(E4M3FN)

# integers as a float layout whose values up to 128 all are one apart: (shift, least, top) for `stochastic_row`
_UNITS = (16, (127 + 7) << 23)


@njit(**INNER)
def _sizes(n: int, wire: Any) -> tuple[int, int, int]:
    """Bytes of the codes of a row of `n` values, of one scale, and of the whole row."""
    width, rule, bits = wire[0], wire[1], wire[2]
    code_bytes = (n * bits + 7) // 8
    scale_bytes = 4 if rule == numba_scales.CURRENT or rule == numba_scales.CURRENT_POW2 else 1
    return code_bytes, scale_bytes, code_bytes + (n + width - 1) // width * scale_bytes


@njit(**INNER)
def _in_vectors(wire: Any) -> bool:
    """Whether codes and tiles are those that `numba_vectors` knows."""
    return wire[0] % LANES == 0 and wire[3] == _E4M3[0]


@njit(**INNER)
def _new_scratch(part: int, width: int) -> Any:
    """What a part needs: integers, floats and bytes."""
    tiles = (part + width - 1) // width
    return (
        np.empty(2 * tiles + 3 * part + 4, np.int32),
        np.empty(2 * tiles + part, np.float32),
        np.empty(tiles + part, np.uint8),
    )


@njit(**INNER)
def _areas(scratch: Any, tiles: int, n: int, part: int, most: int) -> Any:
    """The areas of the scratch for `n` values in so many tiles.

    Of tiles: largest, scale words, scale bytes, quant_scale, factor. Of values: source, scaled, random words (all
    there are), scale of each, code of each.
    """
    integers, floats, bytes = borrow(scratch[0]), borrow(scratch[1]), borrow(scratch[2])
    values = integers[2 * most :]
    return (
        integers[:tiles], integers[most : most + tiles], bytes[:tiles], floats[:tiles], floats[most : most + tiles],
        values[:n], values[part : part + n], values[2 * part :], floats[2 * most : 2 * most + n],
        bytes[most : most + n],
    )  # fmt: skip


@njit(**INNER)
def _encode_part(
    source: Any, at: int, wire: Any, random: Any, residual: Any, out: Any, scales: Any, areas: Any
) -> None:
    """Codes and scales of the values of a part, the first of them number `at` of all.

    source: what is sent, float32 bits where there is a residual: that becomes source - sent, where a block is finite.
    """
    width, rule, bits, layout = wire[0], wire[1], wire[2], wire[3:]
    largest, words, stored, quant_scale, factor, _, scaled, random_words, spread, unpacked = areas
    numba_tiles.largest_of_tiles(source, width, largest)
    numba_scales.scales_of(largest, rule, layout, 0, quant_scale, factor, words, stored)
    rows.store_scales(largest, words, stored, len(scales) // len(largest), scales)
    codes = unpacked if bits == 4 else out
    if not (random[0] or len(residual) or layout[5]):
        if _in_vectors(wire):
            rows.encode_e4m3_tiles(source, quant_scale, width, codes)
        else:
            numba_tiles.repeat(quant_scale, width, 0, spread)
            numba_rows.scale_and_encode_row(source, spread, layout, codes)
    else:
        numba_tiles.repeat(quant_scale, width, 0, spread)
        numba_rows.scale_row(source, spread, scaled)
        if random[0]:
            numba_rows.draw_row(random[1], random[2], at // 4, random_words[: (at % 4 + len(scaled) + 3) // 4 * 4])
            grid = (_UNITS[0], _UNITS[1], layout[2]) if layout[5] else (layout[0], layout[1], layout[2])
            numba_rows.stochastic_row(scaled, random_words[at % 4 :], grid)
        numba_tiles.encode_row(scaled, layout, codes)
    if len(residual):
        numba_tiles.repeat(factor, width, 0, spread)
        rows.decode_plain_row(codes, layout, scaled)
        sent = random_words[: len(scaled)]
        numba_rows.multiply_row(scaled, spread, sent)
        for t in range(len(largest)):
            left, right = t * width, min(t * width + width, len(residual))
            if largest[t] < INFINITY and left < right:
                rows.subtract_row(source[left:right], sent[left:right], residual[left:right])
    rows.clear_codes(largest, width, codes)
    if bits == 4:
        numba_packing.pack4(codes, len(codes), out)


@njit(nogil=True, cache=True)
def encode(x: Any, n: int, part: int, first: int, last: int, wire: Any, random: Any, residual: Any, out: Any) -> None:
    """Encode parts `first` to `last` of rows of `n` values each; what `x` lacks of the last rows is zeros.

    part: values of a part, a multiple of the block's. random: (whether to round stochastically, key, stream).
    """
    width, bits = wire[0], wire[2]
    code_bytes, scale_size, row_bytes = _sizes(n, wire)
    parts, most = (n + part - 1) // part, (part + width - 1) // width
    scratch = _new_scratch(part, width)
    x, residual, out = borrow(x), borrow(residual), borrow(out)
    for item in range(first, last):
        row, start = item // parts, item % parts * part
        count = min(part, n - start)
        at, tiles = row * n + start, (count + width - 1) // width
        there = max(min(count, len(x) - at), 0)
        codes_at, scales_at = (
            row * row_bytes + start * bits // 8,
            row * row_bytes + code_bytes + start // width * scale_size,
        )
        codes, scales = (
            out[codes_at : codes_at + (count * bits + 7) // 8],
            out[scales_at : scales_at + tiles * scale_size],
        )
        areas = _areas(scratch, tiles, count, part, most)
        if there == count and not len(residual):
            _encode_part(x[at : at + count], at, wire, random, residual, codes, scales, areas)
            continue
        source = areas[5]
        if len(residual):
            source[there:] = 0
            rows.add_row(x[at : at + there], residual[at : at + there], source)
        else:
            rows.widen_row(x[at : at + there], source)
        left = residual[at : at + there] if len(residual) else residual
        _encode_part(source, at, wire, random, left, codes, scales, areas)
    hold(scratch)


@njit(**INNER)
def _load_part(buffer: Any, row_at: int, start: int, n: int, wire: Any, areas: Any) -> Any:
    """The codes of a part of the row that begins at `row_at`, one a byte; their factors go into the area `factor`."""
    bits, layout = wire[2], wire[3:]
    code_bytes, scale_size, _ = _sizes(n, wire)
    _, words, _, _, factor, source, _, _, _, unpacked = areas
    codes_at = row_at + start * bits // 8
    scales_at = row_at + code_bytes + start // wire[0] * scale_size
    rows.load_scales(buffer[scales_at : scales_at + len(factor) * scale_size], scale_size, words, factor)
    codes = buffer[codes_at : codes_at + (len(source) * bits + 7) // 8]
    if bits == 4:
        rows.unpack4(codes, unpacked, layout[5] != 0)
        codes = unpacked
    return codes


@njit(**INNER)
def _decode_part(codes: Any, wire: Any, areas: Any, out: Any) -> None:
    """out = what the codes and factors of `_load_part` say, int32 (float32) or uint16 (bfloat16)."""
    _, _, _, _, factor, source, scaled, _, spread, _ = areas
    if not _in_vectors(wire):
        numba_tiles.repeat(factor, wire[0], 0, spread)
        rows.decode_row(codes, spread, wire[3:], scaled, out)
    elif out.itemsize == 4:
        rows.decode_e4m3_tiles(codes, factor, wire[0], False, out)
    else:
        rows.decode_e4m3_tiles(codes, factor, wire[0], False, source)
        rows.narrow_row(source, out)


@njit(**INNER)
def _accumulate_part(codes: Any, wire: Any, areas: Any) -> None:
    """Add what the codes and factors of `_load_part` say to the area `source`."""
    _, _, _, _, factor, source, scaled, _, spread, _ = areas
    if _in_vectors(wire):
        rows.accumulate_e4m3_tiles(codes, factor, wire[0], source)
    else:
        numba_tiles.repeat(factor, wire[0], 0, spread)
        rows.accumulate_row(codes, spread, wire[3:], scaled, source)


@njit(nogil=True, cache=True)
def decode(
    buffer: Any, stride: int, n: int, part: int, first: int, last: int, wire: Any, streamed: bool, out: Any
) -> None:
    """Decode parts `first` to `last` of rows of `n` values each into `out`, which may end within the last rows.

    stride: bytes from the beginning of one row to the next.
    streamed: past the caches, where a part of `out` (float32) begins on a cache line, as `out` itself does.
    """
    width = wire[0]
    parts, most = (n + part - 1) // part, (part + width - 1) // width
    scratch = _new_scratch(part, width)
    buffer, out = borrow(buffer), borrow(out)
    for item in range(first, last):
        row, start = item // parts, item % parts * part
        at = row * n + start
        count = min(min(part, n - start), len(out) - at)
        if count <= 0:
            break
        areas = _areas(scratch, (count + width - 1) // width, count, part, most)
        codes, factor, values = _load_part(buffer, row * stride, start, n, wire, areas), areas[4], areas[5]
        if not streamed or at % LANES:
            _decode_part(codes, wire, areas, out[at : at + count])
        elif _in_vectors(wire):
            rows.decode_e4m3_tiles(codes, factor, width, True, out[at : at + count])
        else:
            _decode_part(codes, wire, areas, values)
            whole = count // LANES * LANES
            for i in range(0, whole, LANES):
                stream_line(values, i, out, at + i)
            numba_rows.copy_row(values[whole:], out[at + whole : at + count])
    hold(scratch)


@njit(nogil=True, cache=True)
def reduce(
    buffer: Any, stride: int, ranks: int, n: int, part: int, first: int, last: int, wire: Any, divisor: float,
    random: Any, residual: Any, total: Any, out: Any,
) -> None:  # fmt: skip
    """The sum of rows of `n` values over `divisor`, parts `first` to `last`: into `total`, and encoded into `out`."""
    width, bits = wire[0], wire[2]
    code_bytes, scale_size, _ = _sizes(n, wire)
    most = (part + width - 1) // width
    scratch = _new_scratch(part, width)
    buffer, residual, total, out = borrow(buffer), borrow(residual), borrow(total), borrow(out)
    for item in range(first, last):
        start = item * part
        count = min(part, n - start)
        tiles = (count + width - 1) // width
        areas = _areas(scratch, tiles, count, part, most)
        source, scaled = areas[5], areas[6]
        for row in range(ranks):
            codes = _load_part(buffer, row * stride, start, n, wire, areas)
            if row == 0:
                _decode_part(codes, wire, areas, source)
            else:
                _accumulate_part(codes, wire, areas)
        if divisor != 1.0:
            rows.divide_row(source, f32(divisor))
        if len(total):
            numba_rows.copy_row(source, total[start : start + count])
        if len(out):
            left = residual
            if len(residual):
                left = residual[start : start + count]
                rows.add_row(source, left, scaled)
                numba_rows.copy_row(scaled, source)
            codes = out[start * bits // 8 : (start + count) * bits // 8 + (count * bits % 8 != 0)]
            scales_at = code_bytes + start // width * scale_size
            _encode_part(
                source, start, wire, random, left, codes, out[scales_at : scales_at + tiles * scale_size], areas
            )
    hold(scratch)
