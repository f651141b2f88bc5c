"""Precision schedules at work: a prepared model changes its recipe after so many optimizer steps."""

from __future__ import annotations

from torch import nn

from narrowgauge.layers.convert import take_up
from narrowgauge.layers.delayed import DelayedState
from narrowgauge.layers.wrapping import AutocastForward
from narrowgauge.recipes.spec import Recipe


class Schedule:
    """Keeps a converted model in the recipe that is in force.

    model: converted by the first recipe. recipe: resolved, with or without a schedule. forward: its forward with
    autocast, if it has one. Whatever `convert` leaves alone is left alone: parameters, hooks, ties; scaling histories
    go on where a layer's casts stay the same, and begin anew where they do not.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, forward: AutocastForward | None) -> None:
        self._model = model
        self._forward = forward
        self._phases = recipe.phases
        self._at = 0  # which of the phases
        self._adopt_layers()

    def go_to(self, steps: int) -> None:
        """Take up what is in force after `steps` optimizer steps, where that is another recipe than now."""
        at = sum(begin <= steps for begin, _ in self._phases) - 1
        if at == self._at:
            return
        self._at = at
        recipe = self._phases[at][1]
        take_up(self._model, recipe)
        if self._forward is not None:
            self._forward.recipe = recipe
        self._adopt_layers()

    @property
    def layers(self) -> list[DelayedState]:
        """The layers whose histories roll with the optimizer's steps; not those that were converted back since."""
        return [layer for layer in self._layers if isinstance(layer, DelayedState)]

    def _adopt_layers(self) -> None:
        self._layers = [module for module in self._model.modules() if isinstance(module, DelayedState)]
        for layer in self._layers:
            layer.rolls_at_step = True
