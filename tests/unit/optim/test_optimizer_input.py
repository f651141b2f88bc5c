"""What the optimizers refuse: each error says what was expected, what was found, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from state_formats import SCALED_FP16
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics.formats import FP16, INT8
from narrowgauge.optim.checks import SMALLEST_EPS

KINDS = [ng.optim.AdamW, ng.optim.Adam, ng.optim.SGD, ng.optim.Lion, ng.optim.Muon]


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 4), dtype=dtype), requires_grad=dtype.is_floating_point)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, "expected lr of at least 0, found lr=-0.001"),
        ({"lr": float("nan")}, "expected lr of at least 0, found lr=nan"),
        ({"lr": float("inf")}, "expected lr of at least 0, found lr=inf"),
        ({"lr": torch.ones(2)}, r"lr: expected a number or a tensor of one, found shape \[2\]"),
        ({"weight_decay": -0.1}, "expected weight_decay of at least 0, found weight_decay=-0.1"),
        ({"min_state_size": -1}, "min_state_size=-1: expected a whole number"),
        ({"stochastic_rounding": 1}, "stochastic_rounding=1: expected True or False"),
        ({"exp_avg": "int8"}, "exp_avg='int8': expected a CastSpec"),
        ({"exp_avg": ng.CastSpec(FP16)}, "unscaled float16 loses most of a moment's range"),
        ({"master": ng.CastSpec(INT8, companding=ng.SQUARE_ROOT, granularity=ng.Block(1, 128))}, "companding is for"),
        ({"offload": "disk"}, "offload='disk': expected 'cpu'"),
    ],
)
def test_arguments_of_every_optimizer(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(NarrowgaugeError, match=message):
        kind([weight()], **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ng.optim.AdamW, {"betas": (1.0, 0.9)}, "expected beta1 of at least 0 and below 1, found beta1=1.0"),
        (ng.optim.AdamW, {"betas": (0.9, -0.1)}, "expected beta2 of at least 0 and below 1, found beta2=-0.1"),
        (ng.optim.AdamW, {"betas": (0.9,)}, r"expected betas=\(beta1, beta2\), found betas=\(0.9,\)"),
        (ng.optim.Lion, {"betas": (0.9, 1.5)}, "found beta2=1.5"),
        (ng.optim.AdamW, {"eps": 0.0}, "expected eps of at least 3.7e-23, found eps=0.0.*0 / 0"),
        (ng.optim.Adam, {"eps": 1e-30}, "found eps=1e-30"),
        (ng.optim.AdamW, {"eps": -1e-8}, "found eps=-1e-08"),
        (ng.optim.SGD, {"momentum": -0.9}, "expected momentum of at least 0, found momentum=-0.9"),
        (ng.optim.SGD, {"nesterov": True}, "expected a momentum above 0 and dampening 0, found momentum=0.0"),
        (ng.optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "found momentum=0.9, dampening=0.1"),
        (ng.optim.Muon, {"momentum": -1.0}, "found momentum=-1.0"),
        (ng.optim.Muon, {"ns_steps": 100}, "expected ns_steps of 0 to 99, found ns_steps=100"),
        (ng.optim.Muon, {"ns_coefficients": (1.0, 2.0)}, r"expected three ns_coefficients, found \(1.0, 2.0\)"),
        (ng.optim.Muon, {"adjust_lr_fn": "match_rms_adam"}, "unknown adjust_lr_fn='match_rms_adam'; did you mean"),
        (ng.optim.Muon, {"eps": 0.0}, "expected eps of more than 0"),
    ],
)
def test_arguments_of_single_optimizers(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(NarrowgaugeError, match=message):
        kind([weight()], **options)


def test_the_smallest_eps_bounds_every_step() -> None:
    """Gradients whose square float32 cannot hold: the step is m / eps, and not longer than 40 times lr."""
    p = nn.Parameter(torch.zeros(1000))
    optimizer = ng.optim.AdamW([p], lr=1.0, eps=SMALLEST_EPS, weight_decay=0.0)
    p.grad = torch.logspace(-38, -18, 1000)
    p.grad[0] = 0
    optimizer.step()
    assert (optimizer.state[p]["exp_avg_sq"] == 0).sum() > 500
    assert p.isfinite().all() and p[0] == 0
    assert 1.0 < p.detach().abs().max() <= 40.0


@pytest.mark.parametrize("shape", [(4,), (), (2, 3, 4), (2, 3, 4, 5)], ids=str)
def test_muon_names_a_parameter_that_is_no_matrix(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.zeros(shape))
    with pytest.raises(NarrowgaugeError, match="'layer.weight': Muon is for matrices, found shape"):
        ng.optim.Muon([("layer.weight", p)])
    optimizer = ng.optim.Muon([weight()])
    with pytest.raises(NarrowgaugeError, match="'parameter 0 of group 1': Muon is for matrices"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1  # as it was


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int32, torch.bool], ids=str)
def test_parameters_that_are_not_real_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(NarrowgaugeError, match=f"expected parameters of a real floating dtype, found {dtype}"):
        ng.optim.AdamW([nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_sparse_gradient_names_its_parameter_before_anything_changes(kind: Any) -> None:
    dense, sparse = weight(), weight(5, 3)
    optimizer = kind([("dense", dense), ("embedding.weight", sparse)])
    dense.grad = torch.ones_like(dense)
    sparse.grad = torch.ones(5, 3).to_sparse()
    with pytest.raises(
        NarrowgaugeError, match="'embedding.weight': expected a dense gradient, found layout torch.spar"
    ):
        optimizer.step()
    assert torch.equal(dense, torch.ones(4, 4)) and not optimizer.state


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_gradient_that_is_not_floating_names_its_parameter_before_anything_changes(
    dtype: torch.dtype, prepared: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer: Any = ng.optim.AdamW(model.named_parameters())
    if prepared:  # by then the look for infinite values has seen it
        model, optimizer = ng.prepare(model, optimizer, "narrow8")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad_dtype = None
        p.grad = torch.ones(p.shape)
    model[1].weight.grad = torch.ones(64, 64, dtype=dtype)
    with pytest.raises(NarrowgaugeError, match=f"'1.weight': expected a floating gradient, found {dtype}"):
        optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(state["step"] for state in optimizer.state.values())


@pytest.mark.parametrize(
    "groups",
    [
        lambda p, q: [p, q, p],
        lambda p, q: [{"params": [p]}, {"params": [q, p]}],
        lambda p, q: [("a", p), ("b", p)],
    ],
    ids=["in one group", "in two groups", "under two names"],
)
def test_a_parameter_that_is_there_twice(groups: Any) -> None:
    """It would be stepped twice."""
    with pytest.raises(NarrowgaugeError, match=r"expected every parameter once, found .*, shape \[4, 4\], twice"):
        ng.optim.AdamW(groups(weight(), weight()))


@pytest.mark.parametrize("flag", ["amsgrad", "differentiable", "capturable"])
def test_options_of_torch_that_change_the_step_are_refused_by_name(flag: str) -> None:
    with pytest.raises(NarrowgaugeError, match=f"{flag}=True: AdamW has no such mode"):
        ng.optim.AdamW([{"params": [weight()], flag: True}])
    with pytest.raises(TypeError, match=flag):
        ng.optim.AdamW([weight()], **{flag: True})
    ng.optim.AdamW([{"params": [weight()], flag: False}])


def test_torchs_own_checks_are_there() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        ng.optim.AdamW([])
    with pytest.raises(TypeError, match="ordered collections"):
        ng.optim.AdamW([{"params": {weight(), weight()}}])
    with pytest.raises(ValueError, match="non-leaf"):
        ng.optim.AdamW([weight() * 2])
    one = weight()
    assert ng.optim.AdamW([{"params": one}]).param_groups[0]["params"] == [one]


def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    optimizer = ng.optim.AdamW([weight()])
    for group in ({"params": [weight()], "lr": -1}, {"params": [weight(dtype=torch.complex64)]}):
        with pytest.raises(NarrowgaugeError):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    p = next(optimizer.parameters())
    p.grad = torch.ones_like(p)
    optimizer.step()


def test_a_step_of_a_parameter_of_no_group_is_refused() -> None:
    optimizer, stranger = ng.optim.AdamW([weight()]), weight(3)
    stranger.grad = torch.ones_like(stranger)
    with pytest.raises(NarrowgaugeError, match=r"expected a parameter of this optimizer, found one of shape \[3\]"):
        optimizer.step_parameters([stranger])


def test_formats_that_cannot_play_their_role() -> None:
    with pytest.raises(RecipeError, match="exp_avg_sq=.*unscaled float16"):
        ng.optim.AdamW([weight()], exp_avg_sq=ng.CastSpec(FP16))
    with pytest.raises(RecipeError, match="ULP is the scale of a master's residual"):
        ng.optim.AdamW([weight()], exp_avg=ng.CastSpec(INT8, scale=ng.ULP))
    ng.optim.AdamW([weight()], exp_avg_sq=SCALED_FP16)
