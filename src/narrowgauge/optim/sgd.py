"""SGD with state in any format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.optim import checks
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.formats import FLOAT32, StateFormats
from narrowgauge.optim.rules import Rule
from narrowgauge.optim.rules import Sgd as SgdNumbers
from narrowgauge.recipes.fields import MIN_STATE_SIZE
from narrowgauge.recipes.spec import CastSpec


class SGD(LowPrecisionOptimizer):
    """torch.optim.SGD with momentum, masters and parameters in any format.

    The arguments up to nesterov are torch's; lr may be a tensor. exp_avg: format of the momentum, which the state holds
    as momentum_buffer. The others: see `StateFormats` and `LowPrecisionOptimizer`. Raises NarrowgaugeError for values
    that torch refuses, and for a format of the momentum where there is none.
    """

    rule = Rule.SGD
    moments: ClassVar[Mapping[str, str]] = {"momentum_buffer": "exp_avg"}

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
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
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        formats = StateFormats(exp_avg, FLOAT32, master, stochastic_rounding, min_state_size)
        super().__init__(params, defaults, formats, overrides=overrides, generator=generator, offload=offload)
        if exp_avg != FLOAT32 and not any(group["momentum"] for group in self.param_groups):
            raise NarrowgaugeError(
                f"exp_avg={exp_avg!r}: SGD with momentum=0 has no state to keep so; pass momentum, or leave exp_avg out"
            )

    def kind_of_step(self, p: Tensor, state: dict[str, Any]) -> Any:
        """What, besides the group, the numbers of the step depend on: whether there is a momentum yet."""
        return "momentum_buffer" in state

    def hyper(self, group: dict[str, Any], p: Tensor, state: dict[str, Any]) -> SgdNumbers:
        """The numbers of the step, from the group as it is now."""
        return SgdNumbers(
            lr=float(group["lr"]),
            momentum=group["momentum"],
            one_minus_dampening=1 - group["dampening"],
            nesterov=group["nesterov"],
            l2=float(group["weight_decay"]),
            first="momentum_buffer" not in state,
        )

    def moment_names(self, group: Mapping[str, Any]) -> Iterable[str]:
        """Names of the moments of the group's parameters: none without momentum."""
        return self.moments if group["momentum"] else ()

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        checks.check_number("momentum", group["momentum"], lambda x: x >= 0, "at least 0")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise NarrowgaugeError(
                "nesterov=True: expected a momentum above 0 and dampening 0, found "
                f"momentum={group['momentum']}, dampening={group['dampening']}"
            )
