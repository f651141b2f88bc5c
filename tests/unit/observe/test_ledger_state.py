"""Bytes of 8-bit training state, to the byte: a formula for every role of every recipe."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.ledger import Ledger, ledger
from narrowgauge.optim.release import release_gradients

SHAPES = [(100, 96), (200, 96), (64, 200)]  # a table and two linear layers
LARGE = sum(rows * columns for rows, columns in SHAPES)
SMALL = 200 + 64  # biases
VALUES = LARGE + SMALL
ONE_SCALE = len(SHAPES) * (4 + 4)  # a float32 scale and an amax of each tensor
TILES = sum(rows * -(-columns // 128) * 4 for rows, columns in SHAPES) + len(SHAPES) * 4  # scales, and one amax each
PACKED = sum(rows * -(-columns // 2) for rows, columns in SHAPES)

WIDE = {role: 4 * VALUES for role in ("param", "grad", "exp_avg", "exp_avg_sq")}
SCALED_FP16 = 2 * LARGE + ONE_SCALE + 4 * SMALL
FP8 = LARGE + ONE_SCALE + 4 * SMALL
HISTORIES = {"scaling": 2 * (2 * (16 * 4 + 4) + 8 + 1)}
MOMENT8 = LARGE + TILES + 4 * SMALL
MOMENT4 = PACKED + TILES + 4 * SMALL
NARROW = {"param": 2 * VALUES, "master": VALUES, "grad": FP8, "exp_avg": MOMENT8, "exp_avg_sq": MOMENT8}


def without(roles: dict[str, int], *names: str) -> dict[str, int]:
    return {role: size for role, size in roles.items() if role not in names}


EXPECTED = {
    "fp32": WIDE,
    "fp8_lm_o1": {**WIDE, "param": SCALED_FP16, "grad": FP8, **HISTORIES},
    "fp8_lm_o2": {"param": SCALED_FP16, "grad": FP8, "exp_avg": FP8, "exp_avg_sq": SCALED_FP16, **HISTORIES},
    "fp8_lm_o3": {
        "param": FP8, "master": 2 * LARGE + ONE_SCALE, "grad": FP8, "exp_avg": FP8, "exp_avg_sq": SCALED_FP16,
        **HISTORIES,
    },
    "narrow8": NARROW,
    "narrow8_sr": without(NARROW, "master"),
    "bf16_pure": {**WIDE, "param": 2 * VALUES, "grad": 2 * VALUES},
}  # fmt: skip


def made(recipe: str | ng.Recipe, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options):
    torch.manual_seed(0)
    (entries, width), (hidden, _), (out, _) = SHAPES
    model = nn.Sequential(nn.Embedding(entries, width), nn.Linear(width, hidden), nn.Linear(hidden, out))
    return ng.prepare(model, kind(model.parameters(), lr=1e-3), recipe, **options)


def backward(model: nn.Module) -> None:
    ids = torch.randint(0, SHAPES[0][0], (8,), generator=torch.Generator().manual_seed(0))
    model(ids).float().square().mean().backward()


def after_a_step(recipe: str | ng.Recipe, **options) -> Ledger:
    model, optimizer = made(recipe, **options)
    backward(model)
    optimizer.step()
    return ledger(model, optimizer)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_role_of_every_recipe(name: str) -> None:
    found = after_a_step(name)
    steps = found.roles.get("step", 0)  # torch's AdamW counts in tensors of 4 bytes
    assert steps in (0, 4 * 5)
    assert without(dict(found.roles), "step") == EXPECTED[name]
    assert found.parameters == VALUES
    assert found.total == sum(EXPECTED[name].values()) + steps


def test_four_bits_a_moment() -> None:
    found = after_a_step(ng.recipe("narrow8", moment_bits=4))
    assert found.roles == {**NARROW, "exp_avg": MOMENT4, "exp_avg_sq": MOMENT4}


def test_a_lossless_remainder_takes_two_bytes() -> None:
    lossless = ng.recipe("narrow8", master=ng.CastSpec(ng.formats.INT16, scale=ng.ULP))
    assert after_a_step(lossless).roles == {**NARROW, "master": 2 * VALUES}


def test_every_parameter_counts_as_large_where_there_is_no_limit() -> None:
    found = after_a_step(ng.recipe("fp8_lm_o2", min_state_size=0)).roles
    assert found["grad"] == VALUES + ONE_SCALE + 2 * (4 + 4)


def test_one_moment_is_called_momentum() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model, optimizer = ng.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "narrow8")
    model(torch.randn(4, 64)).float().sum().backward()
    optimizer.step()
    assert list(ledger(model, optimizer).roles) == ["param", "master", "grad", "momentum"]
    assert ledger(model, optimizer).roles["momentum"] == 64 * 64 + 64 * 4 + 4


def test_released_gradients_take_nothing() -> None:
    model, optimizer = made("narrow8")
    release_gradients(optimizer)
    backward(model)
    found = ledger(model, optimizer)
    assert found.roles == without(NARROW, "grad")
    optimizer.step()
    assert ledger(model, optimizer).roles == found.roles


def test_gradients_are_wide_while_they_are_summed() -> None:
    model, optimizer = made("narrow8")
    with ng.accumulate(model):
        backward(model)
        assert ledger(model, optimizer).roles["grad"] == 4 * VALUES
        backward(model)
    assert ledger(model, optimizer).roles["grad"] == FP8


def test_state_on_the_host_is_counted_there() -> None:
    found = after_a_step("narrow8", offload="cpu")
    assert found.roles == NARROW and found.devices == {"cpu": NARROW}


def test_devices_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False, device="meta"))
    found = ledger(model)
    assert found.roles == {"param": 512}
    assert found.devices == {"cpu": {"param": 256}, "meta": {"param": 256}}
    header, param, total = str(found).splitlines()
    assert header.split()[-4:] == ["on", "cpu", "on", "meta"]
    assert param.split()[-2:] == total.split()[-2:] == ["256", "256"]
    assert "on cpu" not in str(ledger(model[0]))


def test_the_order_is_that_of_the_design() -> None:
    assert list(after_a_step("fp8_lm_o3").roles) == ["param", "master", "grad", "exp_avg", "exp_avg_sq", "scaling"]


def test_as_json() -> None:
    found = after_a_step("narrow8_sr")
    data = json.loads(json.dumps(found.to_dict()))
    assert data["parameters"] == VALUES
    assert data["bytes"] == {**EXPECTED["narrow8_sr"], "total": found.total}
    assert data["bytes_per_parameter"]["total"] == found.per_parameter
    assert data["bytes_by_device"] == {"cpu": EXPECTED["narrow8_sr"]}
    with_activations = Ledger(found.roles, VALUES, activation=7).to_dict()
    assert with_activations["bytes"]["activation"] == 7 and with_activations["bytes"]["total"] == found.total
