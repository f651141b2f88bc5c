"""The casts as operators of torch's `narrowgauge` namespace: opaque to compilers and visible to dispatch modes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics import formats, philox, scaling
from narrowgauge.numerics.companding import RANGE_EXPANSION, Companding
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.hadamard import POINTS
from narrowgauge.numerics.kernels import dispatch
from narrowgauge.numerics.scaling import ScaleRule

_LIBRARY = torch.library.Library("narrowgauge", "DEF")
_LIBRARY.define("amax(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.define(
    "quantize(Tensor x, Tensor? quant_scale, str fmt, bool? saturating, bool codes, ScalarType? carrier, bool count,"
    " Tensor? key=None, int stream=0, bool nonzero=False) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "dequantize(Tensor codes, Tensor? dequant_scale, str fmt, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "quantize_blocks(Tensor x, str fmt, int? rows, int? columns, str rule, bool codes, ScalarType? carrier, bool count,"
    ' Tensor? key=None, int stream=0, str companding="LINEAR", bool nonzero=False)'
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.define(
    "dequantize_blocks(Tensor codes, Tensor dequant_scale, str fmt, int? rows, int? columns, ScalarType dtype,"
    ' Tensor? tensor_amax, str companding="LINEAR") -> Tensor',
    tags=(torch.Tag.pt2_compliant_tag,),
)
# the tensors are those that the key is for: without them a compiler would take two draws for one
_LIBRARY.define(
    "draw_key(Tensor x, Tensor weight) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
_LIBRARY.define("hadamard(Tensor x, int[] signs) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _quantize_op(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: str,
    saturating: bool | None,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    key: Tensor | None = None,
    stream: int = 0,
    nonzero: bool = False,
) -> tuple[Tensor, ...]:
    """An operator cannot return None: empty tensors stand for what was not asked for."""
    outputs = dispatch.quantize_eagerly(
        x, quant_scale, formats.ALL[fmt], saturating, codes, carrier, count, key, stream, nonzero
    )
    encoded, *others = (x.new_empty(0) if out is None else out for out in outputs)
    return (_apart(encoded, x), _apart(_apart(others[0], x), encoded), *others[1:])


def _dequantize_op(codes: Tensor, dequant_scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    return _apart(dispatch.dequantize_eagerly(codes, dequant_scale, formats.ALL[fmt], dtype), codes)


def _apart(out: Tensor, other: Tensor) -> Tensor:
    """A copy where a wide cast changed nothing and gave back `other`: an operator may not alias its arguments."""
    return out.clone() if out.data_ptr() == other.data_ptr() else out


def _quantize_fake(
    x: Tensor,
    quant_scale: Tensor | None,
    fmt: str,
    saturating: bool | None,
    codes: bool,
    carrier: torch.dtype | None,
    count: bool,
    key: Tensor | None = None,
    stream: int = 0,
    nonzero: bool = False,
) -> tuple[Tensor, ...]:
    counts = [x.new_empty((), dtype=torch.int64) if count else x.new_empty(0) for _ in range(2)]
    return (
        x.new_empty(x.shape, dtype=formats.ALL[fmt].dtype) if codes else x.new_empty(0),
        x.new_empty(x.shape, dtype=carrier) if carrier is not None else x.new_empty(0),
        *counts,
    )


def _quantize_blocks_op(
    x: Tensor, fmt: str, rows: int | None, columns: int | None, rule: str, codes: bool, carrier: torch.dtype | None,
    count: bool, key: Tensor | None = None, stream: int = 0, companding: str = "LINEAR", nonzero: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    outputs = dispatch.quantize_blocks_eagerly(
        x, formats.ALL[fmt], Block(rows, columns), ScaleRule[rule], codes, carrier, count, key, stream,
        Companding[companding], nonzero,
    )  # fmt: skip
    return tuple(x.new_empty(0) if out is None else out for out in outputs)


def _quantize_blocks_fake(
    x: Tensor, fmt: str, rows: int | None, columns: int | None, rule: str, codes: bool, carrier: torch.dtype | None,
    count: bool, key: Tensor | None = None, stream: int = 0, companding: str = "LINEAR", nonzero: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    grid: list[Any] = [
        torch.sym_min(length, 1) if size is None else (length + size - 1) // size
        for length, size in zip(x.shape, (rows, columns), strict=True)
    ]
    if companding == RANGE_EXPANSION.name:
        grid.append(2)
    return (
        x.new_empty(x.shape, dtype=formats.ALL[fmt].dtype) if codes else x.new_empty(0),
        x.new_empty(x.shape, dtype=carrier) if carrier is not None else x.new_empty(0),
        x.new_empty(grid, dtype=scaling.stored_dtype(ScaleRule[rule])),
        x.new_empty((), dtype=torch.float32),
        *(x.new_empty((), dtype=torch.int64) if count else x.new_empty(0) for _ in range(2)),
    )


def _dequantize_blocks_op(
    codes: Tensor, dequant_scale: Tensor, fmt: str, rows: int | None, columns: int | None, dtype: torch.dtype,
    tensor_amax: Tensor | None, companding: str = "LINEAR",
) -> Tensor:  # fmt: skip
    return dispatch.dequantize_blocks_eagerly(
        codes, dequant_scale, formats.ALL[fmt], Block(rows, columns), dtype, tensor_amax, Companding[companding]
    )


def _dequantize_blocks_fake(
    codes: Tensor, dequant_scale: Tensor, fmt: str, rows: int | None, columns: int | None, dtype: torch.dtype,
    tensor_amax: Tensor | None, companding: str = "LINEAR",
) -> Tensor:  # fmt: skip
    return codes.new_empty(codes.shape, dtype=dtype)


_LIBRARY.impl("amax", dispatch.amax_eagerly, "CompositeExplicitAutograd")
_LIBRARY.impl("quantize", _quantize_op, "CompositeExplicitAutograd")
_LIBRARY.impl("dequantize", _dequantize_op, "CompositeExplicitAutograd")
_LIBRARY.impl("draw_key", lambda x, weight: philox.draw_key(x.device), "CompositeExplicitAutograd")
torch.library.register_fake("narrowgauge::draw_key", lambda x, weight: x.new_empty((), dtype=torch.int64), lib=_LIBRARY)
_LIBRARY.impl("quantize_blocks", _quantize_blocks_op, "CompositeExplicitAutograd")
_LIBRARY.impl("dequantize_blocks", _dequantize_blocks_op, "CompositeExplicitAutograd")
_LIBRARY.impl("hadamard", lambda x, signs: dispatch.transform_eagerly(x, tuple(signs)), "CompositeExplicitAutograd")
torch.library.register_fake("narrowgauge::quantize_blocks", _quantize_blocks_fake, lib=_LIBRARY)
torch.library.register_fake("narrowgauge::dequantize_blocks", _dequantize_blocks_fake, lib=_LIBRARY)
torch.library.register_fake(
    "narrowgauge::hadamard",
    lambda x, signs: x.new_empty((x.shape[0] + POINTS - 1) // POINTS * POINTS, x.shape[1], dtype=torch.float32),
    lib=_LIBRARY,
)
torch.library.register_fake("narrowgauge::amax", lambda x: x.new_empty((), dtype=torch.float32), lib=_LIBRARY)
torch.library.register_fake("narrowgauge::quantize", _quantize_fake, lib=_LIBRARY)
torch.library.register_fake(
    "narrowgauge::dequantize", lambda codes, scale, fmt, dtype: codes.new_empty(codes.shape, dtype=dtype), lib=_LIBRARY
)
