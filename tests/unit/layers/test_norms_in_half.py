"""Norms whose parameters are in 16 bits: statistics in float32, also those that run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.layers.kinds import NORMS

SHAPES = {1: (4, 6, 5), 2: (4, 6, 5, 3), 3: (4, 6, 2, 3, 2)}
BATCH = [(nn.BatchNorm1d, 1), (nn.BatchNorm2d, 2), (nn.BatchNorm3d, 3)]
INSTANCE = [(nn.InstanceNorm1d, 1), (nn.InstanceNorm2d, 2), (nn.InstanceNorm3d, 3)]


def made(kind: type[nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(0)
    if kind is nn.GroupNorm:
        norm = kind(2, 6)
    elif kind in (nn.LayerNorm, nn.RMSNorm):
        norm = kind(5)
    else:
        norm = kind(6, affine=True, track_running_stats=True, **options)
    with torch.no_grad():
        for p in norm.parameters():  # values that bfloat16 has
            p.copy_(torch.randn(p.shape).bfloat16())
    return norm


def check_equal(norm: nn.Module, reference: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for training in (True, True, False):
        norm.train(training)
        reference.train(training)
        x = (torch.randn(shape) * 3 + 1).to(dtype)
        ours, theirs = x.clone().requires_grad_(), x.float().requires_grad_()
        y, expected = norm(ours), reference(theirs)
        assert y.dtype is dtype and torch.equal(y, expected.to(dtype))
        grad = torch.randn(shape).to(dtype)
        y.backward(grad)
        expected.backward(grad.float())
        assert torch.equal(ours.grad, theirs.grad.to(dtype))
    for a, b in zip(norm.buffers(), reference.buffers(), strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize(
    ("kind", "dimensions"),
    [*BATCH, *INSTANCE, (nn.GroupNorm, 2), (nn.GroupNorm, 1), (nn.LayerNorm, 1), (nn.RMSNorm, 1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_in_bfloat16_are_normalized_in_float32(kind, dimensions: int, dtype: torch.dtype) -> None:
    reference = made(kind)
    norm = copy.deepcopy(reference)
    ng.convert(norm, "bf16")
    for p in norm.parameters():
        p.data = p.data.bfloat16()
    assert type(norm) is NORMS[kind] and ng.report(norm)[""].reason == "statistics in float32"
    check_equal(norm, reference, SHAPES[dimensions], dtype)


@pytest.mark.parametrize(("kind", "dimensions"), [BATCH[1], INSTANCE[0]])
@pytest.mark.parametrize("options", [{"momentum": None}, {"momentum": 0.5}, {"eps": 0.1}])
def test_options_of_running_statistics_hold(kind, dimensions: int, options: dict[str, object]) -> None:
    reference = made(kind, **options)
    norm = copy.deepcopy(reference)
    ng.convert(norm, "bf16")
    for p in norm.parameters():
        p.data = p.data.bfloat16()
    check_equal(norm, reference, SHAPES[dimensions], torch.float32)


def test_running_statistics_in_16_bits_stay_so_and_move() -> None:
    norm = made(nn.BatchNorm2d).bfloat16()
    reference = made(nn.BatchNorm2d)
    ng.convert(norm, "bf16")
    x = torch.randn(SHAPES[2]) + 4
    assert torch.equal(norm(x), reference(x))
    assert norm.running_mean.dtype is torch.bfloat16
    assert torch.equal(norm.running_mean, reference.running_mean.bfloat16()) and norm.running_mean.min() > 0.2


@pytest.mark.parametrize(("kind", "dimensions"), [*BATCH, *INSTANCE, (nn.GroupNorm, 2)])
def test_with_float32_parameters_they_are_torchs_own(kind, dimensions: int) -> None:
    norm = made(kind)
    reference = copy.deepcopy(norm)
    ng.convert(norm, "bf16")
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SHAPES[dimensions]).to(dtype)
        assert torch.equal(norm(x), reference(x))


@pytest.mark.filterwarnings("ignore:.*none of this model's is quantized")
@pytest.mark.parametrize("recipe", ["narrow8", "narrow8_sr", "bf16_pure"])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_network_with_batch_norm_trains(recipe: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    model, optimizer = ng.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), recipe, autocast=autocast)
    x, labels = torch.randn(8, 3, 8, 8), torch.arange(8) % 4
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(x if autocast else x.bfloat16()).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] and model[1].running_mean.dtype is torch.float32
