"""transformers' `Trainer` with a recipe. Needs `pip install narrowgauge[hf]`.

    from narrowgauge.integrations.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=dataset, recipe="narrow8")
    trainer.train()

The stock `Trainer` takes a prepared model and optimizer too (`optimizers=(optimizer, None)`). This one prepares them
itself, with the optimizer that `TrainingArguments` ask for; it sums the micro-batches of a step exactly, logs what the
casts did, and its checkpoints have two parts: weights that transformers loads, under the model's own names and in its
own dtype with all digits that fit, and the folder `narrowgauge/`, from which a run resumes bit for bit.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.integrations.huggingface import full_values
from narrowgauge.layers.gradients import accumulate
from narrowgauge.layers.report import ConversionReport, report
from narrowgauge.layers.statistics import Statistics, collect
from narrowgauge.observe.ledger import Ledger, ledger
from narrowgauge.observe.shares import shares_by_role
from narrowgauge.optim.clip import clip_grad_norm_
from narrowgauge.preparation import prepare
from narrowgauge.recipes.library import recipe as recipe_named
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.checkpoint import load, save

try:
    import transformers
    from transformers.training_args import ParallelMode
except ImportError as error:
    raise ConfigError("transformers is not installed: pip install 'narrowgauge[hf]'") from error

STATE = "narrowgauge"  # the part of a checkpoint that is ours
_SCHEDULER = "scheduler.pt"


class Trainer(transformers.Trainer):
    """`transformers.Trainer`, trained by a recipe.

    Args:
        recipe: a recipe or its name. It says what `bf16` and `fp16` of the arguments would: those are refused.
        statistics_every: optimizer steps between counts of saturated and flushed values, which are logged with the
            next loss as `saturated/ROLE` and `flushed/ROLE`, shares in [0, 1]; 0: never.
        args, kwargs: as transformers takes them.

    Raises RecipeError for an unknown recipe, ConfigError for arguments that a recipe does not go with.
    """

    model: Any  # transformers says Module or None
    lr_scheduler: Any

    def __init__(self, *args: Any, recipe: Recipe | str, statistics_every: int = 100, **kwargs: Any) -> None:
        self.recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
        self.statistics_every = statistics_every
        self._prepared: nn.Module | None = None
        self._dtypes: dict[str, torch.dtype] = {}  # of the model's own state, before it was prepared
        self._summing: ExitStack | None = None
        self._counting: tuple[ExitStack, Statistics] | None = None
        self._shares: dict[str, float] = {}
        super().__init__(*args, **kwargs)
        for flag in ("bf16", "fp16"):
            if getattr(self.args, flag):
                raise ConfigError(
                    f"TrainingArguments({flag}=True) beside recipe={self.recipe.name!r}: expected the recipe alone to "
                    f"say what is computed in which format: leave {flag} out, or take recipe={flag!r}"
                )
        if self.recipe.resolve(self.args.device).needs_loss_scaling:
            raise ConfigError(f"recipe={self.recipe.name!r} scales the loss, which this trainer does not: take bf16")
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ConfigError("a recipe with DeepSpeed or FSDP through TrainingArguments: use narrowgauge.distributed")

    @property
    def conversion_report(self) -> ConversionReport:
        """Which layers compute how, and why."""
        return report(self.model)

    @property
    def ledger(self) -> Ledger:
        """Bytes of the model and the optimizer, by role."""
        return ledger(self.model, self._own_optimizer())

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, prepared with the model."""
        model = model or self.model
        assert model is not None
        optimizer = super().create_optimizer(model)
        if self._prepared is not model:
            self._dtypes = {name: value.dtype for name, value in model.state_dict().items()}
            _, self.optimizer = prepare(model, optimizer, self.recipe)
            self._prepared = model
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch."""
        is_alone = self.args.parallel_mode != ParallelMode.DISTRIBUTED
        if self._summing is None and is_alone and self.current_gradient_accumulation_steps > 1:
            self._summing = ExitStack()
            self._summing.enter_context(accumulate(model))
        self._begin_counting(model)
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        except BaseException as error:
            for stack in (self._summing, self._counting and self._counting[0]):
                if stack is not None:
                    stack.__exit__(type(error), error, error.__traceback__)
            self._summing = self._counting = None
            raise
        if self.accelerator.sync_gradients:
            self._end_counting()
            if self._summing is not None:
                self._summing.close()
                self._summing = None
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and what the last counted step found with it."""
        if "loss" in logs:
            logs, self._shares = logs | self._shares, {}
        super().log(logs, *args, **kwargs)

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _begin_counting(self, model: nn.Module) -> None:
        step = self.state.global_step + 1
        if self._counting is None and self.statistics_every > 0 and step % self.statistics_every == 0:
            stack = ExitStack()
            self._counting = stack, stack.enter_context(collect(model))

    def _end_counting(self) -> None:
        if self._counting is None:
            return
        (stack, statistics), self._counting = self._counting, None
        stack.close()
        shares = shares_by_role(statistics.read())
        self._shares = {f"{measure}/{role}": share for role, of in shares.items() for measure, share in of.items()}

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As transformers saves, with plain weights."""
        if state_dict is not None or self._prepared is not self.model or not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        values = full_values(self.model, self._own_optimizer())
        super()._save(output_dir, {name: values[name].to(dtype) for name, dtype in self._dtypes.items()})
        config = Path(output_dir or str(self.args.output_dir)) / "config.json"
        if config.is_file():  # which names the dtype that the parameters have in training
            dtype = next(dtype for dtype in self._dtypes.values() if dtype.is_floating_point)
            told = json.loads(config.read_text(encoding="utf-8")) | {"dtype": str(dtype).removeprefix("torch.")}
            config.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.args.should_save:
            save(Path(output_dir) / STATE, self.model, self._own_optimizer())
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not (Path(checkpoint) / STATE).is_dir():
            raise CheckpointError(
                f"{checkpoint}: expected a checkpoint of a trainer with a recipe, found no folder {STATE!r} in it: "
                "resume with the trainer that wrote it, or load its weights with from_pretrained"
            )
        load(Path(checkpoint) / STATE, self.model, self._own_optimizer())
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))
