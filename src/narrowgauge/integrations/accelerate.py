"""accelerate's `Accelerator` with a recipe. Needs `pip install narrowgauge[hf]`.

    from narrowgauge.integrations.accelerate import Accelerator

    accelerator = Accelerator(recipe="narrow8")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The loop stays what it is. `prepare` first lets accelerate place and wrap the model, then `narrowgauge.prepare` makes it
and its optimizer run by the recipe: on several processes gradients are then averaged as the recipe says. Micro-batches
inside `accumulate` are summed exactly, and `save_state` writes the folder `narrowgauge/`, from which `load_state` goes
on bit for bit, beside the weights that other tools read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.distributed.sharding import is_sharded
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.integrations.huggingface import full_values
from narrowgauge.integrations.requirements import require
from narrowgauge.layers.gradients import accumulate
from narrowgauge.observe.ledger import Ledger, ledger
from narrowgauge.optim.clip import clip_grad_norm_
from narrowgauge.optim.replace import inmost
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.preparation import prepare
from narrowgauge.recipes.library import recipe as recipe_named
from narrowgauge.recipes.spec import Recipe
from narrowgauge.tensors.quantized import QuantizedTensor
from narrowgauge.train.checkpoint import load, save

require("accelerate", "1.6", "narrowgauge[hf]")

import accelerate  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step  # noqa: E402
from accelerate.utils import DistributedType, DynamoBackend  # noqa: E402

STATE = "narrowgauge"  # the part of a checkpoint that is ours
_WRAPS = (  # what accelerate wraps in DistributedDataParallel, or leaves alone
    DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU,
)  # fmt: skip


class Prepared(NamedTuple):
    """A model that trains by the recipe. wrapped: as accelerate gave it back. dtypes: of its state, before."""

    model: nn.Module
    wrapped: nn.Module
    optimizer: AcceleratedOptimizer
    dtypes: dict[str, torch.dtype]


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, training by a recipe.

    Args:
        recipe: a recipe or its name. It says what `mixed_precision` would: that must be "no".
        *args: as accelerate takes them.
        **kwargs: as accelerate takes them.

    Raises RecipeError for an unknown recipe; ConfigError for a mixed_precision, for DeepSpeed, FSDP, Megatron-LM or
    another kind of distribution than DistributedDataParallel, for `sync_each_batch`, and for a dynamo backend.
    """

    scaler: Any  # accelerate says None

    def __init__(self, *args: Any, recipe: Recipe | str, **kwargs: Any) -> None:
        self.recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
        self._prepared: list[Prepared] = []
        self._sums: dict[nn.Module, ExitStack] = {}
        super().__init__(*args, **kwargs)
        self._check(sharded=kwargs.get("fsdp_plugin") is not None)
        if self.recipe.resolve(self.device).needs_loss_scaling:
            self.scaler = LossScaler(self.recipe, self.device)
        self.register_save_state_pre_hook(self._save_ours)
        self.register_load_state_pre_hook(self._load_ours)

    def _check(self, sharded: bool) -> None:
        name = self.recipe.name
        if self.mixed_precision != "no":
            raise ConfigError(
                f"mixed_precision={self.mixed_precision!r} beside recipe={name!r}: expected the recipe alone to say "
                "what is computed in which format: set mixed_precision to 'no' in the file of `accelerate config`, or "
                "launch with --mixed_precision no"
            )
        if self.distributed_type not in _WRAPS or sharded:
            found = "FSDP" if sharded else self.distributed_type.value
            raise ConfigError(
                f"recipe={name!r} with {found} through accelerate: expected one process, or DistributedDataParallel; "
                "shard the model by narrowgauge.distributed.shard before prepare, and launch without FSDP"
            )
        if self.gradient_state.plugin_kwargs.get("sync_each_batch", False):
            raise ConfigError(
                "sync_each_batch=True with a recipe: micro-batches are summed in float32 and travel once a step: "
                "leave it out"
            )
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:  # type: ignore[union-attr]
            raise ConfigError(
                "a dynamo backend through accelerate with a recipe: expected none; call torch.compile on the model "
                "that prepare returns"
            )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate prepares, then by the recipe: each trainable model with the optimizer of its parameters.

        Objects that `narrowgauge.prepare` has made are prepared anew by this recipe, with all their digits. A model
        without trainable parameters, such as a frozen one, stays as it is. Raises ConfigError for a trainable model
        without its optimizer in the same call, for an optimizer without its model, and for two optimizers of a model.
        """
        pairs = _pairs(args)
        dtypes = {at: {name: value.dtype for name, value in args[at].state_dict().items()} for at, _ in pairs}
        placed = super().prepare(*args, device_placement=device_placement)
        results = list(placed) if len(args) > 1 else [placed]
        for at, of in pairs:
            wrapped, optimizer = results[at], results[of]
            _, inner = prepare(wrapped, inmost(optimizer), self.recipe)
            renew_wrapper(optimizer, inner)
            model = self.unwrap_model(wrapped)
            earlier = next((each for each in self._prepared if each.model is model), None)
            if earlier is not None:
                self._prepared.remove(earlier)
            self._prepared.append(Prepared(model, wrapped, optimizer, earlier.dtypes if earlier else dtypes[at]))
        return tuple(results) if len(args) > 1 else results[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As accelerate's; one that `narrowgauge.distributed.shard` has parted stays as it is: FSDP2 is its wrapper."""
        if is_sharded(model):
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[arg-type]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """As accelerate's, and it knows of steps that the recipe's guard has skipped."""
        wrapped: Any = super().prepare_optimizer(optimizer, device_placement)
        if type(wrapped) is AcceleratedOptimizer:
            wrapped.__class__ = _Optimizer
            vars(wrapped)["end_sums"] = self._end_sums
        return wrapped

    @property
    def ledger(self) -> Ledger:
        """Bytes of the model that was prepared last and of its optimizer, by role."""
        if not self._prepared:
            raise ConfigError("expected a prepared model, found none: call prepare(model, optimizer) first")
        last = self._prepared[-1]
        return ledger(last.model, inmost(last.optimizer))

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """As accelerate's, with an exact sum of the gradients of a step's micro-batches.

        Of models of the recipe gradients stay float32 until the step's last backward, or, where the loss's own
        `backward` is called, until clipping, the step or the end of that context; then they are averaged and cast once.
        """
        ours = [model for model in models if any(model in (each.wrapped, each.model) for each in self._prepared)]
        with super().accumulate(*(model for model in models if model not in ours)):
            if not self.sync_gradients:
                for model in ours:
                    if model not in self._sums:
                        self._sums[model] = ExitStack()
                        self._sums[model].enter_context(accumulate(model))
            try:
                yield
            except BaseException as error:
                sums, self._sums = self._sums, {}
                for each in sums.values():
                    each.__exit__(type(error), error, error.__traceback__)
                raise
            self._end_sums()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As accelerate's; in the last micro-batch of a step the gradients are then those of the whole step."""
        super().backward(loss, **kwargs)
        self._end_sums()

    def _end_sums(self) -> None:
        """Average and cast what was summed, in the last micro-batch of a step."""
        if self._sums and self.sync_gradients:
            sums, self._sums = self._sums, {}
            for each in sums.values():
                each.close()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """As accelerate's, with the recipe's loss scaler."""
        if self.scaler is None:
            return
        self._end_sums()
        given = self._optimizers if optimizer is None else optimizer
        for each in given if isinstance(given, list | tuple) else [given]:
            self.scaler.unscale_(inmost(each))

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """`narrowgauge.clip_grad_norm_` of the unscaled gradients: the norm of the whole model, before clipping."""
        self._end_sums()
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """As accelerate's. Raises ConfigError where the recipe keeps gradients in 8 bits."""
        self._end_sums()
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(isinstance(p.grad, QuantizedTensor) for p in listed):
            raise ConfigError(
                f"recipe {self.recipe.name!r} keeps gradients in 8 bits, whose values are not clipped one by one: use "
                "clip_grad_norm_, or a recipe with wider gradients"
            )
        super().clip_grad_value_(listed, clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Plain tensors on the CPU under the model's own names: the dtypes from before `prepare`, all digits that fit.

        Of a model that does not train by the recipe: as accelerate's.
        """
        for each in self._prepared:
            if model is each.wrapped or model is each.model:
                values = full_values(each.model, inmost(each.optimizer))
                return {name: values[name].to(dtype) for name, dtype in each.dtypes.items()}
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As accelerate's, and the folder `narrowgauge/` with the exact state of model and optimizer."""
        with self._without_our_optimizers():
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        """As accelerate's: goes on bit for bit from what `save_state` wrote, on any number of processes.

        Raises CheckpointError for a folder that was written without a recipe.
        """
        with self._without_our_optimizers():
            return super().load_state(input_dir, load_kwargs, **kwargs)

    @contextmanager
    def _without_our_optimizers(self) -> Iterator[None]:
        """Whose state is in our own part of a checkpoint."""
        every = self._optimizers
        self._optimizers = [
            optimizer for optimizer in every if all(optimizer is not p.optimizer for p in self._prepared)
        ]
        try:
            yield
        finally:
            self._optimizers = every

    def _save_ours(self, models: list[nn.Module], weights: list[dict[str, Tensor]], output_dir: str) -> None:
        for number, each in enumerate(self._prepared):
            save(_part(output_dir, number), each.wrapped, inmost(each.optimizer))

    def _load_ours(self, models: list[nn.Module], input_dir: str) -> None:
        for number, each in enumerate(self._prepared):
            part = _part(input_dir, number)
            if not part.is_dir():
                raise CheckpointError(
                    f"{input_dir}: expected what an Accelerator with a recipe has saved, found no folder {part.name!r} "
                    "in it: load it with the Accelerator that wrote it, or its weights before prepare"
                )
            load(part, each.wrapped, inmost(each.optimizer))
        models[:] = [model for model in models if all(model not in (p.model, p.wrapped) for p in self._prepared)]


class _Optimizer(AcceleratedOptimizer):
    """accelerate's wrapper of an optimizer that narrowgauge has prepared."""

    def step(self, closure: Any = None) -> None:
        self.end_sums()  # type: ignore[attr-defined]
        super().step(closure)

    @property
    def step_was_skipped(self) -> bool:
        return self._is_overflow or bool(getattr(self.optimizer, "step_was_skipped", False))


def _part(folder: str, number: int) -> Path:
    """Where the state of a model lies, by the order in which models were prepared."""
    return Path(folder) / (STATE if number == 0 else f"{STATE}_{number}")


def renew_wrapper(wrapper: AcceleratedOptimizer, optimizer: Optimizer | None) -> None:
    """Put the optimizer that narrowgauge.prepare has returned into accelerate's wrapper."""
    assert optimizer is not None
    wrapper.optimizer = optimizer
    if wrapper.scaler is not None:
        wrapper._optimizer_original_step_method = optimizer.step
        wrapper._optimizer_patched_step_method = patch_optimizer_step(wrapper, optimizer.step)


def _pairs(objects: tuple[Any, ...]) -> list[tuple[int, int]]:
    """Places of each trainable model and of its optimizer among the objects. Raises ConfigError."""
    optimizers = {at: each for at, each in enumerate(objects) if isinstance(each, Optimizer)}
    pairs: list[tuple[int, int]] = []
    for at, model in enumerate(objects):
        if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
            continue
        own = {id(p) for p in model.parameters()}
        holding = [
            of for of, each in optimizers.items() if any(id(p) in own for g in each.param_groups for p in g["params"])
        ]
        if len(holding) != 1:
            raise ConfigError(
                f"prepare: expected one optimizer of {type(model).__name__}'s parameters beside it, found "
                f"{len(holding)}: give model and optimizer to the same call, several optimizers as one with groups; "
                "freeze a model that does not train"
            )
        pairs.append((at, holding[0]))
    if alone := [at for at in optimizers if all(at != of for _, of in pairs)]:
        raise ConfigError(
            f"prepare: expected the model whose parameters {type(objects[alone[0]]).__name__} holds in the same call, "
            "found the optimizer alone: the recipe changes both"
        )
    return pairs
