"""Run as a program with TRITON_INTERPRET=1: holds the Triton kernels of rows on the wire against the torch twin."""

from __future__ import annotations

import contextlib

import torch
from triton_interpreted import assert_bits_equal

from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E5M2, INT4, INT8
from narrowgauge.numerics.kernels import triton_wire, twin_wire
from narrowgauge.numerics.kernels.wire import WireFormat
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP

KEY = torch.tensor(-0x123456789ABCDEF, dtype=torch.int64)
# format, block, rule, (rows, values of a row, values there are), dtype, key, with a residual
CASES = (
    (E4M3FN, 128, E8M0_UP, (2, 512, 1000), torch.float32, None, True),
    (E4M3FN, 128, E8M0_UP, (3, 1000, 2600), torch.bfloat16, KEY, False),
    (E4M3FN, 96, CURRENT, (1, 77, 77), torch.float32, KEY, True),
    (E5M2, 128, CURRENT_POW2, (2, 300, 600), torch.float16, None, False),
    (E5M2, 32, E8M0_FLOOR, (2, 300, 600), torch.float32, KEY, True),
    (INT8, 128, E8M0_UP, (2, 300, 600), torch.float32, None, True),
    (INT8, 16, CURRENT, (2, 300, 500), torch.bfloat16, KEY, True),
    (E2M1FN, 128, E8M0_UP, (2, 301, 600), torch.float32, None, True),
    (E2M1FN, 16, CURRENT, (2, 301, 600), torch.float32, KEY, False),
    (INT4, 6, CURRENT, (2, 301, 600), torch.float32, None, False),
    (INT4, 128, E8M0_UP, (2, 301, 600), torch.float32, KEY, True),
)


def check() -> None:
    for i, (fmt, block, rule, (rows, n, numel), dtype, key, feeds_back) in enumerate(CASES):
        form = WireFormat(fmt, block, rule)
        draw = torch.Generator().manual_seed(i)
        x = torch.randn(numel, generator=draw) * torch.rand(numel, generator=draw).mul(-20).exp2()
        x[3], x[5], x[numel // 2] = 0.0, torch.nan, torch.inf
        x = x.to(dtype)
        residual = torch.randn(numel, generator=draw) / 100 if feeds_back else None
        found, expected = (torch.zeros(rows, form.row_bytes(n), dtype=torch.uint8) for _ in range(2))
        kept = [None if residual is None else residual.clone() for _ in range(2)]
        triton_wire.encode(x, rows, n, form, key, 3, kept[0], found)
        twin_wire.encode(x, rows, n, form, key, 3, kept[1], expected)
        assert torch.equal(found, expected), CASES[i]
        if feeds_back:
            assert_bits_equal(kept[0], kept[1])
        apart = torch.cat([expected, expected[:, :3]], dim=1)[:, :-3]
        for out_dtype in (torch.float32, torch.bfloat16):
            decoded = [torch.empty(numel, dtype=out_dtype) for _ in range(2)]
            triton_wire.decode(apart, n, form, decoded[0])
            twin_wire.decode(expected, n, form, decoded[1])
            assert_bits_equal(*decoded)
        assert_bits_equal(triton_wire.reduce(apart, n, form, 3.0), twin_wire.reduce(expected, n, form, 3.0))
        sums = [torch.zeros(form.row_bytes(n), dtype=torch.uint8) for _ in range(2)]
        kept = [None if residual is None else residual[:n].clone() for _ in range(2)]
        triton_wire.reduce_and_encode(apart, n, form, 3.0, key, 4, kept[0], sums[0])
        twin_wire.reduce_and_encode(expected, n, form, 3.0, key, 4, kept[1], sums[1])
        assert torch.equal(*sums), CASES[i]
        if feeds_back:
            assert_bits_equal(kept[0], kept[1])


if __name__ == "__main__":
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    check()
