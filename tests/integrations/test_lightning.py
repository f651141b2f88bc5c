"""Lightning's Trainer with a recipe."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError, RecipeError
from narrowgauge.integrations.huggingface import full_values
from narrowgauge.tensors.quantized import QuantizedTensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of lightning and what it loads
    import lightning.pytorch as pl

    from narrowgauge.integrations.lightning import Precision

RECIPES = ("fp8_delayed", "narrow8", "fp8_lm_o2")
STEPS, CLIP = 4, 0.1

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need",
        "You defined a `validation_step` but have no `val_dataloader`",
        ".*does not have many workers which may be a bottleneck",
        "The number of training batches .* is smaller than the logging interval",
        ".*is an instance of `nn.Module` and is already saved during checkpointing",
        "Checkpoint directory .* exists and is not empty",
        "`isinstance.treespec, LeafSpec.` is deprecated",
        "You're resuming from a checkpoint that ended before the epoch ended",
        "Your `val_dataloader`'s sampler has shuffling enabled",
    )
]


class Module(pl.LightningModule):
    """Says the number that follows; `factor` scales a loss, to break a step."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Embedding(64, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64)
        )
        self.losses: list[float] = []
        self.grads: list[type] = []
        self.factor = 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.net(ids).flatten(0, 1), (ids.flatten() + 1) % 64)

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss = self(ids)
        self.losses.append(loss.item())
        return loss * self.factor

    def on_after_backward(self) -> None:
        self.grads.append(type(self.net[1].weight.grad))

    def validation_step(self, ids: Tensor, index: int) -> None:
        self.log("val_loss", self(ids))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(count: int) -> DataLoader[Any]:
    ids = torch.randint(0, 64, (8 * count, 4), generator=torch.Generator().manual_seed(0))
    return DataLoader(ids, batch_size=8)  # type: ignore[arg-type]


def one_batch_again() -> DataLoader[Any]:
    """Lightning goes on within an epoch from its first batch, unless the loader has a state: let that be no other."""
    return DataLoader(batches(1).dataset[:].repeat(STEPS, 1), batch_size=8)  # type: ignore[index,arg-type]


def trainer(recipe: str | ng.Recipe, folder: Path, **changes: Any) -> pl.Trainer:
    options: dict[str, Any] = {
        "max_steps": STEPS, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "enable_checkpointing": False, "gradient_clip_val": CLIP,
        "default_root_dir": folder, "plugins": [Precision(recipe)],
    }  # fmt: skip
    return pl.Trainer(**options | changes)


def alone(recipe: str, micro_batches: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """The loop without Lightning."""
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    module, optimizer = ng.prepare(module, optimizer, recipe, autocast=False)
    data, losses = iter(batches(STEPS * micro_batches)), []
    for _ in range(STEPS):
        with ng.accumulate(module):
            for _ in range(micro_batches):
                with ng.autocast(recipe, "cpu"):
                    loss = module(next(data))
                (loss / micro_batches).backward()
                losses.append(loss.item())
        ng.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses, full_values(module, optimizer)


def full(trained: pl.Trainer) -> dict[str, Tensor]:
    return full_values(trained.lightning_module, trained.optimizers[0])


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_training_is_the_loop_without_lightning(recipe: str, micro_batches: int, tmp_path: Path) -> None:
    losses, weights = alone(recipe, micro_batches)
    module = Module()
    trained = trainer(recipe, tmp_path, accumulate_grad_batches=micro_batches)
    trained.fit(module, batches(STEPS * micro_batches))
    assert module.losses == losses
    assert_equal(full(trained), weights)
    kept = Tensor if recipe in ("bf16", "fp8_delayed") else QuantizedTensor
    assert module.grads == [*[Tensor] * (micro_batches - 1), kept] * STEPS
    assert ng.report(module).counts()["converted"] == (1 if recipe == "bf16" else 3)
    assert trained.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**STEPS)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_resumed_is_the_same_run_and_its_weights_are_plain(recipe: str, tmp_path: Path) -> None:
    saving = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    whole = trainer(recipe, tmp_path, enable_checkpointing=True, callbacks=[saving])
    first = Module()
    whole.fit(first, one_batch_again())
    path = tmp_path / "step=2.ckpt"
    second = Module()
    resumed = trainer(recipe, tmp_path)
    resumed.fit(second, one_batch_again(), ckpt_path=path, weights_only=True)
    assert second.losses == first.losses[2:] and len(first.losses) == STEPS
    assert_equal(full(resumed), full(whole))

    last = tmp_path / f"step={STEPS}.ckpt"
    saved = torch.load(last, weights_only=True)["state_dict"]
    values = full(whole)
    assert set(saved) == set(Module().state_dict())
    assert all(torch.equal(saved[name], values[name]) and value.dtype is torch.float32 for name, value in saved.items())
    plain = Module.load_from_checkpoint(last, weights_only=True)
    assert_equal(plain.state_dict(), saved)

    # the best checkpoint, evaluated after training and in a process that has not trained
    (after,) = whole.validate(first, batches(2), ckpt_path=last, weights_only=True, verbose=False)
    (fresh,) = trainer(recipe, tmp_path).validate(
        Module(), batches(2), ckpt_path=last, weights_only=True, verbose=False
    )
    (wide,) = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False).validate(
        plain, batches(2), verbose=False
    )
    for found in (after, fresh):  # E4M3 in each of two layers, 2.6 % of an operand
        assert found["val_loss"] == pytest.approx(wide["val_loss"], rel=0.02)
    with pytest.raises(CheckpointError, match="written by another recipe than 'narrow8_sr'"):
        trainer("narrow8_sr", tmp_path).fit(Module(), batches(STEPS), ckpt_path=path, weights_only=True)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step..` before")  # the first step is skipped
def test_fp16_scales_the_loss_and_skips_a_broken_step(tmp_path: Path) -> None:
    module = Module()
    trained = trainer("fp16", tmp_path)
    trained.fit(module, batches(STEPS))
    expected, optimizer = ng.prepare(Module(), None, "fp16", autocast=False)[0], None
    optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    expected, optimizer = ng.prepare(expected, optimizer, "fp16", autocast=False)
    schedule, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), ng.LossScaler("fp16", "cpu")
    for ids in batches(STEPS):
        with ng.autocast("fp16", "cpu"):
            loss = expected(ids)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        ng.clip_grad_norm_(expected.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    assert_equal(full(trained), full_values(expected, optimizer))
    plugin: Any = trained.precision_plugin
    assert plugin.scaler.get_scale() == 2.0**16

    broken = Module()
    broken.factor = float("inf")
    before = {name: value.clone() for name, value in broken.state_dict().items()}
    failing = trainer("fp16", tmp_path, max_steps=2)
    failing.fit(broken, batches(2))
    assert_equal(broken.state_dict(), before)
    assert failing.precision_plugin.scaler.get_scale() == 2.0**14  # type: ignore[attr-defined]


def test_an_error_within_a_step_leaves_a_module_that_trains(tmp_path: Path) -> None:
    class Fails(Module):
        fails = True

        def training_step(self, ids: Tensor, index: int) -> Tensor:
            if self.fails and index == 1:
                raise KeyError("labels")
            return super().training_step(ids, index)

    module = Fails()
    with pytest.raises(KeyError, match="labels"):
        trainer("narrow8", tmp_path, accumulate_grad_batches=2).fit(module, batches(2))
    module.fails = False
    module.zero_grad()
    trainer("narrow8", tmp_path, accumulate_grad_batches=2, max_steps=1).fit(module, batches(2))
    assert module.grads[-2:] == [Tensor, QuantizedTensor]


def test_what_cannot_be_prepared_is_refused(tmp_path: Path) -> None:
    class Two(Module):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.net[1], self.net[4])]

        def training_step(self, ids: Tensor, index: int) -> Tensor:  # type: ignore[override]
            raise AssertionError

    two = Two()
    two.automatic_optimization = False
    with pytest.raises(ConfigError, match="expected one optimizer from configure_optimizers, found 2"):
        trainer("narrow8", tmp_path, gradient_clip_val=None).fit(two, batches(1))
    with pytest.raises(ConfigError, match="clip by norm"):
        trainer("narrow8", tmp_path, gradient_clip_algorithm="value").fit(Module(), batches(1))
    with pytest.raises(RecipeError, match="narrow8"):
        Precision("narow8")


def test_single_values_are_clipped_where_gradients_are_wide(tmp_path: Path) -> None:
    class Looks(Module):
        largest: list[float]

        def on_before_zero_grad(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.largest = [g.abs().max().item() for g in grads] or self.largest

    module = Looks()
    module.largest = []
    options = {"gradient_clip_algorithm": "value", "gradient_clip_val": 1e-3, "max_steps": 2}
    trainer("fp8_current", tmp_path, **options).fit(module, batches(2))
    assert max(module.largest) == pytest.approx(1e-3)
