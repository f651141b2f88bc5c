"""What `prepare` puts on a model's root so that the training loop stays unchanged.

Both are callables in the place of a method of one object. The class, the state-dict keys, deepcopy and pickle stay what
they are.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.errors import ConversionError
from narrowgauge.layers import averaging, gradients
from narrowgauge.layers.autocast import EmulatedProducts, emulates_products, torch_region
from narrowgauge.layers.convert import device_of
from narrowgauge.recipes.spec import Recipe


class AutocastForward:
    """The forward of `module` inside the autocast region of `recipe` (resolved)."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self.module = module
        self.recipe = recipe
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")  # another library's replacement

    @property
    def __signature__(self) -> inspect.Signature:
        # trainers read the signature to learn which inputs a model takes
        return inspect.signature(type(self.module).forward.__get__(self.module) if self.inner is None else self.inner)

    @property
    def __code__(self) -> CodeType:
        # torch.export reads it for the name and place of what it traces
        return (type(self.module).forward if self.inner is None else inspect.unwrap(self.inner)).__code__

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward without autocast."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        # not as a bound method: where torch.compile breaks the graph it would fetch that anew, as module.forward
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _check_wrapper(self.module, self.recipe)
        device_type = device_of(self.module).type
        if device_type == "meta":  # which has no autocast, and no values
            check_all_meta(args, kwargs)
            return self.plain(*args, **kwargs)
        with torch_region(self.recipe, device_type):
            if emulates_products(self.recipe, device_type):
                with EmulatedProducts():
                    return self.plain(*args, **kwargs)
            return self.plain(*args, **kwargs)


def _check_wrapper(model: nn.Module, recipe: Recipe) -> None:
    """Raise ConversionError where torch's DDP is around a model that was prepared alone, and ranks would part.

    It would average gradients that were cast before, or let each rank round its own updates stochastically.
    """
    around = DistributedDataParallel._get_active_ddp_module()
    if around is None or around.module is not model:
        return
    if gradients.casts_alone(model):
        what = "whose gradients are cast to 8 bits before it averages them"
    elif recipe.param.is_stochastic:
        what = "whose updates each rank would round by random bits of its own"
    else:
        return
    raise ConversionError(
        f"DistributedDataParallel is around a model that was prepared alone, {what}: wrap the model first, then call "
        "narrowgauge.prepare with the wrapper"
    )


def check_all_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConversionError for an input with values to a model without."""
    if any(isinstance(x, Tensor) and not x.is_meta for x in (*args, *kwargs.values())):
        raise ConversionError(
            "the model is on the meta device and has no values: call model.to_empty(device=...) and initialise or load "
            "it before the forward pass"
        )


class PreciseApply:
    """`_apply` of a root module that leaves float32 buffers in float32 when the model changes its dtype.

    Rotary frequencies, running statistics and the like lose in 16 bits what no later cast gives back. Parameters that
    take the place of others get their hooks.
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
        gradients.renew(self.module)
        return self.module

    def __deepcopy__(self, memo: dict[int, Any]) -> PreciseApply:
        averaging.warn_of_rounding(self.module)
        return PreciseApply(copy.deepcopy(self.module, memo))


def install(model: nn.Module, recipe: Recipe, autocast: bool) -> AutocastForward | None:
    """Put both on `model`; autocast False: the forward is, or becomes again, the model's own.

    Parts of the model that were prepared before lose their own autocast: their layers have taken up this recipe.
    Returns the forward with autocast, or None.
    """
    for module in model.modules():
        earlier = module.__dict__.get("forward")
        if isinstance(earlier, AutocastForward):
            del module.forward
            if earlier.inner is not None:
                module.forward = earlier.inner
    model._apply = PreciseApply(model)  # type: ignore[method-assign]
    if not autocast:
        return None
    model.forward = AutocastForward(model, recipe)
    return model.forward
