"""Views of a QuantizedTensor with scales of tiles, which can be read and not written."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.tensors.values import laid_out, part_of

if TYPE_CHECKING:
    from narrowgauge.tensors.quantized import QuantizedTensor

_get_data: Callable[[Tensor], Tensor] = torch._C.TensorBase.data.__get__  # type: ignore[attr-defined]


class ReadOnlyView(Tensor):
    """A part, or another shape, of a QuantizedTensor whose tiles it cuts or turns into something else.

    It shows what the tensor holds now, and operations on it give plain tensors, but views of it are such views again.
    Whatever would write to it raises NarrowgaugeError, since its values have no scales of their own: no write is lost.

    source: the tensor that it is a view of. part: the codes of the view, in the memory of the source's codes.
    """

    source: QuantizedTensor
    part: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[ReadOnlyView], source: QuantizedTensor, part: Tensor) -> ReadOnlyView:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            part.size(),
            strides=part.stride(),
            storage_offset=part.storage_offset(),
            dtype=source.dtype,
            device=source.device,
        )

    def __init__(self, source: QuantizedTensor, part: Tensor) -> None:
        self.source = source
        self.part = part

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if is_composite_view(func):
            return func.decompose(*args, **kwargs)
        for view in arguments_written(cls, func, args, kwargs):
            view._refuse(str(func))
        if func.is_view and isinstance(args[0], cls):
            return args[0]._view(func, args, kwargs)

        return on_values(cls, cls.read, func, args, kwargs)

    def read(self) -> Tensor:
        """The values as a plain tensor, without gradient."""
        return part_of(laid_out(self.source), self.source.codes, self.part)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """A plain tensor of the values, in `dtype` (default: the dtype that this one stands for)."""
        return self.clone().to(dtype or self.dtype)

    def _view(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if is_reinterpretation(func, args):
            self._refuse(f"{func}, which would let its bits be written,")
        part = self.part if func is torch.ops.aten.view.dtype else func(self.part, *args[1:], **kwargs)
        with torch.inference_mode(self.is_inference()):
            if isinstance(part, (list, tuple)):
                return type(part)(type(self)(self.source, p) for p in part)
            return type(self)(self.source, part)

    def _refuse(self, what: str) -> NoReturn:
        raise NarrowgaugeError(
            f"{what} would write to a view of shape {tuple(self.shape)} of a QuantizedTensor with scales "
            f"{self.source.spec.granularity}: its values have no scales of their own; write to the tensor itself, or "
            "to a copy with .clone()"
        )

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same view outside of autograd. Assigning raises NarrowgaugeError."""
        return _get_data(self)

    @data.setter
    def data(self, other: Tensor) -> None:
        self._refuse("assigning .data")

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A read-only array of the values; `force` is as in torch: it detaches and moves to the CPU first."""
        array = (self.detach().clone() if force else self.clone()).numpy(force=force)
        array.flags.writeable = False  # it is a copy: a write would be lost
        return array

    def tolist(self) -> Any:
        """The values as nested lists."""
        return self.detach().clone().tolist()

    def share_memory_(self) -> NoReturn:
        self._refuse("share_memory_")

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        self._refuse("__dlpack__, which hands out memory,")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A plain tensor: a copy of the values."""
        memo[id(self)] = copy.deepcopy(self.detach().clone(), memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["source", "part"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: None, outer_size: Any, outer_stride: Any
    ) -> ReadOnlyView:
        return ReadOnlyView(inner["source"], inner["part"])  # type: ignore[arg-type]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if type(self.part) is not Tensor or self.is_meta:  # no values to show
            return f"ReadOnlyView(size={tuple(self.shape)}, device={self.device}, spec=({self.source.spec}))"
        values = repr(self.detach().clone().float()).removeprefix("tensor(").removesuffix(")")
        return f"ReadOnlyView({values}, of a QuantizedTensor with spec=({self.source.spec}))"


def arguments_written(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of class `cls` that `func` writes to, by its schema."""
    if not func._schema.is_mutable:
        return
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        yield from (x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, cls))


def on_values(cls: type, read: Callable[[Any], Tensor], func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Run `func` with what `read` gives in the place of every argument of class `cls`, also within lists."""

    def unwrap(x: Any) -> Any:
        if isinstance(x, cls):
            return read(x)
        return type(x)(map(unwrap, x)) if type(x) in (list, tuple) else x

    return func(*map(unwrap, args), **{key: unwrap(value) for key, value in kwargs.items()})


def is_composite_view(func: Any) -> bool:
    """True for `reshape`, `to` and the like, views or copies as it comes, which inference mode passes on whole."""
    return func.is_view and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def is_reinterpretation(func: Any, args: tuple) -> bool:
    """True where `view` would show the bits as another dtype."""
    return func is torch.ops.aten.view.dtype and args[1] is not args[0].dtype
