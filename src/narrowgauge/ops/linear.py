"""A linear layer in low precision: one autograd function for its three GEMMs, driven by the recipe's casts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.matmul import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Gemm, multiply
from narrowgauge.ops.operands import Cast, Counter, DelayedSlots, Recording, cast, raise_live_slot
from narrowgauge.ops.shared import SharedInputs

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
    shared: SharedInputs | None = None,
) -> Tensor:
    """x @ weight.T + bias with operands cast by `casts`, in forward and in backward.

    x: [..., K]; weight: [N, K], a plain or a quantized tensor; bias: [N] or None, rounded to `out_dtype` before it is
    added. Returns [..., N] of `out_dtype`. Gradients have the dtypes of x, weight and bias; the bias gradient is summed
    in float32 from the uncast grad_output.

    delayed: the slots of the roles ("input", "weight", "grad_output") whose scale is delayed. record: whether the live
    amax slots are raised, here and in backward. counter: told what each cast did, on sampled steps. shared: casts of
    inputs made by sibling layers within one forward of their parent.

    Saved for backward: the codes of the input operand (1 byte a value in FP8) and of the weight, with their scales.
    Where `casts.in_compute` runs grad_weight in the compute dtype, the input is saved in that dtype; where it runs
    grad_input so, the weight parameter itself is kept by reference and cast again.
    """
    call = _Call(
        casts, Recording(delayed, record, counter), out_dtype, shared, torch.is_grad_enabled(), x.dtype, weight.dtype
    )
    return _Linear.apply(x, weight, bias, call)  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """What one call carries from forward to backward beside tensors to be saved."""

    casts: LinearCasts
    recording: Recording
    out_dtype: torch.dtype
    shared: SharedInputs | None
    grad_enabled: bool
    input_dtype: torch.dtype
    weight_dtype: torch.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        rows = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
        needs_x, needs_weight = (needed and call.grad_enabled for needed in ctx.needs_input_grad[:2])
        input_now, input_later = _cast_input(x, rows, call, needs_weight)
        weight_now, weight_later = _cast_for(OUTPUT, GRAD_INPUT, "weight", weight.detach(), call, needs_x)
        backend = call.casts.backend(OUTPUT, x.device)
        y = multiply(OUTPUT, input_now.factor(backend), weight_now.factor(backend), backend, call.out_dtype, bias)
        ctx.call, ctx.input_shape = call, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        saved_weight = weight_later
        if weight_later is not None and not weight_later.format.is_narrow:
            ctx.weight_by_reference, saved_weight = True, weight_later._replace(codes=weight, dequant_scale=None)
        else:
            ctx.weight_by_reference = False
        ctx.formats = [c.format if c is not None else None for c in (input_later, saved_weight)]
        tensors = [(c.codes, c.dequant_scale) if c is not None else (None, None) for c in (input_later, saved_weight)]
        ctx.save_for_backward(*tensors[0], *tensors[1])
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        rows = grad_output.reshape(grad_output.shape[:-1].numel(), grad_output.shape[-1])
        needed = dict(zip((GRAD_INPUT.name, GRAD_WEIGHT.name), ctx.needs_input_grad[:2], strict=True))
        dtypes = {GRAD_INPUT.name: call.input_dtype, GRAD_WEIGHT.name: call.weight_dtype}
        grads: dict[str, Tensor | None] = {}
        casts_made: dict[Any, Cast] = {}
        for gemm in (GRAD_INPUT, GRAD_WEIGHT):
            if not needed[gemm.name]:
                grads[gemm.name] = None
                continue
            backend = call.casts.backend(gemm, grad_output.device)
            spec = call.casts.spec(gemm, gemm.left)
            key = (spec, backend.carrier)
            if key not in casts_made:
                casts_made[key] = cast(
                    gemm.left, rows, spec, call.recording, keep_codes=False, carrier=backend.carrier
                )
                raise_live_slot(gemm.left, casts_made[key].amax, call.recording)
            left = casts_made[key].factor(backend)
            right = _saved(ctx, gemm).factor(backend)
            grads[gemm.name] = multiply(gemm, left, right, backend, dtypes[gemm.name])
        grad_x = grads[GRAD_INPUT.name]
        if grad_x is not None:
            grad_x = grad_x.reshape(ctx.input_shape)
        grad_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, grads[GRAD_WEIGHT.name], grad_bias, None


def _cast_for(
    now: Gemm, later: Gemm, role: str, x: Tensor, call: _Call, needed_later: bool
) -> tuple[Cast, Cast | None]:
    """The casts of `x` for a GEMM of the forward and, where needed, for one of the backward: one where they agree."""
    spec, spec_later = call.casts.spec(now, role), call.casts.spec(later, role)
    if role == "input" and call.casts.activation is not None:
        spec_later = call.casts.activation
    agree = spec == spec_later
    carrier = call.casts.backend(now, x.device).carrier
    first = cast(role, x, spec, call.recording, keep_codes=agree and needed_later, carrier=carrier)
    raise_live_slot(role, first.amax, call.recording)
    if not needed_later or agree:
        return first, first if needed_later else None
    second = cast(role, x, spec_later, call.recording, keep_codes=True, carrier=None)
    raise_live_slot(role, second.amax, call.recording)
    return first, second


def _cast_input(x: Tensor, rows: Tensor, call: _Call, needed_later: bool) -> tuple[Cast, Cast | None]:
    return _cast_for(OUTPUT, GRAD_WEIGHT, "input", rows, call, needed_later)


def _saved(ctx: Any, gemm: Gemm) -> Cast:
    """The right-hand operand of a backward GEMM from what forward saved."""
    call: _Call = ctx.call
    at = 0 if gemm is GRAD_WEIGHT else 1
    codes, dequant_scale = ctx.saved_tensors[2 * at : 2 * at + 2]
    if gemm is GRAD_INPUT and ctx.weight_by_reference:
        return cast("weight", codes, call.casts.spec(gemm, "weight"), call.recording, keep_codes=True, carrier=None)
    return Cast(codes, None, dequant_scale, None, ctx.formats[at])
