"""What the guard decides, carried out: casts of layers and formats of moments, changed while a model trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import ConfigError
from narrowgauge.layers import delayed
from narrowgauge.layers.convert import take_up
from narrowgauge.layers.recipe_layer import RecipeLayer
from narrowgauge.numerics import scaling
from narrowgauge.observe.run_header import layer_of
from narrowgauge.optim import storage
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.recipes.layers import products_of
from narrowgauge.recipes.serialize import spec_from_dict
from narrowgauge.recipes.spec import MOMENT_ROLES, CastSpec, Recipe
from narrowgauge.train.guard_ladder import Rung

# second uses of an operand, which follow it: a cast of their own would keep what the operand has left
_SECOND_USE = {"input": "activation", "weight": "weight_for_grad_input", "grad_output": "grad_output_for_grad_weight"}
_WIDE: dict[str, Any] = {
    **dict.fromkeys(("input", "weight", "grad_output", *_SECOND_USE.values())),
    "hadamard": None,
}
Operands = Mapping[tuple[str, str], Rung]


def widened(recipe: Recipe, operands: Operands, everything: bool) -> Recipe:
    """`recipe`, which is plain, with the casts of single roles of layers; everything: all in the compute dtype."""
    of_layer: dict[str, dict[str, Any]] = {}
    for (layer, role), spec in operands.items():
        of_layer.setdefault(layer, {}).update({role: spec, _SECOND_USE[role]: None})
    entries = []
    for layer, fields in of_layer.items():
        own = recipe.for_layer(layer)
        specs = {role: fields.get(role, getattr(own, role)) for role in ("input", "grad_output")}
        if own.hadamard is not None and not any(specs.values()):
            fields["hadamard"] = None  # it prepares for casts, and there are none
        entries.append((_literal(layer), fields))
    entries += [("*", _WIDE)] if everything else []
    return recipe.replace(layers=(*recipe.layers, *entries)) if entries else recipe


def recipe_of(state: Mapping[str, Any], recipe: Recipe) -> Recipe:
    """The plain `recipe` with what the guard whose `state_dict` this is has widened in it."""
    operands = {
        (layer, role): spec and spec_from_dict(spec) for layer, role, spec in state["casts"] if role not in MOMENT_ROLES
    }
    return widened(recipe, operands, bool(state["everything"]["climbed"]))


def _literal(name: str) -> str:
    """A glob that matches this name only."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name) or "*"


def check_prepared(model: nn.Module, recipe: Recipe) -> None:
    """Raise ConfigError where layers multiply otherwise than `recipe` says in any of its phases.

    The guard takes up the recipe, widened, in all layers: such ones would change unasked.
    """
    for name, layer in layers_of(model).items():
        assert layer.recipe is not None
        expected = [phase.for_layer(name) for _, phase in recipe.phases]
        if not any(products_of(layer.recipe) == products_of(each) for each in expected):
            raise ConfigError(
                f"the guard: expected a model prepared by recipe '{recipe.name}', found '{name or 'the model'}' by "
                f"'{layer.recipe.name}', with other casts: give the guard the recipe that `prepare` was given"
            )


@torch.no_grad()
def take_up_casts(model: nn.Module, recipe: Recipe, seeds: Mapping[tuple[str, str], float], at_step: bool) -> None:
    """Let the layers multiply by `recipe`.

    Histories of roles whose cast stays go on, also where another role of the layer changes. A role that comes to have a
    history begins with `seeds[layer, role]`, the amax that was last seen. at_step: optimizer steps roll histories.
    """
    before = {
        name: (layer.training_casts, dict(layer.delayed_rules), _state_of(layer))
        for name, layer in layers_of(model).items()
    }
    take_up(model, recipe)
    for name, layer in layers_of(model).items():
        layer.rolls_at_step = at_step
        known = before.get(name)
        if known is not None and known[0] == layer.training_casts:
            continue
        _, rules, state = known or (None, {}, {})
        for role, rule in layer.delayed_rules.items():
            if rules.get(role) == rule:
                for suffix in (delayed.HISTORY, delayed.SCALE):
                    layer.get_buffer(role + suffix).copy_(state[role + suffix])
                for common in (delayed.ROLLS, delayed.PENDING):
                    layer.get_buffer(common).copy_(state[common])
            elif (name, role) in seeds:
                _seed(layer, role, seeds[name, role])


def layers_of(model: nn.Module) -> dict[str, RecipeLayer]:
    """The converted layers, by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, RecipeLayer) and m.recipe is not None}


def _state_of(layer: RecipeLayer) -> dict[str, Tensor]:
    return {name: layer.get_buffer(name) for name in delayed.state_names(layer)}


def _seed(layer: RecipeLayer, role: str, amax: float) -> None:
    """Let a history hold one finished step of that amax, and the scale follow from it."""
    rule = layer.delayed_rules[role]
    history, scale = layer.get_buffer(role + delayed.HISTORY), layer.get_buffer(role + delayed.SCALE)
    if rule.scale.history_length > 1:
        history[..., -1] = amax
    seen = torch.full_like(scale, amax)
    scale.copy_(scaling.delayed_scale_of(seen, scale, rule.format, rule.scale))


class Moments:
    """The moments of an optimizer that the guard may keep in other formats, by label and role.

    A parameter's label is `layer_of` its name in the model, as in the journal; of one that the model has not, in the
    optimizer. Of torch's own optimizers there are none: they keep float32.
    """

    def __init__(self, optimizer: Optimizer | None, model: nn.Module) -> None:
        self.optimizer = optimizer if isinstance(optimizer, LowPrecisionOptimizer) else None
        self._labels: dict[Tensor, str] = {p: layer_of(name) for name, p in model.named_parameters()}

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        """(label, parameter) of all parameters."""
        if self.optimizer is not None:
            for p in self.optimizer.parameters():
                yield self._labels.get(p) or layer_of(self.optimizer.name_of(p)), p

    def spec(self, p: Tensor, role: str) -> CastSpec | None:
        """The format of the moment with that role; None where the optimizer keeps none."""
        assert self.optimizer is not None
        if role not in self._names:
            return None
        return self.optimizer.formats_of(p).of_moment(role, p.numel())

    @property
    def _names(self) -> dict[str, str]:
        """Role -> name in the state."""
        assert self.optimizer is not None
        return {role: name for name, role in self.optimizer.moments.items()}

    def keep(self, p: Tensor, role: str, spec: CastSpec) -> None:
        """Keep the moment in another format: the values that there are, are cast once."""
        assert self.optimizer is not None
        fields: dict[str, Any] = {role: spec}
        if role == "exp_avg_sq":
            fields["keep_nonzero"] = True
        self.optimizer.override(p, **fields)

    @torch.no_grad()
    def refill(self, p: Tensor) -> None:
        """Give zeros of the second moment, where the first is none, the least that they can have been.

        By Cauchy and Schwarz m^2 <= v (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2)) for moments of the same gradients, if
        b1^2 < b2. Without it the next steps would divide by what is left of v after one gradient.
        """
        assert self.optimizer is not None
        group, state = self.optimizer.place_of(p).group, self.optimizer.state.get(p, {})
        m, v = state.get("exp_avg"), state.get("exp_avg_sq")
        if m is None or v is None or "betas" not in group:
            return
        beta1, beta2 = (float(beta) for beta in group["betas"])
        if beta1**2 >= beta2:
            return
        share = (1 - beta2) * (1 - beta1**2 / beta2) / (1 - beta1) ** 2
        shape = p.shape if m.shape == p.shape else v.shape
        first, second = storage.decode(m, shape), storage.decode(v, shape)
        storage.overwrite(v, torch.where(second == 0, first.square() * share, second))

    @torch.no_grad()
    def lost(self, p: Tensor, spec: CastSpec | None = None) -> float | None:
        """The share of second moments that are zero although the first is not; spec: as they would be, so cast."""
        assert self.optimizer is not None
        state = self.optimizer.state.get(p, {})
        m, v = state.get("exp_avg"), state.get("exp_avg_sq")
        if m is None or v is None:
            return None
        first, second = storage.decode(m, v.shape), storage.decode(v, v.shape)
        if spec is not None:
            second = storage.decode(storage.encode(second, spec), second.shape)
        moved = first != 0
        count = int(moved.sum())
        return int((moved & (second == 0)).sum()) / count if count else 0.0
