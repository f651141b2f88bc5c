"""The four models of PPO, each prepared for its part."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from narrowgauge.distributed.meeting_point import has_peers
from narrowgauge.errors import ConfigError
from narrowgauge.layers.convert import device_of
from narrowgauge.optim.scaler import LossScaler
from narrowgauge.preparation import prepare
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train import frozen_models
from narrowgauge.train.frozen_models import Frozen, is_converted
from narrowgauge.train.ppo_config import PPOConfig
from narrowgauge.train.ppo_update import Trained
from narrowgauge.train.rollout import RewardFunction
from narrowgauge.train.scoring import turn_off_dropout
from narrowgauge.train.value_head import ValueHead


class Models(NamedTuple):
    """What a PPOTrainer trains and asks."""

    policy: Trained
    value: Trained
    reference: Frozen
    reward: Frozen | RewardFunction | None


def prepared(
    policy: nn.Module,
    value: nn.Module | None,
    reference: nn.Module | None,
    reward: nn.Module | RewardFunction | None,
    recipe: Recipe,
    reference_recipe: Recipe,
    config: PPOConfig,
    optimizers: tuple[Optimizer, Optimizer] | None,
) -> Models:
    """Take over the models that `PPOTrainer` was given; recipes are resolved. Raises ConfigError as it says."""
    if value is None:
        value = ValueHead(copy.deepcopy(policy), generator=torch.Generator().manual_seed(config.seed))
    reference = copy.deepcopy(policy) if reference is None else reference
    _check(policy, value, reference, reward, recipe, reference_recipe)
    frozen = frozen_models.reference_of(reference, policy, reference_recipe, recipe)
    value_rate = config.learning_rate if config.value_learning_rate is None else config.value_learning_rate
    rates = (config.learning_rate, value_rate)
    trained = [
        _trained(model, None if optimizers is None else optimizers[i], rates[i], recipe, config)
        for i, model in enumerate((policy, value))
    ]
    asked = frozen_models.reward_model_of(reward, recipe) if isinstance(reward, nn.Module) else reward
    return Models(trained[0], trained[1], frozen, asked)


def _trained(model: nn.Module, optimizer: Optimizer | None, rate: float, recipe: Recipe, config: PPOConfig) -> Trained:
    turn_off_dropout(model)
    if optimizer is None:
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=config.weight_decay)
    model, optimizer = prepare(model, optimizer, recipe, max_skips=config.max_skips)
    return Trained(model, optimizer, LossScaler(recipe, device_of(model), max_skips=config.max_skips))


def _check(
    policy: nn.Module,
    value: nn.Module,
    reference: nn.Module,
    reward: nn.Module | RewardFunction | None,
    recipe: Recipe,
    reference_recipe: Recipe,
) -> None:
    if has_peers():
        raise ConfigError("PPO runs in one process: found several; start it without torchrun")
    if recipe.schedule or reference_recipe.schedule:
        raise ConfigError("PPO takes recipes without a schedule, for policy and reference alike: use recipe.at(steps)")
    for name, model in (("policy", policy), ("value model", value)):
        if is_converted(model):
            raise ConfigError(f"the {name} is prepared already: pass the plain model, which PPOTrainer prepares itself")
    models = {"policy": policy, "value model": value, "reference": reference}
    models |= {"reward model": reward} if isinstance(reward, nn.Module) else {}
    seen: dict[int, str] = {}
    for name, model in models.items():
        for p in model.parameters():
            if seen.setdefault(id(p), name) != name:
                raise ConfigError(f"{seen[id(p)]} and {name} share parameters: expected models of their own; copy one")
