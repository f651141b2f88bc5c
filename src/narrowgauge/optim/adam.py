"""AdamW and Adam with state in any format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.optim import checks
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.formats import FLOAT32, StateFormats
from narrowgauge.optim.rules import Adam as AdamNumbers
from narrowgauge.optim.rules import Rule
from narrowgauge.recipes.fields import MIN_STATE_SIZE
from narrowgauge.recipes.spec import CastSpec


class AdamW(LowPrecisionOptimizer):
    """torch.optim.AdamW with moments, masters and parameters in any format.

    The arguments up to weight_decay are torch's; lr may be a tensor. The others: see `StateFormats` and
    `LowPrecisionOptimizer`. Raises NarrowgaugeError for values that torch refuses.
    """

    rule = Rule.ADAM
    moments: ClassVar[Mapping[str, str]] = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    decoupled: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        exp_avg: CastSpec = FLOAT32,
        exp_avg_sq: CastSpec = FLOAT32,
        master: CastSpec | None = None,
        stochastic_rounding: bool = False,
        min_state_size: int = MIN_STATE_SIZE,
        keep_nonzero: bool = True,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        generator: torch.Generator | None = None,
        offload: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
            "decoupled_weight_decay": self.decoupled,
        }  # fmt: skip
        formats = StateFormats(exp_avg, exp_avg_sq, master, stochastic_rounding, min_state_size, keep_nonzero)
        super().__init__(params, defaults, formats, overrides=overrides, generator=generator, offload=offload)

    def hyper(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> AdamNumbers:
        """The numbers of the step, from the group as it is now."""
        beta1, beta2 = group["betas"]
        decoupled = group.get("decoupled_weight_decay", self.decoupled)
        return AdamNumbers.at(
            state["step"],
            float(group["lr"]),
            (float(beta1), float(beta2)),
            float(group["eps"]),
            float(group["weight_decay"]),
            decoupled,
        )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        checks.check_betas(group["betas"])
        checks.check_eps(float(group["eps"]))


class Adam(AdamW):
    """torch.optim.Adam with moments, masters and parameters in any format: weight decay joins the gradient (L2)."""

    decoupled = False

    def __init__(self, params: Any, lr: float | Tensor = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, **formats: Any) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, **formats)
