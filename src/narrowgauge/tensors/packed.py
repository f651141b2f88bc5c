"""A tensor stored as packed codes of fewer than 8 bits, with scales: what an optimizer keeps of a moment."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics import packing
from narrowgauge.recipes.serialize import spec_from_dict, spec_to_dict
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors import tiles
from narrowgauge.tensors.parts import scale_dtype
from narrowgauge.tensors.quantized import QuantizedTensor, quantize
from narrowgauge.tensors.values import as_bytes, laid_out, part_of
from narrowgauge.tensors.views import ReadOnlyView, arguments_written, is_composite_view, on_values

aten = torch.ops.aten
_INNER = ("packed", "dequant_scale", "amax")


class PackedTensor(Tensor):
    """A float32 tensor that is stored as `packed` codes, `8 // bits` of them a byte along the rows, and scales.

    It is for keeping: operations read the values and give plain tensors; `detach`, `clone` and `to` a device keep the
    codes; `copy_` casts anew and `zero_` clears. Views show what it holds and cannot be written. Everything else that
    would write to it is refused, so that no write is lost.

    packed: uint8, see `numerics.packing`. dequant_scale, amax, spec: as of a QuantizedTensor. shape: of the values.
    Raises NarrowgaugeError for a format of 8 bits or more, and for parts that do not fit the shape.
    """

    packed: Tensor
    dequant_scale: Tensor
    amax: Tensor
    spec: CastSpec

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[PackedTensor],
        packed: Tensor,
        dequant_scale: Tensor,
        amax: Tensor,
        spec: CastSpec,
        shape: Sequence[int],
    ) -> PackedTensor:
        _check_parts(packed, dequant_scale, amax, spec, shape)
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=torch.float32, device=packed.device
        )

    def __init__(
        self, packed: Tensor, dequant_scale: Tensor, amax: Tensor, spec: CastSpec, shape: Sequence[int]
    ) -> None:
        self.packed, self.dequant_scale, self.amax, self.spec = packed, dequant_scale, amax, spec

    @staticmethod
    def quantize(x: Tensor, spec: CastSpec, generator: torch.Generator | None = None) -> PackedTensor:
        """Cast `x` as `narrowgauge.quantize` does, and pack the codes. spec: of a format below 8 bits."""
        if spec.format.bits >= 8:
            raise NarrowgaugeError(f"expected a format below 8 bits to pack, found {spec.format}: use quantize")
        q = quantize(x, spec, generator)
        codes = q.codes if q.ndim else q.codes.reshape(1)
        return PackedTensor(packing.pack_codes(codes, spec.format), q.dequant_scale, q.amax, spec, x.shape)

    def unpacked(self) -> QuantizedTensor:
        """The same with one code a byte: a copy."""
        columns = self.shape[-1] if self.ndim else 1
        codes = packing.unpack_codes(self.packed, self.spec.format, columns).reshape(self.shape)
        return QuantizedTensor(codes, self.dequant_scale, self.spec, torch.float32, self.amax)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """A plain tensor of the values, in `dtype` (default float32)."""
        return self.unpacked().dequantize(dtype)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes held: packed codes, scales and amax."""
        return sum(part.nbytes for part in self._parts())

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if is_composite_view(func):
            return func.decompose(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None and isinstance(args[0], cls):
            return rule(*args, **kwargs)
        for tensor in arguments_written(cls, func, args, kwargs):
            tensor._refuse(str(func))
        if func.is_view and isinstance(args[0], cls):
            with torch.inference_mode(args[0].is_inference()):  # a view shares its base's version counter
                whole = _View(args[0], torch.empty(args[0].shape, device="meta"))  # type: ignore[arg-type]
                return func(whole, *args[1:], **kwargs)
        return on_values(cls, cls.dequantize, func, args, kwargs)

    def _with(self, parts: Sequence[Tensor]) -> PackedTensor:
        return PackedTensor(parts[0], parts[1], parts[2], self.spec, self.shape)

    def _parts(self) -> list[Tensor]:
        return [getattr(self, name) for name in _INNER]

    def _refuse(self, what: str) -> NoReturn:
        raise NarrowgaugeError(
            f"{what} would write to a PackedTensor of shape {tuple(self.shape)}, and the write would be lost: use "
            "copy_ for the whole, or work on .dequantize()"
        )

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same parts outside of autograd. Assigning raises NarrowgaugeError."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        self._refuse("assigning .data")

    def share_memory_(self) -> PackedTensor:
        """Move codes, scales and amax to shared memory, in place."""
        for part in self._parts():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """True where the codes are in shared memory."""
        return self.packed.is_shared()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A read-only array of the values; `force` is as in torch."""
        array = self.dequantize().numpy(force=force)
        array.flags.writeable = False  # it is a copy: a write would be lost
        return array

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.dequantize().tolist()

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        self._refuse("__dlpack__, which hands out memory,")

    def __tensor_flatten__(self) -> tuple[list[str], tuple[CastSpec, torch.Size]]:
        return list(_INNER), (self.spec, self.shape)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: tuple[CastSpec, torch.Size], outer_size: Any, outer_stride: Any
    ) -> PackedTensor:
        return PackedTensor(inner["packed"], inner["dequant_scale"], inner["amax"], *context)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedTensor:
        if id(self) not in memo:
            memo[id(self)] = self._with([copy.deepcopy(part, memo) for part in self._parts()])
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        parts = (self.packed, as_bytes(self.dequant_scale), self.amax)
        return _rebuild, (parts, spec_to_dict(self.spec), tuple(self.shape))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedTensor(size={tuple(self.shape)}, device={self.device}, spec=({self.spec}))"


class _View(ReadOnlyView):
    """A view of a PackedTensor, which decodes what that holds whenever it is read. part: without memory."""

    def read(self) -> Tensor:
        now = self.source.unpacked()  # type: ignore[attr-defined]
        return part_of(laid_out(now), now.codes, self.part)


def _check_parts(packed: Tensor, dequant_scale: Tensor, amax: Tensor, spec: CastSpec, shape: Sequence[int]) -> None:
    """Raise NarrowgaugeError unless these can be the parts of a PackedTensor."""
    if spec.format.bits >= 8:
        raise NarrowgaugeError(f"expected a format below 8 bits to pack, found {spec.format}: use QuantizedTensor")
    if type(packed) is not Tensor:  # a compiler's, of parts that were checked
        return
    width = packing.packed_width(shape[-1] if shape else 1, spec.format.bits)
    scales = tiles.scale_shape(shape, spec) if spec.in_blocks else ()
    expected = {
        "packed": (torch.uint8, (*shape[:-1], width)),
        "dequant_scale": (scale_dtype(spec), scales),
        "amax": (torch.float32, ()),
    }
    for (name, (dtype, size)), part in zip(expected.items(), (packed, dequant_scale, amax), strict=True):
        if part.dtype is not dtype or tuple(part.shape) != tuple(size):
            raise NarrowgaugeError(
                f"{name}: expected {dtype} of shape {tuple(size)} for {spec.format} values of shape {tuple(shape)}, "
                f"found {part.dtype} of shape {tuple(part.shape)}"
            )


def _rebuild(parts: tuple[Tensor, Tensor, Tensor], spec_fields: Mapping[str, Any], shape: tuple) -> PackedTensor:
    """What pickle and torch.load call."""
    spec = spec_from_dict(spec_fields)
    packed, dequant_scale, amax = parts
    return PackedTensor(packed, dequant_scale.view(scale_dtype(spec)), amax, spec, shape)


def _to_copy(x: PackedTensor, **kwargs: Any) -> Tensor:
    if kwargs.get("dtype") not in (None, torch.float32):
        return torch.ops.aten._to_copy.default(x.dequantize(), **kwargs)
    options = {key: value for key, value in kwargs.items() if key in ("device", "non_blocking", "pin_memory")}
    return x._with([aten._to_copy.default(part, **options) for part in x._parts()])


def _copy_into(x: PackedTensor, source: Tensor, non_blocking: bool = False) -> PackedTensor:
    if not isinstance(source, PackedTensor) or source.spec != x.spec or source.shape != x.shape:
        source = source.read() if isinstance(source, ReadOnlyView) else source
        source = source.dequantize() if isinstance(source, PackedTensor) else source
        source = source if source.is_floating_point() else source.float()
        source = PackedTensor.quantize(source.detach().to(x.device).expand(x.shape), x.spec)
    for mine, theirs in zip(x._parts(), source._parts(), strict=True):
        mine.copy_(theirs, non_blocking=non_blocking)
    return x


def _zero(x: PackedTensor) -> PackedTensor:
    return _copy_into(x, torch.zeros(x.shape, device=x.device))


_RULES: dict[Any, Any] = {
    aten.detach.default: lambda x: x._with(x._parts()),
    aten.alias.default: lambda x: x._with(x._parts()),
    aten.clone.default: lambda x, **kwargs: x._with([part.clone() for part in x._parts()]),
    aten._pin_memory.default: lambda x, *args: x._with([part.pin_memory() for part in x._parts()]),
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_into,
    aten.zero_.default: _zero,
}

# so that torch.load(weights_only=True) reads what torch.save wrote
torch.serialization.add_safe_globals([_rebuild])
