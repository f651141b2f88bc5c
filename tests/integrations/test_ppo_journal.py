"""PPO's journal has what precision does to policy and value model, and looking changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import narrowgauge as ng
from narrowgauge.integrations.ppo_journal import PPOJournal
from narrowgauge.models.gpt import GPT, GPTConfig
from narrowgauge.observe.journal_writer import JournalWriter
from narrowgauge.observe.report_data import report_data
from narrowgauge.observe.report_run import RunReader
from narrowgauge.train.ppo import PPOConfig, PPOTrainer

SHAPE = GPTConfig(vocab_size=12, layers=1, width=32, heads=2, context=16)
NUMBERS = PPOConfig(max_new_tokens=4, batch_size=4, epochs=2, micro_batch_size=2, learning_rate=1e-2)
PROMPTS = [[1 + i, 2] for i in range(8)]


def trained(path: Path | None, every: int = 2, steps: int = 4, recipe: str = "narrow8") -> PPOTrainer:
    def reward(prompts: list[list[int]], completions: list[list[int]]) -> list[float]:
        return [float(sum(token == 7 for token in each)) for each in completions]

    policy = GPT(SHAPE, generator=torch.Generator().manual_seed(0))
    trainer = PPOTrainer(policy, reward=reward, recipe=recipe, config=NUMBERS, stop_ids=0)
    writer = None if path is None else JournalWriter.create(path, {"task": "ppo"})
    journal = None if writer is None else PPOJournal(trainer, writer, every)
    for _ in trainer.train(PROMPTS, steps):
        if writer is not None and journal is not None:
            writer.write("step", step=trainer.steps, loss=1.0)
            journal.stepped(trainer.steps)
    if writer is not None:
        writer.close()
    return trainer


def stored(trainer: PPOTrainer) -> list[torch.Tensor]:
    models = (trainer.policy.model, trainer.value.model)
    return [p.detach().float() for model in models for p in model.parameters()]


def test_policy_and_value_model_are_looked_at_and_no_bit_changes(tmp_path: Path, one_thread: None) -> None:
    path = tmp_path / "journal.jsonl"
    plain, observed = trained(None), trained(path)
    assert all(map(torch.equal, stored(plain), stored(observed)))
    journal = ng.observe.Journal(path)
    precision = list(journal.of_kind("precision"))
    assert [row["step"] for row in precision] == [2, 4]
    layers = precision[-1]["layers"]
    assert {"blocks.0.mlp.down", "value.backbone.blocks.0.mlp.down"} <= layers.keys()
    for name in ("blocks.0.mlp.down", "value.backbone.blocks.0.mlp.down"):
        assert {"input", "weight", "grad_output", "grad", "exp_avg", "exp_avg_sq", "param"} <= layers[name].keys()
        assert 25 < layers[name]["weight"]["sqnr_db"] < 35  # E4M3
        assert journal.header["formats"][name]["weight"]["format"] == "E4M3FN"
    largest = dict(observed.policy.model.named_parameters())["blocks.0.mlp.down.weight"].detach().abs().max()
    amax = layers["blocks.0.mlp.down"]["param"]["amax"]  # of the step's four updates, with the residual
    assert float(largest) * (1 - 2**-8) <= amax <= float(largest) + 4 * 2 * NUMBERS.learning_rate
    shown = report_data([RunReader(tmp_path)])["runs"][0]
    assert shown["precision"]["samples"] == 2 and shown["missing"] == [
        "exponent histograms", "validation losses"
    ]  # fmt: skip


def test_bytes_are_those_of_all_models_with_their_gradients(tmp_path: Path, one_thread: None) -> None:
    trainer = trained(tmp_path / "journal.jsonl", every=0, steps=2, recipe="fp32")
    (row,) = ng.observe.Journal(tmp_path / "journal.jsonl").of_kind("bytes")
    ledgers = trainer.ledgers()  # after the step: without gradients
    for role in ("param", "exp_avg", "exp_avg_sq"):
        assert row["roles"][role] == sum(each.roles.get(role, 0) for each in ledgers.values()), role
    trainable = sum(p.numel() for each in (trainer.policy, trainer.value) for p in each.model.parameters())
    assert row["roles"]["grad"] == row["roles"]["exp_avg"] == 4 * trainable
    assert row["parameters"] == sum(each.parameters for each in ledgers.values())
    assert not list(ng.observe.Journal(tmp_path / "journal.jsonl").of_kind("precision"))
