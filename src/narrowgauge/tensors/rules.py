"""What torch operations do with a QuantizedTensor: a few rules, and one fallback for all the rest."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.numerics.companding import RANGE_EXPANSION
from narrowgauge.numerics.scaling import CURRENT, FLT_MAX, NONE, Delayed
from narrowgauge.tensors import norm_rules, tiles
from narrowgauge.tensors.cast import FLOATING
from narrowgauge.tensors.lookup import rows_of
from narrowgauge.tensors.parts import scale_of_zeros
from narrowgauge.tensors.values import values_of, write
from narrowgauge.tensors.views import ReadOnlyView, arguments_written, is_composite_view, is_reinterpretation

if TYPE_CHECKING:
    from narrowgauge.tensors.quantized import QuantizedTensor

aten = torch.ops.aten

# (class, op, args, kwargs) -> result, or NotImplemented where the rule does not apply to these arguments
Rule = Callable[[type, Any, tuple, dict[str, Any]], Any]
_RULES: dict[Any, Rule] = dict(norm_rules.RULES)


def dispatch(cls: type[QuantizedTensor], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `func`, at least one of whose arguments is a `cls`."""
    if is_composite_view(func):
        return func.decompose(*args, **kwargs)
    rule = _RULES.get(func)
    if rule is not None:
        result = rule(cls, func, args, kwargs)
        if result is not NotImplemented:
            return result
    if torch.Tag.inplace_view in func.tags:
        raise NarrowgaugeError(
            f"{func} would change the shape or storage of a QuantizedTensor in place, and its codes would not follow: "
            "use the form that returns a new tensor, or assign to .data"
        )
    if func.is_view and isinstance(args[0], cls):
        return _view(cls, func, args, kwargs)
    name = func._schema.name.removeprefix("aten::")
    if name.endswith("_like") or name.startswith("new_"):  # these read no values
        stand_in = torch.empty_strided(args[0].size(), args[0].stride(), dtype=args[0].dtype, device=args[0].device)
        return func(stand_in, *args[1:], **kwargs)
    return _fallback(cls, func, args, kwargs)


def _fallback(cls: type[QuantizedTensor], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run `func` on the values of its QuantizedTensors, then cast those that it wrote to."""
    written = {id(q): q for q in arguments_written(cls, func, args, kwargs)}
    plain: dict[int, Tensor] = {}

    def unwrap(x: Any) -> Any:
        if isinstance(x, cls):
            if id(x) not in plain:
                values = values_of(x)
                # unscaled wide codes may be the values themselves: a write must not reach them uncast
                plain[id(x)] = values.clone() if id(x) in written and x.spec.scale is NONE else values
            return plain[id(x)]
        return type(x)(map(unwrap, x)) if type(x) in (list, tuple) else x

    result = func(*map(unwrap, args), **{key: unwrap(value) for key, value in kwargs.items()})
    for key, q in written.items():
        if plain[key].shape != q.shape:
            raise NarrowgaugeError(
                f"{func} would resize a QuantizedTensor of shape {tuple(q.shape)} to {tuple(plain[key].shape)}: "
                "give an output of the result's shape"
            )
        write(q, plain[key])
    if not written:
        return result
    by_plain = {id(values): written[key] for key, values in plain.items() if key in written}
    if isinstance(result, (list, tuple)):
        return type(result)(by_plain.get(id(x), x) for x in result)
    return by_plain.get(id(result), result)


def _view(cls: type[QuantizedTensor], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A view of the codes, with the same scale; of tiles where it keeps them whole, else one that refuses writes."""
    q = args[0]
    if is_reinterpretation(func, args):
        raise NarrowgaugeError(
            f"cannot reinterpret a QuantizedTensor as {args[1]}: its memory holds codes, not {q.dtype} values; use "
            ".codes for the codes, or .dequantize().view(...) for the values"
        )
    if func is aten.view.dtype:
        func, args = aten.alias.default, args[:1]

    def wrap(codes: Tensor) -> QuantizedTensor | ReadOnlyView:
        if q.spec.in_blocks:
            return _view_of_tiles(cls, q, codes, func, args)
        # as_strided may leave elements out and repeat others, whatever their number
        is_whole = codes.numel() == q.codes.numel() and func is not aten.as_strided.default
        whole = q._whole if q._whole is not None else None if is_whole else q.codes
        return cls(codes, q.dequant_scale, q.spec, q.dtype, q.amax, whole=whole)

    # a view shares its base's version counter, so under inference_mode it must be a normal tensor where its base is
    with torch.inference_mode(q.is_inference()):
        codes = func(q.codes, *args[1:], **kwargs)
        views = [wrap(c) for c in codes] if isinstance(codes, (list, tuple)) else wrap(codes)
    if any(isinstance(view, ReadOnlyView) for view in (views if isinstance(views, list) else [views])):
        return views  # of another class, which has no storage to alias
    return return_and_correct_aliasing(func, args, kwargs, views)


def _view_of_tiles(
    cls: type[QuantizedTensor], q: QuantizedTensor, codes: Tensor, func: Any, args: tuple
) -> QuantizedTensor | ReadOnlyView:
    if _turns_matrices(func, args, q.ndim):
        return cls(codes, tiles.transposed_scales(q.dequant_scale, q.spec), q.spec.transposed, q.dtype, q.amax)
    source = cls(q.codes, q.dequant_scale, q.spec, q.dtype, q.amax)
    return source if _is_same_view(codes, q.codes) else ReadOnlyView(source, codes)


def _turns_matrices(func: Any, args: tuple, ndim: int) -> bool:
    """True for the views that transpose every matrix of the last two dimensions."""
    if ndim < 2 or func not in (aten.t.default, aten.transpose.int, aten.permute.default):
        return False
    order = list(range(ndim))
    if func is aten.permute.default:
        order = [d % ndim for d in args[1]]
    elif func is aten.transpose.int:
        first, second = args[1] % ndim, args[2] % ndim
        order[first], order[second] = second, first
    else:
        order.reverse()
    return order == [*range(ndim - 2), ndim - 1, ndim - 2]


def _is_same_view(a: Tensor, b: Tensor) -> bool:
    """True where two views of one memory have the same shape and the same elements in the same places."""
    if a.size() != b.size() or a.storage_offset() != b.storage_offset():
        return False
    return all(s == t for size, s, t in zip(a.size(), a.stride(), b.stride(), strict=True) if size > 1)


def _rule(*funcs: Any) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(funcs, rule))
        return rule

    return register


@_rule(aten.clone.default, aten._pin_memory.default)
def _copy(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    q = args[0]
    codes = func(q.codes, *args[1:], **kwargs)
    return cls(codes, q.dequant_scale.clone(), q.spec, q.dtype, q.amax.clone())


@_rule(aten.record_stream.default)
def _record_stream(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    for part in (args[0].codes, args[0].dequant_scale, args[0].amax):
        func(part, *args[1:], **kwargs)


@_rule(aten._to_copy.default)
def _to(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """To another device, or to stand for another floating dtype; any other dtype gives a plain tensor."""
    q = args[0]
    dtype = kwargs.pop("dtype", None) or q.dtype
    if dtype not in FLOATING:
        return _fallback(cls, func, args, {**kwargs, "dtype": dtype})
    scalar = {key: value for key, value in kwargs.items() if key != "memory_format"}
    parts = func(q.codes, **kwargs), func(q.dequant_scale, **scalar), func(q.amax, **scalar)
    return cls(parts[0], parts[1], q.spec, dtype, parts[2])


@_rule(aten.empty_like.default)
def _empty_like(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Codes without values, with the scales of an all-zero tensor."""
    q = args[0]
    dtype = kwargs.pop("dtype", None) or q.dtype
    if dtype not in FLOATING:
        return NotImplemented
    codes = func(q.codes, *args[1:], **kwargs)
    amax = torch.zeros((), dtype=torch.float32, device=codes.device)
    return cls(codes, scale_of_zeros(q.shape, q.spec, codes.device), q.spec, dtype, amax)


@_rule(aten.dequantize.self)
def _dequantize(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return args[0].dequantize()


@_rule(aten.embedding.default, aten.index_select.default)
def _look_up(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    q, index = args[0], args[-1] if func is aten.index_select.default else args[1]
    of_rows = func is aten.embedding.default or args[1] % max(q.ndim, 1) == 0
    if not isinstance(q, cls) or q.ndim != 2 or not of_rows:
        return NotImplemented
    rows = rows_of(q, index.reshape(-1))
    return NotImplemented if rows is None else rows.reshape(*index.shape, q.shape[1])


@_rule(aten.copy_.default)
def _copy_into(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    q: Any = args[0]
    source: Any = args[1].read() if isinstance(args[1], ReadOnlyView) else args[1]
    if not isinstance(q, cls):
        return NotImplemented
    if not isinstance(source, cls):
        source = source if source.dtype in FLOATING else source.to(q.dtype)
        write(q, source.to(q.device).expand(q.shape), keep_unchanged=False)
        return q
    if source.spec != q.spec or source.shape != q.shape or q._whole is not None:
        write(q, values_of(source).to(q.device).expand(q.shape), keep_unchanged=False)
        return q
    for name in ("codes", "dequant_scale", "amax"):
        getattr(q, name).copy_(getattr(source, name), *args[2:], **kwargs)
    return q


@_rule(aten.zero_.default)
def _zero(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    q = args[0]
    if q._whole is not None:
        return NotImplemented
    q.codes.zero_()
    q.dequant_scale.copy_(scale_of_zeros(q.shape, q.spec, q.device))
    q.amax.zero_()
    return q


@_rule(aten.mul_.Tensor, aten.div_.Tensor)
def _scale(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A factor goes into the scale where the scale's rule allows it: the codes stay."""
    q, factor = args[:2]
    if not isinstance(q, cls) or q._whole is not None or not _fits_scale(cls, factor, q):
        return NotImplemented
    func(q.dequant_scale, factor)
    q.dequant_scale.clamp_(max=FLT_MAX)  # zeros stay zeros under any factor
    func(q.amax, factor)
    q.amax.abs_()  # a tensor factor may be negative
    return q


def _fits_scale(cls: type, factor: Any, q: QuantizedTensor) -> bool:
    rule = q.spec.scale
    # a byte takes the factor only if it is cast anew, and an exponent beside the scale takes none
    if rule is NONE or q.dequant_scale.dtype is not torch.float32 or q.spec.companding is RANGE_EXPANSION:
        return False
    free = rule is CURRENT or isinstance(rule, Delayed)
    if isinstance(factor, Tensor):
        # its value is not known without waiting for the device
        return free and factor.ndim == 0 and factor.is_floating_point() and not isinstance(factor, cls)
    if isinstance(factor, complex) or not 0 < factor < math.inf:
        return False
    return free or math.frexp(factor)[0] == 0.5


_ONE_BY_ONE = {
    aten._foreach_mul_.Scalar: aten.mul_.Tensor,
    aten._foreach_mul_.Tensor: aten.mul_.Tensor,
    aten._foreach_mul_.ScalarList: aten.mul_.Tensor,
    aten._foreach_div_.Scalar: aten.div_.Tensor,
    aten._foreach_div_.Tensor: aten.div_.Tensor,
    aten._foreach_div_.ScalarList: aten.div_.Tensor,
    aten._foreach_zero_.default: aten.zero_.default,
    aten._foreach_copy_.default: aten.copy_.default,
}


@_rule(*_ONE_BY_ONE)
def _foreach(cls: type, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """As a loop over the list, so that the rules above apply and the result is that of the loop."""
    for i, x in enumerate(args[0]):
        rest = [a[i] if isinstance(a, (list, tuple)) else a for a in args[1:]]
        _ONE_BY_ONE[func](x, *rest, **kwargs)
