"""A prepared model handed to a process that only imports the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import multiprocessing, nn

import narrowgauge as ng


def run(model: nn.Module, x: torch.Tensor, answers: Any) -> None:
    torch.set_num_threads(1)
    with torch.no_grad():
        answers.put((model(x).float().tolist(), str(ng.report(model)), sorted(model.state_dict())))


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp16_pure"])
def test_a_spawned_process_gets_an_equal_model(recipe: str, mlp) -> None:  # case 72
    model = mlp()
    ng.prepare(model, None, recipe)
    for _ in range(2):
        model(torch.randn(4, 32)).float().sum().backward()
    model.zero_grad()
    x = torch.randn(4, 32)
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=run, args=(model, x, answers))
    process.start()
    y, report, keys = answers.get()
    process.join(timeout=60)
    assert process.exitcode == 0
    with torch.no_grad():
        assert y == model(x).float().tolist()
    assert report == str(ng.report(model)) and keys == sorted(model.state_dict())
