"""Lightning's `Precision` plugin with a recipe. Needs `pip install 'lightning>=2.5'`.

    from narrowgauge.integrations.lightning import Precision

    trainer = lightning.Trainer(plugins=[Precision("narrow8")])

The plugin prepares the module and the optimizer that `configure_optimizers` returns, after Lightning has wrapped the
module for several processes; schedulers go on working. It sums the micro-batches of `accumulate_grad_batches` exactly,
clips by `narrowgauge.clip_grad_norm_`, and its checkpoints resume bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.integrations.huggingface import full_values
from narrowgauge.integrations.requirements import require
from narrowgauge.layers.autocast import autocast
from narrowgauge.layers.convert import convert, device_of
from narrowgauge.layers.delayed import is_state_name
from narrowgauge.layers.gradients import accumulate
from narrowgauge.optim.clip import clip_grad_norm_
from narrowgauge.optim.guard import StepGuard
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.preparation import prepare
from narrowgauge.recipes.library import recipe as recipe_named
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.quantized import QuantizedTensor

require("lightning", "2.5", "lightning>=2.5")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.plugins.precision import Precision as LightningPrecision  # noqa: E402

_SCALER, _MODEL, _RECIPE = "scaler", "model", "recipe"  # the parts of a checkpoint's entry for this plugin


class Precision(LightningPrecision):
    """Train by a recipe, or its name.

    Steps, including the loss, run inside `narrowgauge.autocast(recipe)`. With manual optimization place
    `narrowgauge.accumulate` yourself. Raises RecipeError for an unknown recipe; when training begins ConfigError for
    more than one optimizer, and ConversionError for a module or an optimizer that cannot be prepared.
    """

    def __init__(self, recipe: Recipe | str) -> None:
        self.recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
        self.scaler: LossScaler | None = None
        self._module: pl.LightningModule | None = None
        self._wrapped: nn.Module | None = None  # the module, or DistributedDataParallel around it
        self._optimizer: Optimizer | None = None
        self._dtypes: dict[str, torch.dtype] = {}  # of the module's own state, before it was prepared
        self._sums: ExitStack | None = None

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Prepare what Lightning has set up; without optimizers, convert the module for evaluation."""
        module: Any = model.module if isinstance(model, DistributedDataParallel) else model
        if module is not self._module:
            self._dtypes = {name: value.dtype for name, value in module.state_dict().items()}
            module.register_load_state_dict_pre_hook(_complete)
        self._module, self._wrapped = module, model
        if optimizers and optimizers[0] is self._optimizer:  # of an evaluation after training
            return model, optimizers, lr_schedulers
        if not optimizers:
            if self._optimizer is None:
                convert(module, self.recipe.at(0))
            return model, optimizers, lr_schedulers
        if len(optimizers) > 1:
            raise ConfigError(
                f"expected one optimizer from configure_optimizers, found {len(optimizers)}: put their parameters into "
                "groups of one, or prepare models and optimizers yourself, without this plugin"
            )
        _, self._optimizer = prepare(model, optimizers[0], self.recipe, autocast=False)
        device = device_of(module)
        if self.recipe.resolve(device).needs_loss_scaling:
            self.scaler = LossScaler(self.recipe, device)
        if isinstance(model, DistributedDataParallel) and module.automatic_optimization:
            model.no_sync = nullcontext  # type: ignore[method-assign]  # `accumulate` keeps gradients here until the step
        return model, [self._optimizer], lr_schedulers

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """The recipe's autocast, of the phase that a schedule is in."""
        guard = None if self._optimizer is None else StepGuard.on(self._optimizer)
        assert self._module is not None
        with autocast(self.recipe.at(0 if guard is None else guard.steps), device_of(self._module)):
            yield

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Begin the sum of a step's micro-batches with the first of several."""
        if self._sums is None and self._accumulates():
            assert self._wrapped is not None
            self._sums = ExitStack()
            self._sums.enter_context(accumulate(self._wrapped))
        with self.forward_context():
            yield

    def _accumulates(self) -> bool:
        """True in all micro-batches of a step but the last."""
        assert self._module is not None
        return self._module.automatic_optimization and self._module.trainer.fit_loop._should_accumulate()

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Backward; with the last micro-batch the gradients are averaged and cast."""
        super().backward(tensor, model, optimizer, *args, **kwargs)
        if self._sums is not None and not self._accumulates():
            self._sums.close()
            self._sums = None

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """The step, scaled where the recipe computes in float16."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None and model.automatic_optimization:  # training_step has left this batch out
            return None
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        step = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return step

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm of the whole model."""
        clip_grad_norm_(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """As Lightning does. Raises ConfigError where the recipe keeps gradients in 8 bits."""
        if any(isinstance(p.grad, QuantizedTensor) for p in self.main_params(optimizer)):
            raise ConfigError(
                f"gradient_clip_algorithm='value' with recipe {self.recipe.name!r}, which keeps gradients in 8 bits: "
                "clip by norm, or take a recipe with wider gradients"
            )
        super().clip_grad_by_value(optimizer, clip_val)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the optimizer's state: parameters as they are stored, scaling histories."""
        if self._module is None or self._optimizer is None:
            return {}
        exact = {name: value.detach() for name, value in self._module.state_dict().items()}
        return {
            _RECIPE: self.recipe.name,
            _MODEL: exact,
            _SCALER: {} if self.scaler is None else self.scaler.state_dict(),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Make the checkpoint's weights plain: in the dtypes from before training, with all digits that fit."""
        if self._module is None or self._optimizer is None:
            return
        values = full_values(self._module, self._optimizer)
        checkpoint["state_dict"] = {name: values[name].to(dtype) for name, dtype in self._dtypes.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`; the optimizer's state follows. Raises CheckpointError for another recipe's."""
        if self._module is None or self._optimizer is None or _MODEL not in state_dict:
            return
        saved, own = state_dict[_MODEL], self._module.state_dict()
        fits = all(name in saved and saved[name].dtype is value.dtype for name, value in own.items())
        if not fits or state_dict[_RECIPE] != self.recipe.name:
            raise CheckpointError(
                f"the checkpoint was written by another recipe than {self.recipe.name!r}: expected that, found "
                f"{state_dict[_RECIPE]!r}; train on by it, or load the weights alone with load_from_checkpoint"
            )
        self._module.load_state_dict(saved)
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict[_SCALER])

    def teardown(self) -> None:
        """After training, also where it was broken off within a step."""
        if self._sums is not None:
            sums, self._sums = self._sums, None
            error = KeyboardInterrupt()
            sums.__exit__(KeyboardInterrupt, error, None)  # what was summed belongs to no step
        super().teardown()


def _complete(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Let plain weights be loaded into a module with scaling histories, which stay as they are."""
    for name, value in module.state_dict().items():
        if is_state_name(name.rpartition(".")[2]):
            state.setdefault(prefix + name, value)
