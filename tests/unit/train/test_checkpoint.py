"""`ng.save` and `ng.load`: what was saved comes back with the same bits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import narrowgauge as ng


def make_model(seed: int = 0, *, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 10, bias=False))
    model.register_buffer("counter", torch.tensor(3))
    if tied:
        model[3].weight = model[0].weight
    return model


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        ids = torch.randint(10, (4, 6))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.detach().flatten().view(torch.uint8), b.detach().flatten().view(torch.uint8))
    )


def test_training_goes_on_with_the_same_bits(tmp_path: Path) -> None:  # case 69
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    take_steps(model, optimizer, 3)
    ng.save(tmp_path / "c", model, optimizer, random=torch.get_rng_state())
    expected = take_steps(model, optimizer, 3)
    other = make_model(seed=1)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=5.0)
    torch.set_rng_state(ng.load(tmp_path / "c", other, other_optimizer)["random"])
    assert other_optimizer.param_groups[0]["lr"] == 1e-2
    assert take_steps(other, other_optimizer, 3) == expected
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert bits_equal(a, b), name


@pytest.mark.parametrize("recipe", ng.recipe_names())
def test_a_prepared_model_goes_on_with_the_same_bits_in_every_recipe(tmp_path: Path, recipe: str) -> None:  # case 69
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, ng.LossScaler]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 32))
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
        return model, optimizer, ng.LossScaler(recipe, "cpu", init_scale=2.0**12, growth_interval=2)

    def go_on(parts: tuple[nn.Module, torch.optim.Optimizer, ng.LossScaler], steps: range) -> list[float]:
        model, optimizer, scaler = parts
        torch.manual_seed(steps.start)  # the key of stochastic rounding; a run's checkpoint holds the generator's state
        losses = []
        for step in steps:
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            loss = (model(x).float() - x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    whole = build(0)
    go_on(whole, range(3))
    ng.save(tmp_path / "c", *whole[:2], scaler=whole[2])
    expected = go_on(whole, range(3, 6))
    other = build(1)
    other[2].load_state_dict(ng.load(tmp_path / "c", *other[:2])["scaler"])
    assert go_on(other, range(3, 6)) == expected
    assert whole[2].get_scale() == other[2].get_scale()
    for (name, a), b in zip(whole[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        for x, y in zip(plain(a), plain(b), strict=True):
            assert bits_equal(x, y), name


def plain(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (value.codes, value.dequant_scale) if isinstance(value, ng.QuantizedTensor) else (value,)


@pytest.mark.parametrize("loaded", [None, "fp32", "bf16", "fp8_current", "fp16_pure"])
def test_delayed_scaling_state_stands_in_no_other_recipes_way(tmp_path: Path, loaded: str | None) -> None:
    def make(recipe: str | None) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(16, 16))
        if recipe:
            ng.prepare(model, None, recipe)
        return model

    source, target = make("fp8_delayed"), make(loaded)
    ng.save(tmp_path / "checkpoint", source)
    ng.load(tmp_path / "checkpoint", target)
    assert torch.allclose(target[0].weight, source[0].weight, rtol=2**-10)
    assert set(target.state_dict()) == {"0.weight", "0.bias"}


def test_extra_state_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "numbers": [1, -2.5, True, None, "text", math.inf, 2**70],
        "pair": (1, (2.0, "x")),
        "by_index": {0: "a", 7: torch.arange(3, dtype=torch.int16)},
        "scalar": torch.tensor(2.0, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "nested": {"list": [torch.ones(2, 3).t()]},
    }
    ng.save(tmp_path / "c", nn.Linear(1, 1), **extra)
    loaded = ng.load(tmp_path / "c", nn.Linear(1, 1))
    assert loaded["numbers"] == extra["numbers"] and loaded["pair"] == extra["pair"]
    assert loaded["numbers"][2] is True and loaded["by_index"][0] == "a"
    assert bits_equal(loaded["by_index"][7], extra["by_index"][7])
    assert bits_equal(loaded["scalar"], extra["scalar"])
    assert loaded["empty"].shape == (0, 4)
    assert torch.equal(loaded["nested"]["list"][0], torch.ones(3, 2))
    ng.save(tmp_path / "n", nn.Linear(1, 1), nan=math.nan)
    assert math.isnan(ng.load(tmp_path / "n", nn.Linear(1, 1))["nan"])


def test_an_object_with_state_is_stored_as_its_state(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    ng.save(tmp_path / "c", nn.Linear(1, 1), schedule=schedule)
    assert ng.load(tmp_path / "c", nn.Linear(1, 1))["schedule"]["step_size"] == 2


def test_the_files_hold_plain_tensors_that_load_without_this_library(tmp_path: Path) -> None:  # case 71
    model = make_model()
    ng.save(tmp_path / "c", model, torch.optim.AdamW(model.parameters()))
    plain = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert set(plain) == set(model.state_dict())
    assert not [p for p in (tmp_path / "c").iterdir() if p.suffix not in (".safetensors", ".json")]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:  # case 55
    model = make_model(tied=True)
    ng.save(tmp_path / "c", model)
    assert "3.weight" not in safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    other = make_model(seed=1, tied=True)
    weight = other[0].weight
    ng.load(tmp_path / "c", other)
    assert other[3].weight is other[0].weight is weight
    assert bits_equal(weight, model[0].weight)


def test_overlapping_views_are_stored_apart(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    ng.save(tmp_path / "c", nn.Linear(1, 1), a=base[:4], b=base[2:], c=base)
    loaded = ng.load(tmp_path / "c", nn.Linear(1, 1))
    assert [loaded[k].tolist() for k in "abc"] == [[0, 1, 2, 3], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("format_name", ["E4M3FN", "E5M2", "FP16", "BF16"])
def test_quantized_parameters_are_stored_as_codes_and_scale(tmp_path: Path, format_name: str) -> None:
    spec = ng.CastSpec(getattr(ng.formats, format_name))
    model, other = (nn.Linear(8, 4) for _ in range(2))
    for module in (model, other):
        module.weight = nn.Parameter(ng.quantize(module.weight.detach(), spec))
    ng.save(tmp_path / "c", model, state=model.weight)
    extra = ng.load(tmp_path / "c", other)
    for loaded in (other.weight, extra["state"]):
        assert isinstance(loaded, ng.QuantizedTensor) and loaded.spec == spec
        assert bits_equal(loaded.codes, model.weight.codes)
        assert bits_equal(loaded.dequant_scale, model.weight.dequant_scale)
        assert bits_equal(loaded.amax, model.weight.amax)
    stored = safetensors.torch.load_file(tmp_path / "c" / "model.safetensors")
    assert stored["weight.codes"].dtype == spec.format.dtype


def test_optimizer_state_keeps_the_dtype_in_which_it_was_saved(tmp_path: Path) -> None:  # case 41
    model = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"step": torch.tensor(3.0), "exp_avg": torch.randn(8, 8), "exp_avg_sq": torch.rand(8, 8)}
    optimizer.state[model.weight] = dict(state)
    ng.save(tmp_path / "c", model, optimizer)
    fresh = torch.optim.AdamW(model.parameters())
    ng.load(tmp_path / "c", model, fresh)
    for key, value in state.items():
        assert bits_equal(fresh.state[model.weight][key], value), key


def test_saving_again_replaces_the_folder(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ng.save(tmp_path / "c", model, step=1)
    ng.save(tmp_path / "c", model, step=2)
    assert ng.load(tmp_path / "c", model)["step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_compiled_model_is_stored_under_its_own_names(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ng.save(tmp_path / "c", torch.compile(model, backend="eager"))  # type: ignore[arg-type]
    ng.load(tmp_path / "c", model)
