"""What tuning came to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from narrowgauge.recipes.serialize import to_dict
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tune.choices import Assignment
from narrowgauge.tune.estimate import Estimate, Estimates, whole
from narrowgauge.tune.measure import Costs, Measured
from narrowgauge.tune.program import Point
from narrowgauge.tune.verify import ShortRun

TUNED, HAND = "tuned", "hand rule"


@dataclass(frozen=True)
class Contender:
    """One choice for all layers. cost: in nats, the sum of what was chosen by. runs: one for each seed."""

    name: str
    assignment: Assignment
    cost: float
    bytes_per_token: float
    time_share: float
    runs: list[ShortRun] = field(default_factory=list)

    @property
    def held_out(self) -> float:
        """Mean over the seeds, nats a token; NaN where nothing ran."""
        return fmean(run.held_out for run in self.runs) if self.runs else math.nan

    def above(self, other: Contender) -> tuple[float, float]:
        """(mean, standard error) of the held-out loss above another contender's, seed by seed; NaN where unknown."""
        differences = [mine.held_out - its.held_out for mine, its in zip(self.runs, other.runs, strict=True)]
        if not differences:
            return math.nan, math.nan
        error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
        return fmean(differences), error

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name, "cost": self.cost, "bytes_per_token": self.bytes_per_token,
            "time_share": self.time_share, "held_out": [run.held_out for run in self.runs],
            "last_loss": [run.last_loss for run in self.runs], "assignment": dict(self.assignment),
        }  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """The recipe, and all that it rests on.

    layers: names, in the model's order. choices: names, the wide one first. slope: nats that e times as many steps
    gain; worth: what the short runs lose for all of their way, see `estimate`. tokens: of a micro-batch, for which
    bytes are counted. front: of least costs, by bytes a token. contenders: all wide, all in the narrowest choice, HAND
    and TUNED.
    """

    recipe: Recipe
    layers: Sequence[str]
    choices: Sequence[str]
    measured: Measured
    costs: Mapping[tuple[str, str], Costs]
    slope: float
    worth: float
    tokens: int
    front: Sequence[Point]
    contenders: Mapping[str, Contender]
    seconds: float

    @property
    def wide(self) -> str:
        """The name of the choice in which every layer is right."""
        return self.choices[0]

    @property
    def tuned(self) -> Contender:
        return self.contenders[TUNED]

    def assignment_of(self, point: Point) -> dict[str, str]:
        """{layer: choice} of a point of the front."""
        return {layer: self.choices[at] for layer, at in zip(self.layers, point.chosen, strict=True)}

    @cached_property
    def estimates(self) -> Estimates:
        return Estimates(self.measured)

    def cost(self, layer: str, choice: str) -> Estimate:
        """What a layer's choice is chosen by, in nats a token; 0 for the wide one."""
        return self.estimates.cost(layer, choice, self.slope)

    def expected(self, assignment: Assignment) -> Estimate:
        """What a short run is expected to lose, in nats a token above all wide, by the sum of the layers."""
        return self.estimates.expected(assignment, self.worth)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        effects = [
            {
                "layer": layer, "choice": choice, "loss_change": effect.loss_change, "grad_error": effect.grad_error,
                "own_grad_error": effect.own_grad_error, "cost": self.cost(layer, choice).value,
                "cost_error": self.cost(layer, choice).error, "bytes": self.costs[layer, choice].bytes,
                "loss_changes": effect.loss_changes, "errors": effect.errors,
            }
            for (layer, choice), effect in self.measured.effects.items()
        ]  # fmt: skip
        together = {
            name: {
                "expected": vars(self.expected(dict.fromkeys(self.layers, name))),
                "measured": vars(whole(effect, self.worth)),
            }
            for name, effect in self.measured.together.items()
        }
        return {
            "recipe": to_dict(self.recipe), "layers": list(self.layers), "choices": list(self.choices),
            "slope": self.slope, "worth": self.worth, "tokens": self.tokens, "sensitivity": effects,
            "together": together,
            "front": [
                {
                    "cost": p.loss, "bytes_per_token": p.bytes, "time_share": p.time,
                    "assignment": self.assignment_of(p),
                }
                for p in self.front
            ],
            "contenders": [
                {**each.to_dict(), "expected": vars(self.expected(each.assignment))}
                for each in self.contenders.values()
            ],
            "seconds": self.seconds,
        }  # fmt: skip
