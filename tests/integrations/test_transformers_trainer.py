"""transformers' Trainer with a recipe, and the stock one with a prepared model."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
from transformers import Trainer as StockTrainer

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError, RecipeError
from narrowgauge.integrations import requirements
from narrowgauge.integrations.transformers import Trainer
from narrowgauge.tensors.quantized import QuantizedTensor

RECIPES = ("fp8_delayed", "narrow8", "fp8_lm_o2", "fp8_lm_o3")


class Lines(Dataset[dict[str, Tensor]]):
    """Sequences of 24 random bytes."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 256, (24,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, **shape)
    )


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 3e-3,
        "logging_steps": 1, "save_steps": 2, "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 1,
    }  # fmt: skip
    return TrainingArguments(str(folder), **values | changes)


def losses(trainer: StockTrainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def state(trainer: StockTrainer) -> dict[str, Tensor]:
    found = trainer.model.state_dict()
    return {k: v.dequantize() if isinstance(v, QuantizedTensor) else v.clone() for k, v in found.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_resumed_is_the_same_run_and_transformers_loads_what_it_wrote(recipe: str, tmp_path: Path) -> None:
    whole = Trainer(llama(), arguments(tmp_path), train_dataset=Lines(), recipe=recipe)
    whole.train()
    counts = whole.conversion_report.counts()
    assert counts["converted"] >= 14  # the linear layers of two blocks
    resumed = Trainer(llama(), arguments(tmp_path), train_dataset=Lines(), recipe=recipe)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 4
    for name, value in state(whole).items():
        assert torch.equal(state(resumed)[name], value), name

    loaded, info = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not any(info.values()), info
    optimizer = whole.optimizer.optimizer
    for name, p in whole.model.named_parameters():
        value = loaded.get_parameter(name)
        assert value.dtype is torch.float32  # as it was before it was prepared
        full = optimizer.full_values(p) if hasattr(optimizer, "full_values") else p
        assert torch.equal(value, full.float()), name


def test_the_stock_trainer_resumes_a_prepared_model_bit_for_bit(tmp_path: Path) -> None:
    run = arguments(tmp_path, gradient_accumulation_steps=1)

    def make() -> StockTrainer:
        model = llama()
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "narrow8")
        return StockTrainer(model, run, train_dataset=Lines(), optimizers=(optimizer, None))

    whole, resumed = make(), make()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    for name, value in state(whole).items():
        assert torch.equal(state(resumed)[name], value), name


def test_micro_batches_are_summed_exactly_and_clipped_by_their_codes(tmp_path: Path) -> None:
    seen: dict[str, list[Any]] = {"within": [], "before the step": [], "norm": []}

    class Look(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen["within"].append(type(model.model.layers[0].mlp.up_proj.weight.grad))

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen["before the step"].append(type(model.model.layers[0].mlp.up_proj.weight.grad))
            seen["norm"].append(ng.clip_grad_norm_(model.parameters(), float("inf")).item())

    run = arguments(tmp_path, max_steps=2, max_grad_norm=0.25, save_strategy="no")
    trainer = Trainer(llama(), run, train_dataset=Lines(), recipe="narrow8", callbacks=[Look()])
    trainer.train()
    assert seen["within"] == [Tensor] * 2
    assert seen["before the step"] == [QuantizedTensor] * 2
    assert seen["norm"] == pytest.approx([0.25] * 2, rel=1e-4)
    assert all(row["grad_norm"] > 0.5 for row in trainer.state.log_history if "grad_norm" in row)  # before clipping


def test_what_the_casts_did_is_logged_with_the_loss(tmp_path: Path) -> None:
    run = arguments(tmp_path, save_strategy="no")
    trainer = Trainer(llama(), run, train_dataset=Lines(), recipe="fp8_current", statistics_every=2)
    trainer.train()
    counted = [row["step"] for row in trainer.state.log_history if "flushed/grad_output" in row]
    assert counted == [2, 4]
    assert all(0 <= row[key] <= 1 for row in trainer.state.log_history for key in row if key.startswith("flushed/"))
    row = next(row for row in trainer.state.log_history if "flushed/weight" in row)
    assert {key for key in row if "/" in key} == {"zero/grad"} | {
        f"{what}/{role}" for what in ("saturated", "flushed", "sqnr_db") for role in ("input", "weight", "grad_output")
    }
    assert 20 < row["sqnr_db/grad_output"] < row["sqnr_db/weight"] < 35


def test_a_journal_for_the_report_lies_in_the_output_directory_and_a_resumed_run_goes_on_with_it(
    tmp_path: Path,
) -> None:
    run = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)

    def make() -> Trainer:
        return Trainer(llama(), run, train_dataset=Lines(), recipe="narrow8", statistics_every=1)

    whole = make()
    whole.train()
    journal = ng.observe.Journal(tmp_path)
    assert journal.header["recipe"]["name"] == "narrow8" and journal.header["formats"] and journal.header["environment"]
    assert journal.steps["step"].tolist() == [1, 2, 3, 4] and not journal.problems
    assert journal.steps["loss"].tolist() == losses(whole) and not journal.steps["skipped"].any()
    rows = list(journal.of_kind("precision"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    roles = {role for row in rows for of in row["layers"].values() for role in of}
    assert roles == {"input", "weight", "grad_output", "grad", "exp_avg", "exp_avg_sq", "param"}
    assert [row["step"] for row in journal.of_kind("histograms")] == [4]
    (sizes,) = journal.of_kind("bytes")
    assert sizes["step"] == 1 and sizes["roles"]["grad"] > 0 and sizes["parameters"] > 0
    make().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    resumed = ng.observe.Journal(tmp_path)
    assert [row["step"] for row in resumed.of_kind("resumed")] == [2]
    assert resumed.steps["step"].tolist() == [1, 2, 3, 4]
    assert list(resumed.of_kind("precision")) == rows  # the same bits


def test_an_error_in_a_step_leaves_gradients_that_the_next_run_can_use(tmp_path: Path) -> None:
    class Fails(Trainer):
        fails = True

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if self.fails and self.accelerator.sync_gradients:
                raise KeyError("labels")
            return super().compute_loss(*args, **kwargs)

    run = arguments(tmp_path, max_steps=1, save_strategy="no")
    trainer = Fails(llama(), run, train_dataset=Lines(), recipe="narrow8", statistics_every=1)
    with pytest.raises(KeyError, match="labels"):
        trainer.train()
    trainer.fails = False
    trainer.model.zero_grad()
    trainer.train()
    assert len(losses(trainer)) == 1 and losses(trainer)[0] > 0


REFUSED = {
    "bf16=True.*'fp32', which computes in FP32.*leave bf16 out, or take recipe='bf16'": {
        "recipe": "fp32",
        "bf16": True,
    },
    "fp16=True.*'narrow8', which computes in BF16.*take recipe='fp16'": {"fp16": True},
    "bf16_full_eval=True casts the parameters": {"bf16_full_eval": True},
    "tf32=False.*'tf32' with tf32=True: leave tf32 out": {"recipe": "tf32", "tf32": False},
    "did you mean 'narrow8'": {"recipe": "narow8"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused_with_a_remedy(message: str, tmp_path: Path) -> None:
    changes = dict(REFUSED[message])
    recipe = changes.pop("recipe", "narrow8")
    with pytest.raises((ConfigError, RecipeError), match=message):
        Trainer(llama(), arguments(tmp_path, **changes), train_dataset=Lines(), recipe=recipe)


def test_a_checkpoint_of_the_stock_trainer_is_named(tmp_path: Path) -> None:
    StockTrainer(llama(), arguments(tmp_path), train_dataset=Lines()).train()
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=Lines(), recipe="narrow8")
    with pytest.raises(CheckpointError, match="checkpoint-2: expected a checkpoint of a trainer with a recipe"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("found", [None, "4.57.1"])
def test_without_transformers_or_with_an_old_one_the_message_says_what_to_install(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(package: str) -> str:
        if found is None:
            raise requirements.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(requirements, "version", version)
    monkeypatch.delitem(sys.modules, "narrowgauge.integrations.transformers")
    message = r"pip install 'narrowgauge\[hf\]'" if found is None else "transformers 5.0 or newer, found 4.57.1"
    with pytest.raises(ConfigError, match=message):
        importlib.import_module("narrowgauge.integrations.transformers")
