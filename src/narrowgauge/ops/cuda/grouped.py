"""The products of many experts' rows with their weights in one call of CUDA hardware."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.numerics.formats import E4M3FN, Format
from narrowgauge.ops.cuda.routes import HOPPER, Machine, Route, Scaling

MULTIPLE = 16  # of both features: rows of codes and of bf16 results start at multiples of 16 bytes


def why_not_grouped(
    route: Route | None,
    formats: tuple[Format, Format],
    machine: Machine,
    weight: Sequence[int],
    out_dtype: torch.dtype,
    has_bias: bool,
) -> str | None:
    """Why one call cannot multiply all experts' rows, or None where it can.

    route: how scaled_mm would multiply one expert's; None: not at all. formats: of the codes. weight: [N, K] of one
    expert. The demands are those of torch's _scaled_grouped_mm (2.11 to 2.14), whose kernel for scales of rows is
    Hopper's.
    """
    if route is None or (route.left, route.right) != (Scaling.ROW, Scaling.ROW):
        return "scaled_grouped_mm is used with scales of rows"
    if formats != (E4M3FN, E4M3FN):
        return "scaled_grouped_mm multiplies E4M3FN by E4M3FN"
    if machine.capability[0] != HOPPER:
        return f"scaled_grouped_mm with scales of rows runs on 9.0, not on {machine}"
    if out_dtype is not torch.bfloat16:
        return f"scaled_grouped_mm gives bf16, not {str(out_dtype).removeprefix('torch.')}"
    if has_bias:
        return "scaled_grouped_mm adds no bias"
    if any(size % MULTIPLE for size in weight):
        return f"scaled_grouped_mm takes multiples of {MULTIPLE}, not a weight of {weight[0]} by {weight[1]}"
    return None


def grouped_product(rows: Tensor, row_scale: Tensor, weights: Tensor, weight_scale: Tensor, ends: Tensor) -> Tensor:
    """For each expert g: its rows @ weights[g].T, summed in float32 and rounded to bf16: [T, N].

    rows: E4M3FN codes [T, K] in the order of the experts, the last row of g before ends[g] (int32). weights: codes
    [G, N, K]. row_scale [T], weight_scale [G, N]: float32 factors of the rows.
    """
    # not torch.nn.functional.scaled_grouped_mm: it calls the same kernel, and has no shape function for torch.compile
    return torch._scaled_grouped_mm(
        _contiguous(rows),
        _contiguous(weights).transpose(1, 2),
        _contiguous(row_scale),
        _contiguous(weight_scale),
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def _contiguous(x: Tensor) -> Tensor:
    # unlike Tensor.contiguous, clone works on fake CUDA tensors where torch is built without CUDA
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
