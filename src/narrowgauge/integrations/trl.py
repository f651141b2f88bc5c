"""TRL's trainers with a recipe. Needs `pip install narrowgauge[hf]`.

    from narrowgauge.integrations.trl import SFTTrainer

    trainer = SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer, recipe="narrow8")
    trainer.train()

Each is TRL's own with what `narrowgauge.integrations.transformers.Trainer` adds. Beside that:

- Reference models compute what the policy would with the same weights, to the bit, and are frozen, their weights in FP8
  where that changes no bit; reward models are frozen by `narrowgauge.freeze`.
- The output layer computes in the recipe's compute dtype; logits are float32 before any softmax, as in TRL, and
  rewards before they are compared.
"""

from __future__ import annotations

import copy
import inspect
import json
import warnings
from collections.abc import Sized
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import ConfigError, DataError
from narrowgauge.integrations.requirements import require
from narrowgauge.integrations.rewards import check_rewards, checked
from narrowgauge.integrations.transformers import IGNORED, Trainer
from narrowgauge.layers.autocast import autocast
from narrowgauge.layers.wrapping import AutocastForward
from narrowgauge.recipes.select import head_is_asked_for
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train.frozen_models import freeze_reference, freeze_scorer, is_frozen

# TRL's first whose log-probabilities come from `add_fused_lm_head`
require("trl", "1.16", "narrowgauge[hf]")

import trl  # noqa: E402
from accelerate.utils import is_peft_model  # noqa: E402
from trl.data_utils import is_conversational  # noqa: E402
from trl.trainer.callbacks import SyncRefModelCallback  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402


class _RecipeTrainer(Trainer):
    """What all of TRL's trainers need; mixed in before one of them.

    Args: `recipe` and `statistics_every` as in `narrowgauge.integrations.transformers.Trainer`; all others as TRL takes
    them. `bf16=True`, which TRL's configurations say by themselves, is turned off in the trainer's copy of them.
    """

    _config: type[Any]
    _has_fused_head = True
    _has_frozen = False
    ref_model: Any = None
    reward_funcs: list[Any]

    def __init__(self, *args: Any, recipe: Recipe | str, statistics_every: int = 100, **kwargs: Any) -> None:
        given = self._named(args, kwargs)
        config = given.get("args")
        if config is None:
            config = self._config(output_dir=f"{type(self).__name__}-output", bf16=False)
        given["args"] = config = copy.copy(config)
        config.bf16 = False
        if config.mixed_precision == "bf16":
            config.mixed_precision = "no"
        if config.use_liger_kernel:
            raise ConfigError("use_liger_kernel=True replaces layers that the recipe converts: leave it out")
        for model in (given.get("model"), given.get("ref_model")):
            if isinstance(model, nn.Module):
                _drop_earlier_forward(model)
        self._check_data(given)
        self._adjust(given)
        super().__init__(recipe=recipe, statistics_every=statistics_every, **given)
        if self._has_fused_head and self.recipe.resolve(self.args.device).needs_loss_scaling:
            raise ConfigError(
                f"recipe='{self.recipe.name}' scales the loss, and TRL takes log-probabilities and their gradients by "
                "operations of its own, which overflow in float16: take bf16"
            )
        if self._has_fused_head and self.recipe.quantizes_gemms and head_is_asked_for(self.recipe):
            raise ConfigError(
                f"recipe='{self.recipe.name}' quantizes lm_head, and TRL computes log-probabilities from its weight "
                "directly, in the compute dtype: leave the head out of `include`, and in `exclude`"
            )
        self._check_left(given)
        self._freeze_once()

    @property
    def is_prepared(self) -> bool:
        """Whether the policy runs by the recipe already: it is prepared when training or evaluation begins."""
        return self._prepared is self.model

    def prepare_policy(self) -> None:
        """Prepare the model and its optimizer now, if they are not."""
        if not self.is_prepared:
            self.create_optimizer()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As TRL evaluates; the model runs by the recipe also before it was trained."""
        self.prepare_policy()
        return super().evaluate(*args, **kwargs)

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments by TRL's names; TypeError as a call of TRL's trainer gives it."""
        theirs = next(each for each in type(self).__mro__ if each.__module__.startswith("trl."))
        bound = inspect.signature(theirs.__init__).bind(self, *args, **kwargs).arguments
        return {name: value for name, value in bound.items() if name != "self"}

    def _held_out_weight(self, inputs: Any) -> Tensor:
        return torch.tensor(self._own_examples())  # TRL takes means

    def _adjust(self, given: dict[str, Any]) -> None:
        """Change the arguments before TRL sees them."""

    def _freeze_once(self) -> None:
        if not self._has_frozen:
            self._has_frozen = True
            self._freeze_models()

    def _freeze_models(self) -> None:
        """Freeze the models beside the policy, once TRL has them."""

    def _check_data(self, given: dict[str, Any]) -> None:
        """Raise for data and tokenizers that cannot be trained with, before TRL fails in other words."""
        data: Any = given.get("train_dataset")
        tokenizer = given.get("processing_class")
        if data is not None and hasattr(data, "__len__") and len(data) == 0:
            raise DataError("train_dataset: expected examples, found none: check the file or the filter it comes from")
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        if tokenizer is None:
            return
        if (
            tokenizer.pad_token is None
            and tokenizer.eos_token is None
            and not getattr(given["args"], "pad_token", None)
        ):
            raise ConfigError(
                "the tokenizer has neither a pad token nor an end-of-sequence token: expected one to fill short "
                "sequences up with: set tokenizer.pad_token to a token of its vocabulary, e.g. tokenizer.unk_token"
            )
        first = next(iter(data), None) if data is not None else None
        has_template = tokenizer.chat_template or getattr(given["args"], "chat_template_path", None)
        if isinstance(first, dict) and is_conversational(first) and not has_template:
            raise ConfigError(
                "train_dataset has messages, and the tokenizer no chat template to write them with: set "
                "tokenizer.chat_template, take the tokenizer of an instruction-tuned model, or give the dataset as text"
            )

    def _check_left(self, given: dict[str, Any]) -> None:
        """Raise where TRL has dropped all examples."""
        before, after = given.get("train_dataset"), self.train_dataset
        if isinstance(before, Sized) and isinstance(after, Sized) and len(after) == 0:
            raise DataError(
                f"train_dataset: none of {len(before)} examples has a token to train on: max_length="
                f"{getattr(self.args, 'max_length', None)} cuts all completions off, or all labels are ignored: raise "
                "max_length, or shorten the prompts"
            )


class SFTTrainer(_RecipeTrainer, trl.SFTTrainer):
    """`trl.SFTTrainer`, trained by a recipe."""

    _config = trl.SFTConfig

    def _held_out_weight(self, inputs: Any) -> Tensor:
        return (inputs["labels"][..., 1:] != IGNORED).sum()  # TRL divides by this process's own


class RewardTrainer(_RecipeTrainer, trl.RewardTrainer):
    """`trl.RewardTrainer`, trained by a recipe."""

    _config = trl.RewardConfig
    _has_fused_head = False

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, of rewards in float32: their differences are small beside them."""
        hook = model.register_forward_hook(_with_wide_logits)
        try:
            return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            hook.remove()


class DPOTrainer(_RecipeTrainer, trl.DPOTrainer):
    """`trl.DPOTrainer`, trained by a recipe.

    Without `ref_model` the reference is a copy of the model as it is given, not one that is loaded by its name.
    """

    _config = trl.DPOConfig
    _measures_floor = False

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As TRL computes it; the KL from a reference that came frozen is logged once, before the first step."""
        if self._measures_floor and self.state.global_step == 0 and self.model.training:
            self._measures_floor = False
            self._note_floor(self._kl_at_start(model, inputs))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _freeze_models(self) -> None:
        if self.ref_model is None:
            return
        if is_frozen(self.ref_model):  # by its owner
            self._measures_floor = True
            self.ref_model.eval()
            return
        is_updated = bool(getattr(self.args, "sync_ref_model", False))
        freeze_reference(self.ref_model, self.model, self.recipe, is_updated=is_updated)

    def _adjust(self, given: dict[str, Any]) -> None:
        model, adapted = given["model"], given.get("peft_config") is not None
        if given.get("ref_model") is None and isinstance(model, nn.Module) and not adapted:
            if not is_peft_model(model) and not given["args"].precompute_ref_log_probs:
                given["ref_model"] = copy.deepcopy(model)

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        # TRL computes them before training begins; they are cached by the weights, and follow the recipe, too
        if self.ref_model is None:
            self.prepare_policy()
        else:
            self._freeze_once()
        own, self._precompute_model_hash = self._precompute_model_hash, f"{self._precompute_model_hash} {self.recipe}"
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            self._precompute_model_hash = own

    def _kl_at_start(self, model: nn.Module, inputs: Any) -> float:
        used = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
        with torch.no_grad():
            ours, theirs = (
                each(**used, labels=labels, use_cache=False, fused_lm_head=True) for each in (model, self.ref_model)
            )
        return _kl(ours.log_probs, theirs.log_probs, ours.label_mask)

    def _note_floor(self, kl: float) -> None:
        self.recipe_callback.note({"kl_at_start": kl})
        if kl > 0:
            warnings.warn(
                f"the reference is stored in another precision than recipe='{self.recipe.name}' computes with: before "
                f"the first step its KL from the policy is {kl:.3g} a token, a floor that no training lowers where "
                "their weights are equal; give the reference unfrozen, and it is frozen without one",
                stacklevel=3,
            )


class _OnPolicy(_RecipeTrainer):
    """A policy that is sampled from and scored by reward functions.

    Where `beta` is not 0, the reference is a copy of the model as it is given, not one that is loaded by its name.
    """

    args: Any
    reward_func_names: list[str]
    temperature: float
    beta: float

    def _adjust(self, given: dict[str, Any]) -> None:
        # without beta TRL makes no reference, and refuses to synchronize one
        config = given["args"]
        self._asked = {"beta": config.beta, "sync_ref_model": config.sync_ref_model}
        is_adapted = given.get("peft_config") is not None or (
            isinstance(given["model"], nn.Module) and is_peft_model(given["model"])
        )
        self._copies = config.beta != 0.0 and not is_adapted
        if self._copies:
            config.beta, config.sync_ref_model = 0.0, False
        given["reward_funcs"] = _listed(given["reward_funcs"])

    def _freeze_models(self) -> None:
        if self._copies:
            for name, value in self._asked.items():
                setattr(self.args, name, value)
            self.beta = self._asked["beta"]
            self.ref_model = self._copy_of_policy()
            if self.args.sync_ref_model:
                self.add_callback(SyncRefModelCallback(ref_model=self.ref_model, accelerator=self.accelerator))
            freeze_reference(self.ref_model, self.model, self.recipe, is_updated=self.args.sync_ref_model)
        for at, (reward, name) in enumerate(zip(self.reward_funcs, self.reward_func_names, strict=True)):
            if isinstance(reward, nn.Module):
                freeze_scorer(reward, self.recipe)
            else:
                self.reward_funcs[at] = checked(reward, name)

    def _copy_of_policy(self) -> nn.Module:
        policy: Any = self.model
        own = policy.__dict__.pop("forward")  # TRL's head: its copy would call the policy
        try:
            reference = copy.deepcopy(policy)
        finally:
            policy.forward = own
        in_fp32 = bool(getattr(self.args, "cast_lm_head_to_fp32", False))
        add_fused_lm_head(reference, temperature=self.temperature, cast_lm_head_to_fp32=in_fp32)
        return self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's, inside the recipe's autocast."""
        # in several processes the wrapper has it, and what is sampled from is the model inside
        outside = autocast(self.recipe.at(self.state.global_step)) if self._is_distributed else nullcontext()
        with outside:
            return super()._generate_and_score_completions(*args, **kwargs)  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        check_rewards(rewards, self.reward_func_names)
        return rewards


class GRPOTrainer(_OnPolicy, trl.GRPOTrainer):
    """`trl.GRPOTrainer`, trained by a recipe."""

    _config = trl.GRPOConfig

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = Path(checkpoint or "") / "entropy_ctrl_state.json"
        if self.use_adaptive_entropy and checkpoint is not None and path.exists():  # as TRL's own method reads it
            state = json.loads(path.read_text(encoding="utf-8"))
            self.entropy_coef, self._last_world_entropy = state["entropy_coef"], state["last_world_entropy"]


class RLOOTrainer(_OnPolicy, trl.RLOOTrainer):
    """`trl.RLOOTrainer`, trained by a recipe."""

    _config = trl.RLOOConfig


def _with_wide_logits(model: nn.Module, args: Any, output: Any) -> Any:
    output.logits = output.logits.float()
    return output


def _listed(functions: Any) -> list[Any]:
    return list(functions) if isinstance(functions, (list, tuple)) else [functions]


def _kl(policy: Tensor, reference: Tensor, mask: Tensor) -> float:
    """Mean over the masked tokens of Schulman's k3, which is never negative: exp(d) - 1 - d, d = reference - policy."""
    d = (reference.double() - policy.double())[mask.bool()]
    return (torch.expm1(d) - d).mean().item() if d.numel() else 0.0


def _drop_earlier_forward(model: nn.Module) -> None:
    """Take off what an earlier trainer put on the model's forward: TRL's head, and the autocast of its recipe.

    Copies of such a model would call the forward of the model that they were copied from.
    """
    base = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    for each in {id(model): model, id(base): base}.values():
        forward = each.__dict__.get("forward")
        if isinstance(forward, AutocastForward):
            del each.forward
            forward = forward.inner
        if forward is not None:
            each.forward = forward
        code = getattr(getattr(forward, "__func__", None), "__code__", None)
        if isinstance(forward, MethodType) and code is not None and "trl" in Path(code.co_filename).parts:
            del each.forward
