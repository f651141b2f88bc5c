"""PPO on prompts from JSON Lines: texts to ids, reward functions on texts, and checkpoints of `train.ppo`'s loop."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from narrowgauge.data.jsonl import Record
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.integrations.finetune_config import PPOConfig
from narrowgauge.integrations.finetune_events import Started
from narrowgauge.integrations.finetune_models import Loaded, Say, end_tokens, load
from narrowgauge.integrations.finetune_run import LAST_WRITTEN, FinetuneRun
from narrowgauge.integrations.finetune_watch import Watch
from narrowgauge.integrations.ppo_journal import PPOJournal
from narrowgauge.integrations.pretrained import save_pretrained
from narrowgauge.integrations.rewards import check_rewards, checked
from narrowgauge.layers.report import report
from narrowgauge.train.ppo import PPOConfig as Numbers
from narrowgauge.train.ppo import PPOStatistics, PPOTrainer

Ids = list[int]
_STATE = "narrowgauge"  # the loop's part of a checkpoint
_NO_LIMIT = 1e30


class PPORun:
    """The loop, and the rows that its prompts are of.

    Each step answers `batch_size` x `accumulation` rows: those after the last step's, in an order that is drawn anew
    for each pass over the data.
    """

    def __init__(self, config: PPOConfig, loaded: Loaded, rows: list[Record], rewards: Sequence[Callable], say: Say):
        device = config.torch_device()
        self.config, self.rows, self.tokenizer = config, rows, loaded.tokenizer
        self.prompts = [prompt_ids(row["prompt"], loaded.tokenizer) for row in rows]
        self._chosen: list[int] = []
        self._rewards = [checked(function, path) for path, function in zip(config.reward, rewards, strict=True)]
        reward = self._score if rewards else _reward_model(config, loaded, say).to(device)
        self.trainer = PPOTrainer(
            loaded.model.to(device),
            reward=reward,
            recipe=config.build_recipe(),
            config=_numbers(config),
            stop_ids=end_tokens(loaded),
            pad_id=loaded.tokenizer.pad_token_id,
        )

    def steps(self) -> Iterator[PPOStatistics]:
        """Go on to the last step."""
        size = self.config.batch_size * self.config.accumulation
        order = islice(_order(len(self.rows), self.config.seed), self.trainer.steps * size, None)
        while self.trainer.steps < self.config.steps:
            self._set_rate()
            self._chosen = list(islice(order, size))
            yield self.trainer.step([self.prompts[row] for row in self._chosen])

    def rate(self) -> float:
        """The learning rate of the next step."""
        config, step = self.config, self.trainer.steps
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        progress = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
        factor = {
            "constant": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }[config.schedule]
        return config.learning_rate * factor

    def save(self, path: Path) -> None:
        """Write a checkpoint: a Hugging Face directory with the loop's state in it. Raises CheckpointError."""
        shutil.rmtree(path, ignore_errors=True)  # one that was cut short
        policy = self.trainer.policy
        save_pretrained(policy.model, path, policy.optimizer, "fp32")
        self.tokenizer.save_pretrained(path)
        self.trainer.save(path / _STATE)
        (path / LAST_WRITTEN).write_text(json.dumps({"global_step": self.trainer.steps}) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Go on from a checkpoint, which `FinetuneRun` has verified. Raises CheckpointError."""
        self.trainer.load(path / _STATE, is_verified=True)

    def _set_rate(self) -> None:
        rate = self.rate()
        for trained in (self.trainer.policy, self.trainer.value):
            for group in trained.optimizer.param_groups:
                group["lr"] = rate

    def _score(self, prompts: list[Ids], completions: list[Ids]) -> list[float]:
        """The sum of what the functions say, called as TRL calls them. Raises DataError where all say None."""
        rows = [self.rows[at] for at in self._chosen]
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
        is_chat = isinstance(rows[0]["prompt"], list)
        columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
        columns["completions"] = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
        columns["prompts"] = [row["prompt"] for row in rows]
        columns["completion_ids"] = completions
        found = [[math.nan if value is None else value for value in _said(each, columns)] for each in self._rewards]
        rewards = torch.tensor(found, dtype=torch.float64).T
        check_rewards(rewards, self.config.reward)
        return rewards.nansum(dim=1).tolist()


def run_ppo(run: PPORun, folder: FinetuneRun, watch: Watch) -> int:
    """Take the steps that are left, or those until a signal; return the last one's number."""
    config, trainer = run.config, run.trainer
    if watch.resumed_from is not None:
        run.load(watch.resumed_from)
    watch.step = trainer.steps
    watch.on_event(
        Started(
            step=trainer.steps,
            run_dir=folder.path,
            config=config,
            steps=config.steps,
            parameters=sum(p.numel() for p in trainer.policy.model.parameters()),
            examples=len(run.rows),
            eval_examples=0,
            report=report(trainer.policy.model),
            device=str(trainer.device),
            resumed_from=watch.resumed_from,
        )
    )
    journal = None if watch.journal is None else PPOJournal(trainer, watch.journal, config.statistics_every)
    watch.start_clock()
    rate = run.rate()
    with watch.interruption:
        for statistics in run.steps():
            watch.stepped(trainer.steps, config.steps, _figures(statistics, rate))
            if journal is not None:
                journal.stepped(trainer.steps)
            rate = run.rate()
            is_last = trainer.steps == config.steps or watch.interruption.requested
            if is_last or (config.save_every and trainer.steps % config.save_every == 0):
                path = folder.checkpoint(trainer.steps)
                run.save(path)
                watch.saved(path)
                for step in folder.steps()[: -config.keep_last]:
                    shutil.rmtree(folder.checkpoint(step), ignore_errors=True)
            if watch.interruption.requested:
                break
    return trainer.steps


def _said(function: Callable[..., Any], columns: dict[str, Any]) -> list[float | None]:
    """What a reward function says, which may be a coroutine as in TRL."""
    said = function(**columns)
    return asyncio.run(said) if inspect.iscoroutine(said) else said


def prompt_ids(prompt: str | list[Record], tokenizer: Any) -> Ids:
    """A prompt's tokens; those of messages end where the assistant's answer begins. Raises DataError for none."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError(f"prompt {prompt!r:.60}: expected at least one token, found none: leave it out")
    return list(ids)


def _numbers(config: PPOConfig) -> Numbers:
    return Numbers(
        max_new_tokens=config.max_completion,
        temperature=config.temperature,
        batch_size=config.batch_size * config.accumulation,
        micro_batch_size=config.batch_size,
        minibatch_size=config.mini_batch_size or None,
        epochs=config.passes,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip or _NO_LIMIT,
        gamma=config.gamma,
        lam=config.gae_lambda,
        clip_range=config.clip_range,
        kl_coefficient=config.kl,
        seed=config.seed,
    )


def _reward_model(config: PPOConfig, loaded: Loaded, say: Say) -> Any:
    """The reward model of a configuration. Raises ConfigError where its tokens are others, or it has no head."""
    assert config.reward_model is not None  # check saw to it
    said: list[str] = []
    found = load(config.reward_model, is_reward=True, say=said.append)
    if said and said[-1].startswith("not in the checkpoint"):
        raise ConfigError(
            f"reward_model={config.reward_model!r}: expected a trained reward model, found one without a head: train "
            "it with `narrowgauge reward`"
        )
    if found.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise ConfigError(
            f"reward_model={config.reward_model!r}: expected the tokenizer of {config.model!r}, found another one: "
            "take a reward model that was trained from the same model"
        )
    for message in said:
        say(message)
    return found.model


def _order(count: int, seed: int) -> Iterator[int]:
    """Rows, pass after pass, each in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _figures(statistics: PPOStatistics, rate: float) -> dict[str, float]:
    told = {key: float(value) for key, value in statistics.to_dict().items() if key != "step"}
    renamed = {"policy_loss": "loss", "reward_mean": "reward", "policy_grad_norm": "grad_norm"}
    return {renamed.get(key, key): value for key, value in told.items()} | {"lr": rate}
