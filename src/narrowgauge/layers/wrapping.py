"""What `prepare` puts on a model's root so that the training loop stays unchanged.

Both are callables in the place of a method of one object. The class, the state-dict keys, deepcopy and pickle stay what
they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from narrowgauge.layers.autocast import EmulatedProducts, emulates_products, torch_region
from narrowgauge.layers.convert import device_of
from narrowgauge.recipes.spec import Recipe


class AutocastForward:
    """The forward of `module` inside the autocast region of `recipe` (resolved)."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self.module = module
        self.recipe = recipe
        # another library's replacement of forward stays in force; ours is replaced
        earlier = module.__dict__.get("forward")
        self.inner = earlier.inner if isinstance(earlier, AutocastForward) else earlier

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward without autocast."""
        return self.inner if self.inner is not None else type(self.module).forward.__get__(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        # trainers read the signature to learn which inputs a model takes
        return inspect.signature(self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device_type = device_of(self.module).type
        with torch_region(self.recipe, device_type):
            if emulates_products(self.recipe, device_type):
                with EmulatedProducts():
                    return self.plain(*args, **kwargs)
            return self.plain(*args, **kwargs)


class PreciseApply:
    """`_apply` of a root module that leaves float32 buffers in float32 when the model changes its dtype.

    Rotary frequencies, running statistics and the like lose in 16 bits what no later cast gives back.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        owners = list(self.module.modules()) if recurse else [self.module]
        before = [
            (owner, name, buffer)
            for owner in owners
            for name, buffer in owner._buffers.items()
            if buffer is not None and buffer.is_floating_point()
        ]
        type(self.module)._apply(self.module, fn, recurse)
        for owner, name, old in before:
            new = owner._buffers[name]
            if new is not None and new.dtype is not old.dtype:
                owner._buffers[name] = old.to(new.device)
        return self.module


def install(model: nn.Module, recipe: Recipe, autocast: bool) -> None:
    """Put both on `model`; autocast False: the forward is, or becomes again, the model's own."""
    if autocast:
        model.forward = AutocastForward(model, recipe)
    elif isinstance(earlier := model.__dict__.get("forward"), AutocastForward):
        del model.forward
        if earlier.inner is not None:
            model.forward = earlier.inner
    model._apply = PreciseApply(model)  # type: ignore[method-assign]
