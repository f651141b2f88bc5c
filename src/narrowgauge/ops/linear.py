"""A linear layer in low precision: one autograd function for its three GEMMs, driven by the recipe's casts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowgauge.ops import deferred, kernels
from narrowgauge.ops.backends import Backend
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.matmul import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Gemm, multiply
from narrowgauge.ops.operands import Cast, Caster, Counter, DelayedSlots, key_of_call, plain
from narrowgauge.ops.parted import WHOLE, Exchange, Parting
from narrowgauge.ops.ranked import codes_only, from_ranked_rows, gather_rows, ranked_rows
from narrowgauge.ops.saved import Saved, restore, save
from narrowgauge.ops.shared import SharedInputs
from narrowgauge.ops.smoothing import channel_factors
from narrowgauge.ops.uses import MakeCast, backward_casts, forward_casts
from narrowgauge.tensors.local import as_part_of, local
from narrowgauge.tensors.quantized import QuantizedTensor

__all__ = ["Counter", "DelayedSlots", "LinearCasts", "linear"]

NOTHING_DELAYED: Mapping[str, DelayedSlots] = {}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: LinearCasts,
    *,
    delayed: Mapping[str, DelayedSlots] = NOTHING_DELAYED,
    record: bool = False,
    out_dtype: torch.dtype,
    counter: Counter | None = None,
    shared: SharedInputs[Cast] | None = None,
    generator: torch.Generator | None = None,
    training: bool = True,
    parting: Parting = WHOLE,
    transposed: bool = False,
) -> Tensor:
    """x @ weight.T + bias with operands cast by `casts`, in forward and in backward.

    x: [..., K]; weight: [N, K], or [K, N] where it is transposed, a plain or a quantized tensor; bias: [N] or None,
    rounded to `out_dtype` before it is added. Returns [..., N] of `out_dtype`. Gradients have the dtype of x, and the
    `grad_dtype` of weight and bias; the bias gradient is summed in float32 from the uncast grad_output.

    delayed: the slots of the roles ("input", "weight", "grad_output") whose scale is delayed. record: whether the live
    amax slots are raised, here and in backward. counter: told what each cast did, on sampled steps. shared: casts of
    inputs made by sibling layers within one forward of their parent. generator: source of the random bits of stochastic
    casts, one draw a call; None: torch's default one of the device. training False: a call without gradients draws no
    random bits for the casts of backward. parting: what of the operands this process has, if not all; weight and bias
    may then be DTensors, and get gradients laid out alike. In sequence-parallel training the last but one dimension of
    x, of the output, or of both is this process's part of a sequence: see `Parting.gathers`.

    Saved for backward: the codes of the input operand (1 byte a value in FP8, packed below 8 bits) and of the weight,
    with their scales. Where `casts.in_compute` runs grad_weight in the compute dtype, the input is saved in that dtype;
    where it runs grad_input so, the weight itself is kept by reference and cast again. Inside `deferred.putting_off`
    backward leaves the weight gradient to be taken later, from the same operands.
    """
    # read here: on the inside of the autograd function torch.compile sees a tensor without attributes
    held = weight if parting is WHOLE else local(weight)
    weight_spec = held.spec if isinstance(held, QuantizedTensor) else None
    key = key_of_call(casts, x, weight, generator, training)
    parted = parting.smoothed() if casts.smooth else parting.operands
    caster = Caster(delayed, record, counter, None if casts.smooth else shared, weight_spec, key, parted)
    bias_grad_dtype = None if bias is None else grad_dtype_of(bias)
    grad_enabled = torch.is_grad_enabled()
    call = _Call(casts, caster, out_dtype, x.dtype, grad_dtype_of(weight), bias_grad_dtype, grad_enabled)
    if parting is not WHOLE:
        call = call._replace(parting=parting, parameters=(weight, bias))
    if transposed:
        call = call._replace(transposed=True)
    later = deferred.current()
    if later is not None and grad_enabled and weight.requires_grad and x.requires_grad:
        # autograd does not know the weight, so that it runs no hooks of it in the pass that leaves it out
        call, weight = call._replace(put_off=later.of(weight)), weight.detach()
    return _Linear.apply(x, weight, bias, call)  # type: ignore[no-any-return]


def grad_dtype_of(parameter: Tensor) -> torch.dtype:
    """The dtype in which autograd takes the gradient of a weight or bias: a wide one is not rounded on the way.

    Compiled code cannot ask; there it is the parameter's own, which autograd casts.
    """
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return parameter.grad_dtype or parameter.dtype  # None allows any


class _Call(NamedTuple):
    """What one call carries from forward to backward beside the tensors that are saved."""

    casts: LinearCasts
    caster: Caster
    out_dtype: torch.dtype
    input_dtype: torch.dtype
    weight_grad_dtype: torch.dtype
    bias_grad_dtype: torch.dtype | None
    grad_enabled: bool  # inside the autograd function it always reads False
    put_off: Callable[[Callable[[], Tensor]], None] | None = None  # takes the product of the weight gradient
    parting: Parting = WHOLE
    parameters: tuple[Tensor, Tensor | None] | None = None  # weight and bias, where they may be DTensors
    transposed: bool = False  # the weight is [K, N]

    def weight(self, weight: Tensor) -> Tensor:
        """The matrix [N, K] that this process has of the weight, outside of autograd."""
        held = (weight if self.parting is WHOLE else local(weight)).detach()
        return held.t() if self.transposed else held


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        rows = _rows(x.detach(), "grad_output", call.parting)
        needs_x, needs_weight = (needed and call.grad_enabled for needed in ctx.needs_input_grad[:2])
        needs_weight = needs_weight or call.put_off is not None
        values, factors = call.weight(weight), None
        if call.casts.smooth:
            factors = channel_factors(rows, call.parting.over_rows("input"))
            rows, values = rows / factors.to(rows.dtype), plain(values) * factors
        make: MakeCast[Cast] = functools.partial(call.caster.cast, "input", rows, source=x)
        exchange = call.parting.for_role("input")
        make = make if exchange is None else codes_only(make)
        left, input_saved = forward_casts("input", make, GRAD_WEIGHT if needs_weight else None, call.casts, x.device)
        if exchange is not None:
            left = gather_rows(left, exchange, call.caster.shared, x)
        make = functools.partial(call.caster.cast, "weight", values)
        right, weight_saved = forward_casts("weight", make, GRAD_INPUT if needs_x else None, call.casts, x.device)
        backend = call.casts.backend(OUTPUT, x.device)
        summed = call.parting.for_role("grad_output")
        held = bias if bias is None or call.parting is WHOLE else local(bias)
        now = held if summed is None else None  # else it is added to the sum
        y = multiply(OUTPUT, left.factor(backend), right.factor(backend), backend, call.out_dtype, now)

        tensors: list[Tensor | None] = [factors]
        ctx.saved = {}
        for gemm, cast in ((GRAD_WEIGHT, input_saved), (GRAD_INPUT, weight_saved)):
            if cast is not None:
                # a wide copy of the weight would cost more than casting it again
                again = weight if gemm is GRAD_INPUT and not cast.spec.format.is_narrow else None
                ctx.saved[gemm.name], parts = save(cast, len(tensors), again)
                tensors += parts
        ctx.save_for_backward(*tensors)
        # without the shared casts: they hold inputs, whose graph holds this node, and no collector sees such a cycle
        ctx.call = call._replace(caster=call.caster._replace(shared=None))
        ctx.input_shape = x.shape
        if exchange is not None:
            return from_ranked_rows(y, x.shape, exchange.ranks)
        if summed is None:
            # not marked as a view: FSDP2 and pipelines refuse modules that return one, and in-place operations, too
            return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[1]))
        return _summed(y, held, x.shape, summed, call.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        rows = _rows(grad_output, "input", call.parting)
        grads: dict[str, Tensor] = {}
        saved_tensors = ctx.saved_tensors  # activation checkpointing lets them be read once
        factors = saved_tensors[0]
        gemms = [gemm for gemm in (GRAD_INPUT, GRAD_WEIGHT) if gemm.name in ctx.saved]
        for gemm, backend, left in _grad_output_casts(call, rows, gemms):
            right = _restored(ctx, gemm, saved_tensors, factors)
            product = functools.partial(_gradient, gemm, left, right, backend, call, factors)
            if gemm is GRAD_WEIGHT and call.put_off is not None:
                call.put_off(product)
            else:
                grads[gemm.name] = product()
        grad_x, grad_weight = grads.get(GRAD_INPUT.name), grads.get(GRAD_WEIGHT.name)
        grad_bias = None
        if call.bias_grad_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = kernels.column_sum(rows).to(call.bias_grad_dtype)
        if call.parameters is not None:
            grad_x = None if grad_x is None else _own_input(grad_x, grad_output.shape, call)
            if grad_bias is not None and call.parameters[1] is not None:
                grad_bias = as_part_of(call.parameters[1], grad_bias)
        return None if grad_x is None else grad_x.reshape(ctx.input_shape), grad_weight, grad_bias, None


def _rows(x: Tensor, gathers: str, parting: Parting) -> Tensor:
    """`x` as a matrix; ranked, where it has all rows and the layer gathers those of the role `gathers`."""
    exchange = parting.for_role(gathers)
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]) if exchange is None else ranked_rows(x, exchange.ranks)


def _summed(y: Tensor, bias: Tensor | None, whole: torch.Size, exchange: Exchange, dtype: torch.dtype) -> Tensor:
    """This process's part of the sequence of the sum over processes of ranked rows `y`; whole: the input's shape."""
    total = exchange.sum_scattered(y)
    if bias is not None:
        total = total + bias.to(dtype).float()
    *lead, tokens, _ = whole
    return total.to(dtype).view(*lead, tokens // exchange.ranks, y.shape[1])


def _own_input(grad_x: Tensor, grad_output_shape: torch.Size, call: _Call) -> Tensor:
    """The gradient of this process's input from that of ranked rows."""
    gathered, summed = call.parting.for_role("input"), call.parting.for_role("grad_output")
    if gathered is not None:
        return gathered.sum_scattered(grad_x).to(call.input_dtype)
    return grad_x if summed is None else from_ranked_rows(grad_x, grad_output_shape, summed.ranks)


def _grad_output_casts(call: _Call, rows: Tensor, gemms: list[Gemm]) -> list[tuple[Gemm, Backend, Cast]]:
    """The casts of the grad_output of which `rows` are what this process has, gathered where it has a part."""
    make: MakeCast[Cast] = functools.partial(call.caster.cast, "grad_output", rows)
    exchange = call.parting.for_role("grad_output")
    if exchange is None:
        return backward_casts(make, gemms, call.casts, rows.device)
    local_casts = backward_casts(codes_only(make), gemms, call.casts, rows.device)
    gathered = {id(cast): cast for _, _, cast in local_casts}
    gathered = {key: gather_rows(cast, exchange) for key, cast in gathered.items()}
    return [(gemm, backend, gathered[id(cast)]) for gemm, backend, cast in local_casts]


def _gradient(gemm: Gemm, left: Cast, right: Cast, backend: Backend, call: _Call, factors: Tensor | None) -> Tensor:
    """The matrix of one backward product, in the dtype of what it is the gradient of."""
    dtype = call.input_dtype if gemm is GRAD_INPUT else call.weight_grad_dtype
    grad = multiply(gemm, left.factor(backend), right.factor(backend), backend, dtype)
    if factors is not None:  # powers of two: exact
        grad = grad / factors.to(grad.dtype) if gemm is GRAD_INPUT else grad * factors.to(grad.dtype)
    if gemm is GRAD_INPUT or call.parameters is None:
        return grad.t() if call.transposed and gemm is GRAD_WEIGHT else grad
    return as_part_of(call.parameters[0], grad)


def _restored(ctx: Any, gemm: Gemm, saved_tensors: tuple[Any, ...], factors: Tensor | None) -> Cast:
    """The right-hand operand of a backward GEMM, from what forward saved."""
    call: _Call = ctx.call
    saved: Saved = ctx.saved[gemm.name]
    if saved.spec is not None:
        cast = restore(saved, saved_tensors)
        exchange = call.parting.for_role(gemm.right)
        return cast if exchange is None else gather_rows(cast, exchange)
    weight = call.weight(saved_tensors[saved.at])
    how = call.casts.operand(gemm, gemm.right)
    weight = weight if factors is None else plain(weight) * factors
    return call.caster.cast(gemm.right, weight, how, keep_codes=True, carrier=None, counted=False)
