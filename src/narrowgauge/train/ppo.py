"""Proximal policy optimization of a language model from rewards, in low precision.

Schulman et al. 2017 (arXiv:1707.06347) in the form of Stiennon et al. 2020 and InstructGPT (arXiv:2203.02155): a policy
that is trained, a value model that is trained beside it, a frozen reference that the policy pays for leaving, and a
reward model or function. Two of the four are stored in FP8, and two train with 8-bit states, where the recipe says so.

    trainer = PPOTrainer(policy, None, None, reward, recipe="narrow8", config=PPOConfig(), stop_ids=[eos])
    for statistics in trainer.train(prompts, steps=100): ...

A step: sample completions, score them, score their tokens under policy, reference and value model, estimate advantages,
and update. Micro-batches are drawn once a step and stay together: a recipe that scales by the tensor at hand then
computes a token's log-probability before and in the first update from the same bits, and the first ratio is exactly 1.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from narrowgauge.errors import CheckpointError, ConfigError, DataError
from narrowgauge.observe.ledger import Ledger, ledger
from narrowgauge.observe.observation import Observation
from narrowgauge.recipes import library
from narrowgauge.recipes.spec import Recipe
from narrowgauge.train import frozen_models
from narrowgauge.train.checkpoint import PathLike, load, save
from narrowgauge.train.experience import Scorer
from narrowgauge.train.frozen_models import Frozen
from narrowgauge.train.ppo_config import PPOConfig
from narrowgauge.train.ppo_losses import adapted_coefficient
from narrowgauge.train.ppo_models import prepared
from narrowgauge.train.ppo_statistics import PPOStatistics, Tally, has_ended, statistics_of
from narrowgauge.train.ppo_update import minibatches, update
from narrowgauge.train.rollout import RewardFunction, Samples, experience_of, scored
from narrowgauge.train.sampling import sample_completions
from narrowgauge.train.scoring import checked_prompts, mode
from narrowgauge.train.value_head import ValueHead

__all__ = ["PPOConfig", "PPOStatistics", "PPOTrainer", "ValueHead"]

Prompt = Sequence[int] | Tensor


class PPOTrainer:
    """Trains `policy` by PPO. All four models are taken over and changed in place.

    policy, value, reference: plain models, not yet prepared: this library's GPT, or modules that return `.logits` for
    (input_ids, attention_mask). value: one number a token; None: a ValueHead on a copy of the policy. reference: None:
    a copy of the policy; one that was frozen before stays as it is. reward: a model with one number a sequence, or a
    function of (prompts, completions), lists of ids, that returns a number for each.

    recipe: of policy and value model (`narrowgauge.prepare`), and of the frozen ones. A reference that has the policy's
    weights gives the policy's log-probabilities bit for bit, with weights of linear layers in FP8 where the recipe's
    products cast them so. reference_recipe: another one; then, and for a reference that came frozen, the two differ
    where nothing was learnt yet: the mean KL of the first step, the floor below which no KL can be told from rounding,
    is warned of and in every step's statistics.

    stop_ids: ids that end a completion. pad_id: fills up short sequences; None: the first stop id, or 0. generator: of
    all random numbers; None: a new one by config.seed. optimizers: of policy and value model; None: AdamW.

    Dropout is turned off. Raises ConfigError for models that share parameters, are prepared already, or do not fit.
    """

    def __init__(
        self,
        policy: nn.Module,
        value: nn.Module | None = None,
        reference: nn.Module | None = None,
        reward: nn.Module | RewardFunction | None = None,
        *,
        recipe: str | Recipe,
        config: PPOConfig | None = None,
        stop_ids: int | Sequence[int] = (),
        pad_id: int | None = None,
        generator: torch.Generator | None = None,
        optimizers: tuple[Optimizer, Optimizer] | None = None,
        reference_recipe: str | Recipe | None = None,
    ) -> None:
        self.config = config = config or PPOConfig()
        self.device = next(policy.parameters()).device
        self.recipe = library.recipe(recipe).resolve(self.device)
        other = self.recipe if reference_recipe is None else library.recipe(reference_recipe).resolve(self.device)
        models = prepared(policy, value, reference, reward, self.recipe, other, config, optimizers)
        self.policy, self.value, self.reference, self.reward = models
        self.stop_ids = [stop_ids] if isinstance(stop_ids, int) else [int(i) for i in stop_ids]
        self.pad_id = pad_id if pad_id is not None else (self.stop_ids or [0])[0]
        if generator is None:
            generator = torch.Generator(self.device).manual_seed(config.seed)
        self.generator = generator
        self.steps = 0
        self.kl_coefficient = config.kl_coefficient
        self.kl_floor = 0.0 if self.reference.matches else float("nan")  # measured in the first step
        self.observations: tuple[Observation, ...] = ()  # look at the updates of the steps that are due
        self._order: list[int] = []  # prompts of `train` that are still to come in this pass

    def train(self, prompts: Sequence[Prompt], steps: int) -> Iterator[PPOStatistics]:
        """Take steps on `config.batch_size` prompts each, drawn without replacement, pass after pass.

        Yields what each step did; save, evaluate or stop in between. A run that was loaded goes on where it was saved,
        with the same prompts.
        """
        if not len(prompts):
            raise DataError("no prompts: expected at least one")
        for _ in range(steps):
            chosen: list[int] = []
            while len(chosen) < self.config.batch_size:
                if not self._order:
                    drawn = torch.randperm(len(prompts), generator=self.generator, device=self.generator.device)
                    self._order = drawn.tolist()
                taken = self.config.batch_size - len(chosen)
                chosen, self._order = chosen + self._order[:taken], self._order[taken:]
            yield self.step([prompts[i] for i in chosen])

    def step(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[int]] | None = None,
        sampler_log_probs: Sequence[Sequence[float | None]] | None = None,
    ) -> PPOStatistics:
        """One rollout of all prompts, and the updates from it.

        completions: drawn elsewhere, by a policy that is nearly this one; they end with a stop id where one was drawn,
        and may be empty. sampler_log_probs: their tokens' log-probabilities, as that sampler says: each token then
        counts by policy / sampler, at most config.sampler_ratio_cap; those for which it says None or NaN teach the
        policy nothing, and are counted.

        Raises DataError for prompts and rewards that are not as they must be, DivergenceError where the policy gives no
        finite numbers any more.
        """
        samples = self._sample(prompts, completions, sampler_log_probs)
        samples.scores = scored(
            samples, self._reward, stop_ids=self.stop_ids, pad_id=self.pad_id, device=self.device,
            micro_batch_size=self.config.micro_batch_size, bad_rewards=self.config.bad_rewards,
        )  # fmt: skip
        if self.config.missing_end_penalty is not None:
            samples.scores = [
                score - (0.0 if has_ended(c, self.stop_ids) else self.config.missing_end_penalty)
                for score, c in zip(samples.scores, samples.completions, strict=True)
            ]
        tally, kept = Tally(), samples.without_bad()
        scorer = Scorer(self.policy.model, self.value.model, self.reference, self.config, self.kl_coefficient)
        size = self.config.micro_batch_size
        groups = minibatches(len(kept.prompts), size, self.generator) if kept.prompts else []
        experience = [experience_of(kept, rows, self.pad_id, self.device) for rows in groups]
        scorer.score(experience, tally, measures_floor=self.kl_floor != self.kl_floor)
        self._note_floor(tally)
        with ExitStack() as stack:
            for trained in (self.policy, self.value):
                stack.enter_context(mode(trained.model, training=True))
            for observation in self.observations:
                stack.enter_context(observation.step(self.steps + 1))
            for _ in range(self.config.epochs if experience else 0):
                together = len(experience) if self.config.minibatch_size is None else self.config.minibatch_size // size
                for numbers in minibatches(len(experience), together, self.generator):
                    update(self.policy, self.value, [experience[i] for i in numbers], self.config, tally)
        self.steps += 1
        statistics = statistics_of(
            tally, kept.scores, samples.completions, self.stop_ids, step=self.steps, kl_floor=self.kl_floor,
            kl_coefficient=self.kl_coefficient,
        )  # fmt: skip
        if self.config.kl_target is not None and kept.prompts:
            self.kl_coefficient = adapted_coefficient(
                self.kl_coefficient, statistics.kl, self.config.kl_target, len(kept.prompts), self.config.kl_horizon
            )
        return statistics

    @property
    def _reward(self) -> Frozen | RewardFunction:
        if self.reward is None:
            raise ConfigError("no reward: expected a model or a function of (prompts, completions); pass reward=")
        return self.reward

    def _sample(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Sequence[int]] | None,
        sampler_log_probs: Sequence[Sequence[float | None]] | None,
    ) -> Samples:
        if not len(prompts):
            raise DataError("no prompts: expected at least one")
        room = self.config.max_new_tokens
        if completions is not None:
            room = max([1, *map(len, completions)])
        checked = checked_prompts(prompts, self.policy.model, room, self.config.long_prompts)
        if completions is None:
            if sampler_log_probs is not None:
                raise ConfigError("sampler_log_probs without completions: expected both, or none of them")
            drawn = sample_completions(
                self.policy.model, checked, room, stop_ids=self.stop_ids, pad_id=self.pad_id,
                temperature=self.config.temperature, generator=self.generator,
                batch_size=self.config.sampling_batch_size,
            )  # fmt: skip
            return Samples(checked, drawn)
        rows = [[int(i) for i in completion] for completion in completions]
        sampler = None if sampler_log_probs is None else list(sampler_log_probs)
        for name, given in (("completions", rows), ("sampler_log_probs", sampler)):
            if given is not None and len(given) != len(checked):
                raise DataError(f"{len(given)} {name} for {len(checked)} prompts: expected one for each")
        return Samples(checked, rows, sampler_log_probs=sampler)

    def _note_floor(self, tally: Tally) -> None:
        if not tally.counts("kl_floor"):
            return
        self.kl_floor = tally.mean("kl_floor")
        if self.kl_floor > 0:
            warnings.warn(
                f"the reference does not compute as the policy does (recipe '{self.recipe.name}' and "
                f"'{self.reference.recipe.name}'): before any update their KL is {self.kl_floor:.3g} nats a token, "
                "rounding alone where their weights are equal, and the penalty counts it; for a KL of 0 leave "
                "reference_recipe out and pass a reference that was not frozen before",
                stacklevel=3,
            )

    def ledgers(self) -> dict[str, Ledger]:
        """Bytes by role of each model, from the storages that are there."""
        found = {
            "policy": ledger(self.policy.model, self.policy.optimizer),
            "value": ledger(self.value.model, self.value.optimizer),
            "reference": ledger(self.reference.model),
        }
        return found | ({"reward": ledger(self.reward.model)} if isinstance(self.reward, Frozen) else {})

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the two trained models and their optimizers: plain values, for `save`."""
        return {
            "steps": self.steps,
            "kl_coefficient": self.kl_coefficient,
            "kl_floor": self.kl_floor,
            "generator": self.generator.get_state(),
            "order": list(self._order),
            "scalers": [self.policy.scaler.state_dict(), self.value.scaler.state_dict()],
            "reference": frozen_models.fingerprint(self.reference.model),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`. Raises CheckpointError where the reference is not the one of the saved run."""
        found = frozen_models.fingerprint(self.reference.model)
        if found != state["reference"]:
            raise CheckpointError(
                "the reference is not that of the saved run: expected the same weights, recipe and precision; build "
                "the trainer from the models that the run began with, then load"
            )
        self.steps, self.kl_coefficient = state["steps"], state["kl_coefficient"]
        self.kl_floor, self._order = state["kl_floor"], list(state["order"])
        self.generator.set_state(state["generator"])
        for trained, saved in zip((self.policy, self.value), state["scalers"], strict=True):
            trained.scaler.load_state_dict(saved)

    def save(self, path: PathLike) -> Path:
        """Write a folder from which `load` goes on bit for bit: `value/`, and `policy/` with the trainer's state.

        The frozen models are not in it: they are built anew from what the run began with.
        """
        path = Path(path)
        save(path / "value", self.value.model, self.value.optimizer, steps=self.steps)
        save(path / "policy", self.policy.model, self.policy.optimizer, trainer=self.state_dict())
        return path

    def load(self, path: PathLike, *, is_verified: bool = False) -> None:
        """Read what `save` wrote into a trainer that was built as the saved one was. Raises CheckpointError.

        is_verified: as of `narrowgauge.load`.
        """
        path = Path(path)
        read = functools.partial(load, is_verified=is_verified)
        steps = read(path / "value", self.value.model, self.value.optimizer)["steps"]
        state = read(path / "policy", self.policy.model, self.policy.optimizer)["trainer"]
        if state["steps"] != steps:
            raise CheckpointError(
                f"{path}: the policy is of step {state['steps']} and the value model of step {steps}: writing was cut "
                "short; take an earlier checkpoint"
            )
        self.load_state_dict(state)
