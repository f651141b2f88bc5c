"""`load_state_dict` of a prepared model: weights in FP8 become values, bare codes are refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import CheckpointError


def a_model(recipe: str = "fp8_current") -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))
    return ng.prepare(model, None, recipe)[0]


def a_state(prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(state in FP8, the weights that it stands for)."""
    state, values = {}, {}
    for i, shape in enumerate([(96, 64), (64, 96)]):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 0.02
        q = ng.quantize(weight, ng.CastSpec(ng.formats.E4M3FN, ng.PER_ROW))
        state |= {f"{prefix}{i}.weight": q.codes, f"{prefix}{i}.weight_scale": q.dequant_scale}
        values[f"{prefix}{i}.weight"] = q.dequantize()
    return state, values


@pytest.mark.parametrize("how", ["prepared", "twice", "copied", "pickled"])
def test_weights_are_dequantized(how: str) -> None:  # case 73
    model = a_model()
    model = {
        "prepared": lambda: model,
        "twice": lambda: ng.prepare(model, None, "fp8_rowwise")[0],
        "copied": lambda: copy.deepcopy(model),
        "pickled": lambda: pickle.loads(pickle.dumps(model)),
    }[how]()
    state, values = a_state()
    before = dict(state)
    model.load_state_dict(state)
    assert all(torch.equal(model.get_parameter(name), value) for name, value in values.items())
    assert state.keys() == before.keys() and all(state[name] is before[name] for name in state)  # the caller's


def test_a_prepared_part_of_a_plain_model_does_so_too() -> None:
    whole = nn.ModuleDict({"part": a_model(), "other": nn.Linear(2, 2)})
    state, values = a_state("part.")
    whole.load_state_dict(state | {"other.weight": torch.ones(2, 2), "other.bias": torch.ones(2)})
    assert all(torch.equal(whole.get_parameter(name), value) for name, value in values.items())


@pytest.mark.parametrize("strict", [True, False])
def test_codes_without_scale_are_refused_and_nothing_changes(strict: bool) -> None:  # case 73
    model = a_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state, _ = a_state()
    del state["1.weight_scale"]
    with pytest.raises(CheckpointError, match=r"'1\.weight' is in FP8 and its scale is missing"):
        model.load_state_dict(state, strict=strict)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_what_is_left_out_is_said() -> None:
    state, _ = a_state()
    said = r"1 of the tensors left out, the first '0\.input_scale': it scales activations"
    with pytest.warns(UserWarning, match=said):
        a_model().load_state_dict(state | {"0.input_scale": torch.tensor(1.0)})


def test_a_buffer_in_fp8_stays_one() -> None:
    model = a_model()
    model.register_buffer("table", torch.zeros(4, dtype=torch.float8_e4m3fn))
    state, _ = a_state()
    model.load_state_dict(state | {"table": torch.ones(4).to(torch.float8_e4m3fn)})
    assert model.table.dtype is torch.float8_e4m3fn and bool((model.table.float() == 1).all())
