"""From a configuration to a trainer: what does not need a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.errors import DataError
from narrowgauge.integrations import finetune_trainers
from narrowgauge.integrations.finetune_config import FinetuneConfig, GRPOConfig, SFTConfig

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


def test_parameters_may_stay_unused_among_listed_experts_and_beside_other_senses() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    assert not finetune_trainers.may_leave_unused(model)
    model.experts = nn.ModuleList([nn.Linear(2, 2)])
    assert finetune_trainers.may_leave_unused(model)
    both = SimpleNamespace(get_text_config=lambda: LlamaConfig(**TINY))
    assert finetune_trainers.may_leave_unused(SimpleNamespace(config=both, named_modules=lambda: []))


@pytest.mark.parametrize(
    ("batch_size", "processes", "generations", "expected"),
    [(8, 0, 8, 8), (4, 1, 8, 8), (2, 2, 8, 4), (2, 2, 4, 2), (3, 2, 4, 6), (6, 1, 4, 12)],
)
def test_held_out_answers_are_whole_groups(batch_size: int, processes: int, generations: int, expected: int) -> None:
    given = {"batch_size": batch_size, "processes": processes, "generations": generations}
    assert finetune_trainers.answers_held_out(GRPOConfig(model="m", data="d.jsonl", **given)) == expected
    assert expected * max(processes, 1) % generations == 0


@pytest.mark.parametrize(
    ("kind", "more", "processes", "needed"),
    [
        (SFTConfig, {}, 1, 1),
        (SFTConfig, {"accumulation": 3}, 2, 8),
        (GRPOConfig, {"generations": 4, "accumulation": 2}, 2, 4),  # 16 answers, 4 a prompt
        (GRPOConfig, {"generations": 4}, 1, 1),
    ],
)
def test_an_epoch_has_a_step(kind: type[FinetuneConfig], more: dict[str, int], processes: int, needed: int) -> None:
    config = kind(model="m", data="d.jsonl", batch_size=4, **more)

    def trainer_of(examples: int) -> SimpleNamespace:
        return SimpleNamespace(args=SimpleNamespace(world_size=processes), train_dataset=[0] * examples)

    finetune_trainers._check_enough(config, trainer_of(needed))
    with pytest.raises(DataError, match=f"d.jsonl: expected at least {needed} examples, .*, found {needed - 1}"):
        finetune_trainers._check_enough(config, trainer_of(needed - 1))
