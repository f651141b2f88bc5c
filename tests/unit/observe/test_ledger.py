"""Bytes per role come from the storages that are there, each counted once."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.observe.ledger import SavedActivations, ledger


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()


def test_float32_adamw_takes_sixteen_bytes_a_parameter() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, torch.randn(4, 64))
    found = ledger(model, optimizer)
    count = 64 * 64
    assert found.roles == {
        "param": 4 * count,
        "grad": 4 * count,
        "step": 4,
        "exp_avg": 4 * count,
        "exp_avg_sq": 4 * count,
    }
    assert found.parameters == count and found.total == 16 * count + 4
    assert found.per_parameter == found.total / count


def test_gradients_and_states_count_only_while_they_are_there() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert ledger(model, optimizer).roles == {"param": 4 * 72}
    trained(model, optimizer, torch.randn(4, 8))
    assert ledger(model, optimizer).roles["momentum"] == 4 * 72
    optimizer.zero_grad()
    assert "grad" not in ledger(model, optimizer).roles


def test_tied_and_viewed_storage_counts_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[2:])
    found = ledger(model)
    assert found.roles == {"param": 4 * 80} and found.parameters == 80


def test_a_view_counts_the_whole_storage_that_it_holds() -> None:
    model = nn.Module()
    model.register_buffer("part", torch.zeros(100)[:3])
    assert ledger(model).roles == {"buffer": 400}


def test_quantized_parameters_count_codes_and_scale() -> None:
    model = nn.Linear(32, 32, bias=False)
    model.weight = nn.Parameter(ng.quantize(model.weight.detach(), ng.CastSpec(ng.formats.E4M3FN)))
    found = ledger(model).roles["param"]
    assert 32 * 32 + 4 <= found <= 32 * 32 + 16


def test_delayed_scaling_counts_its_histories_and_scales() -> None:
    model, _ = ng.prepare(nn.Sequential(nn.Linear(32, 32)), None, ng.DelayedScaling(amax_history_len=16))
    assert ng.ledger(model).roles["scaling"] == 3 * (16 * 4 + 4) + 8 + 1


def test_saved_activations_leave_parameters_out_and_count_each_storage_once() -> None:
    model = nn.Linear(16, 16)
    x = torch.randn(8, 16)
    with SavedActivations(model) as measured:
        y = model(x)
        (y * y).sum()
    assert measured.bytes == x.nbytes + y.nbytes  # the product saves y twice, the layer its input and its weight


def test_the_table_has_every_role_the_total_and_the_activations() -> None:
    text = str(ledger(nn.Linear(10, 10), activation=1234))
    assert "param" in text and "total" in text and "1,234" in text and "4.000" in text


def test_a_model_without_parameters_has_no_bytes() -> None:
    assert ledger(nn.ReLU()).per_parameter == 0.0


def test_what_was_counted_is_freed_without_a_backward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(dim=-1))
    with SavedActivations(model) as measured:
        output = model(torch.ones(2, 4))  # which its own node saves
    found = weakref.ref(output)
    assert measured.bytes == 4 * (2 * 4 + 2 * 4)
    del output
    gc.collect()
    assert found() is None
