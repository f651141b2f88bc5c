"""Rows of values on the wire: codes, then the scales of their blocks, as bytes; and sums of such rows.

A row of n values is ceil(n * bits / 8) bytes of codes (two of 4 bits a byte, the even value in the low nibble), then
one scale for each block, a byte for E8M0 rules and four, the lowest first, for float32. A block that holds NaN or an
infinity has the scale NaN, so that all of it decodes to NaN. Sums are float32, in the order of rows. Numba, Triton and
`twin_wire` give the same bytes; each passes over memory once and keeps no float32 copy of what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import formats, scaling
from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E5M2, INT4, INT8, Format
from narrowgauge.numerics.kernels import twin_wire
from narrowgauge.numerics.kernels.paths import has_gpu_kernels
from narrowgauge.numerics.kernels.tracing import is_traced
from narrowgauge.numerics.scaling import CURRENT, CURRENT_POW2, E8M0_FLOOR, E8M0_UP, ScaleRule

FORMATS = (E4M3FN, E5M2, INT8, E2M1FN, INT4)
RULES = (CURRENT, CURRENT_POW2, E8M0_UP, E8M0_FLOOR)
MAX_BLOCK = 4096  # values of a block: a program of a GPU holds it whole
_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
_OUTPUTS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class WireFormat:
    """What a row is made of: the format of its codes, the values of a block, the rule of the blocks' scales.

    Raises RecipeError for a format, rule or block that has no rows.
    """

    fmt: Format
    block: int
    rule: ScaleRule

    def __post_init__(self) -> None:
        if self.fmt not in FORMATS:
            raise RecipeError(f"{self.fmt} on the wire: expected one of {', '.join(map(str, FORMATS))}")
        if self.rule not in RULES:
            raise RecipeError(f"scale {self.rule!r} on the wire: expected one of {', '.join(map(repr, RULES))}")
        if not 1 <= self.block <= MAX_BLOCK or self.block * self.fmt.bits % 8:
            even = " and an even number, as two codes share a byte" if self.fmt.bits < 8 else ""
            raise RecipeError(
                f"blocks of {self.block} values of {self.fmt} on the wire: expected 1 to {MAX_BLOCK}{even}"
            )

    def code_bytes(self, n: int) -> int:
        """Bytes of the codes of a row of `n` values."""
        return (n * self.fmt.bits + 7) // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return scaling.stored_dtype(self.rule).itemsize

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` values."""
        return self.code_bytes(n) + (n + self.block - 1) // self.block * self.scale_bytes


def encode(
    x: Tensor,
    rows: int,
    n: int,
    wire: WireFormat,
    *,
    key: Tensor | None = None,
    stream: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The values of `x` in rows of `n`, as bytes: uint8 [rows, wire.row_bytes(n)].

    x: floating, of any shape with at most rows * n values; the rows are filled up with zeros. key: int64,
    0-dimensional: round stochastically, value i of `x` by word i of `philox.random_words(key, stream)`; None: to
    nearest even. residual: float32 of the number of values of `x`, contiguous: it is added to them, and becomes what
    the bytes lack of the sum; blocks that are not finite leave it as it is. out: contiguous bytes to write into,
    instead of new ones.
    """
    x = x.detach().reshape(-1)
    x = x if x.dtype in _INPUTS else x.float()
    if is_traced(x):
        return _given(torch.ops.narrowgauge.encode_rows(x, rows, n, *_names(wire), key, stream, residual), out)
    return _encode(x, rows, n, wire, key, stream, residual, out)


def decode(
    buffer: Tensor,
    numel: int,
    n: int,
    wire: WireFormat,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The first `numel` values of rows of `n`, uint8 [rows, wire.row_bytes(n)], in `dtype`: [numel].

    Each is the float32 product of code and scale, rounded once to `dtype`. out: a contiguous tensor of `numel` values
    to write into instead of a new one; it then sets dtype and shape.
    """
    dtype = dtype if out is None else out.dtype
    if dtype not in _OUTPUTS:
        return _given(decode(buffer, numel, n, wire).to(dtype), out)
    if is_traced(buffer) or (out is not None and is_traced(out)):
        return _given(torch.ops.narrowgauge.decode_rows(buffer, numel, n, *_names(wire), dtype), out)
    return _decode(buffer, numel, n, wire, dtype, out)


def reduce(buffer: Tensor, n: int, wire: WireFormat, divisor: float = 1.0) -> Tensor:
    """The sum of rows, uint8 [rows, wire.row_bytes(n)], in their order, divided by `divisor`: float32 [n]."""
    if is_traced(buffer):
        return torch.ops.narrowgauge.reduce_rows(buffer, n, *_names(wire), float(divisor))
    return _reduce(buffer, n, wire, divisor)


def reduce_and_encode(
    buffer: Tensor,
    n: int,
    wire: WireFormat,
    divisor: float = 1.0,
    *,
    key: Tensor | None = None,
    stream: int = 0,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`encode` of `reduce`: uint8 [wire.row_bytes(n)]. The options are those of `encode`, residual is float32 [n]."""
    if is_traced(buffer):
        arguments = (n, *_names(wire), float(divisor), key, stream, residual)
        return _given(torch.ops.narrowgauge.reduce_and_encode_rows(buffer, *arguments), out)
    return _reduce_and_encode(buffer, n, wire, divisor, key, stream, residual, out)


def _given(result: Tensor, out: Tensor | None) -> Tensor:
    """The result, in `out` where there is one."""
    return result if out is None else out.copy_(result.view(out.shape))


def _encode(
    x: Tensor, rows: int, n: int, wire: WireFormat, key: Tensor | None, stream: int, residual: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.empty(rows, wire.row_bytes(n), dtype=torch.uint8, device=x.device) if out is None else out
    if out.numel():
        module_for(x).encode(x.contiguous(), rows, n, wire, key, stream, residual, out)
    return out


def _decode(
    buffer: Tensor, numel: int, n: int, wire: WireFormat, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    values = torch.empty(numel, dtype=dtype, device=buffer.device) if out is None else out
    if numel:
        rows = _rows(buffer)
        module_for(rows).decode(rows, n, wire, values)
    if out is not None:
        torch.autograd.graph.increment_version(out)  # autograd cannot see the kernel's writes
    return values


def _reduce(buffer: Tensor, n: int, wire: WireFormat, divisor: float) -> Tensor:
    rows = _rows(buffer)
    return module_for(rows).reduce(rows, n, wire, divisor)


def _reduce_and_encode(
    buffer: Tensor, n: int, wire: WireFormat, divisor: float, key: Tensor | None, stream: int, residual: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = torch.empty(wire.row_bytes(n), dtype=torch.uint8, device=buffer.device) if out is None else out
    if out.numel():
        rows = _rows(buffer)
        module_for(rows).reduce_and_encode(rows, n, wire, divisor, key, stream, residual, out)
    return out


def _rows(buffer: Tensor) -> Tensor:
    """Rows whose bytes lie side by side: the rows themselves may lie apart."""
    return buffer if buffer.stride(1) == 1 else buffer.contiguous()


def module_for(x: Tensor) -> ModuleType:
    """The kernels of the tensor's device, loaded on first use."""
    if has_gpu_kernels(x):
        from narrowgauge.numerics.kernels import triton_wire

        return triton_wire
    if x.is_cpu and x.numel() > 0:
        from narrowgauge.numerics.kernels import cpu_wire

        return cpu_wire
    return twin_wire


def _names(wire: WireFormat) -> tuple[str, int, str]:
    """A wire format as operators take it."""
    return wire.fmt.name, wire.block, wire.rule.name


def _format(fmt: str, block: int, rule: str) -> WireFormat:
    return WireFormat(formats.ALL[fmt], block, ScaleRule[rule])


_LIBRARY = torch.library.Library("narrowgauge", "FRAGMENT")
_FORMAT = "str fmt, int block, str rule"
_BITS = "Tensor? key, int stream, Tensor(a!)? residual"
# schema -> (what runs, what fake tensors take its result for); arguments of the three names stand side by side
_OPERATORS = {
    f"encode_rows(Tensor x, int rows, int n, {_FORMAT}, {_BITS}) -> Tensor": (
        lambda x, rows, n, a, b, c, *rest: _encode(x, rows, n, _format(a, b, c), *rest),
        lambda x, rows, n, a, b, c, *rest: x.new_empty(rows, _format(a, b, c).row_bytes(n), dtype=torch.uint8),
    ),
    f"decode_rows(Tensor buffer, int numel, int n, {_FORMAT}, ScalarType dtype) -> Tensor": (
        lambda buffer, numel, n, a, b, c, dtype: _decode(buffer, numel, n, _format(a, b, c), dtype),
        lambda buffer, numel, n, a, b, c, dtype: buffer.new_empty(numel, dtype=dtype),
    ),
    f"reduce_rows(Tensor buffer, int n, {_FORMAT}, float divisor) -> Tensor": (
        lambda buffer, n, a, b, c, divisor: _reduce(buffer, n, _format(a, b, c), divisor),
        lambda buffer, n, a, b, c, divisor: buffer.new_empty(n, dtype=torch.float32),
    ),
    f"reduce_and_encode_rows(Tensor buffer, int n, {_FORMAT}, float divisor, {_BITS}) -> Tensor": (
        lambda buffer, n, a, b, c, *rest: _reduce_and_encode(buffer, n, _format(a, b, c), *rest),
        lambda buffer, n, a, b, c, *rest: buffer.new_empty(_format(a, b, c).row_bytes(n)),
    ),
}
for _schema, (_real, _fake) in _OPERATORS.items():
    _name = _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"narrowgauge::{_name}", _fake, lib=_LIBRARY)
