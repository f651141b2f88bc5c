"""accelerate's Accelerator with a recipe, and the stock one with objects that were prepared before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.errors import CheckpointError, ConfigError, NarrowgaugeError
from narrowgauge.integrations.accelerate import Accelerator
from narrowgauge.integrations.huggingface import full_values
from narrowgauge.tensors.quantized import QuantizedTensor

RECIPES = ("fp8_delayed", "narrow8", "narrow8_sr", "fp8_lm_o2", "fp8_lm_o3")
STEPS, CLIP = 4, 0.1


@pytest.fixture(autouse=True)
def no_state() -> Iterator[None]:
    """Accelerators share what the first of them was told."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, step: int) -> Tensor:
    ids = torch.randint(0, 64, (8, 4), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(ids).float().flatten(0, 1), (ids.flatten() + 1) % 64)


def alone(recipe: str, micro_batches: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """The loop without accelerate."""
    model, optimizer = ng.prepare(*make(), recipe)
    torch.manual_seed(5)
    losses = []
    for step in range(STEPS):
        with ng.accumulate(model):
            for micro_batch in range(micro_batches):
                loss = loss_of(model, step * micro_batches + micro_batch)
                (loss / micro_batches).backward()
                losses.append(loss.item())
        ng.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_values(model, optimizer)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in make()[0].state_dict():  # delayed scaling adds its own
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
def test_the_loop_is_that_without_accelerate_and_goes_on_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    expected, weights = alone(recipe)

    def run(first: int) -> tuple[list[float], Accelerator, nn.Module]:
        accelerator = Accelerator(cpu=True, recipe=recipe)
        model, optimizer = accelerator.prepare(*make())
        torch.manual_seed(5)
        if first:
            accelerator.load_state(str(tmp_path))
        losses = []
        for step in range(first, STEPS):
            loss = loss_of(model, step)
            accelerator.backward(loss)
            assert accelerator.clip_grad_norm_(model.parameters(), CLIP) > CLIP
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).item())
            if not first and step == 1:
                accelerator.save_state(str(tmp_path))
        return losses, accelerator, model

    for first in (0, 2):
        losses, accelerator, model = run(first)
        assert losses == expected[first:]
        assert_equal(accelerator.get_state_dict(model), weights)
        assert accelerator.unwrap_model(model) is model
        assert ng.report(model).counts()["converted"] == (1 if recipe == "bf16" else 3)  # norm, linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_are_summed_exactly(recipe: str) -> None:
    expected, weights = alone(recipe, micro_batches=3)
    accelerator = Accelerator(cpu=True, recipe=recipe, gradient_accumulation_steps=3)
    model, optimizer = accelerator.prepare(*make())
    torch.manual_seed(5)
    losses, kinds = [], []
    for micro_batch in range(3 * STEPS):
        with accelerator.accumulate(model):
            loss = loss_of(model, micro_batch)
            accelerator.backward(loss)
            kinds.append(type(model[1].weight.grad) is QuantizedTensor)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected
    assert kinds == [False, False, recipe != "fp8_delayed"] * STEPS  # whose gradients are float32
    assert_equal(accelerator.get_state_dict(model), weights)


def test_a_loss_that_is_called_backward_on_itself_is_summed_as_exactly() -> None:
    _, weights = alone("narrow8", micro_batches=2)
    accelerator = Accelerator(cpu=True, recipe="narrow8", gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*make())
    torch.manual_seed(5)
    for micro_batch in range(2 * STEPS):
        with accelerator.accumulate(model):
            (loss_of(model, micro_batch) / 2).backward()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(accelerator.get_state_dict(model), weights)


def test_an_error_in_a_micro_batch_leaves_a_model_that_trains_on() -> None:
    accelerator = Accelerator(cpu=True, recipe="narrow8", gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*make())
    with pytest.raises(KeyError), accelerator.accumulate(model):
        accelerator.backward(loss_of(model, 0))
        raise KeyError("labels")
    optimizer.zero_grad(set_to_none=True)
    model.zero_grad()
    accelerator.step = 0
    for micro_batch in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, micro_batch))
    assert type(model[1].weight.grad) is QuantizedTensor


def test_fp16_scales_the_loss_and_a_skipped_step_is_known_to_the_scheduler(tmp_path: Path) -> None:
    model, optimizer = ng.prepare(*make(), "fp16")
    scaler = ng.LossScaler("fp16", "cpu")
    for step in range(STEPS):
        scaler.scale(loss_of(model, step)).backward()
        scaler.unscale_(optimizer)
        ng.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = full_values(model, optimizer)

    def start() -> tuple[Accelerator, Any, Any, Any]:
        plain, adamw = make()
        accelerator = Accelerator(cpu=True, recipe="fp16")
        schedule = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1.0)
        return accelerator, *accelerator.prepare(plain, adamw, schedule)

    def go_on(accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any, steps: range) -> None:
        for step in steps:
            accelerator.backward(loss_of(model, step))
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    first = start()
    go_on(*first, range(2))
    first[0].save_state(str(tmp_path))
    second = start()
    second[0].load_state(str(tmp_path))
    go_on(*second, range(2, STEPS))
    accelerator, model, optimizer, schedule = second
    assert_equal(accelerator.get_state_dict(model), weights)
    assert accelerator.scaler.get_scale() == 2.0**16 and schedule.scheduler.last_epoch == STEPS

    accelerator.backward(loss_of(model, 0) * float("inf"))
    optimizer.step()
    schedule.step()
    assert accelerator.optimizer_step_was_skipped and schedule.scheduler.last_epoch == STEPS
    assert accelerator.scaler.get_scale() == 2.0**15
    assert_equal(accelerator.get_state_dict(model), weights)


def test_a_step_that_the_guard_skips_is_known_to_the_scheduler() -> None:
    accelerator = Accelerator(cpu=True, recipe="narrow8")
    plain, adamw = make()
    schedule = torch.optim.lr_scheduler.StepLR(adamw, 1, 0.5)
    model, optimizer, schedule = accelerator.prepare(plain, adamw, schedule)
    for factor, rate in ((1.0, 5e-3), (float("nan"), 5e-3), (1.0, 2.5e-3)):
        accelerator.backward(loss_of(model, 0) * factor)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        assert accelerator.optimizer_step_was_skipped == (factor != factor)
        assert optimizer.param_groups[0]["lr"] == rate


@pytest.mark.parametrize("recipe", ["narrow8", "fp8_lm_o2"])
def test_other_tools_read_the_weights_of_a_checkpoint(recipe: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    accelerator = Accelerator(cpu=True, recipe=recipe)
    model, optimizer = accelerator.prepare(*make())
    accelerator.backward(loss_of(model, 0))
    optimizer.step()
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.save_model(model, str(tmp_path / "model"))
    full = full_values(model, optimizer.optimizer)
    plain, _ = make()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    for folder in ("state", "model"):
        saved = load_file(tmp_path / folder / "model.safetensors")
        plain.load_state_dict(saved)
        for name, value in saved.items():
            assert value.dtype is torch.float32 and torch.equal(value, full[name]), name
            assert not torch.equal(value, before[name]), name
    assert not list(tmp_path.rglob("optimizer*.bin"))  # whose contents are in the folder narrowgauge
    assert accelerator.ledger.per_parameter < 8.5


def test_the_stock_accelerator_runs_prepared_objects_and_refuses_to_save_codes_as_values(tmp_path: Path) -> None:
    for recipe in RECIPES:
        expected, weights = alone(recipe)
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(*ng.prepare(*make(), recipe))
        torch.manual_seed(5)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, step)
            accelerator.backward(loss)
            if step == 0:  # torch's norm adds in another order than ours
                norm = ng.clip_grad_norm_(model.parameters(), float("inf"))
                assert accelerator.clip_grad_norm_(model.parameters(), float("inf")).item() == pytest.approx(
                    norm.item()
                )
            ng.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses == expected
        assert_equal(full_values(model, optimizer.optimizer), weights)
        if recipe.startswith("fp8_lm"):
            with pytest.raises(NarrowgaugeError, match="narrowgauge.save"):
                accelerator.save_state(str(tmp_path / recipe))


def test_objects_that_were_prepared_before_are_taken_with_all_their_digits() -> None:
    prepared = ng.prepare(*make(), "narrow8")
    weights = full_values(*prepared)
    accelerator = Accelerator(cpu=True, recipe="narrow8")
    model, optimizer = accelerator.prepare(*prepared)
    assert model is prepared[0] and optimizer.optimizer is prepared[1]
    assert_equal(full_values(model, optimizer.optimizer), weights)
    accelerator.backward(loss_of(model, 0))
    optimizer.step()
    assert not torch.equal(full_values(model, optimizer.optimizer)["1.weight"], weights["1.weight"])


def test_a_frozen_model_beside_the_one_that_trains_stays_as_it_is(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, recipe="narrow8")
    reference = ng.freeze(make()[0], "fp8_current")
    codes = reference[1].weight.data.codes.clone()
    same, model, optimizer = accelerator.prepare(reference, *make())
    assert same is reference and torch.equal(reference[1].weight.data.codes, codes)
    accelerator.backward(loss_of(model, 0) + loss_of(reference, 0))
    optimizer.step()
    assert reference[1].weight.grad is None and torch.equal(reference[1].weight.data.codes, codes)


def test_what_a_recipe_does_not_go_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="mixed_precision='bf16' beside recipe='narrow8'"):
        Accelerator(cpu=True, mixed_precision="bf16", recipe="narrow8")
    no_dynamo = accelerate.utils.TorchDynamoPlugin(backend="eager")
    AcceleratorState._reset_state(True)
    with pytest.raises(ConfigError, match="torch.compile on the model"):
        Accelerator(cpu=True, dynamo_plugin=no_dynamo, recipe="narrow8")
    AcceleratorState._reset_state(True)
    each = accelerate.utils.GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    with pytest.raises(ConfigError, match="sync_each_batch"):
        Accelerator(cpu=True, gradient_accumulation_plugin=each, recipe="narrow8")
    sharded = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(ConfigError, match="narrowgauge.distributed.shard"):
        Accelerator(cpu=True, fsdp_plugin=sharded, recipe="narrow8")
    with pytest.raises(ng.RecipeError, match="narrow8"):
        Accelerator(cpu=True, recipe="narow8")


def test_models_and_optimizers_are_prepared_together() -> None:
    accelerator = Accelerator(cpu=True, recipe="narrow8")
    model, optimizer = make()
    with pytest.raises(ConfigError, match="expected one optimizer of Sequential's parameters beside it, found 0"):
        accelerator.prepare(model)
    with pytest.raises(ConfigError, match="found the optimizer alone"):
        accelerator.prepare(optimizer)
    halves = [torch.optim.AdamW(model[at].parameters()) for at in (1, 4)]
    with pytest.raises(ConfigError, match="found 2"):
        accelerator.prepare(model, *halves)
    with pytest.raises(ConfigError, match="expected a prepared model"):
        _ = accelerator.ledger


def test_a_checkpoint_without_the_exact_state_is_refused(tmp_path: Path) -> None:
    stock = accelerate.Accelerator(cpu=True)
    stock.prepare(*make())
    stock.save_state(str(tmp_path))
    accelerator = Accelerator(cpu=True, recipe="narrow8")
    accelerator.prepare(*make())
    with pytest.raises(CheckpointError, match="found no folder 'narrowgauge'"):
        accelerator.load_state(str(tmp_path))


def test_single_values_are_clipped_where_gradients_are_wide() -> None:
    for recipe in ("fp8_current", "narrow8"):
        accelerator = Accelerator(cpu=True, recipe=recipe)
        model, _ = accelerator.prepare(*make())
        accelerator.backward(loss_of(model, 0))
        if recipe == "narrow8":
            with pytest.raises(ConfigError, match="clip_grad_norm_"):
                accelerator.clip_grad_value_(model.parameters(), 1e-3)
            continue
        before = model[1].weight.grad.clone()
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        assert before.abs().max() > 1e-3
        assert torch.equal(model[1].weight.grad, before.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize(
    ("section", "recipe", "converted"),
    [
        (
            {"backend": "TE", "amax_compute_algo": "max", "amax_history_len": 4, "fp8_format": "HYBRID", "margin": 1},
            ng.DelayedScaling(amax_history_len=4, margin=1).replace(evaluation="compute"),
            3,
        ),
        ({"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": False}, None, 1),
        ({"backend": "MSAMP", "opt_level": "O2"}, ng.recipe("fp8_lm_o2"), 3),
    ],
)
def test_a_file_of_accelerate_config_with_fp8_says_the_recipe(
    section: dict[str, Any], recipe: ng.Recipe | None, converted: int, tmp_path: Path
) -> None:
    from accelerate.commands.config.config_args import ClusterConfig

    file = tmp_path / "default_config.yaml"
    ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="NO", mixed_precision="fp8", use_cpu=True, debug=False,
        fp8_config=section, num_processes=1,
    ).to_yaml_file(str(file))  # fmt: skip
    read = ng.recipes.from_accelerate(file)
    assert recipe is None or read == recipe
    accelerator = Accelerator(cpu=True, recipe=read)
    plain, _ = make()
    plain.insert(4, nn.Linear(96, 96))
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    linear = [row.status for row in ng.report(model) if row.module == "Linear"]
    assert linear.count("converted") == converted  # with torchao accelerate keeps the first and the last
    losses = []
    for _ in range(4):
        accelerator.backward(loss := loss_of(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
