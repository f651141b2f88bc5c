"""Which casts an operand needs where two products take it: one where they agree, and each role counted once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

import torch

from narrowgauge.ops.backends import Backend
from narrowgauge.ops.casts import LinearCasts, OperandCast
from narrowgauge.ops.matmul import OUTPUT, Gemm

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class MakeCast(Protocol[T_co]):
    """Casts one operand in the way asked for: a matrix, or the matrices of many experts."""

    def __call__(self, how: OperandCast, *, keep_codes: bool, carrier: torch.dtype | None, counted: bool) -> T_co: ...


def forward_casts(
    role: str, make: MakeCast[T], later: Gemm | None, casts: LinearCasts, device: torch.device
) -> tuple[T, T | None]:
    """What OUTPUT multiplies of `role`, and what a `later` product of backward will; None where there is none.

    One cast serves both where they agree; else the second keeps codes only.
    """
    how, carrier = casts.operand(OUTPUT, role), casts.backend(OUTPUT, device).carrier
    how_later = None if later is None else casts.operand(later, role)
    counted = not casts.runs_in_compute(OUTPUT)
    agree = how_later is not None and how.agrees_with(how_later)
    now = make(how, keep_codes=agree, carrier=carrier, counted=counted)
    if later is None or how_later is None or agree:
        return now, now if agree else None
    counted = not counted and not casts.runs_in_compute(later)
    return now, make(how_later, keep_codes=True, carrier=None, counted=counted)


def backward_casts(
    make: MakeCast[T], gemms: Iterable[Gemm], casts: LinearCasts, device: torch.device
) -> list[tuple[Gemm, Backend, T]]:
    """Each of `gemms`, its backend, and its cast of the grad_output: made once for all products that agree."""
    done: list[tuple[OperandCast, torch.dtype | None, T]] = []
    found: list[tuple[Gemm, Backend, T]] = []
    is_counted = False  # a role is counted once, by its first quantized use
    for gemm in gemms:
        backend = casts.backend(gemm, device)
        how = casts.operand(gemm, gemm.left)
        left = next((cast for seen, dtype, cast in done if seen.agrees_with(how) and dtype is backend.carrier), None)
        if left is None:
            counted = not is_counted and not casts.runs_in_compute(gemm)
            is_counted = is_counted or counted
            left = make(how, keep_codes=False, carrier=backend.carrier, counted=counted)
            done.append((how, backend.carrier, left))
        found.append((gemm, backend, left))
    return found
