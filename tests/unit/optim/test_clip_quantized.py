"""Norms, clipping and the look for bad values on quantized gradients: from codes, scale and amax alone."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.layers import gradients
from narrowgauge.numerics import rounding
from narrowgauge.numerics.formats import E2M1FN, E4M3FN, E5M2, FP16, INT4, INT8, Format
from narrowgauge.numerics.granularity import Block
from narrowgauge.numerics.kernels import counts
from narrowgauge.numerics.kernels.cpu_threads import MIN_CHUNK
from narrowgauge.numerics.norms import norms
from narrowgauge.optim.guard import all_finite
from narrowgauge.tensors import norm_rules
from narrowgauge.tensors.quantized import QuantizedTensor

SPEC = ng.CastSpec(E4M3FN)


def quantized(*sizes: tuple[int, ...], spec: ng.CastSpec = SPEC) -> list[QuantizedTensor]:
    generator = torch.Generator().manual_seed(0)
    return [ng.quantize(torch.randn(size, generator=generator), spec) for size in sizes]


@pytest.fixture
def no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """No value of a QuantizedTensor is read."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("decoded")

    for module in ("values", "rules", "norm_rules"):
        monkeypatch.setattr(f"narrowgauge.tensors.{module}.values_of", refuse)
    monkeypatch.setattr("narrowgauge.tensors.values.decode", refuse)


# counting


@pytest.mark.parametrize("size", [0, 1, 3, 1023, 70001])
def test_counts_are_those_of_every_code(size: int) -> None:
    codes = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    expected = torch.tensor([(codes == code).sum() for code in range(256)])
    assert torch.equal(counts.count_codes([codes])[0], expected)
    twin = torch.zeros(1, 256, dtype=torch.int64)
    counts.twin([codes], twin)
    assert torch.equal(twin[0], expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_counts_of_several_threads_are_those_of_one(threads: int) -> None:
    codes = torch.randint(256, (4 * MIN_CHUNK + 3,), dtype=torch.uint8)
    torch.set_num_threads(threads)  # the fixture of this folder sets it back
    assert torch.equal(counts.count_codes([codes])[0], torch.bincount(codes, minlength=256))


# norms


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, INT8, E2M1FN, INT4], ids=repr)
def test_norms_are_those_of_the_values_in_float64(fmt: Format, order: float) -> None:
    for q in quantized((7,), (300, 41), (5, 4, 3), spec=ng.CastSpec(fmt)):
        for each in (q, q.mT if q.ndim == 2 else q):
            values = rounding.decode(each.codes, fmt).double()
            exact = torch.linalg.vector_norm(values, order) * q.dequant_scale.double()
            found = torch.linalg.vector_norm(each, order)
            assert found.dtype is torch.float32 and abs(found.item() - exact.item()) <= 2**-24 * exact.item()
            assert torch._foreach_norm([each], order)[0] == found
            assert torch.linalg.vector_norm(each, order, dtype=torch.float64).item() == pytest.approx(
                exact.item(), rel=1e-15
            )


def test_a_norm_has_the_bits_of_its_formula() -> None:
    codes = torch.tensor([0x08, 0x7E, 0xFE, 0x01, 0x01, 0x80], dtype=torch.uint8)  # 2^-6, +-448, twice 2^-9, -0
    scale, amax = torch.tensor([0.5]), torch.tensor([224.0])
    table = counts.count_codes([codes])
    assert norms(table, scale, amax, E4M3FN, 2.0).item() == 0.5 * math.sqrt(2 * 448.0**2 + 2.0**-12 + 2 * 2.0**-18)
    assert norms(table, scale, amax, E4M3FN, 1.0).item() == 0.5 * (896 + 2.0**-6 + 2.0**-8)
    assert norms(table, scale, amax, E4M3FN, math.inf).item() == 224.0
    assert norms(torch.zeros_like(table), scale, amax, E4M3FN, math.inf).item() == 0.0


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_what_is_not_finite_shows_in_every_norm(order: float) -> None:
    for bad, check in ((math.inf, torch.isinf), (-math.inf, torch.isinf), (math.nan, torch.isnan)):
        x = torch.randn(20, 80)
        x[3, 3] = bad
        assert check(torch.linalg.vector_norm(ng.quantize(x, SPEC), order))


def test_mixed_lists_have_the_norms_of_their_tensors() -> None:
    x = torch.randn(30, 50)
    blocks = ng.quantize(x, ng.CastSpec(E4M3FN, Block(1, 16)))
    wide = ng.quantize(x, ng.CastSpec(FP16, scale=ng.TENSOR_POW2))
    mixed = [x, *quantized((30, 50)), blocks, x[:1], wide, *quantized((9,), spec=ng.CastSpec(E5M2))]
    together = torch._foreach_norm(mixed, 2.0)
    for tensor, norm in zip(mixed, together, strict=True):
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(tensor + 0).item(), rel=1e-6)
    assert torch._foreach_norm(mixed, 2.0, dtype=torch.float64)[1].dtype is torch.float64


def test_norms_along_a_dimension_and_of_other_orders_read_values() -> None:
    (q,) = quantized((20, 80))
    values = q.dequantize()
    assert torch.equal(torch.linalg.vector_norm(q, dim=1), torch.linalg.vector_norm(values, dim=1))
    assert torch.equal(torch.linalg.vector_norm(q, 3.0), torch.linalg.vector_norm(values, 3.0))
    assert torch.linalg.vector_norm(q, keepdim=True).shape == (1, 1)
    assert torch.linalg.vector_norm(q, dim=(0, 1)) == torch.linalg.vector_norm(q)
    with pytest.raises(RuntimeError):
        torch.linalg.vector_norm(ng.quantize(torch.zeros(0), SPEC), math.inf)


# clipping and the guard


def parameters(*grads: Tensor) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(g.shape)) for g in grads]
    for p, g in zip(made, grads, strict=True):
        p.grad = g.clone()
    return made


@pytest.mark.parametrize("torchs", [False, True])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_moves_scales_and_leaves_codes(no_values: None, torchs: bool, max_norm: float) -> None:
    grads = quantized((300, 41), (7,), (40, 40))
    ps = parameters(*grads)
    clip = nn.utils.clip_grad_norm_ if torchs else ng.clip_grad_norm_
    norm = clip(ps, max_norm)
    exact = math.sqrt(sum(float((g.codes.float() * g.dequant_scale).double().square().sum()) for g in grads))
    assert norm.item() == pytest.approx(exact, rel=2**-22)
    factor = torch.tensor(min(1.0, max_norm / (norm.item() + 1e-6)))
    for p, g in zip(ps, grads, strict=True):
        assert isinstance(p.grad, QuantizedTensor)
        assert torch.equal(p.grad.codes.view(torch.uint8), g.codes.view(torch.uint8))
        torch.testing.assert_close(p.grad.dequant_scale, g.dequant_scale * factor, rtol=2**-22, atol=0)
        torch.testing.assert_close(p.grad.amax, g.amax * factor, rtol=2**-22, atol=0)


def test_clipping_in_one_list_with_wide_gradients_gives_one_norm() -> None:
    (q,) = quantized((300, 41))
    ps = parameters(q, torch.full((7,), 2.0))
    norm = ng.clip_grad_norm_(ps, 1.0)
    total = math.hypot(float(q.norm()), math.sqrt(28.0))
    assert norm.item() == pytest.approx(total, rel=1e-6)
    assert math.hypot(*(float(p.grad.norm()) for p in ps)) == pytest.approx(1.0, rel=1e-5)


def test_the_look_for_bad_values_reads_no_codes(no_values: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_rules, "count_codes", None)
    grads = quantized((300, 41), (7,))
    assert all_finite([*grads, torch.ones(3)])
    for bad in (math.inf, math.nan):
        x = torch.ones(20)
        x[3] = bad
        assert not all_finite([*grads, ng.quantize(x, SPEC)])
        assert not all_finite([*grads, x])


def test_unscaling_moves_scales_and_finds_what_is_not_finite(no_values: None) -> None:
    grads = quantized((300, 41), (7,))
    for bad in (False, True):
        ps = parameters(*grads, torch.full((3,), 4.0))
        if bad:
            ps[1].grad.amax.fill_(math.inf)  # type: ignore[union-attr]
        optimizer = torch.optim.SGD(ps, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        assert [each.item() for each in found.values()] == [float(bad)]
        for p, g in zip(ps, grads, strict=False):
            assert torch.equal(p.grad.codes.view(torch.uint8), g.codes.view(torch.uint8))  # type: ignore[union-attr]
            assert p.grad.dequant_scale == g.dequant_scale / 1024  # type: ignore[union-attr]
        assert torch.equal(ps[2].grad, torch.full((3,), 4.0 / 1024))


# whole steps


def model_with(recipe: ng.Recipe, optimizer: str, **options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.Linear(80, 64))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, **options)
    return ng.prepare(model, made, recipe)


def losses_of(model: nn.Module, micro_batches: int = 1) -> list[Tensor]:
    x = torch.randn(micro_batches, 4, 64, generator=torch.Generator().manual_seed(1))
    return [model(part).float().square().mean() / micro_batches for part in x]


@pytest.mark.parametrize("name", ["narrow8", "fp8_lm_o2"])
@pytest.mark.parametrize("clip", [False, True])
def test_torchs_grad_scaler_gives_what_ours_gives(name: str, clip: bool) -> None:
    recipe = ng.recipe(name, compute=FP16)  # case 27
    weights = []
    for make in (torch.amp.GradScaler, ng.LossScaler):
        model, optimizer = model_with(recipe, "AdamW")
        scaler = (
            make("cpu", init_scale=1024.0) if make is torch.amp.GradScaler else make(recipe, "cpu", init_scale=1024.0)
        )
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(4):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            (loss,) = losses_of(model)
            scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
            if step != 2:
                assert isinstance(model[0].weight.grad, QuantizedTensor)
            if clip:
                scaler.unscale_(optimizer)
                (nn.utils if make is torch.amp.GradScaler else ng).clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0  # the step of infinite gradients was skipped
        assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
        weights.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*weights, strict=True):
        assert torch.equal(a + 0, b + 0)


@pytest.mark.parametrize("vector", [(2.0, 4.0), (3.0, 4.0)])
def test_clipping_follows_unscaling_and_reports_the_real_norm(vector: tuple[float, float]) -> None:
    model = nn.Module()  # case 30
    model.weight = nn.Parameter(torch.zeros(2))
    recipe = ng.recipe("fp32", grad=SPEC, min_state_size=1)
    gradients.install(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((model.weight * torch.tensor(vector)).sum()).backward()
    scaler.unscale_(optimizer)
    stored = model.weight.grad.dequantize()  # 2, 4 are exact; 3 has an error of at most 1/16
    assert (stored - torch.tensor(vector)).abs().max() <= (0.0 if vector[0] == 2.0 else 3 / 16)
    norm = ng.clip_grad_norm_(model.parameters(), 1.0)
    assert norm.item() == pytest.approx(stored.norm().item(), rel=1e-6)
    scaler.step(optimizer)
    torch.testing.assert_close(model.weight.detach(), -stored / stored.norm(), rtol=1e-5, atol=0)


def test_gradients_that_add_up_are_unscaled_once() -> None:
    results = []  # case 31
    for fused in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 80)
        gradients.install(model, ng.recipe("fp32", grad=SPEC))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with ng.accumulate(model):
            for loss in losses_of(model, 4):
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        mean = torch.autograd.grad(sum(losses_of(model, 4)), list(model.parameters()))
        weight_grad = model.weight.grad.dequantize()
        # one cast of the sum: 1/16 of a value, or 2.2e-6 of the largest
        bound = (mean[0].abs() / 16).clamp(min=2.2e-6 * mean[0].abs().max())
        assert ((weight_grad - mean[0]).abs() <= bound * 1.001).all()
        torch.testing.assert_close(model.bias.grad, mean[1], rtol=1e-5, atol=1e-7)  # small, and wide
        ng.clip_grad_norm_(model.parameters(), 1e-2)
        scaler.step(optimizer)
        scaler.update()
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["narrow8", "fp8_lm_o2", "bf16"])
def test_clipping_and_a_fused_optimizer_go_together_without_a_scaler(name: str) -> None:
    results = []  # case 32
    for fused in (False, True):
        model, optimizer = model_with(ng.recipe(name), "AdamW", fused=fused)
        for _ in range(3):
            optimizer.zero_grad()
            (loss,) = losses_of(model)
            loss.backward()
            ng.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        results.append([p.detach() + 0 for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_quantized_gradients_are_freed() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))  # case 89
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = ng.prepare(model, optimizer, ng.recipe("narrow8", min_state_size=16))

    def alive() -> int:
        """Bytes of 8-bit storages that any object reaches, each once."""
        gc.collect()
        sizes: dict[int, int] = {}
        for each in gc.get_objects():
            if type(each) is Tensor and each.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                sizes[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
            if type(each) is QuantizedTensor and each.spec == SPEC:
                sizes[each.codes.untyped_storage().data_ptr()] = each.codes.untyped_storage().nbytes()
        return sum(sizes.values())

    seen = []
    for _ in range(5):
        loss = model(torch.randn(4, 64)).square().mean()
        loss.backward()
        del loss
        after_backward = alive()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((after_backward, alive()))
    assert seen == [(8 * 64 * 64, 0)] * 5
