"""The first row of the journal of a loop of one's own."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng


def test_a_header_says_where_a_run_runs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), "narrow8")
    header = ng.observe.header(model, optimizer, recipe="narrow8")
    assert header["device"] == "cpu" and header["threads"] == torch.get_num_threads()
    assert header["parameters"] == 2 * 64 * 128 + 128 + 64
    assert ng.observe.header(torch.nn.ReLU(), None, None)["device"] == "cpu"


def test_a_parameters_master_or_residual_is_in_the_header() -> None:
    for recipe, master in (("narrow8", "INT8"), ("bf16_pure", None), ("bf16", None), ("fp8_lm_o3", "FP16")):
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), recipe)
        described = ng.observe.header(model, optimizer, recipe=recipe)["formats"]["0"]["param"]
        assert described.get("master") == master, recipe


def test_what_is_rounded_stochastically_is_so_in_the_header() -> None:
    def rounding(recipe: str) -> set[str]:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), recipe)
        roles = ng.observe.header(model, optimizer, recipe)["formats"]["0"]
        return {role for role, spec in roles.items() if spec.get("rounding") == "stochastic"}

    assert rounding("nvfp4") == {"grad_output"}
    assert rounding("bf16_pure") == {"param"}
    assert "param" not in rounding("narrow8")  # its residual is rounded to the nearest


def test_the_range_of_companded_moments_is_that_of_their_codes() -> None:
    """The largest value of a tile has the last code: its magnitude is max times the scale, 127^2 or 255^2 of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters()), "narrow8")
    observation = ng.observe.Observation(model, optimizer, every=1)
    with observation.step(1):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    found = observation.read()
    assert found is not None
    spec = ng.observe.header(model, optimizer, "narrow8")["formats"]["0"]
    for role, largest in (("exp_avg", 127.0**2), ("exp_avg_sq", 255.0**2)):
        measures = found.layers["0"][role]
        assert (spec[role]["max"], spec[role]["min"], spec[role]["companding"]) == (largest, 1.0, "square root")
        assert spec[role]["max"] * measures["scale"] == pytest.approx(measures["amax"], rel=1e-6)
    assert "rounding" not in spec["exp_avg"] and spec["exp_avg_sq"]["rounding"].endswith("nothing but zero to zero")
