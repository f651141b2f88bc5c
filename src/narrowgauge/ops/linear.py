"""A linear layer in low precision: one autograd function for its three GEMMs, driven by the recipe's casts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowgauge.numerics.formats import Format
from narrowgauge.ops import kernels
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.matmul import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Gemm, multiply
from narrowgauge.ops.operands import Cast, Caster, Counter, DelayedSlots
from narrowgauge.ops.shared import SharedInputs
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
    grad_input so, the weight itself is kept by reference and cast again.
    """
    # read here: on the inside of the autograd function torch.compile sees a tensor without attributes
    weight_spec = weight.spec if isinstance(weight, QuantizedTensor) else None
    caster = Caster(delayed, record, counter, shared, weight_spec)
    call = _Call(casts, caster, out_dtype, x.dtype, weight.dtype, torch.is_grad_enabled())
    return _Linear.apply(x, weight, bias, call)  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """What one call carries from forward to backward beside the tensors that are saved."""

    casts: LinearCasts
    caster: Caster
    out_dtype: torch.dtype
    input_dtype: torch.dtype
    weight_dtype: torch.dtype
    grad_enabled: bool  # inside the autograd function it always reads False


class _Saved(NamedTuple):
    """How an operand waits for backward; its two tensors are in `ctx.saved_tensors`.

    format: of the saved codes; None: the tensor itself was saved, and is cast again.
    """

    at: int
    format: Format | None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        rows = x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])
        needs_x, needs_weight = (needed and call.grad_enabled for needed in ctx.needs_input_grad[:2])
        left, input_saved = _cast_pair("input", rows, GRAD_WEIGHT if needs_weight else None, call, source=x)
        right, weight_saved = _cast_pair("weight", weight.detach(), GRAD_INPUT if needs_x else None, call)
        backend = call.casts.backend(OUTPUT, x.device)
        y = multiply(OUTPUT, left.factor(backend), right.factor(backend), backend, call.out_dtype, bias)

        tensors: list[Tensor | None] = []
        ctx.saved = {}
        for gemm, cast in ((GRAD_WEIGHT, input_saved), (GRAD_INPUT, weight_saved)):
            if cast is None:
                continue
            # a wide copy of the weight would cost more than casting it again
            again = gemm is GRAD_INPUT and not cast.format.is_narrow
            ctx.saved[gemm.name] = _Saved(len(tensors), None if again else cast.format)
            tensors += [weight, None] if again else [cast.codes, cast.dequant_scale]
        ctx.save_for_backward(*tensors)
        # without the shared casts: they hold inputs, whose graph holds this node, and no collector sees such a cycle
        ctx.call = call._replace(caster=call.caster._replace(shared=None))
        ctx.input_shape, ctx.bias_dtype = x.shape, None if bias is None else bias.dtype
        return y.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        rows = grad_output.reshape(grad_output.shape[:-1].numel(), grad_output.shape[-1])
        dtypes = {GRAD_INPUT.name: call.input_dtype, GRAD_WEIGHT.name: call.weight_dtype}
        grads: dict[str, Tensor] = {}
        left_casts: dict[Any, Cast] = {}
        saved_tensors = ctx.saved_tensors  # activation checkpointing lets them be read once
        for gemm in (GRAD_INPUT, GRAD_WEIGHT):
            if gemm.name not in ctx.saved:
                continue
            backend = call.casts.backend(gemm, grad_output.device)
            spec = call.casts.spec(gemm, gemm.left)
            if (spec, backend.carrier) not in left_casts:
                counted = not call.casts.runs_in_compute(gemm) and not any(spec == seen for seen, _ in left_casts)
                left_casts[spec, backend.carrier] = call.caster.cast(
                    gemm.left, rows, spec, keep_codes=False, carrier=backend.carrier, counted=counted
                )
            left = left_casts[spec, backend.carrier].factor(backend)
            right = _restored(ctx, gemm, saved_tensors).factor(backend)
            grads[gemm.name] = multiply(gemm, left, right, backend, dtypes[gemm.name])
        grad_x = grads[GRAD_INPUT.name].reshape(ctx.input_shape) if GRAD_INPUT.name in grads else None
        grad_bias = None
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = kernels.column_sum(rows).to(ctx.bias_dtype)
        return grad_x, grads.get(GRAD_WEIGHT.name), grad_bias, None


def _cast_pair(
    role: str, x: Tensor, later: Gemm | None, call: _Call, source: Tensor | None = None
) -> tuple[Cast, Cast | None]:
    """The casts of `x` for the output GEMM and for a `later` one of backward, None if none: one where they agree."""
    spec, carrier = call.casts.spec(OUTPUT, role), call.casts.backend(OUTPUT, x.device).carrier
    spec_later = None if later is None else call.casts.spec(later, role)
    counted = not call.casts.runs_in_compute(OUTPUT)
    agree = spec is spec_later or spec == spec_later
    now = call.caster.cast(role, x, spec, keep_codes=agree, carrier=carrier, counted=counted, source=source)
    if spec_later is None or agree:
        return now, None if spec_later is None else now
    assert later is not None
    counted = not counted and not call.casts.runs_in_compute(later)
    return now, call.caster.cast(role, x, spec_later, keep_codes=True, carrier=None, counted=counted, source=source)


def _restored(ctx: Any, gemm: Gemm, saved_tensors: tuple[Any, ...]) -> Cast:
    """The right-hand operand of a backward GEMM, from what forward saved."""
    call: _Call = ctx.call
    saved: _Saved = ctx.saved[gemm.name]
    codes, dequant_scale = saved_tensors[saved.at : saved.at + 2]
    if saved.format is not None:
        return Cast(codes, None, dequant_scale, saved.format)
    spec = call.casts.spec(gemm, gemm.right)
    return call.caster.cast(gemm.right, codes.detach(), spec, keep_codes=True, carrier=None, counted=False)
