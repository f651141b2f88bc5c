"""Muon with state in any format."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError, closest
from narrowgauge.optim import checks
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.formats import FLOAT32, StateFormats
from narrowgauge.optim.rules import Muon as MuonNumbers
from narrowgauge.optim.rules import Rule
from narrowgauge.recipes.fields import MIN_STATE_SIZE
from narrowgauge.recipes.spec import CastSpec
from narrowgauge.tensors.shares import parted

# of the quintic Newton-Schulz iteration, for the steepest slope at 0 (Jordan et al. 2024, "Muon")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# torch's bound on the steps of the iteration, which converges in about five
MAX_NS_STEPS = 99

# name of a rule -> the factor on lr for a matrix of [rows, columns]; "original": Jordan et al. 2024,
# "match_rms_adamw": Liu et al. 2025, arXiv:2502.16982
ADJUSTMENTS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(LowPrecisionOptimizer):
    """torch.optim.Muon with momentum, masters and parameters in any format; for matrices alone.

    The arguments up to adjust_lr_fn are torch's: adjust_lr_fn is "original" (also for None) or "match_rms_adamw".
    exp_avg: format of the momentum, which the state holds as momentum_buffer. The others: see `StateFormats` and
    `LowPrecisionOptimizer`. Raises NarrowgaugeError for values that torch refuses, and for a parameter that is not
    two-dimensional.
    """

    rule = Rule.MUON
    moments: ClassVar[Mapping[str, str]] = {"momentum_buffer": "exp_avg"}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        exp_avg: CastSpec = FLOAT32,
        master: CastSpec | None = None,
        stochastic_rounding: bool = False,
        min_state_size: int = MIN_STATE_SIZE,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        generator: torch.Generator | None = None,
        offload: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
        }  # fmt: skip
        formats = StateFormats(exp_avg, FLOAT32, master, stochastic_rounding, min_state_size)
        super().__init__(params, defaults, formats, overrides=overrides, generator=generator, offload=offload)

    def kind_of_step(self, p: Tensor, state: dict[str, Any]) -> Any:
        """What, besides the group, the numbers of the step depend on: the matrix's shape."""
        return tuple(p.shape)

    def hyper(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> MuonNumbers:
        """The numbers of the step, from the group as it is now."""
        lr, momentum = float(group["lr"]), group["momentum"]
        rows, columns = p.shape
        factor = ADJUSTMENTS[group["adjust_lr_fn"] or "original"](rows, columns) if p.numel() else 1.0
        return MuonNumbers(
            lr=lr * factor,
            momentum=momentum,
            one_minus_momentum=1 - momentum,
            nesterov=group["nesterov"],
            decay=1 - lr * float(group["weight_decay"]),
            coefficients=tuple(group["ns_coefficients"]),
            ns_steps=group["ns_steps"],
            eps=group["eps"],
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        checks.check_number("momentum", group["momentum"], lambda x: x >= 0, "at least 0")
        checks.check_number("eps", group["eps"], lambda x: x > 0, "more than 0")
        checks.check_number("ns_steps", group["ns_steps"], lambda x: 0 <= x <= MAX_NS_STEPS, f"0 to {MAX_NS_STEPS}")
        if len(group["ns_coefficients"]) != 3:
            raise NarrowgaugeError(f"expected three ns_coefficients, found {group['ns_coefficients']}")
        rule = group["adjust_lr_fn"]
        if rule is not None and rule not in ADJUSTMENTS:
            raise NarrowgaugeError(f"unknown adjust_lr_fn={rule!r}{closest(str(rule), ADJUSTMENTS)}")
        for p in group["params"]:
            if parted(p):
                raise NarrowgaugeError(
                    f"'{self.name_of(p)}': Muon is for whole matrices, found a part of one of shape {list(p.shape)} "
                    f"({p.placements}): part whole parameters over the processes, "  # type: ignore[attr-defined]
                    "narrowgauge.distributed.data_parallel(model, layout, partition=True), or give it to AdamW"
                )
            if p.ndim != 2:
                raise NarrowgaugeError(
                    f"'{self.name_of(p)}': Muon is for matrices, found shape {list(p.shape)}; give vectors, embeddings "
                    "and convolutions to AdamW"
                )
