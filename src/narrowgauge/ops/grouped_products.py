"""The rows of many experts times their weights: in one call where the hardware has it, else one for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics import scaling
from narrowgauge.ops import backends
from narrowgauge.ops.backends import Backend
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.cuda.grouped import grouped_product, why_not_grouped
from narrowgauge.ops.matmul import GEMMS, GRAD_WEIGHT, Factor, Gemm, multiply
from narrowgauge.ops.operands import Cast


class Rows(NamedTuple):
    """The casts of each expert's rows; whole: the one cast that they are parts of, where they are."""

    parts: list[Cast]
    whole: Cast | None


def times_weights(
    gemm: Gemm,
    lefts: Rows,
    rights: Sequence[Cast],
    biases: Sequence[Tensor | None],
    backend: Backend,
    out_dtype: torch.dtype,
) -> Tensor:
    """OUTPUT or GRAD_INPUT of all experts: [T, features of the result], in the order of the experts.

    rights, biases: of the experts that have rows, as `lefts.parts` are; each [N, K], and [features of the result].
    """
    weights = [right.factor(backend) for right in rights]
    if lefts.whole is not None and backend.route is not None:
        machine, has_bias = backends.machine_of(weights[0].values.device), biases[0] is not None
        formats = (lefts.whole.spec.format, weights[0].spec.format)
        if why_not_grouped(backend.route, formats, machine, weights[0].values.shape, out_dtype, has_bias) is None:
            return _in_one_call(gemm, lefts, weights, backend)
    each = zip(lefts.parts, weights, biases, strict=True)
    return torch.cat([multiply(gemm, left.factor(backend), w, backend, out_dtype, bias) for left, w, bias in each])


def _in_one_call(gemm: Gemm, lefts: Rows, weights: list[Factor], backend: Backend) -> Tensor:
    assert lefts.whole is not None
    rows = lefts.whole.factor(backend)
    codes = torch.stack([weight.values if gemm.right_transposed else weight.values.t() for weight in weights])
    scales = torch.stack([_scales(weight, codes.shape[1]) for weight in weights])
    sizes = [left.factor(backend).values.shape[0] for left in lefts.parts]
    ends = torch.tensor(sizes).cumsum(0).to(rows.values.device, torch.int32)
    return grouped_product(rows.values, _scales(rows, rows.values.shape[0]), codes, scales, ends)


def _scales(factor: Factor, count: int) -> Tensor:
    """One float32 factor for each of `count` rows, or columns, of a cast with scales of them, or of the whole."""
    if factor.block_scale is None:
        assert factor.dequant_scale is not None
        return factor.dequant_scale.expand(count)
    scale = scaling.block_factors(factor.block_scale).view(-1)
    return scale if factor.dequant_scale is None else scale * factor.dequant_scale


def describe_products(casts: LinearCasts, device: torch.device, weight: Sequence[int], has_bias: bool) -> str:
    """In words: which products of a layer run as one call for all experts, and why the others do not.

    weight: [N, K] of one expert. Said of results in the compute dtype.
    """
    if device.type != "cuda":
        return "a product for each expert"
    found: dict[str, list[str]] = {}
    for gemm in GEMMS:
        why: str | None = "its rows are no multiples of 16"
        if gemm is not GRAD_WEIGHT:
            machine, adds_bias = backends.machine_of(device), has_bias and gemm.right_transposed
            formats = (casts.spec(gemm, gemm.left).format, casts.spec(gemm, gemm.right).format)
            route, dtype = casts.backend(gemm, device).route, casts.compute.dtype
            why = why_not_grouped(route, formats, machine, weight, dtype, adds_bias)
        how = "scaled_grouped_mm" if why is None else f"a product for each expert ({why})"
        found.setdefault(how, []).append(gemm.name)
    return "; ".join(f"{', '.join(names)}: {how}" for how, names in found.items())
