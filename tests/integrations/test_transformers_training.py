"""What a run of transformers' Trainer goes through with a recipe: skipped steps, loss scaling, evaluation, options."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor
from transformers import Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments
from transformers import Trainer as StockTrainer

import narrowgauge as ng
from narrowgauge.integrations.transformers import RecipeCallback, Seq2SeqTrainer, Trainer
from narrowgauge.optim.guard import StepGuard
from narrowgauge.tensors.quantized import QuantizedTensor

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = [torch.randint(1, 64, (12,), generator=torch.Generator().manual_seed(i)) for i in range(24)]
DATA: Any = [{"input_ids": ids, "labels": ids} for ids in ROWS]


def arguments(folder: Path, kind: type = TrainingArguments, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 1, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 1, "save_strategy": "no",
    }  # fmt: skip
    return kind(str(folder), **values | changes)


def state(trainer: StockTrainer) -> dict[str, Tensor]:
    found = trainer.model.state_dict()
    return {k: v.dequantize() if isinstance(v, QuantizedTensor) else v.clone() for k, v in found.items()}


def assert_same(a: StockTrainer, b: StockTrainer) -> None:
    ours, theirs = state(a), state(b)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def column(trainer: StockTrainer, name: str) -> list[Any]:
    return [row[name] for row in trainer.state.log_history if name in row]


class Poison(TrainerCallback):
    """Makes gradients NaN in the step of this number, from 1, and looks at what comes of it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.scheduled: list[int] = []
        self.unchanged: list[bool] = []
        self.hooks: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            norm = next(p for p in model.parameters() if p.ndim == 1)
            self.hooks.append(norm.register_hook(lambda grad: grad * math.nan))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = [p.detach().clone() for p in model.parameters()]
        while self.hooks:
            self.hooks.pop().remove()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.scheduled.append(kwargs["lr_scheduler"].last_epoch)
        pairs = zip(self.before, model.parameters(), strict=True)
        self.unchanged.append(all(torch.equal(a, b.detach()) for a, b in pairs))


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_delayed"])
def test_a_step_that_is_skipped_does_not_advance_the_scheduler(recipe: str, tmp_path: Path) -> None:
    poison = Poison(2)
    run = arguments(tmp_path, bf16=True)  # as the recipe computes: it changes nothing
    trainer = Trainer(FAMILIES["llama"].make(), run, train_dataset=DATA, recipe=recipe, callbacks=[poison])
    trainer.train()
    assert poison.scheduled == [1, 1, 2] and poison.unchanged == [False, True, False]
    assert trainer.state.global_step == 3 and StepGuard.on(trainer._own_optimizer()).steps == 3
    assert column(trainer, "skipped_steps") == [1, 1]
    assert trainer.accelerator.mixed_precision == "no"


def test_the_stock_trainer_does_so_too_with_the_callback_and_trackers_hear_of_it(tmp_path: Path) -> None:
    heard: list[dict[str, float]] = []

    class Tracker(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            heard.append(dict(logs))

    model, poison = FAMILIES["gpt2"].make(), Poison(2)
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), "narrow8")
    run = arguments(tmp_path, max_grad_norm=0.0)
    trainer = StockTrainer(
        model, run, train_dataset=DATA, optimizers=(optimizer, None), callbacks=[Tracker(), poison]
    )  # fmt: skip
    RecipeCallback(statistics_every=2).add_to(trainer)
    trainer.train()
    assert poison.scheduled == [1, 1, 2] and poison.unchanged == [False, True, False]
    assert [row["skipped_steps"] for row in heard if "skipped_steps" in row] == [1, 1]
    counted = [row for row in heard if "flushed/grad_output" in row]
    assert len(counted) == 1 and all(0 <= counted[0][f"{what}/input"] <= 1 for what in ("flushed", "saturated"))


def test_fp16_is_scaled_skips_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    def make(*callbacks: TrainerCallback) -> Trainer:
        run = arguments(
            tmp_path, max_steps=4, fp16=True, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2
        )
        model = FAMILIES["llama"].make().half()  # as from_pretrained(dtype=torch.float16) gives it
        return Trainer(model, run, train_dataset=DATA, recipe="fp16", callbacks=[*callbacks])

    poison = Poison(2)
    with pytest.warns(UserWarning, match="float16"):
        whole = make(poison)
        whole.train()
    assert {p.dtype for p in whole.model.parameters()} == {torch.float32}  # masters
    assert isinstance(whole.accelerator.scaler, ng.LossScaler)
    assert column(whole, "loss_scale") == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
    assert poison.scheduled == [1, 1, 2, 3] and poison.unchanged == [False, True, False, False]
    norms = column(whole, "grad_norm")
    assert math.isnan(norms[1]) or all(0.01 < norm < 100 for norm in (norms[0], *norms[2:]))  # of unscaled gradients
    with pytest.warns(UserWarning, match="float16"):
        resumed = make()
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.accelerator.scaler.state_dict() == whole.accelerator.scaler.state_dict()
    assert column(resumed, "loss")[-2:] == column(whole, "loss")[-2:]
    assert column(resumed, "learning_rate") == column(whole, "learning_rate")
    assert_same(resumed, whole)


def test_labels_that_are_all_ignored_are_named_and_skipped(tmp_path: Path) -> None:
    ignored = [{"input_ids": ids, "labels": torch.full_like(ids, -100)} for ids in ROWS]
    trainer = Trainer(
        FAMILIES["llama"].make(), arguments(tmp_path, max_steps=1), train_dataset=ignored, recipe="narrow8"
    )
    before = FAMILIES["llama"].make().bfloat16().state_dict()
    with pytest.warns(UserWarning, match="step 1: all labels are -100, .* the step changes nothing"):
        trainer.train()
    assert column(trainer, "grad_norm") == [0.0]
    for name, value in state(trainer).items():
        assert torch.equal(value, before[name].to(value.dtype)), name


def test_activation_checkpointing_of_the_arguments_changes_no_bit(tmp_path: Path) -> None:
    runs = []
    for more in ({}, {"activation_checkpointing": True}):
        run = arguments(tmp_path, lr_scheduler_type="cosine", warmup_steps=1, **more)
        runs.append(Trainer(FAMILIES["gemma3"].make(), run, train_dataset=DATA, recipe="fp8_delayed"))
        runs[-1].train()
    assert_same(*runs)


def test_evaluation_runs_by_the_recipe_before_and_after_training(tmp_path: Path) -> None:
    run = arguments(
        tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    trainer = Trainer(FAMILIES["llama"].make(), run, train_dataset=DATA, eval_dataset=DATA[:4], recipe="narrow8")
    first = trainer.evaluate()["eval_loss"]
    assert trainer.conversion_report.counts()["converted"] == 14
    twin = FAMILIES["llama"].make()
    twin, _ = ng.prepare(twin, torch.optim.AdamW(twin.parameters()), "narrow8")
    twin.eval()
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in DATA[:4]])
        wanted = twin(input_ids=ids, labels=ids)
    assert first == pytest.approx(wanted.loss.item(), rel=1e-6)
    predicted = trainer.predict(DATA[:4])
    assert torch.equal(torch.tensor(predicted.predictions), wanted.logits.float())
    trainer.train()
    found = column(trainer, "eval_loss")
    best = 1 + max(range(3), key=lambda at: found[at])
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == max(found)  # with all digits
    loaded = type(twin).from_pretrained(tmp_path / f"checkpoint-{best}")
    for name, p in trainer.model.named_parameters():
        assert torch.equal(trainer._own_optimizer().full_values(p), loaded.get_parameter(name).float()), name


def test_t5_by_the_sequence_to_sequence_trainer(tmp_path: Path) -> None:
    run = arguments(
        tmp_path, Seq2SeqTrainingArguments, max_steps=2, predict_with_generate=True, generation_max_length=6
    )  # fmt: skip
    trainer = Seq2SeqTrainer(FAMILIES["t5"].make(), run, train_dataset=DATA, eval_dataset=DATA[:4], recipe="narrow8")
    trainer.train()
    assert trainer.conversion_report.counts()["converted"] == 32
    assert trainer.ledger.roles["param"] == 2 * sum(p.numel() for p in trainer.model.parameters())
    predicted = trainer.predict(DATA[:4]).predictions
    assert len(predicted) == 4 and predicted.max() < 64


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own
def test_torch_compile_of_the_arguments_compiles_the_prepared_model(tmp_path: Path) -> None:
    runs = []
    for more in ({}, {"torch_compile": True}):
        run = arguments(tmp_path, max_steps=2, **more)
        runs.append(Trainer(FAMILIES["llama"].make(), run, train_dataset=DATA, recipe="fp8_current"))
        runs[-1].train()
    eager, compiled = runs
    assert hasattr(compiled.model_wrapped, "_orig_mod") and compiled.conversion_report.counts()["converted"] == 14
    # sums in another order, a code more or less: within a unit in the last place of bfloat16
    assert column(compiled, "loss") == pytest.approx(column(eager, "loss"), rel=2**-8)


def test_hooks_of_scripts_meet_gradients_that_do_what_gradients_do(tmp_path: Path) -> None:
    """Case 33: what third-party training code does with gradients, in hooks that it placed before the Trainer came."""
    seen: list[str] = []

    def use(p: Tensor) -> None:
        grad = p.grad
        assert grad is not None
        wide = grad.dequantize() if isinstance(grad, QuantizedTensor) else grad.clone()
        seen.append(type(grad).__name__)
        assert torch.equal(grad.view(-1) + 0, wide.view(-1)) and torch.equal(grad.clone() + 0, wide)
        assert grad.isfinite().all() and grad.numel() == p.numel() and torch.equal(grad.to(torch.float32), wide.float())
        assert float(grad.norm()) == pytest.approx(float(wide.float().norm()), rel=2**-8)
        grad.mul_(0.5)

    runs = []
    for halved, lr in ((True, 0.5), (False, 0.25)):
        model = FAMILIES["llama"].make()
        if halved:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(use)
        run = arguments(
            tmp_path, max_steps=1, optim="sgd", learning_rate=lr, lr_scheduler_type="constant", max_grad_norm=0
        )
        recipe = ng.recipe("narrow8", min_state_size=256)
        runs.append(Trainer(model, run, train_dataset=DATA, recipe=recipe))
        runs[-1].train()
    assert_same(*runs)  # half the gradient at twice the rate: the same update, to the bit
    assert {"QuantizedTensor", "Tensor"} == set(seen) and len(seen) == len(list(runs[0].model.parameters()))
