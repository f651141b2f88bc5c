"""transformers' `Trainer` with a recipe. Needs `pip install narrowgauge[hf]`.

    from narrowgauge.integrations.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=dataset, recipe="narrow8")
    trainer.train()

The stock `Trainer` takes a prepared model and optimizer too (`optimizers=(optimizer, None)`, and `RecipeCallback`).
This one prepares them itself, with the optimizer that `TrainingArguments` ask for; it sums the micro-batches of a step
exactly, logs what the casts did, and its checkpoints have two parts: weights that transformers loads, under the model's
own names and in its own dtype with all digits that fit, and the folder `narrowgauge/`, from which a run resumes bit for
bit. `save_pretrained` writes any prepared model in bf16, float32 or FP8.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.integrations.requirements import require
from narrowgauge.layers.autocast import autocast
from narrowgauge.layers.gradients import accumulate
from narrowgauge.layers.report import ConversionReport, report
from narrowgauge.numerics.formats import BF16, FP16
from narrowgauge.observe.ledger import Ledger, ledger
from narrowgauge.optim.clip import clip_grad_norm_
from narrowgauge.optim.replace import inmost
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.preparation import prepare
from narrowgauge.recipes.library import recipe as recipe_named
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.checkpoint import load, save

require("transformers", "5.0", "narrowgauge[hf]")
require("accelerate", "1.6", "narrowgauge[hf]")  # transformers' Trainer asks for it only when it is made

import transformers  # noqa: E402

from narrowgauge.integrations.pretrained import name_dtype, plain_values, save_pretrained  # noqa: E402
from narrowgauge.integrations.recipe_callback import RecipeCallback  # noqa: E402

__all__ = ["RecipeCallback", "Seq2SeqTrainer", "Trainer", "save_pretrained"]

STATE = "narrowgauge"  # the part of a checkpoint that is ours
_SCHEDULER = "scheduler.pt"
IGNORED = -100  # transformers' label of a token that has no loss


class Trainer(transformers.Trainer):
    """`transformers.Trainer`, trained by a recipe.

    Args:
        recipe: a recipe or its name. It says what `bf16`, `fp16` and `tf32` of the arguments would: those that agree
            with it change nothing, the others are refused.
        statistics_every: optimizer steps between samples of what precision does, which are logged with the next loss
            and written into the journal, see `RecipeCallback`; 0: never.
        *args: as transformers takes them.
        **kwargs: as transformers takes them.

    In several processes, as torchrun starts them, DistributedDataParallel wraps the model and gradients travel as the
    recipe says. Steps with gradients that are not finite are skipped, and do not advance the scheduler; recipes that
    scale the loss do it by `narrowgauge.LossScaler`, whose state is a part of checkpoints.

    Raises RecipeError for an unknown recipe, ConfigError for arguments that a recipe does not go with.
    """

    model: Any  # transformers says Module or None
    lr_scheduler: Any
    accelerator: Any
    verified: Path | None = None  # a checkpoint whose sums the caller has taken, and which are not taken again
    reads_once = False  # in several processes, whether no example is read twice in an epoch: the rest is left out

    def __init__(self, *args: Any, recipe: Recipe | str, statistics_every: int = 100, **kwargs: Any) -> None:
        self.recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
        self._prepared: nn.Module | None = None
        self._dtypes: dict[str, torch.dtype] = {}  # of the model's own state, before it was prepared
        self._summing: ExitStack | None = None
        super().__init__(*args, **kwargs)
        self.recipe_callback = RecipeCallback(statistics_every).add_to(self)
        resolved = self.recipe.resolve(self.args.device)
        check_arguments(self.args, resolved)
        self.recipe_callback.recipe = resolved
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError("a recipe with DeepSpeed or FSDP through TrainingArguments: use narrowgauge.distributed")
        if self._is_distributed:
            self.accelerator.prepare = functools.partial(self._prepare_wrapped, self.accelerator.prepare)
        if resolved.needs_loss_scaling:
            self.accelerator.scaler = LossScaler(self.recipe, self.args.device)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """As transformers', without autocast of accelerate's: the recipe brings its own."""
        return super()._build_accelerator_args(**kwargs) | {"mixed_precision": "no"}

    @property
    def conversion_report(self) -> ConversionReport:
        """Which layers compute how, and why."""
        return report(self.model)

    @property
    def ledger(self) -> Ledger:
        """Bytes of the model and the optimizer, by role."""
        return ledger(self.model, self._own_optimizer())

    @property
    def _is_distributed(self) -> bool:
        return self.accelerator.num_processes > 1  # the arguments call processes on CPUs none

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers trains. Raises ConfigError where no parameter does."""
        if isinstance(self.model, nn.Module) and not any(p.requires_grad for p in self.model.parameters()):
            raise ConfigError(
                f"expected parameters to train, found none of {type(self.model).__name__}'s that requires a gradient: "
                "add adapters to a frozen model, or call requires_grad_(True) on what is to be trained"
            )
        return super().train(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, prepared with the model; in several processes once the model is wrapped."""
        model = model or self.model
        assert model is not None
        optimizer = super().create_optimizer(model)
        if self._prepared is not model and not self._is_distributed:
            self.optimizer = self._prepare(model, optimizer)
        return self.optimizer

    def _prepare_wrapped(self, theirs: Callable[..., Any], *objects: Any, **kwargs: Any) -> Any:
        """accelerate's `prepare`, and then the recipe's of the model that it has wrapped, with its optimizer."""
        placed = theirs(*objects, **kwargs)
        if len(objects) == 2 and objects[0] is self.model and self._prepared is not self.model:
            from narrowgauge.integrations.accelerate import renew_wrapper

            wrapped, optimizer = placed
            renew_wrapper(optimizer, self._prepare(wrapped, optimizer.optimizer))
        return placed

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._dtypes = {name: value.dtype for name, value in self.model.state_dict().items()}
        _, optimizer = prepare(model, optimizer, self.recipe)
        self._prepared = self.model
        return optimizer

    def get_train_dataloader(self) -> Any:
        """As transformers', where `reads_once` in several processes without a last batch that not all can fill."""
        own = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = own or (self.reads_once and self._is_distributed)
        try:
            return super().get_train_dataloader()
        finally:
            self.args.dataloader_drop_last = own

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of a step; their gradients are summed in float32."""
        found = super().get_batch_samples(*args, **kwargs)
        self._end_sum(None)
        if len(found[0]) > 1:
            # before transformers turns DDP's reduction off for all but the last: the sum is averaged at its end
            self._summing = ExitStack()
            self._summing.enter_context(accumulate(self.model_wrapped or self.model))
        return found

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch."""
        is_empty = self._has_no_labels(inputs, num_items_in_batch)
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        except BaseException as error:
            self._end_sum(error)
            raise
        if self.accelerator.sync_gradients:
            self._end_sum(None)
            if is_empty:
                model.zero_grad(set_to_none=True)  # of zeros, by which moments would decay, and parameters still move
        return loss

    def _end_sum(self, error: BaseException | None) -> None:
        summing, self._summing = self._summing, None
        if summing is not None:
            summing.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _has_no_labels(self, inputs: Any, num_items_in_batch: Any) -> bool:
        """Warn, and return True, where no token of the whole step has a label, so that its loss is NaN."""
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or not bool((labels == IGNORED).all()):
            return False
        is_alone = self.current_gradient_accumulation_steps == 1 and not self._is_distributed
        if not is_alone if num_items_in_batch is None else int(num_items_in_batch) != 0:
            return False
        warnings.warn(
            f"step {self.state.global_step + 1}: all labels are {IGNORED}, and the loss is an average of nothing: the "
            "step changes nothing; leave such examples out, or look at what masks the labels",
            stacklevel=3,
        )
        return True

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers evaluates; the model runs by the recipe also before it was trained."""
        if self._prepared is not self.model and not self._is_distributed:
            self.create_optimizer()
        elif self._prepared is not self.model:
            warnings.warn(
                "evaluated before training in several processes, where the model is not prepared yet: its layers run "
                "in the recipe's compute dtype",
                stacklevel=2,
            )
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', inside the recipe's autocast; in several processes with the loss of the batches of all."""
        if not self._is_distributed:
            return super().prediction_step(model, inputs, *args, **kwargs)
        inputs = self._without_repeated(inputs)
        # the wrapper has autocast, and what is evaluated is the model inside
        with autocast(self.recipe.at(self.state.global_step)):
            loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None:  # of a last round transformers would take the first processes' losses alone
            weight = self._held_out_weight(inputs)
            total, weights = self.accelerator.reduce(
                torch.stack([loss.double() * weight, weight.to(loss.device, torch.float64)]), "sum"
            )
            loss = (total / weights.clamp(min=1)).to(loss.dtype)
        return (loss, *others)

    def _own_examples(self) -> int:
        """Of a held-out batch, without those from the data's beginning by which accelerate fills up the last round."""
        state, size = self.accelerator.gradient_state, self.args.eval_batch_size
        if not state.end_of_dataloader or state.remainder <= 0:
            return size
        return min(max(state.remainder - self.accelerator.process_index * size, 0), size)

    def _without_repeated(self, inputs: Any) -> Any:
        """A held-out batch in which only tokens of `_own_examples` have labels; where a batch can do without."""
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        own = self._own_examples()
        if (
            not self.model_accepts_loss_kwargs
            or not isinstance(labels, Tensor)
            or labels.dim() != 2
            or own >= len(labels)
        ):
            return inputs
        labels = labels.clone()
        labels[own:] = IGNORED
        return {**inputs, "labels": labels}

    def _held_out_weight(self, inputs: Any) -> Tensor:
        """How much this process's loss of a held-out batch counts beside the others'."""
        has_labels = isinstance(inputs, Mapping) and "labels" in inputs
        is_of_all = self.model_accepts_loss_kwargs and has_labels  # divided by the labels of all processes
        return torch.tensor(1 if is_of_all else self._own_examples())

    def _own_optimizer(self) -> Any:
        """The optimizer without accelerate's wrapper."""
        return inmost(self.optimizer)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._norm(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm(model, float("inf")) if grad_norm is None else grad_norm

    def _norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """The norm of the gradients, unscaled; they are clipped to `max_norm`."""
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(getattr(self.optimizer, "optimizer", self.optimizer))
        return clip_grad_norm_(model.parameters(), max_norm)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As transformers saves, with plain weights."""
        if state_dict is not None or self._prepared is not self.model or not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        values = plain_values(self.model, self._own_optimizer())
        plain = {name: values[name].to(dtype) for name, dtype in self._dtypes.items()}
        super()._save(output_dir, dict(plain))
        if isinstance(self.model, transformers.PreTrainedModel):
            name_dtype(Path(output_dir or str(self.args.output_dir)), plain)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save(Path(output_dir) / STATE, self.model, self._own_optimizer())  # of several processes, all write
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # what is written next says that all is there

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not (Path(checkpoint) / STATE).is_dir():
            raise CheckpointError(
                f"{checkpoint}: expected a checkpoint of a trainer with a recipe, found no folder {STATE!r} in it: "
                "resume with the trainer that wrote it, or load its weights with from_pretrained"
            )
        scheduler = Path(checkpoint) / _SCHEDULER
        if not scheduler.is_file():
            raise CheckpointError(
                f"{checkpoint}: {_SCHEDULER} is missing: the checkpoint is not whole; resume from another one"
            )
        is_verified = self.verified is not None and Path(checkpoint) == self.verified
        load(Path(checkpoint) / STATE, self.model, self._own_optimizer(), is_verified=is_verified)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best_model(self) -> None:
        """As transformers', with all digits of the parameters."""
        best = Path(str(self.state.best_model_checkpoint)) / STATE
        if best.is_dir():
            load(best, self.model, self._own_optimizer())
        else:
            super()._load_best_model()


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer`, trained by a recipe. Arguments and errors as of `Trainer`."""


def check_arguments(args: transformers.TrainingArguments, recipe: Recipe) -> None:
    """Raise ConfigError for arguments that say another precision than a resolved recipe, or none that it has."""
    computes = {"bf16": BF16, "fp16": FP16}
    for flag, dtype in computes.items():
        if getattr(args, flag) and recipe.compute is not dtype:
            raise ConfigError(
                f"TrainingArguments({flag}=True) beside recipe={recipe.name!r}, which computes in {recipe.compute}: "
                f"expected the recipe alone to say what is computed in which format: leave {flag} out, or take "
                f"recipe={flag!r}"
            )
        if getattr(args, f"{flag}_full_eval"):
            raise ConfigError(
                f"{flag}_full_eval=True casts the parameters themselves: the recipe says how the model is evaluated, "
                "e.g. narrowgauge.recipe(name, evaluation='compute'): leave it out"
            )
    if args.tf32 is not None and bool(args.tf32) != recipe.tf32:
        raise ConfigError(
            f"TrainingArguments(tf32={args.tf32}) beside recipe={recipe.name!r} with tf32={recipe.tf32}: leave tf32 "
            f"out, or take narrowgauge.recipe({recipe.name!r}, tf32={bool(args.tf32)})"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs in one process, where transformers would use DataParallel: start a process for each, "
            "with torchrun, or let the process see one GPU"
        )
