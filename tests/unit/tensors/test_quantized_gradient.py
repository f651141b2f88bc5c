"""A QuantizedTensor as `p.grad`: hooks, clipping, loss scaling, accumulation, optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from narrowgauge import CURRENT_POW2, CastSpec
from narrowgauge.numerics.formats import E4M3FN, E5M2
from narrowgauge.tensors.quantized import QuantizedTensor, quantize

SPEC = CastSpec(E4M3FN)


class QuantizedGradient(torch.autograd.Function):
    """x * weight, whose weight gradient is quantized where it arises."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return None, quantize(grad * x, SPEC)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))


def gradient(seed: int = 1, spec: CastSpec = SPEC) -> QuantizedTensor:
    return quantize(torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)), spec)


def test_autograd_keeps_a_quantized_gradient() -> None:
    p, x = parameter(), torch.randn(6, 8)
    QuantizedGradient.apply(x, p).sum().backward()  # type: ignore[union-attr]
    assert isinstance(p.grad, QuantizedTensor)
    assert torch.equal(p.grad.dequantize(), quantize(x, SPEC).dequantize())
    QuantizedGradient.apply(x, p).sum().backward()  # type: ignore[union-attr]  # accumulates
    assert torch.allclose(p.grad.dequantize(), 2 * x, rtol=1 / 8, atol=2.2e-6 * 2 * x.abs().max().item())


def test_hooks_can_do_what_hooks_do() -> None:
    p, x = parameter(), torch.randn(6, 8)  # case 33
    expected, seen = quantize(x, SPEC).dequantize(), []

    def check(grad: Tensor) -> None:
        assert torch.equal(grad.view(-1) + 0, expected.view(-1))
        assert grad.norm().item() == pytest.approx(expected.norm().item(), rel=2**-20)
        assert torch.equal(grad.clone() + 0, expected)
        assert grad.isfinite().all()
        assert torch.equal(grad.to(torch.float32) + 0, expected)
        assert grad.numel() == 48
        seen.append(grad)

    p.register_hook(check)

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        check(param.grad)
        param.grad.mul_(0.5)

    p.register_post_accumulate_grad_hook(halve)
    before = p.detach().clone()
    optimizer = torch.optim.SGD([p], lr=1.0)
    QuantizedGradient.apply(x, p).sum().backward()  # type: ignore[union-attr]
    optimizer.step()
    assert len(seen) == 2 and torch.equal(p, before - expected * 0.5)


@pytest.mark.parametrize("foreach", [False, True])
def test_clipping_reports_the_norm_and_scales_the_gradient(foreach: bool) -> None:
    p, q = parameter(), parameter()
    p.grad, q.grad = gradient(1), gradient(2)
    expected = [p.grad.dequantize(), q.grad.dequantize()]
    norm = nn.utils.clip_grad_norm_([p, q], 1.0, foreach=foreach)
    assert norm == pytest.approx(torch.stack(expected).norm().item(), rel=1e-6)
    for parameter_, before in zip((p, q), expected, strict=True):
        assert isinstance(parameter_.grad, QuantizedTensor)
        torch.testing.assert_close(parameter_.grad.dequantize(), before / (norm + 1e-6), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_gradient_is_seen_by_clipping_and_by_the_scaler(bad: float) -> None:
    p = parameter()
    values = torch.randn(6, 8)
    values[0, 0] = bad
    p.grad = quantize(values, SPEC)
    assert not nn.utils.get_total_norm([p.grad]).isfinite()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    before = p.detach().clone()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD([p], lr=1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0 and torch.equal(p, before)


@pytest.mark.parametrize("fused", [False, True])
def test_torch_grad_scaler_unscales_clips_and_steps(fused: bool) -> None:
    results = []  # case 27
    for quantized in (True, False):
        p = parameter()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.AdamW([p], lr=1e-2, fused=fused)
        for seed in range(3):
            scaler.scale(torch.ones(()))
            scaled = quantize(gradient(seed, CastSpec(E4M3FN, scale=CURRENT_POW2)).dequantize() * 1024, SPEC)
            p.grad = scaled if quantized else scaled.dequantize()
            if seed:  # unscaling by hand and within step
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([p], 1.0)
            scaler.step(optimizer)
            scaler.update()
        results.append(p.detach().clone())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_read_it_and_leave_it(fused: bool) -> None:
    p, plain = parameter(), parameter()
    p.grad = gradient()
    plain.grad = p.grad.dequantize()
    codes, scale = p.grad.codes.clone(), p.grad.dequant_scale.clone()
    for parameter_ in (p, plain):
        torch.optim.AdamW([parameter_], lr=1e-2, fused=fused).step()
    assert torch.equal(p, plain)
    assert torch.equal(p.grad.codes.view(torch.uint8), codes.view(torch.uint8)) and p.grad.dequant_scale == scale


def test_zero_grad_in_both_ways() -> None:
    p = parameter()
    p.grad = held = gradient()
    optimizer = torch.optim.SGD([p], lr=1.0)
    optimizer.zero_grad(set_to_none=False)
    assert p.grad is held and not held.any() and held.dequant_scale == 1
    optimizer.zero_grad()
    assert p.grad is None


def test_plain_gradients_accumulate_into_it() -> None:
    p = parameter()
    p.grad = quantize(torch.full((6, 8), 256.0), CastSpec(E5M2, scale=CURRENT_POW2))
    (p * 256.0).sum().backward()
    assert isinstance(p.grad, QuantizedTensor) and (p.grad == 512.0).all()
