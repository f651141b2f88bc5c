"""Embedding tables in 16 bits: gradients of a token's occurrences are summed in float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.layers.embedding import Embedding


@pytest.mark.parametrize("recipe", ["narrow8", "narrow8_sr", "bf16_pure"])
def test_like_gradients_of_many_occurrences_add_up(recipe: str) -> None:
    plain = nn.Embedding(64, 96).bfloat16()
    ids = torch.zeros(1000, dtype=torch.int64)
    plain(ids).backward(torch.ones(1000, 96, dtype=torch.bfloat16))
    assert (plain.weight.grad[0] == 256).all()  # torch's own sum stands still
    table = nn.Embedding(64, 96)
    model = nn.Sequential(table, nn.Linear(96, 96))
    ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
    assert type(table) is Embedding and table.weight.dtype is torch.bfloat16
    y = table(ids)
    y.backward(torch.ones_like(y))
    # 1000 = 448 * fl(1 / fl(448 / 1000)), to within the roundings of the scale
    assert ((table.weight.grad[0].float() - 1000).abs() <= 1000 * 2**-22).all()
    assert (table.weight.grad[1:].float() == 0).all()


@pytest.mark.parametrize("options", [{"padding_idx": 3}, {"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_options_do_what_torchs_do(options: dict) -> None:
    torch.manual_seed(0)
    wide = nn.Embedding(16, 8, **options)
    narrow = copy.deepcopy(wide).bfloat16()
    wide.weight.data.copy_(narrow.weight.data)
    ng.convert(narrow, "bf16")
    narrow.weight.grad_dtype = torch.float32
    ids = torch.tensor([[1, 3, 3], [1, 1, 5]])
    weight = torch.randn(2, 3, 8)
    y, expected = narrow(ids), wide(ids)
    # a row that is renormalised is rounded to bfloat16 twice
    assert y.dtype is torch.bfloat16 and torch.allclose(y.float(), expected, rtol=2**-7, atol=0)
    (y * weight.bfloat16()).sum().backward()
    (expected * weight.bfloat16().float()).sum().backward()
    assert torch.equal(narrow.weight.grad, wide.weight.grad)


def test_float32_tables_are_looked_up_by_torch_in_bits() -> None:
    table = nn.Embedding(16, 8)
    ids = torch.arange(16)
    before = table(ids)
    ng.convert(table, "bf16")
    assert torch.equal(table(ids), before)
    assert set(table.state_dict()) == {"weight"}


def test_a_frozen_table_gives_no_gradient() -> None:
    table = nn.Embedding(16, 8).bfloat16()
    table.weight.requires_grad_(False)
    ng.convert(table, "bf16")
    assert not table(torch.arange(4)).requires_grad
