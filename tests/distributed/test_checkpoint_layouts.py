"""Checkpoints of any layout in any other one: the same bits where the layout is the same, the same values elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import RANKS, bits, build, full, in_columns, train
from ranks import run
from torch import Tensor

import narrowgauge as ng
from narrowgauge.numerics.formats import E4M3FN, FP16, INT4, INT8, UINT4, UINT8
from narrowgauge.numerics.scaling import ULP
from narrowgauge.optim import storage
from narrowgauge.tensors.local import as_part_of, local
from narrowgauge.train.distributed_checkpoint_pieces import located

pytestmark = pytest.mark.multiproc
RECIPES = {
    "fp32": ng.recipe("fp32"),
    "fp8_delayed": ng.recipe("fp8_delayed"),
    "narrow8": ng.recipe("narrow8"),
    "narrow8 of 4-bit moments": ng.recipe("narrow8", moment_bits=4),
    "narrow8_sr": ng.recipe("narrow8_sr"),
    "fp8_lm_o2": ng.recipe("fp8_lm_o2"),
    "fp8_lm_o3": ng.recipe("fp8_lm_o3"),
}
Fulls = dict[str, dict[str, Tensor]]


def on(layout: str, function: Any, *args: Any) -> list[Any]:
    """`function(layout, *args)` on as many processes as the layout has; of one, on this one."""
    return [function(layout, *args)] if layout == "one" else run(RANKS[layout], function, layout, *args, timeout_s=300)


def differing(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> list[str]:
    """Names whose bits differ."""
    assert a.keys() == b.keys()
    return [key for key in a if not all(map(torch.equal, a[key], b[key]))]


def _trained(layout: str, recipe: str, path: Path | None = None) -> tuple[Any, Any]:
    model, optimizer = build(RECIPES[recipe], layout)
    torch.manual_seed(1)  # of stochastic rounding, where no layout gives the ranks a seed
    train(model, optimizer, 2)
    if path is not None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        ng.save(path, model, optimizer, position=7, random=torch.full((3,), rank), either=torch.ones(2))
    return model, optimizer


def _fulls(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """The whole values of parameters (with all digits), states and buffers, by name."""
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, p in model.named_parameters():
        if hasattr(optimizer, "full_values"):
            found[f"{name} digits"] = full(optimizer.full_values(p))
        for key, value in optimizer.state[p].items():
            if isinstance(value, Tensor) and key != "step":
                decoded = storage.decode(local(value), local(p).shape)
                found[f"{name} {key}"] = full(as_part_of(p, decoded))
    return found


def _saves_and_loads(layout: str, recipes: list[str], folder: Path) -> list[str]:
    """In one layout, bit for bit: names of what is not."""
    rank, wrong = dist.get_rank(), []
    for recipe in recipes:
        whole, its = _trained(layout, recipe, folder / recipe)
        model, optimizer = build(RECIPES[recipe], layout, seed=1)
        extra = ng.load(folder / recipe, model, optimizer)
        wrong += [f"{recipe}: {name}" for name in differing(bits(whole, its), bits(model, optimizer))]
        assert extra["position"] == 7 and extra["random"].tolist() == [rank] * 3 and extra["either"].tolist() == [1, 1]
        for each in ((whole, its), (model, optimizer)):
            torch.manual_seed(3)
            train(*each, 1, first=2)
        wrong += [f"{recipe}, a step on: {name}" for name in differing(bits(whole, its), bits(model, optimizer))]
    return wrong


@pytest.mark.parametrize(
    ("layout", "recipes"),
    [("data 2", list(RECIPES)), ("shard 2 x tensor 2", ["fp32", "narrow8 of 4-bit moments", "fp8_lm_o3"])],
)
def test_the_same_layout_gets_the_same_bits_and_goes_on_with_them(  # case 69
    layout: str, recipes: list[str], tmp_path: Path
) -> None:
    for wrong in on(layout, _saves_and_loads, recipes, tmp_path):
        assert not wrong


def _saves(layout: str, folder: Path) -> Fulls:
    return {recipe: _fulls(*_trained(layout, recipe, folder / recipe)) for recipe in RECIPES}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """layout -> a folder with a checkpoint of every recipe, and the whole values that were saved."""

    @cache
    def of(layout: str) -> tuple[Path, Fulls]:
        folder = tmp_path_factory.mktemp("saved")
        return folder, on(layout, _saves, folder)[0]

    return of


def _loads(layout: str, source: str, folder: Path, expected: Fulls) -> list[str]:
    """What is not as it was saved, or as a cast of what was saved."""
    wrong = []
    for recipe, wanted in expected.items():
        model, optimizer = build(RECIPES[recipe], layout, seed=1)
        ng.load(folder / recipe, model, optimizer)
        found, parameters, columns = _fulls(model, optimizer), dict(model.named_parameters()), in_columns(model)
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        for name, value in found.items():
            parameter, _, key = name.partition(" ")
            state = optimizer.state[parameters[parameter]] if parameter in parameters else {}
            held = state.get("master" if key == "digits" else key)
            held = local(model.state_dict()[parameter]) if held is None else local(held)
            spec = storage.spec_of(held)
            was_cut_in_rows = not ("tensor" in source + layout and parameter in columns)
            if _is_kept(spec, source, was_cut_in_rows):
                wrong += [] if torch.equal(value, wanted[name]) else [f"{recipe}: {name}"]
                continue
            digits = (
                name if key or RECIPES[recipe].master is None else f"{name} digits"
            )  # a parameter follows from them
            again = _cast(wanted[digits], parameters.get(parameter, held), spec)
            wrong += [] if torch.equal(held, again) else [f"{recipe}: cast of {name}"]
            if not torch.equal(value, wanted[name]):
                wrong += _beyond(value, wanted[name], spec, f"{recipe}: {name}")
    return wrong


def _is_kept(spec: Any, source: str, was_cut_in_rows: bool) -> bool:
    """True where a tensor comes with its own bits into another layout."""
    return was_cut_in_rows if spec.in_blocks else not spec.is_scaled or spec.scale is ULP or source == "one"


def _cast(whole: Tensor, part: Tensor, spec: Any) -> Tensor:
    """This process's part of whole values, cast anew."""
    (box,) = located("", part).place.boxes
    return storage.encode(whole[box.slices].contiguous(), spec)


def _beyond(value: Tensor, saved: Tensor, spec: Any, name: str) -> list[str]:
    """The name, where a cast moved values by more than half a step of the format where steps are widest."""
    widest = {E4M3FN: 2.0**-4, FP16: 2.0**-11, INT8: 2.0 / 127, UINT8: 2.0 / 255, INT4: 2.0 / 7, UINT4: 2.0 / 15}
    largest = saved.abs().amax(-1, keepdim=True) if spec.in_blocks else saved.abs().amax()
    return [] if bool(((value - saved).abs() <= widest[spec.format] * largest).all()) else [f"{name} beyond its bound"]


PAIRS = [
    ("one", "shard 2 x tensor 2"), ("one", "data 2"), ("shard 2", "one"), ("shard 2", "tensor 2"),
    ("shard 2 x tensor 2", "one"), ("shard 2 x tensor 2", "shard 4"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "layout"), PAIRS)
def test_another_layout_gets_the_same_values(source: str, layout: str, saved: Any) -> None:
    folder, expected = saved(source)
    for wrong in on(layout, _loads, source, folder, expected):
        assert not wrong
