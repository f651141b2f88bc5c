"""From a configuration to TRL's trainer with a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from narrowgauge.errors import ConfigError, DataError
from narrowgauge.integrations import trl as trainers
from narrowgauge.integrations.finetune_config import (
    DPOConfig,
    FinetuneConfig,
    GRPOConfig,
    RewardConfig,
    SFTConfig,
)
from narrowgauge.integrations.finetune_models import Loaded, length_for
from narrowgauge.integrations.finetune_rewards import Reward
from narrowgauge.integrations.finetune_watch import Watch

try:
    import trl
    from transformers import PrinterCallback, TrainingArguments
except ImportError as error:
    raise ConfigError(f"{error.name} is not installed: pip install 'narrowgauge[hf]'") from error

# transformers' name of it in newer versions; the older one is deprecated there
_CHECKPOINTING = "activation_checkpointing"
if _CHECKPOINTING not in {each.name for each in dataclasses.fields(TrainingArguments)}:
    _CHECKPOINTING = "gradient_checkpointing"
_NEVER = 2**31  # steps between checkpoints where only the last one is asked for


def make_trainer(
    config: FinetuneConfig,
    loaded: Loaded,
    train: Any,
    evaluation: Any,
    output_dir: Path,
    rewards: Sequence[Reward],
    watch: Watch,
) -> Any:
    """The trainer of a task, not yet started. Raises ConfigError where TRL refuses the data or the arguments."""
    make = _TRAINERS[type(config)]
    shared: dict[str, Any] = {
        "train_dataset": train,
        "eval_dataset": evaluation,
        "processing_class": loaded.tokenizer,
        "callbacks": [watch],
        "recipe": config.build_recipe(),
        "statistics_every": config.statistics_every,
    }
    try:
        trainer = make(config, loaded, common_arguments(config, output_dir, loaded.model), shared, rewards)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(f"{config.task}: TRL {trl.__version__} refuses this run: {error}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.reads_once = True
    _check_enough(config, trainer)
    watch.trainer = trainer
    return trainer


def _check_enough(config: FinetuneConfig, trainer: Any) -> None:
    """Raise DataError where an epoch has no step: all processes fill their batches, and groups are whole."""
    processes, examples = trainer.args.world_size, len(trainer.train_dataset)
    needed = config.batch_size * processes if processes > 1 else 1
    told = f"batch_size={config.batch_size} x {processes} processes"
    if isinstance(config, GRPOConfig):
        needed = config.batch_size * config.accumulation * processes // config.generations
        told += f" x accumulation={config.accumulation} / generations={config.generations}"
    if examples < needed:
        raise DataError(
            f"{config.data}: expected at least {needed} examples, {told}, found {examples}: lower batch_size, or give "
            "more"
        )


def may_leave_unused(model: Any) -> bool:
    """Whether a forward may not use all trainable parameters: of one with other senses than text, or lists of experts.

    DistributedDataParallel then looks for them in every step; else it fails where there are some.
    """
    lists = (name for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    return model.config.get_text_config() is not model.config or any("expert" in name for name in lists)


def common_arguments(config: FinetuneConfig, output_dir: Path, model: Any) -> dict[str, Any]:
    """transformers' arguments, for all tasks. The recipe alone says in which formats is computed."""
    schedule = "constant_with_warmup" if config.schedule == "constant" else config.schedule
    return {
        "output_dir": str(output_dir),
        "max_steps": config.steps or -1,
        "num_train_epochs": config.epochs,
        "per_device_train_batch_size": config.batch_size,
        "per_device_eval_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.accumulation,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": schedule,
        "warmup_steps": config.warmup_steps,
        "weight_decay": config.weight_decay,
        "max_grad_norm": config.clip,
        _CHECKPOINTING: config.gradient_checkpointing,
        "seed": config.seed,
        "eval_strategy": "steps" if config.eval_every else "no",
        "eval_steps": config.eval_every or None,
        "save_strategy": "steps",
        "save_steps": config.save_every or _NEVER,
        "save_total_limit": config.keep_last,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # a loss that is not finite is to be seen
        "bf16": False,
        "fp16": False,
        "ddp_find_unused_parameters": may_leave_unused(model),
        "use_cpu": config.torch_device().type == "cpu",
        "dataloader_pin_memory": config.torch_device().type == "cuda",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": not isinstance(config, GRPOConfig),
    }


def _sft(config: SFTConfig, loaded: Loaded, common: dict[str, Any], shared: dict[str, Any], _: Any) -> Any:
    is_messages = "messages" in shared["train_dataset"].column_names
    arguments = trl.SFTConfig(
        **common,
        max_length=length_for(loaded.model, config.max_length),
        packing=config.packing,
        completion_only_loss={"auto": None, "completion": not is_messages, "all": False}[config.loss_on],
        assistant_only_loss=is_messages and config.loss_on == "completion",
    )
    return trainers.SFTTrainer(loaded.model, args=arguments, **shared)


def _dpo(config: DPOConfig, loaded: Loaded, common: dict[str, Any], shared: dict[str, Any], _: Any) -> Any:
    arguments = trl.DPOConfig(
        **common,
        max_length=length_for(loaded.model, config.max_length),
        beta=config.beta,
        loss_type=[config.loss],
        label_smoothing=config.label_smoothing,
    )
    return trainers.DPOTrainer(loaded.model, args=arguments, **shared)


def _reward(config: RewardConfig, loaded: Loaded, common: dict[str, Any], shared: dict[str, Any], _: Any) -> Any:
    arguments = trl.RewardConfig(
        **common,
        max_length=length_for(loaded.model, config.max_length),
        center_rewards_coefficient=config.center_rewards or None,
    )
    return trainers.RewardTrainer(loaded.model, args=arguments, **shared)


def _grpo(
    config: GRPOConfig, loaded: Loaded, common: dict[str, Any], shared: dict[str, Any], rewards: Sequence[Reward]
) -> Any:
    common["per_device_eval_batch_size"] = answers_held_out(config)
    arguments = trl.GRPOConfig(
        **common,
        num_generations=config.generations,
        max_completion_length=config.max_completion,
        temperature=config.temperature,
        beta=config.beta,
    )
    return trainers.GRPOTrainer(loaded.model, reward_funcs=list(rewards), args=arguments, **shared)


def answers_held_out(config: GRPOConfig) -> int:
    """Answers of a held-out batch on each process: as many as in training, or more, until those of all are groups."""
    together = config.batch_size * max(config.processes, 1)
    return config.batch_size * (config.generations // math.gcd(together, config.generations))


_TRAINERS: dict[type[FinetuneConfig], Callable[..., Any]] = {
    SFTConfig: _sft,
    DPOConfig: _dpo,
    RewardConfig: _reward,
    GRPOConfig: _grpo,
}
