"""When an observation looks, and that it does so once: steps between samples and histograms, beginnings, readings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    return ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), ng.recipe("narrow8", first_last=0))


@pytest.mark.parametrize(
    ("every", "histograms_every", "sampled", "counted"),
    [
        (4, 6, [4, 6, 8, 12], [6, 12]),
        (4, 0, [4, 8, 12], []),
        (5, None, [5, 10], []),
        (3, None, [3, 6, 9, 12], [12]),
        (0, 2, [], []),
        (0, None, [], []),
    ],
)
def test_samples_and_histograms_have_distances_of_their_own(every, histograms_every, sampled, counted) -> None:
    observation = ng.observe.Observation(nn.Linear(2, 2), every=every, histograms_every=histograms_every)
    found, with_bins = [], []
    for number in range(1, 14):
        with observation.step(number):
            pass
        seen = observation.read()
        found += [number] if seen is not None else []
        with_bins += [number] if seen is not None and seen.histograms is not None else []
    assert (found, with_bins) == (sampled, counted)


def test_what_a_sample_showed_is_read_once_and_a_look_that_was_not_ended_is() -> None:
    model, optimizer = prepared()
    observation = ng.observe.Observation(model, optimizer, every=1)
    observation.begin(1)
    model(torch.randn(8, 32)).sum().backward()
    observation.begin(2)  # a step that an error ended is forgotten
    observation.end()
    assert model[0].counter is None and optimizer.watches == ()
    found = observation.read()
    assert found is not None and found.layers == {} and observation.read() is None


def test_operands_alone_are_looked_at_where_that_is_asked_for() -> None:
    model, optimizer = prepared()
    observation = ng.observe.Observation(model, optimizer, every=1)
    roles = {}
    for has_state in (False, True):
        observation.begin(1, has_state=has_state)
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
        observation.end()
        optimizer.zero_grad()
        found = observation.read()
        assert found is not None
        roles[has_state] = set(found.layers["0"])
    operands = {"input", "weight", "grad_output"}
    assert roles == {False: operands, True: operands | {"grad", "param"}}


def test_compiled_code_runs_as_it_was_written_in_a_sampled_step() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    observation = ng.observe.Observation(nn.Linear(2, 2), every=2)
    for number, expected in ((2, 0), (1, 1)):
        with observation.step(number):
            function(torch.ones(3))
        assert len(compiled) == expected
