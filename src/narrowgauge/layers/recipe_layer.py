"""What every converted layer has: its recipe, the casts that follow from it, and delayed scaling's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConversionError
from narrowgauge.layers import delayed
from narrowgauge.layers.delayed import DelayedState
from narrowgauge.numerics.formats import Format
from narrowgauge.ops.casts import LinearCasts
from narrowgauge.ops.operands import Counter
from narrowgauge.recipes.spec import CastSpec, Evaluation, Recipe

# what `configure` adds to a plain layer
OWN_ATTRIBUTES = (
    "recipe", "quantized", "reason", "training_casts", "evaluation_casts", "counter", "delayed_rules", "rolls_at_step",
    "warming", "rolls_to_look",
)  # fmt: skip


class RecipeLayer(DelayedState):
    """A layer of linear products that run by a recipe; mixed in before the plain layer's class.

    recipe: the recipe, resolved; None: the layer is as plain as before. quantized: False where the layer is kept in the
    recipe's compute dtype. reason: why. training_casts, evaluation_casts: what it runs in under train() and eval().
    """

    recipe: Recipe | None = None
    quantized: bool = False
    reason: str = ""
    training_casts: LinearCasts
    evaluation_casts: LinearCasts
    counter: Counter | None = None

    def configure(self, recipe: Recipe, quantized: bool, reason: str, smooth: bool = False) -> bool:
        """Take up a resolved recipe; smooth: whether the input's channels are smoothed.

        Returns False where the layer already runs so, and then changes nothing.
        """
        casts = LinearCasts.of(recipe, quantized, smooth)
        evaluation = evaluation_casts(recipe, quantized, smooth)
        unchanged = self.recipe is not None and (self.training_casts, self.evaluation_casts) == (casts, evaluation)
        self.recipe, self.quantized, self.reason = recipe, quantized, reason
        if unchanged:
            return False
        self.training_casts, self.evaluation_casts = casts, evaluation
        self.attach_delayed(delayed.rules_of(casts))
        return True

    def forget_recipe(self) -> None:
        """Be as plain as before `configure`."""
        self.attach_delayed({})
        for name in OWN_ATTRIBUTES:
            self.__dict__.pop(name, None)

    @property
    def casts(self) -> LinearCasts:
        """What the layer runs in now."""
        return self.training_casts if self.training else self.evaluation_casts

    def keep_state(self, ran: Tensor | bool) -> None:
        """Before a forward: roll the delayed scales where no optimizer step does, and note what runs.

        ran: whether there are rows to record, for the layer or for each expert.
        """
        if not self.delayed_rules or not self.training:
            return
        if not self.rolls_at_step and _may_roll():
            delayed.roll_before_forward(self)
        if isinstance(ran, Tensor):
            self.get_buffer(delayed.PENDING).logical_or_(ran)
        elif ran:
            self.get_buffer(delayed.PENDING).fill_(True)

    def reset_parameters(self) -> None:
        """Initialise weight and bias anew, and forget the scaling history of the old ones."""
        super().reset_parameters()  # type: ignore[misc]
        self.reset_delayed()

    def extra_repr(self) -> str:
        if self.recipe is None:
            return super().extra_repr()
        runs = f"{self.training_casts.input} x {self.training_casts.weight}" if self.quantized else "kept"
        return f"{super().extra_repr()}, {self.recipe.name}: {runs}"

    def __getstate__(self) -> dict[str, Any]:
        # a copy belongs to no optimizer until it is prepared with one, and to no measurement
        return {**self.__dict__, "rolls_at_step": False, "counter": None}


def evaluation_casts(recipe: Recipe, quantized: bool, smooth: bool = False) -> LinearCasts:
    """What a layer runs in under `model.eval()`."""
    if not quantized or recipe.evaluation is Evaluation.SAME:
        return LinearCasts.of(recipe, quantized, smooth)
    if isinstance(recipe.evaluation, Format):
        spec = CastSpec(recipe.evaluation)  # scaled by the tensor at hand: there is no history of evaluation data
        recipe = recipe.replace(
            input=spec, weight=spec, weight_for_grad_input=None, override_linear_precision=(False, False, False)
        )
        return LinearCasts.of(recipe, True, smooth)
    return LinearCasts.of(recipe, quantized=False)


def _may_roll() -> bool:
    """False inside a backward, where a forward is a recomputation, and in inference mode."""
    if torch.compiler.is_compiling():
        return True  # compiled code recomputes as a part of its backward graph
    return torch._C._current_graph_task_id() == -1 and not torch.is_inference_mode_enabled()


def output_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype inside an autocast region of the tensor's device, else the tensor's own."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):  # the meta device has no autocast
        return x.dtype
    return torch.get_autocast_dtype(kind)


def check_operands(weight: Tensor, x: Tensor, where: str, in_features: int, fits: bool) -> None:
    """Raise ConversionError where the input is no floating tensor, or the weight is not there or does not fit it.

    where: the layer, in words. fits: whether the shapes of weight and input do.
    """
    if not x.is_floating_point() or x.ndim == 0:
        raise ConversionError(
            f"{where}: expected floating values [..., {in_features}], found {x.dtype} {list(x.shape)}: convert "
            "them first, e.g. with x.float()"
        )
    if weight.is_meta and not x.is_meta:
        raise ConversionError(
            f"{where}: its weight is on the meta device and has no values: call model.to_empty(device=...) and "
            "initialise or load it before the forward pass"
        )
    if weight.device != x.device:
        raise ConversionError(
            f"{where}: its weight is on {weight.device}, and the input on {x.device}: move one to the other's device"
        )
    if not fits:
        raise ConversionError(
            f"{where}: input [..., {x.shape[-1]}] does not fit the weight {list(weight.shape)}: if its storage was "
            "replaced, restore it before the forward pass"
        )
    if torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active():  # type: ignore[attr-defined]
        raise ConversionError(
            f"{where}: torch.func transforms (vmap, grad, jvp) do not reach through a layer that casts its operands: "
            "transform a model that is not prepared, or prepare it with recipe 'fp32'"
        )
    if weight.is_meta or type(weight) is not nn.Parameter:
        return
    if weight.numel() and weight.untyped_storage().nbytes() == 0:
        raise ConversionError(f"{where}: the storage of its weight was freed: restore it before the forward pass")
