"""Lion with state in any format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.optim import checks
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.formats import FLOAT32, StateFormats
from narrowgauge.optim.rules import Lion as LionNumbers
from narrowgauge.optim.rules import Rule
from narrowgauge.recipes.fields import MIN_STATE_SIZE
from narrowgauge.recipes.spec import CastSpec


class Lion(LowPrecisionOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675) with its moment, masters and parameters in any format.

    lr: a number or a tensor; about a tenth of AdamW's. betas: of the update, and of the moment that is kept.
    weight_decay: decoupled, about ten times AdamW's. exp_avg: format of the moment. The others: see `StateFormats` and
    `LowPrecisionOptimizer`. Raises NarrowgaugeError for values out of range.
    """

    rule = Rule.LION
    moments: ClassVar[Mapping[str, str]] = {"exp_avg": "exp_avg"}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        exp_avg: CastSpec = FLOAT32,
        master: CastSpec | None = None,
        stochastic_rounding: bool = False,
        min_state_size: int = MIN_STATE_SIZE,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        generator: torch.Generator | None = None,
        offload: str | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        formats = StateFormats(exp_avg, FLOAT32, master, stochastic_rounding, min_state_size)
        super().__init__(params, defaults, formats, overrides=overrides, generator=generator, offload=offload)

    def kind_of_step(self, p: Tensor, state: dict[str, Any]) -> Any:
        """What, besides the group, the numbers of the step depend on: nothing."""
        return None

    def hyper(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> LionNumbers:
        """The numbers of the step, from the group as it is now."""
        beta1, beta2 = group["betas"]
        return LionNumbers.at(float(group["lr"]), (float(beta1), float(beta2)), float(group["weight_decay"]))

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        checks.check_betas(group["betas"])
