"""A tensor stored as codes and a scale, which stands for a tensor of a floating dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics import packing, philox
from narrowgauge.recipes.serialize import spec_from_dict, spec_to_dict
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors import rules, tiles
from narrowgauge.tensors.cast import cast_storage, check_castable
from narrowgauge.tensors.parts import check_parts, scale_dtype
from narrowgauge.tensors.values import as_bytes, dequantize, values_of
from narrowgauge.tensors.views import ReadOnlyView

_set_data: Callable[[Tensor, Tensor], None] = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
_get_data: Callable[[Tensor], Tensor] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]
_INNER = ("codes", "dequant_scale", "amax")


class QuantizedTensor(Tensor):
    """A tensor of `dtype` that is stored as `codes` of a narrower format, with scales: `x ~ codes * dequant_scale`.

    It is a `torch.Tensor`, and may be a parameter or a gradient. What holds of it:

    - An operation without a rule of its own reads the values that the codes stand for, and gives a plain tensor.
    - An in-place operation casts its result with fresh scales into the same codes, so that every alias sees it; the
      object stays the same. One that changes no value changes no bit. `mul_` and `div_` by a scalar go into the scales
      where their rule allows it (float32 scales: any positive factor, or a power of two where they are powers of two).
      A stochastic cast draws a fresh key from torch's default generator each time.
    - `detach`, `clone`, `to`, `copy_`, `zero_`, `empty_like` keep the codes. `to` another floating dtype changes the
      dtype that the tensor stands for. `zeros_like` and all other constructors give plain tensors.
    - Views of a tensor with one scale alias codes and scale; a write to a view of a part renews the scale of the whole.
      With scales of tiles, views of the same shape and transposed matrices (with the transposed spec) do so; any other
      view is a `ReadOnlyView`, which refuses writes.
    - `p.data = other` casts `other` by the spec of `p`, or takes over the codes of a QuantizedTensor of that spec.
      A plain tensor assigned so is copied: writes to it later do not reach `p`.
    - What cannot be done without losing a write raises NarrowgaugeError: reinterpreting the bits (`view(torch.uint8)`),
      changing the shape in place (`resize_`, `t_`), writing to an expanded view.

    A cast to a narrow or scaled format saturates infinities and keeps NaN. `amax` tells: operations see the values at
    the format's maximum as infinite where `amax` is infinite, so that a non-finite gradient stays one for a loss
    scaler or a norm. `dequantize()` returns what the codes hold.

    codes: of `spec.format.dtype` (formats below 8 bits: one code a byte), of any strides. dequant_scale: for a spec per
    tensor 0-dimensional float32; else one entry a tile, [*batch, down, across] ([across] for a vector), in the dtype
    that the rule stores: float32, float8_e8m0fnu, or NVFP4's float8_e4m3fn, a byte of which stands for
    byte * amax / 2688. Under RANGE_EXPANSION an entry is a pair in a last dimension of two: scale and exponent. amax:
    0-dimensional float32, an upper bound of the source's magnitudes, infinite or NaN where it held such values, and by
    default what follows from the scales (NVFP4: the source's amax, which must be given). The tensors given are kept,
    not copied. Raises NarrowgaugeError for tensors that do not fit `spec`.
    """

    codes: Tensor
    dequant_scale: Tensor
    amax: Tensor
    spec: CastSpec
    # for a view of a part: the codes of the whole, which share its scale
    _whole: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        codes: Tensor,
        dequant_scale: Tensor,
        spec: CastSpec,
        dtype: torch.dtype = torch.float32,
        amax: Tensor | None = None,
        *,
        whole: Tensor | None = None,
    ) -> QuantizedTensor:
        check_parts(codes, dequant_scale, spec, dtype, amax)
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            codes.size(),
            strides=codes.stride(),
            storage_offset=codes.storage_offset(),
            dtype=dtype,
            device=codes.device,
        )

    def __init__(
        self,
        codes: Tensor,
        dequant_scale: Tensor,
        spec: CastSpec,
        dtype: torch.dtype = torch.float32,
        amax: Tensor | None = None,
        *,
        whole: Tensor | None = None,
    ) -> None:
        self.codes = codes
        self.dequant_scale = dequant_scale
        if amax is None:
            amax = tiles.amax_of(dequant_scale, spec) if spec.in_blocks else dequant_scale * spec.format.max
        self.amax = amax
        self.spec = spec
        self._whole = whole

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return rules.dispatch(QuantizedTensor, func, args, dict(kwargs or {}))

    def __tensor_flatten__(self) -> tuple[list[str], tuple[CastSpec, torch.dtype]]:
        names = _INNER if self._whole is None else (*_INNER, "_whole")
        return list(names), (self.spec, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: tuple[CastSpec, torch.dtype], outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        spec, dtype = context
        return QuantizedTensor(
            inner["codes"], inner["dequant_scale"], spec, dtype, inner["amax"], whole=inner.get("_whole")
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """A plain tensor of `codes * dequant_scale`, in `dtype` (default: the dtype that this one stands for).

        With scales of tiles, each code times that of its tile (NVFP4: times byte * amax * fl(1/2688), in this order);
        a companded code stands for what its curve says, see `numerics.companding`.

        Multiplied in float32 and rounded once. Gradients flow through it unchanged.
        """
        return dequantize(self, dtype or self.dtype)

    def packed(self) -> Tensor:
        """The codes of a 4- or 6-bit format packed along the rows, a copy: uint8, see `numerics.packing`.

        Raises NarrowgaugeError for formats of whole bytes: their codes are packed as they are.
        """
        return packing.pack_codes(self.codes, self.spec.format)

    @classmethod
    def from_packed(
        cls,
        packed: Tensor,
        dequant_scale: Tensor,
        spec: CastSpec,
        columns: int,
        dtype: torch.dtype = torch.float32,
        amax: Tensor | None = None,
    ) -> QuantizedTensor:
        """The tensor whose `packed()` codes, of that many columns, these are; the rest as for the class itself."""
        return cls(packing.unpack_codes(packed, spec.format, columns), dequant_scale, spec, dtype, amax)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes held: codes, scale and amax; not the bytes of the tensor that this one stands for."""
        return sum(getattr(self, name).nbytes for name in _INNER)

    @property
    def data(self) -> QuantizedTensor:  # type: ignore[override]
        """An alias outside of autograd: writes to it reach this tensor. Assigning casts by this tensor's spec."""
        return _get_data(self)  # type: ignore[return-value]

    @data.setter
    def data(self, other: Tensor) -> None:
        if isinstance(other, QuantizedTensor) and other.spec == self.spec:
            new = other.detach()
        else:
            new = quantize(other, self.spec, old_scale=self.dequant_scale)
        try:
            _set_data(self, new)
        except RuntimeError as error:
            raise NarrowgaugeError(
                f"cannot assign data on {other.device} to a QuantizedTensor on {self.device}: move it first with "
                "module.to(device), or module.to_empty(device=...) from the meta device"
            ) from error
        self._take_parts(new)  # type: ignore[arg-type]

    def _take_parts(self, other: QuantizedTensor) -> None:
        for name in (*_INNER, "_whole"):
            setattr(self, name, getattr(other, name))

    def share_memory_(self) -> QuantizedTensor:
        """Move codes and scale to shared memory, in place."""
        for name in _INNER:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """True where the codes are in shared memory."""
        return self.codes.is_shared()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A read-only array of the values; `force` is as in torch: it detaches and moves to the CPU first."""
        array = (self.detach().dequantize() if force else self.dequantize()).numpy(force=force)
        array.flags.writeable = False  # it is a copy: a write would be lost
        return array

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.detach().dequantize().tolist()

    def storage(self) -> NoReturn:
        raise NarrowgaugeError(
            "a QuantizedTensor's memory holds codes beside scales, and safetensors files hold plain tensors: save with "
            "narrowgauge.save(path, model, optimizer), or save the values, p.dequantize()"
        )

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        raise NarrowgaugeError(
            "a QuantizedTensor's memory holds codes, not the values that DLPack would share: pass .dequantize() on"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied: call detach() or clone() first")
        # copying the parts with the memo keeps views of one storage views of one storage
        whole = copy.deepcopy(self._whole, memo)
        codes, dequant_scale, amax = (copy.deepcopy(getattr(self, name), memo) for name in _INNER)
        new = QuantizedTensor(codes, dequant_scale, self.spec, self.dtype, amax, whole=whole)
        new.requires_grad_(self.requires_grad)
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(self._extras(), memo))
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple:
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be pickled: call detach() first")
        # as bytes: plain pickle of a float8 tensor cannot be read back (torch 2.13)
        whole = None if self._whole is None else as_bytes(self._whole)
        parts = (as_bytes(self.codes), as_bytes(self.dequant_scale), self.amax, whole)
        return _rebuild, (parts, spec_to_dict(self.spec), self.dtype, self.requires_grad, self._extras())

    def _extras(self) -> dict[str, Any]:
        """Attributes beside the parts, such as the mark of a parameter."""
        own = {*_INNER, "spec", "_whole"}
        return {name: value for name, value in vars(self).items() if name not in own}

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        about = f"spec=({self.spec}), dtype={self.dtype}"
        if self.requires_grad:
            about += ", requires_grad=True"
        if type(self.codes) is not Tensor or self.is_meta:  # no values to show
            return f"QuantizedTensor(size={tuple(self.shape)}, device={self.device}, {about})"
        values = repr(self.detach().dequantize().float()).removeprefix("tensor(").removesuffix(")")
        scale = f"{self.dequant_scale.item():.6g}" if not self.spec.in_blocks else _summary(self.dequant_scale)
        return f"QuantizedTensor({values}, {about}, dequant_scale={scale})"


def quantize(
    x: Tensor, spec: CastSpec, generator: torch.Generator | None = None, *, old_scale: Tensor | None = None
) -> QuantizedTensor:
    """Cast `x` by `spec`, with scales taken from `x`: `codes = cast(x * quant_scale)`.

    x: float16, bfloat16, float32 or float64 (rounded to float32 first), of any shape, also empty; codes and tiles
    follow its logical order whatever its strides, see `Block` for batches, vectors and ragged sizes. The result stands
    for a tensor of x's dtype, has no gradient, and shares no memory with `x`. generator: source of the random bits of
    stochastic rounding (None: torch's default one); nearest-even draws none. old_scale: the dequant_scale that
    TENSOR_POW2 keeps where `x` is all zero or not finite; 1 where left out.

    Infinities saturate in narrow and in scaled formats, NaN stays NaN, and `amax` of the result shows either. In a
    format without NaN, a NaN makes the scale of its tile NaN (NVFP4: of all tiles, since each has a part in the amax of
    the whole); an unscaled cast to one raises RecipeError, and so does delayed scaling, whose scale comes from earlier
    steps. Raises NarrowgaugeError for any other x or generator.
    """
    if not isinstance(spec, CastSpec):
        raise RecipeError(f"expected a CastSpec, found {spec!r}: e.g. CastSpec(formats.E4M3FN)")
    if spec.is_delayed:
        raise RecipeError(
            f"quantize takes the scale from the tensor, and {spec} takes it from earlier steps: use CURRENT, or give "
            "the scale yourself with QuantizedTensor(codes, dequant_scale, spec)"
        )
    check_castable(x)
    if not isinstance(generator, torch.Generator | None):
        raise NarrowgaugeError(f"generator: expected a torch.Generator or None, found {generator!r}")
    values = values_of(x) if isinstance(x, QuantizedTensor) else x.read() if isinstance(x, ReadOnlyView) else x.detach()
    key = philox.draw_key(x.device, generator) if spec.is_stochastic else None
    codes, dequant_scale, amax = cast_storage(values, spec, old_scale, key)
    if codes.dtype is x.dtype:
        codes = codes.clone()  # the cast may be no cast: then the codes are x itself
    return QuantizedTensor(codes, dequant_scale, spec, x.dtype, amax)


def _summary(scales: Tensor) -> str:
    return f"{list(scales.shape)} of {str(scales.dtype).removeprefix('torch.')}"


def _rebuild(
    parts: tuple, spec_fields: Mapping[str, Any], dtype: torch.dtype, requires_grad: bool, extras: dict[str, Any]
) -> QuantizedTensor:
    """What pickle and torch.load call."""
    codes, dequant_scale, amax, whole = parts
    spec = spec_from_dict(spec_fields)
    whole = None if whole is None else whole.view(spec.format.dtype)
    dequant_scale = dequant_scale.view(scale_dtype(spec))
    q = QuantizedTensor(codes.view(spec.format.dtype), dequant_scale, spec, dtype, amax, whole=whole)
    q.requires_grad_(requires_grad)
    vars(q).update(extras)
    return q


# so that torch.load(weights_only=True) reads what torch.save wrote
torch.serialization.add_safe_globals([_rebuild])
