"""The linear layers of many experts in low precision: one autograd function for the three GEMMs of each.

Each expert's operands are cast as those of a layer of its own: no tile holds tokens of two experts, tiles down the
tokens start anew at each expert, and a scale for a whole tensor is one for each expert's part of it. An expert without
tokens casts nothing: its scaling state stays, and its gradients are zeros.

`ops.grouped_products` multiplies the rows, in one call where the hardware has it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from narrowgauge.numerics.scaling import NVFP4
from narrowgauge.ops import kernels
from narrowgauge.ops.casts import LinearCasts, OperandCast
from narrowgauge.ops.experts import group_sizes
from narrowgauge.ops.grouped_products import Rows, times_weights
from narrowgauge.ops.linear import NOTHING_DELAYED, grad_dtype_of
from narrowgauge.ops.matmul import GEMMS, GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Gemm, multiply
from narrowgauge.ops.operands import Cast, Caster, Counter, DelayedSlots, key_of_call, plain
from narrowgauge.ops.saved import Saved, restore, save
from narrowgauge.ops.smoothing import channel_factors
from narrowgauge.ops.uses import backward_casts, forward_casts
from narrowgauge.tensors.quantized import QuantizedTensor

STREAMS = 2 * len(GEMMS)  # of random bits that one layer takes: each expert has streams of its own


def grouped_linear(
    x: Tensor,
    counts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    casts: LinearCasts,
    *,
    delayed: Mapping[str, DelayedSlots] = NOTHING_DELAYED,
    record: bool = False,
    out_dtype: torch.dtype,
    counter: Counter | None = None,
    generator: torch.Generator | None = None,
    training: bool = True,
) -> Tensor:
    """For each expert e: its rows of x @ weight[e].T + bias[e], with operands cast by `casts` as `ops.linear` does.

    x: [T, K], rows in the order of the experts; counts: int64 [E], how many rows each takes, read by the host; weight:
    [E, N, K], a plain or a quantized tensor; bias: [E, N] or None. Returns [T, N] of `out_dtype`. Gradients have the
    shapes of x, weight and bias and dtypes as in `ops.linear`, zeros for experts without rows.

    delayed: the slots of the roles whose scale is delayed, all experts' together: quant_scale [E], history [E, L]. The
    other arguments are those of `ops.linear`. Not to be traced by torch.compile: `ops.graph_breaks` has it outside of
    graphs. Raises NarrowgaugeError where counts do not fit the rows.
    """
    ends, start = [], 0
    for size in group_sizes(counts, weight.shape[0], x.shape[0]):
        ends.append((start, start := start + size))
    parts = tuple(_Part(e, start, stop) for e, (start, stop) in enumerate(ends) if stop > start)
    weight_spec = weight.spec if isinstance(weight, QuantizedTensor) else None
    key = key_of_call(casts, x, weight, generator, training)
    caster = Caster(delayed, record, counter, None, weight_spec, key)
    bias_grad_dtype = None if bias is None else grad_dtype_of(bias)
    call = _Call(
        casts, caster, parts, out_dtype, x.dtype, grad_dtype_of(weight), bias_grad_dtype, torch.is_grad_enabled()
    )
    return _GroupedLinear.apply(x, weight, bias, call)  # type: ignore[no-any-return]


class _Part(NamedTuple):
    """An expert that has rows, and which."""

    expert: int
    start: int
    stop: int

    def of(self, rows: Tensor) -> Tensor:
        return rows[self.start : self.stop]


class _Call(NamedTuple):
    """What one call carries from forward to backward beside the tensors that are saved."""

    casts: LinearCasts
    caster: Caster
    parts: tuple[_Part, ...]
    out_dtype: torch.dtype
    input_dtype: torch.dtype
    weight_grad_dtype: torch.dtype
    bias_grad_dtype: torch.dtype | None
    grad_enabled: bool  # inside the autograd function it always reads False

    def cast(self, part: _Part, role: str, x: Tensor, how: OperandCast, **options: Any) -> Cast:
        """Cast one expert's matrix by its own delayed scale and random bits."""
        slots = {name: all_.of_expert(part.expert) for name, all_ in self.caster.delayed.items()}
        how = how._replace(stream=how.stream + STREAMS * part.expert)
        return self.caster._replace(delayed=slots).cast(role, x, how, **options)

    def cast_rows(self, role: str, rows: Tensor, how: OperandCast, **options: Any) -> Rows:
        """Cast each expert's rows: in one go where no scale is shared by two rows."""
        if not _casts_rows_apart(how):
            return Rows([self.cast(part, role, part.of(rows), how, **options) for part in self.parts], None)
        whole = self.caster.cast(role, rows, how, **options)
        return Rows([_rows_of(whole, part) for part in self.parts], whole)

    def cast_weights(self, weights: list[Tensor], how: OperandCast, **options: Any) -> list[Cast]:
        return [self.cast(p, "weight", weight, how, **options) for p, weight in zip(self.parts, weights, strict=True)]

    def weights_of(self, weight: Tensor, factors: Tensor | None) -> list[Tensor]:
        """The weights of the experts that have rows, with their smoothing factors [parts, K] taken back."""
        weights = [weight[part.expert] for part in self.parts]
        if factors is None:
            return weights
        return [plain(each) * factor for each, factor in zip(weights, factors, strict=True)]

    def spread(self, factors: Tensor) -> Tensor:
        """The smoothing factors [parts, K] of every row: [T, K]."""
        sizes = torch.tensor([part.stop - part.start for part in self.parts], device=factors.device)
        return factors.repeat_interleave(sizes, dim=0)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        rows, casts, parts = x.detach(), call.casts, call.parts
        needs_x, needs_weight = (needed and call.grad_enabled for needed in ctx.needs_input_grad[:2])
        ctx.call, ctx.saved = call, {}
        ctx.weight_shape = weight.shape
        if not parts:
            ctx.save_for_backward()
            return x.new_zeros(0, weight.shape[1], dtype=call.out_dtype)
        factors = None
        if casts.smooth:
            factors = torch.stack([channel_factors(part.of(rows)) for part in parts])
            rows = rows / call.spread(factors).to(rows.dtype)
        lefts, inputs = forward_casts(
            "input",
            functools.partial(call.cast_rows, "input", rows),
            GRAD_WEIGHT if needs_weight else None,
            casts,
            x.device,
        )
        weights = functools.partial(call.cast_weights, call.weights_of(weight.detach(), factors))
        rights, kept = forward_casts("weight", weights, GRAD_INPUT if needs_x else None, casts, x.device)
        biases = [None if bias is None else bias[part.expert] for part in parts]
        y = times_weights(OUTPUT, lefts, rights, biases, casts.backend(OUTPUT, x.device), call.out_dtype)
        # a wide copy of the weights would cost more than casting them again
        again = kept is not None and not kept[0].spec.format.is_narrow
        tensors: list[Tensor | None] = [factors, weight if again else None]
        for gemm, each in ((GRAD_WEIGHT, inputs and inputs.parts), (GRAD_INPUT, None if again else kept)):
            if each is not None:
                ctx.saved[gemm.name] = _save(each, tensors)
        if again:
            ctx.saved[GRAD_INPUT.name] = None
        ctx.save_for_backward(*tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        grad_x, grad_weight, grad_bias = _zeros(ctx, grad_output)
        if not call.parts:
            return grad_x, grad_weight, grad_bias, None
        grad_x = None
        saved_tensors = ctx.saved_tensors  # activation checkpointing lets them be read once
        factors: Tensor | None = saved_tensors[0]
        gemms = [gemm for gemm in (GRAD_INPUT, GRAD_WEIGHT) if gemm.name in ctx.saved]
        make = functools.partial(call.cast_rows, "grad_output", grad_output)
        for gemm, backend, lefts in backward_casts(make, gemms, call.casts, grad_output.device):
            rights = _restored(ctx, gemm, saved_tensors)
            if gemm is GRAD_INPUT:
                grad_x = times_weights(gemm, lefts, rights, [None] * len(rights), backend, call.input_dtype)
                continue
            for part, left, right in zip(call.parts, lefts.parts, rights, strict=True):
                product = multiply(gemm, left.factor(backend), right.factor(backend), backend, call.weight_grad_dtype)
                grad_weight[part.expert] = product
        if factors is not None:  # powers of two: exact
            if grad_x is not None:
                grad_x /= call.spread(factors).to(grad_x.dtype)
            if grad_weight is not None:
                grad_weight[[part.expert for part in call.parts]] *= factors[:, None].to(grad_weight.dtype)
        if grad_bias is not None:
            for part in call.parts:
                grad_bias[part.expert] = kernels.column_sum(part.of(grad_output))
        return grad_x, grad_weight, grad_bias, None


def _casts_rows_apart(how: OperandCast) -> bool:
    """True where what is made of a row depends on no other row."""
    spec = how.spec
    if how.hadamard is not None or spec.is_delayed or spec.scale is NVFP4:  # which has a scale of the whole, too
        return False
    return not spec.is_scaled or spec.granularity.rows == 1


def _rows_of(whole: Cast, part: _Part) -> Cast:
    codes, carrier, block_scale = (
        None if tensor is None else part.of(tensor) for tensor in (whole.codes, whole.carrier, whole.block_scale)
    )
    return whole._replace(codes=codes, carrier=carrier, block_scale=block_scale)


def _save(casts: list[Cast], tensors: list[Tensor | None]) -> list[Saved]:
    """Append what to keep of each expert's cast to `tensors`."""
    found = []
    for cast in casts:
        saved, kept = save(cast, len(tensors))
        found.append(saved)
        tensors += kept
    return found


def _restored(ctx: Any, gemm: Gemm, saved_tensors: tuple[Any, ...]) -> list[Cast]:
    """The right-hand operands of a backward GEMM, from what forward saved."""
    call: _Call = ctx.call
    saved: list[Saved] | None = ctx.saved[gemm.name]
    if saved is not None:
        return [restore(each, saved_tensors) for each in saved]
    weights = call.weights_of(saved_tensors[1].detach(), saved_tensors[0])
    how = call.casts.operand(gemm, gemm.right)
    return call.cast_weights(weights, how, keep_codes=True, carrier=None, counted=False)


def _zeros(ctx: Any, grad_output: Tensor) -> tuple[Any, Any, Any]:
    """Gradients of x, weight and bias to write into; None where none is wanted."""
    call: _Call = ctx.call
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    experts, n, k = ctx.weight_shape
    return (
        grad_output.new_empty(grad_output.shape[0], k, dtype=call.input_dtype) if needs_x else None,
        grad_output.new_zeros(experts, n, k, dtype=call.weight_grad_dtype) if needs_weight else None,
        grad_output.new_zeros(experts, n, dtype=call.bias_grad_dtype) if needs_bias else None,
    )
